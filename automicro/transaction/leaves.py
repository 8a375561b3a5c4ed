"""Leaves that a step reaches: their hooks, and those that no module lists."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from automicro.errors import RollbackError
from automicro.torch_private import (
    Hooks,
    gradient_hooks,
    is_accumulation,
    set_gradient_hooks,
    with_hooks,
)

_NOTE = -1  # an id that no other hook has


class HeldHooks:
    """The hooks of leaves, held back while the gradients of microbatches add up."""

    # They are removed only during our own backwards: a backward inside the user's forward runs
    # them.
    def __init__(self, leaves: Sequence[Tensor] = ()) -> None:
        self.leaves = leaves
        self._order: dict[int, Tensor] = {}
        self._away: list[tuple[Tensor, tuple[Any, Any], tuple[Any, Any]]] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no hook of the leaves run inside the context."""
        try:
            for leaf in self.leaves:
                self._hold(leaf)
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Restore the hooks of the leaves, with those registered since. It may be called twice."""
        while self._away:
            # Removed from the list last, so that after an interruption the next call restores it.
            leaf, theirs, ours = self._away[-1]
            for their, our in zip(theirs, ours, strict=True):
                if our is not None:
                    our.pop(_NOTE, None)
                    their.update(our)
            set_gradient_hooks(leaf, *theirs)
            self._away.pop()

    def in_order(self) -> list[Tensor]:
        """Return the leaves in the order in which autograd reached them, then all others."""
        reached = list(self._order.values())
        return reached + [leaf for leaf in self.leaves if id(leaf) not in self._order]

    def _note(self, leaf: Tensor, _: Tensor) -> None:
        self._order.setdefault(id(leaf), leaf)

    def _hold(self, leaf: Tensor) -> None:
        theirs = gradient_hooks(leaf)
        before: Hooks | None = None if theirs[0] is None else OrderedDict()
        after: Hooks | None = None if theirs[1] is None else OrderedDict()
        # The first backward records the order in which hooks would run, and `deliver` keeps it.
        if id(leaf) not in self._order:
            noting = after if before is None else before
            assert noting is not None
            noting[_NOTE] = functools.partial(self._note, leaf)
        self._away.append((leaf, theirs, (before, after)))
        set_gradient_hooks(leaf, before, after)


def deliver(leaves: Sequence[Tensor], totals: list[Tensor]) -> None:
    """Deliver to each leaf its total gradient, in order and through all its hooks, in one backward.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> handle = weight.register_hook(lambda gradient: gradient.clamp(max=1))
    >>> deliver([weight], [torch.tensor([0.5, 3.0])])
    >>> weight.grad.tolist()
    [0.5, 1.0]
    """
    # Accumulation has the highest priority in autograd, so each leaf and its hooks are finished
    # before the next one. Autograd takes a total without a copy if no other code holds it, so the
    # list is emptied.
    waiting = dict(enumerate(totals))
    totals.clear()
    with torch.enable_grad():
        token = torch.zeros((), device=leaves[0].device, requires_grad=True) * 1
        # In reverse, because a backward begins at the last node, which must be the first leaf's.
        for index in reversed(range(len(leaves))):
            token = _HandOver.apply(  # type: ignore[no-untyped-call]
                token, leaves[index], waiting, index
            )
    token.backward()  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """An operation whose backward gives one leaf its gradient, then lets the next node run."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, leaf: Tensor, waiting: dict[int, Tensor], index: int
    ) -> Any:
        ctx.waiting, ctx.index = waiting, index
        return token.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, ctx.waiting.pop(ctx.index), None, None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return all leaves that a backward of a loss would add a gradient to.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_of((weight * weight).sum())]
    [True]
    """
    # Leaves that are reached only inside an operation's own backward, as in reentrant
    # checkpointing, are missing.
    if loss.grad_fn is None:
        return [loss]
    return [node.variable for node in nodes_of(loss) if is_accumulation(node)]


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Yield the operations that a backward of a tensor would run, each once.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in nodes_of(weight.exp().sum())]
    ['SumBackward0', 'ExpBackward0', 'torch::autograd::AccumulateGrad']
    """
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


class OutsideLeaves:
    """Leaves that an attempt reaches for the first time."""

    # Weak references: most are freed with their microbatch, such as a copy of the input that a
    # forward differentiates with respect to. The others are remembered.
    def __init__(self) -> None:
        self._found: list[tuple[TensorWeakRef, Tensor | None]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def notice(self, leaves: Sequence[Tensor], known: Container[int]) -> None:
        """Set the gradients of unknown leaves aside, before a backward."""
        mine = {id(leaf) for reference, _ in self._found if (leaf := reference()) is not None}
        for leaf in leaves:
            if id(leaf) not in known and id(leaf) not in mine:
                self._found.append((TensorWeakRef(leaf), leaf.grad))
                leaf.grad = None

    def with_hooks(self) -> list[Tensor]:
        """Return the found leaves that have hooks."""
        return with_hooks(leaf for reference, _ in self._found if (leaf := reference()) is not None)

    def take_survivors(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves that are still alive, each with its earlier gradient."""
        found, self._found = self._found, []
        return [
            (leaf, earlier) for reference, earlier in found if (leaf := reference()) is not None
        ]

    def roll_back(self) -> None:
        """Restore the earlier gradients of leaves that are still alive."""
        for leaf, earlier in self.take_survivors():
            leaf.grad = earlier


def refuse_unknown_part() -> None:
    """Raise because a gradient is mixed with that of a failed attempt."""
    raise RollbackError(
        "in a failed attempt the forward used a tensor for the first time that requires a "
        "gradient and is in no module, so its .grad includes a part of that attempt. Clear it "
        "(tensor.grad = None), let a module own the tensor, and pass the module in modules=(…)"
    )
