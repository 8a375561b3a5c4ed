"""Keeping the batch as it was, although a model may write into its input.

A retry must see what the first attempt saw. What a forward gets is never the batch itself:

- containers are new ones, and arrays copies, for every microbatch (see `on_device`);
- tensors are other tensors on the same memory, so that only their values can be written to. Where
  microbatches are views of the batch, they are copied until one committed attempt has shown by
  content that the model leaves its input alone; after that tensor versions are watched;
- objects that nothing tells how to open are copied where a copy is as good; of others the tensors
  in them are watched by their versions.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from automicro.content import same_content
from automicro.errors import RollbackError
from automicro.memory import active_budget
from automicro.slicing import Contents
from automicro.torch_private import version_of

logger = logging.getLogger(__name__)


def cost_of_row(contents: Contents, num_rows: int) -> float:
    """Elements of one row of a batch, on average; what its activations grow with.

    Characters of a text are elements, too. A batch of which nothing is known costs 1 a row.

    >>> cost_of_row(Contents([torch.zeros(4, 10), torch.zeros(4)]), 4)
    11.0
    >>> cost_of_row(Contents(["four", "text", "rows", ""]), 4), cost_of_row(Contents([""]), 1)
    (3.0, 1.0)
    """
    return contents.num_elements / num_rows or 1.0


class InputGuard:
    """What is known about a model: whether it writes into its input."""

    def __init__(self) -> None:
        self.writes: bool | None = None  # None: not known yet

    def watch(self, batches: Sequence[Contents], device: torch.device) -> "InputWatch":
        """Guard the batches of one step, for a model on this device."""
        return InputWatch(self, batches, device)


class InputWatch:
    """The batches of one step, guarded. A part of the transaction.

    Attributes:
        isolate: whether microbatches must be copies of the batch.
    """

    def __init__(
        self, guard: InputGuard, batches: Sequence[Contents], device: torch.device
    ) -> None:
        self._guard = guard
        self._leaves = [leaf for batch in batches for leaf in batch.tensors]
        self._inner = [leaf for batch in batches for leaf in batch.inner_tensors]
        self._versions: list[int] = []
        self._inner_versions: list[int] = []
        self._wrote = False
        # A budget models the copy to its device, so there nothing aliases the batch.
        aliases = active_budget() is None and any(leaf.device == device for leaf in self._leaves)
        unwatchable = any(leaf.is_inference() for leaf in self._leaves)
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
        self._inner_versions = _versions_of(self._inner)

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
        if self._inner_versions and _versions_of(self._inner) != self._inner_versions:
            raise RollbackError(
                "the model wrote into a tensor that lies in an object of the batch "
                "that cannot be opened, so this batch cannot be tried again; clone the tensor in "
                "the forward before changing it, or use register_batch_type"
            )
        if self._versions and self._current_versions() != self._versions:
            self._guard.writes = True
            raise RollbackError(
                "the model wrote into its input, which earlier batches had not shown, so this "
                "batch cannot be tried again; clone the input in the forward before changing it"
            )

    def _current_versions(self) -> list[int]:
        return [] if self.isolate else _versions_of(self._leaves)


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]
