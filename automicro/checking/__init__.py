"""Checks whether splitting changes results: parts compared with the whole, beyond chance."""
