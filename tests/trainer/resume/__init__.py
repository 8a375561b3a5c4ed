"""Kills, full disks and signals during training, and the resume after them."""
