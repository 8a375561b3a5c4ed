"""Begin together, then commit or roll back together."""

from collections.abc import Sequence
from typing import Protocol


class Part(Protocol):
    """One restorable thing."""

    def begin(self) -> None:
        """Remember the state. May run out of memory, before anything has changed."""

    def commit(self) -> None:
        """Keep what happened since `begin`."""

    def roll_back(self) -> None:
        """Put the state back. Right also after a `begin` or a `commit` that failed half-way."""


class Transaction:
    """Several parts as one.

    Not a context manager on purpose: after running out of memory, rolling back has to wait until
    the ``except`` block is left, because the traceback keeps the failed attempt's tensors alive.

    Example:
        >>> import torch
        >>> from automicro.transaction import Gradients, Transaction
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> transaction = Transaction([Gradients([weight])])
        >>> transaction.begin()
        >>> weight.sum().backward()
        >>> transaction.roll_back()
        >>> weight.grad is None
        True
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._begun: list[Part] = []

    def begin(self) -> None:
        """Let every part remember its state.

        Raises:
            torch.OutOfMemoryError: no memory for the copies; roll back, as after any failure.
        """
        for part in self._parts:
            self._begun.append(part)  # first, so that a half-begun part is rolled back too
            part.begin()

    def commit(self) -> None:
        """Let every part keep what happened."""
        for part in self._begun:
            part.commit()
        self._begun.clear()

    def roll_back(self) -> None:
        """Let every part that has begun put its state back.

        All parts get their chance. Those that failed are kept, so that calling again tries them
        again.

        Raises:
            Exception: of the first part that failed.
        """
        failed: list[Part] = []
        failure: Exception | None = None
        for part in reversed(self._begun):
            try:
                part.roll_back()
            except Exception as error:
                failed.append(part)
                failure = failure or error
        self._begun = failed[::-1]
        if failure is not None:
            raise failure
