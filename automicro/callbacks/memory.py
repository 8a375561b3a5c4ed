"""Logging what is allocated on the device."""

import torch

from automicro.events import Callback, Run
from automicro.memory import active_budget, allocated_bytes, peak_bytes
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
        read = {
            "memory/allocated_bytes": allocated_bytes(device),
            "memory/peak_bytes": peak_bytes(device),
        }
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            read["memory/reserved_bytes"] = torch.cuda.memory_reserved(device)
            read["memory/allocator_retries"] = stats.get("num_alloc_retries")
            read["memory/ooms"] = stats.get("num_ooms")
        elif device.type == "cpu" and (budget := active_budget()) is not None:
            read["memory/ooms"] = budget.num_ooms
        return {name: value for name, value in read.items() if value is not None}
