"""Leaves that a loss reaches although no module lists them: a parameter in a closure, say."""

from collections.abc import Container

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from automicro.errors import RollbackError
from automicro.torch_private import is_accumulation, with_hooks


def leaves_of(loss: Tensor) -> list[Tensor]:
    """All leaves that a backward of a loss would add a gradient to.

    Not those that are reached only inside of an operation's own backward, as with reentrant
    checkpointing.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_of((weight * weight).sum())]
    [True]
    """
    if loss.grad_fn is None:
        return [loss]
    seen, found = {loss.grad_fn}, []
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if is_accumulation(node):
            found.append(node.variable)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


class OutsideLeaves:
    """Those that an attempt comes by for the first time.

    Most die with their microbatch, such as a copy of the input that a forward differentiates by.
    They are not kept alive. The others are known from then on.
    """

    def __init__(self) -> None:
        self._found: list[tuple[TensorWeakRef, Tensor | None]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def notice(self, loss: Tensor, known: Container[int]) -> None:
        """Put aside the gradients of those that a loss reaches, before its backward.

        Args:
            loss: of a microbatch.
            known: the ids of leaves that are none.
        """
        mine = {id(leaf) for reference, _ in self._found if (leaf := reference()) is not None}
        for leaf in leaves_of(loss):
            if id(leaf) not in known and id(leaf) not in mine:
                self._found.append((TensorWeakRef(leaf), leaf.grad))
                leaf.grad = None

    def with_hooks(self) -> list[Tensor]:
        """Those whose gradients somebody waits for."""
        return with_hooks(leaf for reference, _ in self._found if (leaf := reference()) is not None)

    def take_survivors(self) -> list[tuple[Tensor, Tensor | None]]:
        """Those that are still alive, each with the gradient that it had."""
        found, self._found = self._found, []
        return [
            (leaf, earlier) for reference, earlier in found if (leaf := reference()) is not None
        ]

    def roll_back(self) -> None:
        """Let those that are still alive have the gradients that they had."""
        for leaf, earlier in self.take_survivors():
            leaf.grad = earlier


def refuse_unknown_part() -> None:
    """Say that a gradient cannot be told from what a failed attempt left.

    Raises:
        RollbackError: always.
    """
    raise RollbackError(
        "the forward reached a tensor that requires a gradient and is in no module for the first "
        "time in an attempt that failed, so what that attempt added to its .grad cannot be told "
        "from what was there; clear it (tensor.grad = None), and let a module own the tensor and "
        "name it with modules=(…)"
    )
