"""A step that leaves no trace unless it succeeds.

A `Transaction` holds parts, each of which can restore one thing: gradients, buffers, random number
generators, metrics. All parts begin together, and then either all commit or all roll back.
"""
