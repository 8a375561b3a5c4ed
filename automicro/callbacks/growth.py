"""Sizes that grow in training."""

from collections.abc import Callable
from typing import Any

from automicro.callbacks.arguments import read_count, read_duration
from automicro.duration import Duration
from automicro.events import Callback, LoopState, Run

Resize = Callable[[Any, int], Any]
"""Gives a batch at another size: ``resize(batch, size)``."""


class GrowthSchedule(Callback):
    """Trains on smaller samples first, and on larger ones as training goes on.

    The size grows from ``start`` to ``end`` in equal steps, and stays at ``end`` afterwards. Larger
    samples need more memory: a microbatch size that fitted at first may not fit any more, and is
    found again then. Evaluations see whole samples.

    Args:
        start: the first size.
        end: the last one.
        over: how long it grows.
        resize: gives a batch of a size: ``resize(batch, size)``. It gets what the loader gave,
            on the host, and returns a new batch, without writing into the old one.
        steps: in how many steps it grows; None for as many as there are sizes. Code compiled for
            one shape is compiled again at each.
        multiple_of: sizes between the first and the last are rounded down to a multiple of this.
        logged_as: the name under which the size is logged.

    Raises:
        TypeError, ValueError: arguments that make no sense.

    Example:
        >>> schedule = GrowthSchedule(
        ...     64, 128, over="100ba", steps=4, resize=lambda batch, size: batch[:, :size]
        ... )
        >>> [schedule.size(LoopState(batch=batch)) for batch in (0, 24, 25, 99, 100, 500)]
        [64, 64, 80, 112, 128, 128]
    """

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Duration,
        resize: Resize,
        steps: int | None = None,
        multiple_of: int = 1,
        logged_as: str = "train/size",
    ) -> None:
        self._start = read_count("start", start)
        self._end = read_count("end", end)
        if end < start:
            raise ValueError(f"it grows from start={start} to end={end}, which is less; swap them")
        self._over = read_duration("over", over)
        self._steps = None if steps is None else read_count("steps", steps)
        self._multiple_of = read_count("multiple_of", multiple_of)
        if not callable(resize):
            raise TypeError(
                f"resize={resize!r} cannot be called; pass a function (batch, size) → batch"
            )
        self._resize = resize
        self._logged_as = logged_as

    def size(self, state: LoopState) -> int:
        """The size of the next batch.

        Args:
            state: where training stands.
        """
        done = min(state.done(self._over.unit), self._over.value)
        # In whole numbers: what a resumed run computes is the same on any machine.
        if self._steps is None:
            grown = (self._end - self._start) * done // self._over.value
        else:
            step = done * self._steps // self._over.value
            grown = (self._end - self._start) * step // self._steps
        size = self._start + grown
        if size in (self._start, self._end):
            return size
        return max(size // self._multiple_of * self._multiple_of, self._start)

    def transform(self, run: Run, batch: Any) -> Any:
        """The batch at the size of now."""
        size = self.size(run.state)
        run.log({self._logged_as: size})
        return self._resize(batch, size)
