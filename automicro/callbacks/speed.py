"""Logging how fast training goes, and how long it waits for data."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automicro.callbacks.arguments import read_duration
from automicro.duration import Duration
from automicro.events import Callback, LoopState, Run
from automicro.results import StepResult


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """What was done, and how long it took, since training began."""

    done: int
    batches: int
    samples: int
    tokens: int | None
    computing_seconds: float
    waiting_seconds: float


class SpeedMonitor(Callback):
    """Logs samples, tokens and batches per second, averaged over the latest batches.

    ``speed/samples_per_second``, ``speed/tokens_per_second`` (where tokens are counted) and
    ``speed/batches_per_second``; of one batch, ``speed/computing_seconds`` and
    ``speed/waiting_seconds``, and ``speed/waiting_share`` of the two together. Waiting is from the
    end of a batch to the start of the next one: the loader, and callbacks that transform the batch.
    Evaluations and checkpoints count as neither.

    A new `fit` begins to measure anew.

    Args:
        window: over how much to average.
        clock: gives seconds.

    Raises:
        TypeError, ValueError: ``window`` is no duration.

    Example:
        >>> monitor = SpeedMonitor(window="100ba")
    """

    def __init__(
        self, *, window: str | Duration = "20ba", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._window = read_duration("window", window)
        self._clock = clock
        self._marks: deque[_Mark] = deque()
        self._computing = self._waiting = 0.0
        self._batch_start = self._last_end = self._pause_start = 0.0
        self._paused = 0.0  # since the last batch

    def fit_start(self, run: Run) -> None:
        """Begin to measure."""
        self._computing = self._waiting = self._paused = 0.0
        self._last_end = self._clock()
        self._marks = deque([self._mark(run.state)])

    def batch_start(self, run: Run, batch: Any) -> None:
        """The wait is over."""
        self._batch_start = self._clock()
        self._waiting += max(self._batch_start - self._last_end - self._paused, 0.0)
        self._paused = 0.0

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Log the speed."""
        self._last_end = self._clock()
        self._computing += self._last_end - self._batch_start
        now = self._mark(run.state)
        while len(self._marks) > 1 and now.done - self._marks[1].done >= self._window.value:
            self._marks.popleft()
        if values := _speeds(self._marks[0], now):
            run.log(values)
        self._marks.append(now)

    def eval_start(self, run: Run) -> None:
        """Stop the clock."""
        self._pause_start = self._clock()

    def eval_end(self, run: Run, values: Mapping[str, float]) -> None:
        """Let the clock go on."""
        self._paused += self._clock() - self._pause_start

    def checkpoint_start(self, run: Run) -> None:
        """Stop the clock."""
        self._pause_start = self._clock()

    def checkpoint_end(self, run: Run, path: Path) -> None:
        """Let the clock go on."""
        self._paused += self._clock() - self._pause_start

    def _mark(self, state: LoopState) -> _Mark:
        return _Mark(
            done=state.done(self._window.unit),
            batches=state.batch,
            samples=state.samples,
            tokens=state.tokens,
            computing_seconds=self._computing,
            waiting_seconds=self._waiting,
        )


def _speeds(start: _Mark, end: _Mark) -> dict[str, float]:
    batches = end.batches - start.batches
    computing = end.computing_seconds - start.computing_seconds
    waiting = end.waiting_seconds - start.waiting_seconds
    seconds = computing + waiting
    if not batches or not seconds > 0:
        return {}
    values = {
        "speed/samples_per_second": (end.samples - start.samples) / seconds,
        "speed/batches_per_second": batches / seconds,
        "speed/computing_seconds": computing / batches,
        "speed/waiting_seconds": waiting / batches,
        "speed/waiting_share": waiting / seconds,
    }
    if end.tokens is not None:
        values["speed/tokens_per_second"] = (end.tokens - (start.tokens or 0)) / seconds
    return values
