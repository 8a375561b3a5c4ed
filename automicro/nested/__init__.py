"""Parts of a model with a size of their own: slices inside of one microbatch."""
