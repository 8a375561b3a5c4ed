"""The command line and its configs."""
