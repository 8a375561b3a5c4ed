"""Batches for the trainer: loaded, shared among ranks, taken up again in the middle."""
