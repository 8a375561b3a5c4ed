"""State as it stood when something was computed, for when that is computed again."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from automicro.state.capture import Captured, capture
from automicro.torch_private import keeping_versions


class Replay:
    """What a computation reaches, as it stands now and as it stood.

    What was captured is used again for the next capture, which then needs no walk.

    Args:
        roots: modules, functions and further values by name.
        large: the only large tensors that are copied, as `capture` has it.

    Example:
        >>> told = ["first"]
        >>> replay = Replay({"told": told})
        >>> before = replay.take()
        >>> told.append("later")
        >>> with replay.as_it_stood(before):
        ...     told.append("again")
        ...     told
        ['first', 'again']
        >>> told
        ['first', 'later']
    """

    def __init__(
        self, roots: Mapping[str, Any], *, large: Mapping[int, Tensor] | None = None
    ) -> None:
        self._roots, self._large = roots, large
        self._free: list[Captured] = []

    def take(self, owner: Any = None) -> Captured:
        """All as it is now; given back when its owner is gone."""
        if self._free:
            captured = self._free.pop().again()
        else:
            captured = capture(self._roots, large=self._large)
        if owner is not None:
            weakref.finalize(owner, self.give_back, captured).atexit = False
        return captured

    def give_back(self, captured: Captured) -> None:
        """It is needed no longer, and nothing is kept alive that only it holds."""
        if captured.is_settled():
            captured.let_go()
            self._free.append(captured)

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Put back afterwards what is changed meanwhile, so that no one need be told of it."""
        now = self.take()
        with keeping_versions(now.tensors):
            try:
                yield
            finally:
                now.put_back()
                self.give_back(now)

    @contextlib.contextmanager
    def as_it_stood(self, before: Captured) -> Iterator[None]:
        """Let all be as it stood for a while."""
        with self.leaving_no_trace(), keeping_versions(before.tensors):
            before.put_back()
            yield
