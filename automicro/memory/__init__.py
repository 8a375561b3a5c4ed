"""Reading and limiting device memory, and simulating a device of any size on the CPU."""
