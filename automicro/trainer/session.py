"""What surrounds a run: the memory limit, progress, and notes on errors that say where."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from torch import nn

from automicro.errors import add_note
from automicro.memory import active_budget, limit_memory, track_residents
from automicro.trainer.determinism import deterministic_algorithms
from automicro.trainer.processes import Place
from automicro.trainer.progress import Progress, make_progress, recoveries_shown_here


class Session:
    """Runs under one memory limit, with everything resident counted, and progress shown.

    Args:
        shows_progress: whether to show how it goes.
        place: of this process: the first shows it for all.
        memory_limit: of the device; None for none.
        device: where it runs.
        residents: what lies there all the time.
        deterministic: whether to refuse algorithms that are not.

    Raises:
        TypeError: ``shows_progress`` is not True or False.
        ValueError: no such limit for this device.
    """

    def __init__(
        self,
        *,
        shows_progress: bool,
        place: Place,
        memory_limit: str | int | float | None,
        device: torch.device,
        residents: Sequence[nn.Module | torch.optim.Optimizer],
        deterministic: bool,
    ) -> None:
        make_progress(shows_progress)  # refuses what is not True or False
        if memory_limit is not None:
            limit_memory(memory_limit, device)  # refuses what cannot be a limit
        self.console: Console | None = None
        self._shown: Progress | None = None  # while it is open
        self._shows_progress = shows_progress and place.is_first
        self._memory_limit = memory_limit
        self._device = device
        self._residents = residents
        self._deterministic = deterministic

    @contextlib.contextmanager
    def open(self) -> Iterator[Progress]:
        """Run inside; shows progress. Inside of itself it changes nothing.

        Raises:
            torch.OutOfMemoryError: what is resident alone exceeds a simulated limit.
        """
        if self._shown is not None:
            yield self._shown
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(recoveries_shown_here())
            if self._deterministic:
                stack.enter_context(deterministic_algorithms(self._device))
            if self._memory_limit is not None:
                stack.enter_context(limit_memory(self._memory_limit, self._device))
            budget = active_budget()
            if budget is not None and self._device.type == "cpu":
                track_residents(budget, self._residents)
            self._shown = stack.enter_context(make_progress(self._shows_progress, self.console))
            stack.callback(self._close)
            yield self._shown

    def _close(self) -> None:
        self._shown = None


@contextlib.contextmanager
def noting(describe: Callable[[], str]) -> Iterator[None]:
    """Add to every exception where it was raised.

    >>> try:
    ...     with noting(lambda: "in epoch 2"):
    ...         raise KeyError("x")
    ... except KeyError as error:
    ...     error.__notes__
    ['automicro: in epoch 2']
    """
    try:
        yield
    except BaseException as error:
        add_note(error, f"automicro: {describe()}")
        raise
