"""Transactions, whose parts begin together and then commit or roll back together."""

from collections.abc import Sequence
from typing import Protocol

from automicro.errors import add_note, remember


class Part(Protocol):
    """A part of a transaction that can restore one thing."""

    def begin(self) -> None:
        """Capture the state. It may run out of memory, before anything has changed."""

    def prepare(self) -> None:
        """Do everything in the commit that can fail, while it can still be rolled back."""
        return

    def commit(self) -> None:
        """Keep the changes since `begin`, without allocating memory."""
        return

    def roll_back(self) -> None:
        """Restore the state, even after a `begin` or a `prepare` that failed half-way."""


class Transaction:
    """Several parts that act as one.

    Example:
        >>> import torch
        >>> from automicro.transaction.gradients import Gradients
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> transaction = Transaction([Gradients({id(weight): weight})])
        >>> transaction.begin()
        >>> weight.sum().backward()
        >>> transaction.roll_back()
        >>> weight.grad is None
        True
    """

    # Not a context manager: after running out of memory, the rollback must wait until the `except`
    # block is left, because the traceback keeps the tensors of the failed attempt alive.
    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._begun: list[Part] = []
        self._is_prepared = False

    @property
    def is_open(self) -> bool:
        """Whether any part has begun and was neither committed nor rolled back."""
        return bool(self._begun)

    def begin(self) -> None:
        """Let every part capture its state.

        Raises:
            torch.OutOfMemoryError: no memory for the copies; roll back, as after any failure.
        """
        self._is_prepared = False
        for part in self._parts:
            self._begun.append(part)  # first, so that a half-begun part is rolled back, too
            part.begin()

    def prepare(self) -> None:
        """Let every part do what can fail in its commit. It may be called before `commit`.

        Raises:
            Exception: a part failed; roll back.
        """
        self._is_prepared = True
        for part in self._begun:
            part.prepare()

    def commit(self) -> None:
        """Commit every part, after all have prepared.

        Raises:
            Exception: a part failed while preparing; roll back. A later exception, such as Ctrl-C,
                is raised only after the commit is complete.
        """
        if not self._is_prepared:
            self.prepare()
        interruption: BaseException | None = None
        while self._begun:
            try:
                self._begun[0].commit()
            # Half a commit could be neither used nor undone, so even Ctrl-C waits for its end.
            except BaseException as error:
                interruption = interruption or error
            del self._begun[0]
        if interruption is not None:
            add_note(interruption, "automicro: the batch was committed; its gradient is in .grad")
            remember(interruption, is_committed=True)
            try:
                raise interruption
            finally:
                interruption = None  # break the reference cycle with the traceback

    def roll_back(self) -> None:
        """Roll back every part that has begun. Calling it again retries the parts that failed.

        Raises:
            BaseException: of the first part that failed.
        """
        failed: list[Part] = []
        failure: BaseException | None = None
        for part in reversed(self._begun):
            try:
                part.roll_back()
            except BaseException as error:
                # The other parts are still rolled back, and a second call retries the failed ones.
                failed.append(part)
                failure = failure or error
        self._begun = failed[::-1]
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # break the reference cycle with the traceback
