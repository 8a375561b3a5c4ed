"""Microbatch sizes kept on disk for later runs, in one small JSON file each."""
