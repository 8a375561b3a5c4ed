"""Monitors that log memory and speed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from automicro.durations import Duration, read_duration
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run, Window
from automicro.memory.device import peak_bytes, read_counts
from automicro.step.results import StepResult


class MemoryMonitor(Callback):
    """Logs the memory of the device after every batch, in bytes.

    Logs ``memory/allocated_bytes``, and ``memory/peak_bytes`` since the start of `fit`. With CUDA's
    allocator it also logs ``memory/reserved_bytes`` (including cached memory),
    ``memory/allocator_retries`` (how often cached memory was freed to serve a request, which is
    slow) and ``memory/ooms``. On a CPU, memory is counted only inside a `MemoryBudget`: allocated,
    peak, and ``memory/ooms``. On other devices nothing is logged.

    The peak is not reset for each batch, because other code reads it, too.

    Example:
        >>> from automicro import MemoryBudget
        >>> with MemoryBudget("1MiB"):
        ...     x = torch.zeros(1024)
        ...     MemoryMonitor().values(torch.device("cpu"))
        {'memory/allocated_bytes': 4096, 'memory/peak_bytes': 4096, 'memory/ooms': 0}
    """

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Log the values, if any."""
        if values := self.values(run.device):
            run.log(values)

    def values(self, device: torch.device) -> dict[str, float]:
        """Return the values to log for a device.

        Args:
            device: the device whose memory is read.
        """
        # This does not wait for the device, because the allocator counts on the host.
        counts = read_counts(device)
        read = {
            "memory/allocated_bytes": counts.allocated_bytes,
            "memory/peak_bytes": peak_bytes(device),
            "memory/reserved_bytes": counts.reserved_bytes,
            "memory/allocator_retries": counts.alloc_retries,
            "memory/ooms": counts.ooms,
        }
        return {name: value for name, value in read.items() if value is not None}


class SpeedMonitor(Callback):
    """Logs samples, tokens and batches per second, averaged over the latest batches.

    Logs ``speed/samples_per_second``, ``speed/tokens_per_second`` (if tokens are counted) and
    ``speed/batches_per_second``. Per batch, it logs ``speed/computing_seconds``,
    ``speed/waiting_seconds`` and ``speed/waiting_share``, the share of waiting in their sum.
    Waiting is the time from the end of a batch to the start of the next one: the data loader, and
    callbacks that transform the batch. Evaluations and checkpoints count as neither.

    Each `fit` starts a new measurement.

    Args:
        window: amount of training to average over.
        clock: returns the time in seconds.

    Raises:
        TypeError, ValueError: ``window`` is not a duration.

    Example:
        >>> monitor = SpeedMonitor(window="100ba")
    """

    def __init__(
        self, *, window: str | Duration = "20ba", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every = read_duration("window", window)
        self._clock = clock
        self._window: Window | None = None  # set during fit
        self._computing = self._waiting = 0.0
        self._batch_start = self._last_end = self._pause_start = 0.0
        self._paused = 0.0  # since the last batch

    def fit_start(self, run: Run) -> None:
        """Start a measurement."""
        self._computing = self._waiting = self._paused = 0.0
        self._last_end = self._clock()
        start = run.state.done(self._every.unit)
        self._window = Window(self._every.value, self._amounts(run.state), start=start)

    def batch_start(self, run: Run, batch: Any) -> None:
        """End the wait for data."""
        self._batch_start = self._clock()
        # An evaluation between two batches is not a wait for data.
        self._waiting += max(self._batch_start - self._last_end - self._paused, 0.0)
        self._paused = 0.0

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Log the speed."""
        self._last_end = self._clock()
        self._computing += self._last_end - self._batch_start
        assert self._window is not None
        place = run.state.done(self._every.unit)
        gained = self._window.gained(place, self._amounts(run.state))
        run.log(_speeds(gained, has_tokens=run.state.tokens is not None))

    def _stop_clock(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self._pause_start = self._clock()

    def _go_on(self, *_: Any, **__: Any) -> None:
        """Restart the clock."""
        self._paused += self._clock() - self._pause_start

    eval_start = checkpoint_start = _stop_clock
    eval_end = checkpoint_end = _go_on

    def _amounts(self, state: LoopState) -> dict[str, float]:
        return {
            "batches": state.batch,
            "samples": state.samples,
            "tokens": state.tokens or 0,
            "computing": self._computing,
            "waiting": self._waiting,
        }


def _speeds(gained: Mapping[str, float], *, has_tokens: bool) -> dict[str, float]:
    batches, seconds = gained["batches"], gained["computing"] + gained["waiting"]
    if not batches or not seconds > 0:
        return {}
    values = {
        "speed/samples_per_second": gained["samples"] / seconds,
        "speed/batches_per_second": batches / seconds,
        "speed/computing_seconds": gained["computing"] / batches,
        "speed/waiting_seconds": gained["waiting"] / batches,
        "speed/waiting_share": gained["waiting"] / seconds,
    }
    if has_tokens:
        values["speed/tokens_per_second"] = gained["tokens"] / seconds
    return values
