"""An error at every operation of a training step of any model, and a check of the remaining state.

SQLite is reliable because its tests fail the first allocation, then the second, until a whole run
passes. This does the same with a step, before and after each operation that torch dispatches.
"""
