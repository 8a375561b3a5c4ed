"""The batch: its rows are counted, cut and joined, and its tensors move to the device."""
