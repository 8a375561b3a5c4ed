"""A device that is none: memory, streams and threads of a GPU, its kernels on the CPU."""
