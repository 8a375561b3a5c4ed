"""The computation from a batch, and extra passes, which leave no trace."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.errors import LossError
from automicro.loss.averages import Average
from automicro.loss.conventions import Convention
from automicro.options import ONE_GRAPH_EACH
from automicro.reach import Reach
from automicro.torch_private import is_older
from automicro.transaction.leaves import nodes_of

Mode: TypeAlias = Literal["train", "eval", "predict"]
"""Which forward: "train" has a loss, "eval" may have one, "predict" has none."""


_running = [0]  # extra passes, each in the one before


def is_extra_pass() -> bool:
    """Whether the forward that is running is an extra one, which counts for nothing.

    There are two kinds: checks of a few rows, at the first batches that might be split, and one
    row through a model with lazy layers. State that automicro can find is put back after them
    (parameters, buffers, attributes of modules, variables that ``loss_fn`` and ``forward`` get
    at). What lies elsewhere, such as a file that a forward writes to, can ask here.

    Example:
        >>> from automicro import is_extra_pass
        >>> is_extra_pass()
        False
    """
    return _running[0] > 0


@contextlib.contextmanager
def extra_pass() -> Iterator[None]:
    """Let `is_extra_pass` say so meanwhile."""
    # A number and no flag: a check may run inside of another extra pass.
    _running[0] += 1
    try:
        yield
    finally:
        _running[0] -= 1


@dataclass(frozen=True, kw_only=True)
class Computation:
    """The computation from a batch: a model, its loss, and how batches are read.

    Attributes:
        modules: the model, then further modules that take part.
        convention: from a batch of rows to a loss.
        averages: what each loss is taken for, by name.
        eval_averages: the same in evaluation.
        layout: of batches.
        device: where the model computes.
        roots: modules, functions and further values, by name, whose state a forward may change.
        reach: what modules and functions get at by themselves.
        left: names of what checks could not put back; each is said once.
    """

    modules: Sequence[nn.Module]
    convention: Convention
    averages: Mapping[str, Average]
    eval_averages: Mapping[str, Average]
    layout: BatchLayout
    device: torch.device
    roots: Mapping[str, Any]
    reach: Reach
    left: set[str] = field(default_factory=set, compare=False)

    @property
    def reached(self) -> list[nn.Module]:
        """The modules, and those that the caller's functions get at by themselves."""
        found = [*self.modules, *self.reach.modules().values()]
        return list({id(module): module for module in found}.values())

    def names(self) -> dict[int, str]:
        """A name for each parameter that a gradient may reach, by its id."""
        found: dict[int, str] = {}
        for root in self.reached:
            for name, parameter in root.named_parameters():
                if parameter.requires_grad:
                    found.setdefault(id(parameter), name)
        return found


def check_own_graph(loss: Tensor, first_node: int) -> None:
    """Refuse a backward through a graph that was there before the forward: it is the caller's.

    Raises:
        LossError: the loss hangs on nodes that are older than the first of the forward.
    """
    older = next((node for node in nodes_of(loss) if is_older(node, first_node)), None)
    if older is not None:
        raise LossError(
            f"the loss hangs on a graph that was made before the forward ({older.name()}), which "
            f"each microbatch would go backward through again; {ONE_GRAPH_EACH}"
        )
