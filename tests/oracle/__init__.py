"""Random search: seeded combinations of user code, each exact or named."""
