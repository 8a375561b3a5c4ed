"""Begin together, then commit or roll back together."""

from collections.abc import Sequence
from typing import Protocol

from automicro.errors import add_note, remember


class Part(Protocol):
    """One restorable thing."""

    def begin(self) -> None:
        """Remember the state. May run out of memory, before anything has changed."""

    def prepare(self) -> None:
        """Do all of the commit that can fail, so that it can still be rolled back."""

    def commit(self) -> None:
        """Keep what happened since `begin`. Needs no memory, and is not given up half-way."""

    def roll_back(self) -> None:
        """Put the state back. Right also after a `begin` or a `prepare` that failed half-way."""


class Transaction:
    """Several parts as one.

    Not a context manager on purpose: after running out of memory, rolling back has to wait until
    the ``except`` block is left, because the traceback keeps the failed attempt's tensors alive.

    Example:
        >>> import torch
        >>> from automicro.transaction.gradients import Gradients
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
        self._is_prepared = False

    def begin(self) -> None:
        """Let every part remember its state.

        Raises:
            torch.OutOfMemoryError: no memory for the copies; roll back, as after any failure.
        """
        self._is_prepared = False
        for part in self._parts:
            self._begun.append(part)  # first, so that a half-begun part is rolled back too
            part.begin()

    def prepare(self) -> None:
        """Let every part do what can fail of its commit. It can be called ahead of `commit`.

        Raises:
            Exception: roll back.
        """
        self._is_prepared = True
        for part in self._begun:
            part.prepare()

    def commit(self) -> None:
        """Let every part keep what happened: first all prepare, then all commit.

        Raises:
            Exception: while preparing; roll back. Afterwards the commit is carried through, and an
                exception (Ctrl-C, say) is raised only at its end.
        """
        if not self._is_prepared:
            self.prepare()
        interruption: BaseException | None = None
        while self._begun:
            try:
                self._begun[0].commit()
            # Half a commit could neither be used nor undone, so that even Ctrl-C waits for its end.
            except BaseException as error:
                interruption = interruption or error
            del self._begun[0]
        if interruption is not None:
            add_note(interruption, "automicro: the batch was committed, its gradient is in .grad")
            remember(interruption, is_committed=True)
            try:
                raise interruption
            finally:
                interruption = None  # it holds this frame: a cycle

    def roll_back(self) -> None:
        """Let every part that has begun put its state back.

        All parts get their chance. Those that failed are kept, so that calling again tries them
        again.

        Raises:
            BaseException: of the first part that failed.
        """
        failed: list[Part] = []
        failure: BaseException | None = None
        for part in reversed(self._begun):
            try:
                part.roll_back()
            except BaseException as error:
                # The others are put back all the same, and a second call tries these again.
                failed.append(part)
                failure = failure or error
        self._begun = failed[::-1]
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # it holds this frame: a cycle
