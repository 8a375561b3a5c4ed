"""Fault injection: an error at every operation of a step, and what is left behind."""
