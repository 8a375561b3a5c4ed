"""What loaders draw with, shared by the tests of feeds on one process and on several."""

import torch
from torch.utils.data import BatchSampler


class WholeBatches(BatchSampler):
    """Not torch's own, so whole batches of it are shared, and it cannot be cut anew."""


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)
