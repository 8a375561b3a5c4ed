"""From files and key=value to the objects of a training run."""
