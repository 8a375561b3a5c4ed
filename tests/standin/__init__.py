"""A simulated device with the memory, streams and threads of a GPU; kernels run on the CPU."""
