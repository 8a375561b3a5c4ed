"""The computation of a loss from a batch, and extra passes, which are rolled back."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from automicro.batch.layout import BatchLayout
from automicro.loss.averages import Average
from automicro.loss.conventions import Convention
from automicro.reach import Reach

Mode: TypeAlias = Literal["train", "eval", "predict"]
"""The forward to run: "train" has a loss, "eval" may have one, "predict" has none."""


_running = [0]  # number of nested extra passes


def is_extra_pass() -> bool:
    """Whether the current forward is an extra one, whose results are discarded.

    These are checks of a few rows, on the first batches that could be split. State that automicro
    can find is rolled back after them (parameters, buffers, attributes of modules, variables that
    ``loss_fn`` and ``forward`` reach). Code with other effects, such as a forward that writes to a
    file, can check this.

    Example:
        >>> from automicro import is_extra_pass
        >>> is_extra_pass()
        False
    """
    return _running[0] > 0


@contextlib.contextmanager
def extra_pass() -> Iterator[None]:
    """Make `is_extra_pass` return True inside the context."""
    # A counter and not a flag, because a check may run inside another extra pass.
    _running[0] += 1
    try:
        yield
    finally:
        _running[0] -= 1


@dataclass(frozen=True, kw_only=True)
class Computation:
    """The computation of a loss from a batch: a model, its loss, and the layout of batches."""

    modules: Sequence[nn.Module]  # the model first
    convention: Convention
    averages: Mapping[str, Average]  # by the name of the loss
    layout: BatchLayout
    device: torch.device
    roots: Mapping[str, Any]  # everything by name whose state a forward may change
    reach: Reach
    # State that checks could not roll back, by name, to be reported once.
    left: set[str] = field(default_factory=set, compare=False)

    @property
    def reached(self) -> list[nn.Module]:
        """The modules, and those that the caller's functions reach on their own."""
        found = [*self.modules, *self.reach.modules().values()]
        return list({id(module): module for module in found}.values())

    def names(self) -> dict[int, str]:
        """Return a name for each parameter that a gradient may reach, by its id."""
        found: dict[int, str] = {}
        for root in self.reached:
            for name, parameter in root.named_parameters():
                if parameter.requires_grad:
                    found.setdefault(id(parameter), name)
        return found
