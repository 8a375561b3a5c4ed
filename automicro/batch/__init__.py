"""The batch: its rows counted, cut and joined, its tensors on their way to the device."""
