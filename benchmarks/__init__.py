"""Timed comparisons, each a script of its own."""
