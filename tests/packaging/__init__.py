"""The published package: its metadata, its sdist, and its wheel in an empty environment."""
