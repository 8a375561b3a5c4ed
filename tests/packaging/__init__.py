"""What is published: its metadata, its sdist, and its wheel where nothing else is installed."""
