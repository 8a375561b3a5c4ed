"""Logging what is allocated on the device."""

import torch

from automicro.events import Callback, Run
from automicro.memory import peak_bytes, read_counts
from automicro.results import StepResult


class MemoryMonitor(Callback):
    """Logs the memory of the device after every batch, in bytes.

    ``memory/allocated_bytes``, and ``memory/peak_bytes`` since `fit` began; with CUDA's allocator
    also ``memory/reserved_bytes`` (cached memory included), ``memory/allocator_retries`` (how often
    it gave back cached memory to go on, which is slow) and ``memory/ooms``. On a CPU memory is
    counted inside a `MemoryBudget` only: allocated, peak, and ``memory/ooms``. Elsewhere nothing
    is logged.

    The peak is not that of each batch: it would have to be reset, and is read by others, too.

    Example:
        >>> from automicro import MemoryBudget
        >>> with MemoryBudget("1MiB"):
        ...     x = torch.zeros(1024)
        ...     MemoryMonitor().values(torch.device("cpu"))
        {'memory/allocated_bytes': 4096, 'memory/peak_bytes': 4096, 'memory/ooms': 0}
    """

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Log."""
        if values := self.values(run.device):
            run.log(values)

    def values(self, device: torch.device) -> dict[str, float]:
        """What there is to log of a device.

        Args:
            device: whose memory it is.
        """
        counts = read_counts(device)
        read = {
            "memory/allocated_bytes": counts.allocated_bytes,
            "memory/peak_bytes": peak_bytes(device),
            "memory/reserved_bytes": counts.reserved_bytes,
            "memory/allocator_retries": counts.alloc_retries,
            "memory/ooms": counts.ooms,
        }
        return {name: value for name, value in read.items() if value is not None}
