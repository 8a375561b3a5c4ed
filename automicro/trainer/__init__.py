"""The training loop, a thin layer on top of `Microbatcher`."""
