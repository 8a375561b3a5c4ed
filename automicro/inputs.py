"""Keeping the batch as it was, although a model may write into its input.

A retry must see what the first attempt saw. Where microbatches would be views of the batch, they
are copied until one committed attempt has shown by content that the model leaves its input alone;
after that tensor versions are watched.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from automicro.content import same_content
from automicro.errors import RollbackError
from automicro.memory import active_budget
from automicro.torch_private import version_of

logger = logging.getLogger(__name__)


def cost_of_row(tensors: Sequence[Tensor], num_rows: int) -> float:
    """Elements of one row of a batch, on average; what its activations grow with.

    >>> cost_of_row([torch.zeros(4, 10), torch.zeros(4)], 4)
    11.0
    """
    return sum(tensor.numel() for tensor in tensors) / num_rows


class InputGuard:
    """What is known about a model: whether it writes into its input."""

    def __init__(self) -> None:
        self.writes: bool | None = None  # None: not known yet

    def watch(self, leaves: Sequence[Tensor], device: torch.device) -> "InputWatch":
        """Guard one batch with these tensors, for a model on this device."""
        return InputWatch(self, leaves, device)


class InputWatch:
    """One batch, guarded. A part of the transaction.

    Attributes:
        isolate: whether microbatches must be copies of the batch.
    """

    def __init__(self, guard: InputGuard, leaves: Sequence[Tensor], device: torch.device) -> None:
        self._guard = guard
        self._leaves = leaves
        self._versions: list[int] = []
        self._wrote = False
        # A budget models the copy to its device, so there nothing aliases the batch.
        aliases = active_budget() is None and any(leaf.device == device for leaf in leaves)
        unwatchable = any(leaf.is_inference() for leaf in leaves)
        self.isolate = aliases and (guard.writes is not False or unwatchable)

    @property
    def requiring_grad(self) -> list[Tensor]:
        """The tensors of the batch that gather a gradient of their own."""
        return [leaf for leaf in self._leaves if leaf.requires_grad and leaf.is_leaf]

    @property
    def compares(self) -> bool:
        """Whether the copies' contents are still of interest."""
        return self.isolate and self._guard.writes is None

    def compare(self, given: Sequence[Tensor], used: Sequence[Tensor]) -> None:
        """Note whether a microbatch differs, after its backward, from the slice it copied."""
        self._wrote |= not all(map(same_content, given, used))

    def begin(self) -> None:
        self._versions = self._current_versions()

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        if self.compares:
            self._guard.writes = self._wrote
            if self._wrote:
                logger.info("the model writes into its input: it gets copies, the batch is kept")
        elif self._current_versions() != self._versions:
            self._guard.writes = True
            logger.warning("the model wrote into its batch; from now on it gets copies")

    def roll_back(self) -> None:
        self._wrote = False
        if self._versions and self._current_versions() != self._versions:
            self._guard.writes = True
            raise RollbackError(
                "the model wrote into its input, which earlier batches had not shown, so this "
                "batch cannot be tried again; clone the input in the forward before changing it"
            )

    def _current_versions(self) -> list[int]:
        return [] if self.isolate else [version_of(leaf) for leaf in self._leaves]
