"""A random search: seeded combinations of what people write, each exact or named."""
