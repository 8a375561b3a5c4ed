"""Everything that a run needs to go on as if it had never stopped."""
