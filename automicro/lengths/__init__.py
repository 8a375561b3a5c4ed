"""Microbatch sizes in tokens, seconds or costs: rows are sorted, packed and cut to length."""
