"""How large a microbatch should be: pure Python, no torch."""
