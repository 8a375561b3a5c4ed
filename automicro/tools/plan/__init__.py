"""Prediction of the memory of a training step, without the device."""
