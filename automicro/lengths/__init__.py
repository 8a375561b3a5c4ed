"""Sizes counted in tokens, seconds or costs: rows are sorted, packed and cut to their lengths."""
