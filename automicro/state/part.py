"""State that code reaches: as a part of a transaction, and as it was, for a replay."""

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from automicro.errors import StateWarning, warn
from automicro.state.capture import Captured, capture
from automicro.torch_private import keeping_versions
from automicro.values import (
    FUNCTION,
    OBJECT,
    UNREADABLE,
    children,
    is_plain,
    kinds_of,
    kinds_within,
    same_objects,
    walk,
)

Roots = Mapping[str, Any]


class State:
    """Everything that some roots reach: what a failed attempt did to it is undone.

    Args:
        roots: gives modules, functions and further values by name, when an attempt begins.
        declared: names of roots all of whose values must come back.
        skip: gives objects that stay as they become.
        is_held: whether the roots, which rarely change, are held from one attempt to the next, so
            that these need no walk; not where what has this part is reached from them.

    Attributes:
        captured: what was there when the attempt began; None outside of one.

    Example:
        >>> told = ["before"]
        >>> state = State(lambda: {"told": told})
        >>> state.begin()
        >>> told.append("in an attempt that fails")
        >>> state.roll_back()
        >>> told
        ['before']
    """

    def __init__(
        self,
        roots: Callable[[], Roots],
        *,
        declared: Iterable[str] = (),
        skip: Callable[[], Iterable[Any]] = tuple,
        is_held: bool = True,
    ) -> None:
        self._roots, self._skip, self._is_held = roots, skip, is_held
        self._declared = tuple(declared)
        self._replay = Replay({})
        self.captured: Captured | None = None
        self._left_out: list[Any] | None = None  # of the last walk that was looked at
        self._named: set[str] = set()

    def begin(self) -> None:
        """Capture it.

        Raises:
            TypeError: a declared root holds what cannot be put back.
        """
        roots, held = self._roots(), self._replay.roots
        # Roots by name and identity: a metric that is given anew is another root.
        is_same = roots.keys() == held.keys() and same_objects(roots.values(), held.values())
        if not (self._is_held and is_same):
            self._replay = Replay(roots, skip=self._skip())
        self.captured = self._replay.take()
        # What the caller named is meant, so that a warning after a failure would come too late.
        if self._declared and self.captured.left_out is not self._left_out:
            self._refuse(self.captured)
            self._left_out = self.captured.left_out

    def prepare(self) -> None:
        """Nothing can fail."""

    def commit(self) -> None:
        captured, self.captured = self.captured, None
        if captured is not None:
            self._give_back(captured)

    def roll_back(self) -> None:
        """Put it back.

        Raises:
            RollbackError: something was changed that is watched, and not copied.

        Warns:
            StateWarning: something cannot be put back; said once for each.
        """
        captured = self.captured
        if captured is None:
            return
        try:
            captured.put_back()
            # Not before all is back: until then a second call tries again.
            self.captured = None
            self._give_back(captured, is_committed=False)
        finally:
            if captured.left_out:
                self._name(captured)

    def _give_back(self, captured: Captured, *, is_committed: bool = True) -> None:
        if self._is_held:
            self._replay.give_back(captured, is_committed=is_committed)
        else:
            self._replay = Replay({})

    def changed_tensors(self, *, by_content: bool = True) -> set[int]:
        """Ids of those that are others than at `begin`; see `Captured.changed_tensors`."""
        return self.captured.changed_tensors(by_content=by_content) if self.captured else set()

    def _name(self, captured: Captured) -> None:
        names, found = captured.names(), collections.defaultdict[str, list[str]](list)
        for value, why in captured.left_out:
            path = f"{names.get(id(value), '?')[0]} (of type {type(value).__name__})"
            # Once in a run and not at each retry.
            if path not in self._named:
                self._named.add(path)
                found[why].append(path)
        for why, new in found.items():
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            warn(
                f"{', '.join(new[:3])}{more}: left as a failed attempt has made it, because {why}. "
                f"{_REMEDY}",
                StateWarning,
            )

    def _refuse(self, captured: Captured) -> None:
        declared = tuple(f"{each}[" for each in self._declared)
        roots = {key: each for key, each in self._replay.roots.items() if key.startswith(declared)}
        names = {id(value): path for path, value in walk(roots, kinds_within(roots))}
        for value, why in captured.left_out:
            if id(value) in names:
                path = f"{names[id(value)]} (of type {type(value).__name__})"
                self.captured = None  # nothing ran that a rollback could undo or tell of
                raise TypeError(f"{path} cannot be put back, because {why}. {_REMEDY}")


_REMEDY = (
    "Keep what a step changes in numbers, lists, tensors or objects, or pass state=[...] with an "
    "object that has begin, prepare, commit and roll_back"
)


PART = ("begin", "prepare", "commit", "roll_back")


def read_state(values: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Read a caller's further state: parts of a transaction, and roots by name.

    Raises:
        TypeError: a value that nothing can change, so that another must have been meant.
    """
    parts: list[Any] = []
    roots: dict[str, Any] = {}
    for index, value in enumerate(values):
        kinds = kinds_of(type(value))
        is_fixed = all(k.write is None and k not in (OBJECT, FUNCTION, UNREADABLE) for k in kinds)
        is_fixed = is_fixed and all(is_plain(each) for _, each in children(value))
        if is_fixed and (kinds or not hasattr(value, "__dict__")):
            raise TypeError(
                f"state=[…] holds {value!r} (of type {type(value).__name__}), which nothing can "
                "change in place; pass the object that holds it"
            )
        # It puts itself back, in its own way.
        if all(callable(getattr(value, name, None)) for name in PART):
            parts.append(value)
        else:
            roots[f"state[{index}]"] = value
    return parts, roots


class Replay:
    """The state that a computation reaches, as it is now and as it was.

    What was captured is used again for the next capture, which then needs no walk.

    Args:
        roots: modules, functions and further values by name.
        skip: objects that stay as they become.
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
        self, roots: Roots, *, skip: Iterable[Any] = (), large: Mapping[int, Tensor] | None = None
    ) -> None:
        self.roots, self._skip, self._large = roots, skip, large
        self._free: list[Captured] = []

    def take(self, owner: Any = None) -> Captured:
        """All as it is now; given back when its owner is gone."""
        if self._free:
            # Lists that were made once are filled again: a walk is what costs.
            captured = self._free.pop().again()
        else:
            captured = capture(self.roots, skip=self._skip, large=self._large)
        if owner is not None:
            # When the process ends, nothing needs it any more.
            weakref.finalize(owner, self.give_back, captured).atexit = False
        return captured

    def give_back(self, captured: Captured, *, is_committed: bool = True) -> None:
        """It is needed no longer, and nothing is kept alive that only it holds."""
        if captured.let_go(is_committed=is_committed):
            self._free.append(captured)

    def undone(self) -> "State":
        """The changes of an attempt to it, as a part of a transaction."""
        state = State(lambda: self.roots)
        state._replay = self
        return state

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Put back afterwards what is changed meanwhile, so that no one need be told of it."""
        now = self.take()
        # What is written is put back, so that autograd has no reason to refuse what it has saved.
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
