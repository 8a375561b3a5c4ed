"""Sizes that were found, kept on disk for the next run: one small JSON file for each."""
