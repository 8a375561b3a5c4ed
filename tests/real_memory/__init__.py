"""Real memory: torch's own CPU allocator with a budget, in a separate process."""
