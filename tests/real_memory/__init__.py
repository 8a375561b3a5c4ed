"""Real memory: torch's own CPU allocator with a budget, in a process of its own."""
