"""Fault injection: an error at every operation of a step, and a check of the remaining state."""
