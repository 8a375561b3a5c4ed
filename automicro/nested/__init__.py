"""Parts of a model with a size of their own, which run in slices of a microbatch."""
