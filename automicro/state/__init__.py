"""State before an attempt: everything that a forward can reach, captured and restored."""
