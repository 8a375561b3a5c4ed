"""Samplers for the tests of feeds on one process and on several."""

import torch
from torch.utils.data import BatchSampler


class WholeBatches(BatchSampler):
    """A custom batch sampler, which cannot be split: ranks share its whole batches."""


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)
