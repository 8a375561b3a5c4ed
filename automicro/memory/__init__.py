"""Measurement and limits of device memory, and simulated devices of any size on the CPU."""
