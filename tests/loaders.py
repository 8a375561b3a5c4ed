"""Samplers for the tests of feeds on one process and on several."""

import torch
from torch.utils.data import BatchSampler


class WholeBatches(BatchSampler):
    """A custom batch sampler, whose whole batches are shared, because it cannot be cut again."""


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)
