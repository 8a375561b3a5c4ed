"""Timed comparisons, each a separate script."""
