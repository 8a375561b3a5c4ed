"""Tools beside training: before a run, after a failure, in tests. Only `cli` imports this."""
