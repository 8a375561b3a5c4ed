"""State as it stood when something was computed, for when that is computed again."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from automicro.state.capture import Captured, capture
from automicro.torch_private import is_uninitialized, keeping_versions


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

    def undone(self) -> "Undone":
        """What an attempt does to it, as a part of a transaction."""
        return Undone(self)

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


class Undone:
    """What happens to what a computation reaches, undone where that fails.

    Args:
        replay: of the computation.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._captured: Captured | None = None

    def begin(self) -> None:
        """Capture it."""
        self._captured = self._replay.take()

    def prepare(self) -> None:
        """Nothing can fail."""

    def commit(self) -> None:
        if self._captured is not None:
            self._replay.give_back(self._captured)
        self._captured = None

    def roll_back(self) -> None:
        """Put it back.

        Raises:
            RollbackError: something was changed that is watched, and not copied.
        """
        if self._captured is not None:
            self._captured.put_back()
        self.commit()


@contextlib.contextmanager
def taking_shapes(modules: Iterable[nn.Module], generators: Iterable[Any]) -> Iterator[None]:
    """Let lazy modules take their shapes meanwhile, and nothing else change that is there already.

    Torch's own generator is left where it is: weights were drawn from it.
    """
    buffers = [each for module in modules for each in module.buffers(recurse=False)]
    there = [*(each for each in buffers if not is_uninitialized(each)), *generators]
    captured = capture({str(index): each for index, each in enumerate(there)})
    try:
        yield
    finally:
        captured.put_back()
