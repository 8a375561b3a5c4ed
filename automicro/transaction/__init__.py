"""A step that leaves no trace unless it succeeds.

A `Transaction` holds parts, one restorable thing each: gradients, buffers, random number
generators, metrics. All parts begin together, and then either all commit or all roll back.
"""
