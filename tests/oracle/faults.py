"""Deliberate faults, and policies with exactly scripted sizes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automicro import Outcome, Policy


class Boom(Exception):  # noqa: N818
    """Error unrelated to memory."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class FaultAt(TorchDispatchMode):
    """Mode that counts operations and raises an error at one of them, or at none."""

    def __init__(self, index: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.index, self.error = index, error
        self.operations = 0
        self.has_raised = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index, self.operations = self.operations, self.operations + 1
        if index == self.index and self.error is not None:
            error, self.error = self.error, None
            self.has_raised = True
            raise error
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Scripted(Policy):
    """Policy that proposes scripted sizes per batch, the next one after a failed attempt."""

    sizes: Sequence[Sequence[int]]
    batch: int = 0
    attempt: int = 0

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        tried = self.sizes[min(self.batch, len(self.sizes) - 1)]
        return min(num_rows, tried[min(self.attempt, len(tried) - 1)])

    def record(self, outcome: Outcome) -> None:
        if outcome.fits:
            self.batch, self.attempt = self.batch + 1, 0
        else:
            self.attempt += 1

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "Scripted", "batch": self.batch, "attempt": self.attempt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch, self.attempt = state["batch"], state["attempt"]
