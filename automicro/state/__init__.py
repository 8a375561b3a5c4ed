"""State as it was before an attempt: everything that a forward can reach, captured and put back."""
