"""Batches of rows of varying length, for ``torch.utils.data.DataLoader(batch_sampler=…)``.

`LengthBatchSampler` has seven modes, which `automicro.data.sampler` defines.
"""

from automicro.data.sampler import MODES, LengthBatchSampler, read_lengths, with_batch_sampler

__all__ = ["MODES", "LengthBatchSampler", "read_lengths", "with_batch_sampler"]
