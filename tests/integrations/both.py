"""Compare a module in its host alone and with automicro, for every host."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from automicro import MemoryBudget, SampleTooLargeError


class Ran(NamedTuple):
    """The results of a run."""

    parameters: list[Tensor]
    logged: list[dict[str, Any]]
    events: list[Any]
    trainer: Any = None


# Train a module, without automicro if the options are None; the result has the fields of `Ran`.
Run = Callable[[Mapping[str, Any] | None], Any]


def max_diff(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference between any two parameters."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def check_rows(found: Sequence[Any], expected: Sequence[Any], close: float = 2e-6) -> None:
    """Check that the rows of two logs have the same names and numbers."""
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, number in other.items():
            is_number = isinstance(number, float | int)
            wanted = pytest.approx(number, rel=close, abs=close) if is_number else number
            assert row[name] == wanted, name


def check(ours: Any, plain: Any, *, close: float, logged: float = 2e-6) -> None:
    """Compare all results up to rounding, or bit for bit if `close` is 0."""
    if close:
        assert max_diff(ours.parameters, plain.parameters) < close
        check_rows(ours.logged, plain.logged, logged)
    else:
        assert all(map(torch.equal, ours.parameters, plain.parameters))
        assert ours.logged == plain.logged
    assert ours.events == plain.events


def with_and_without(
    run: Run, options: Mapping[str, Any] | None = None, *, close: float = 0.0, logged: float = 2e-6
) -> tuple[Any, Any]:
    """Run a module in its host alone and with automicro, and compare all results."""
    plain, ours = run(None), run(options or {})
    check(ours, plain, close=close, logged=logged)
    return plain, ours


def in_less_memory(run: Run, share: float = 0.5) -> tuple[Any, Any]:
    """Run the host alone, then automicro under a limit at which the host alone fails."""
    with MemoryBudget("4GiB") as budget:
        plain = run(None)
    limit = int(budget.peak_bytes * share)
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(limit):
        run(None)
    with MemoryBudget(limit):
        return plain, run({})


def at_any_limit(run: Run, *, close: float, limits: int = 20, first: int = 1) -> None:
    """Compare runs at shares of the peak: each one matches or cannot fit a single row."""
    with MemoryBudget("4GiB") as budget:
        plain = run(None)
    ended = 0
    for number in range(first, limits + 1):
        try:
            with MemoryBudget(budget.peak_bytes * number // limits):
                ours = run({})
        except SampleTooLargeError:
            assert not ended  # a higher limit never fails after a lower one succeeded
            continue
        ended += 1
        check(ours, plain, close=close)
    assert limits // 3 <= ended


def on_ranks(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a job on a rank, with the environment of ``torchrun`` and ``accelerate launch``."""
    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", NODE_RANK="0",
    )  # fmt: skip
    return job(int(rank), *args, **kwargs)
