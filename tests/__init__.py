"""A package, so that test files in different folders may share a name."""
