"""An error at every operation of a training step, and what is left behind: for any model.

SQLite is trusted because its tests fail the first allocation, then the second, until a whole run
passes. This does the same to a step: before and after each operation that torch dispatches.
"""
