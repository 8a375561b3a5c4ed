"""From files and key=value to what is trained."""
