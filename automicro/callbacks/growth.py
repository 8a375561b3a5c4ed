"""Sizes of samples that grow during training."""

from collections.abc import Callable
from typing import Any

from automicro.durations import Duration, read_duration
from automicro.errors import removed
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from automicro.options import read_count

Resize = Callable[[Any, int], Any]
"""Returns a batch at another size: ``resize(batch, size)``."""


@removed(logged_as="Leave it out: the size is logged as train/size")
class GrowthSchedule(Callback):
    """Trains on smaller samples first, and on larger samples as training progresses.

    The size grows from ``start`` to ``end`` in equal steps, and then stays at ``end``. Larger
    samples need more memory: if the microbatch size no longer fits, a new one is found. Evaluations
    use full-size samples.

    Args:
        start: first size.
        end: last size.
        over: duration of the growth.
        resize: returns a batch at another size: ``resize(batch, size)``. It receives the batch of
            the data loader, on the host, and returns a new one without changing the old one.
        steps: number of steps of the growth; None for one step per size. Code compiled for static
            shapes is compiled again at each step.
        multiple_of: sizes between the first and the last are rounded down to a multiple of this.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> def resize_images(batch, size):
        ...     images, targets = batch
        ...     return torch.nn.functional.interpolate(images, (size, size)), targets
        >>> schedule = GrowthSchedule(64, 128, over="100ba", steps=4, resize=resize_images)
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
    ) -> None:
        self._start = read_count("start", start)
        self._end = read_count("end", end)
        if end < start:
            raise ValueError(f"start={start} is above end={end}, but the size must grow. Swap them")
        self._over = read_duration("over", over)
        self._steps = None if steps is None else read_count("steps", steps)
        self._multiple_of = read_count("multiple_of", multiple_of)
        self._resize = resize
        if not callable(resize):
            raise TypeError(
                f"resize={resize!r} cannot be called. Pass a function (batch, size) → batch"
            )

    def size(self, state: LoopState) -> int:
        """Return the size of the next batch.

        Args:
            state: progress of training.
        """
        done = min(state.done(self._over.unit), self._over.value)
        # Integer arithmetic, so that a resumed run computes the same sizes on any machine.
        if self._steps is None:
            grown = (self._end - self._start) * done // self._over.value
        else:
            step = done * self._steps // self._over.value
            grown = (self._end - self._start) * step // self._steps
        size = self._start + grown
        # The first and last sizes are explicit, so they are used even if they are not a multiple.
        if size in (self._start, self._end):
            return size
        return max(size // self._multiple_of * self._multiple_of, self._start)

    def transform(self, run: Run, batch: Any) -> Any:
        """Return the batch at the current size."""
        size = self.size(run.state)
        run.log({"train/size": size})
        return self._resize(batch, size)
