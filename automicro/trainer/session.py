"""What surrounds a run: the memory limit, progress, and notes on errors that say where."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from automicro.memory import active_budget, limit_memory, track_residents
from automicro.trainer.progress import Progress, recoveries_shown_here


@contextlib.contextmanager
def running(
    progress: Progress,
    *,
    memory_limit: str | int | None,
    device: torch.device,
    residents: Sequence[nn.Module | torch.optim.Optimizer],
) -> Iterator[Progress]:
    """Run under one memory limit, with everything resident counted, and progress shown.

    Raises:
        torch.OutOfMemoryError: what is resident alone exceeds a simulated limit.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(recoveries_shown_here())
        if memory_limit is not None:
            stack.enter_context(limit_memory(memory_limit, device))
        budget = active_budget()
        if budget is not None and device.type == "cpu":
            track_residents(budget, residents)
        yield stack.enter_context(progress)


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
        error.add_note(f"automicro: {describe()}")
        raise
