"""A simulated device: memory, streams and threads of a GPU, its kernels on the CPU."""
