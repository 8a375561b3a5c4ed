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

_NOTE = -1  # no id of a hook of anybody's


class HeldHooks:
    """Keeps the hooks of leaves from running while the gradients of microbatches add up.

    They are away only while a backward of ours runs: one inside the user's forward runs them.
    """

    def __init__(self, leaves: Sequence[Tensor] = ()) -> None:
        self.leaves = leaves
        self._order: dict[int, Tensor] = {}
        self._away: list[tuple[Tensor, tuple[Any, Any], tuple[Any, Any]]] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no hook of the leaves run meanwhile."""
        try:
            for leaf in self.leaves:
                self._hold(leaf)
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Give the leaves their hooks, and those registered meanwhile. It may be called twice."""
        while self._away:
            # It leaves the list last: after an interruption the next call gives it back.
            leaf, theirs, ours = self._away[-1]
            for their, our in zip(theirs, ours, strict=True):
                if our is not None:
                    our.pop(_NOTE, None)
                    their.update(our)
            set_gradient_hooks(leaf, *theirs)
            self._away.pop()

    def in_order(self) -> list[Tensor]:
        """The leaves as autograd came by them first, then those that it has not come by."""
        reached = list(self._order.values())
        return reached + [leaf for leaf in self.leaves if id(leaf) not in self._order]

    def _note(self, leaf: Tensor, _: Tensor) -> None:
        self._order.setdefault(id(leaf), leaf)

    def _hold(self, leaf: Tensor) -> None:
        theirs = gradient_hooks(leaf)
        before: Hooks | None = None if theirs[0] is None else OrderedDict()
        after: Hooks | None = None if theirs[1] is None else OrderedDict()
        # The first backward shows in which order hooks would have run, and `deliver` keeps to it.
        if id(leaf) not in self._order:
            noting = after if before is None else before
            assert noting is not None
            noting[_NOTE] = functools.partial(self._note, leaf)
        self._away.append((leaf, theirs, (before, after)))
        set_gradient_hooks(leaf, before, after)


def deliver(leaves: Sequence[Tensor], totals: list[Tensor]) -> None:
    """Hand each leaf its total gradient in this order, through all its hooks, in one backward.

    Adding up has the highest priority in autograd's engine, so that each leaf is done, with its
    hooks, before the next one's turn comes. The engine takes a total over without a copy where
    no other code holds it, so the list is emptied.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> handle = weight.register_hook(lambda gradient: gradient.clamp(max=1))
    >>> deliver([weight], [torch.tensor([0.5, 3.0])])
    >>> weight.grad.tolist()
    [0.5, 1.0]
    """
    waiting = dict(enumerate(totals))
    totals.clear()
    with torch.enable_grad():
        token = torch.zeros((), device=leaves[0].device, requires_grad=True) * 1
        # A backward begins at the node that was made last, which so is that of the first leaf.
        for index in reversed(range(len(leaves))):
            token = _HandOver.apply(  # type: ignore[no-untyped-call]
                token, leaves[index], waiting, index
            )
    token.backward()  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """Gives one leaf its gradient, then lets the next node run."""

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
    return [node.variable for node in nodes_of(loss) if is_accumulation(node)]


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """The operations that a backward of a tensor would run, each once.

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
    """Those that an attempt comes by for the first time.

    Most die with their microbatch, such as a copy of the input that a forward differentiates by.
    They are not kept alive. The others are known from then on.
    """

    def __init__(self) -> None:
        self._found: list[tuple[TensorWeakRef, Tensor | None]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def notice(self, leaves: Sequence[Tensor], known: Container[int]) -> None:
        """Put aside the gradients of those that are not known, before a backward."""
        mine = {id(leaf) for reference, _ in self._found if (leaf := reference()) is not None}
        for leaf in leaves:
            if id(leaf) not in known and id(leaf) not in mine:
                self._found.append((TensorWeakRef(leaf), leaf.grad))
                leaf.grad = None

    def with_hooks(self) -> list[Tensor]:
        """Those whose gradients are waited for."""
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
