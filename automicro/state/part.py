"""State that code reaches, as a part of a transaction, and as an earlier state for a replay."""

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
    """Everything that some roots reach; a roll back undoes the changes of a failed attempt.

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
        # Objects in `skip` keep their changes. If the capture is held, the next attempt needs no
        # walk, which is not possible if the roots reach the owner of this part.
        self._roots, self._skip, self._is_held = roots, skip, is_held
        self._declared = tuple(declared)  # names of roots whose values must all be restored
        self._replay = Replay({})
        self.captured: Captured | None = None  # only during an attempt
        self._left_out: list[Any] | None = None  # of the last walk that was checked
        self._named: set[str] = set()

    def begin(self) -> None:
        """Capture the state."""
        roots, held = self._roots(), self._replay.roots
        # Compare roots by name and identity, because another metric is another root.
        is_same = roots.keys() == held.keys() and same_objects(roots.values(), held.values())
        if not (self._is_held and is_same):
            self._replay = Replay(roots, skip=self._skip())
        self.captured = self._replay.take()
        # The caller named these roots, so a warning after a failure would be too late.
        if self._declared and self.captured.left_out is not self._left_out:
            self._refuse(self.captured)
            self._left_out = self.captured.left_out

    def prepare(self) -> None:
        """Do nothing, because nothing can fail."""

    def commit(self) -> None:
        captured, self.captured = self.captured, None
        if captured is not None:
            self._give_back(captured)

    def roll_back(self) -> None:
        """Restore the state."""
        captured = self.captured
        if captured is None:
            return
        try:
            captured.put_back()
            # Only after everything is restored: until then a second call tries again.
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
        """Return the ids of tensors changed since `begin`; see `Captured.changed_tensors`."""
        return self.captured.changed_tensors(by_content=by_content) if self.captured else set()

    def _name(self, captured: Captured) -> None:
        names, found = captured.names(), collections.defaultdict[str, list[str]](list)
        for value, why in captured.left_out:
            path = f"{names.get(id(value), '?')[0]} (of type {type(value).__name__})"
            # Warn once in a run and not at each retry.
            if path not in self._named:
                self._named.add(path)
                found[why].append(path)
        for why, new in found.items():
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            warn(
                f"{', '.join(new[:3])}{more}: left as a failed attempt changed it, because "
                f"{why}. {_REMEDY}",
                StateWarning,
            )

    def _refuse(self, captured: Captured) -> None:
        declared = tuple(f"{each}[" for each in self._declared)
        roots = {key: each for key, each in self._replay.roots.items() if key.startswith(declared)}
        names = {id(value): path for path, value in walk(roots, kinds_within(roots))}
        for value, why in captured.left_out:
            if id(value) in names:
                path = f"{names[id(value)]} (of type {type(value).__name__})"
                self.captured = None  # nothing ran that a rollback would have to undo
                raise TypeError(f"{path} cannot be restored, because {why}. {_REMEDY}")


_REMEDY = (
    "Keep state that a step changes in numbers, lists, tensors or objects, or pass state=[...] "
    "with an object that has begin, prepare, commit and roll_back"
)


PART = ("begin", "prepare", "commit", "roll_back")


def read_state(values: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split a caller's additional state into parts of a transaction, and roots by name."""
    parts: list[Any] = []
    roots: dict[str, Any] = {}
    for index, value in enumerate(values):
        kinds = kinds_of(type(value))
        is_fixed = all(k.write is None and k not in (OBJECT, FUNCTION, UNREADABLE) for k in kinds)
        is_fixed = is_fixed and all(is_plain(each) for _, each in children(value))
        if is_fixed and (kinds or not hasattr(value, "__dict__")):
            raise TypeError(
                f"state=[…] holds {value!r} (of type {type(value).__name__}), which cannot be "
                "changed in place. Pass the object that holds it"
            )
        # An object with these methods restores itself.
        if all(callable(getattr(value, name, None)) for name in PART):
            parts.append(value)
        else:
            roots[f"state[{index}]"] = value
    return parts, roots


class Replay:
    """The state that a computation reaches, currently and at earlier times.

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
        """Capture the current state; it is given back when its owner is freed."""
        if self._free:
            # Reuse the lists of an earlier capture, because a walk is expensive.
            captured = self._free.pop().again()
        else:
            captured = capture(self.roots, skip=self._skip, large=self._large)
        if owner is not None:
            # At the end of the process it does not have to be given back.
            weakref.finalize(owner, self.give_back, captured).atexit = False
        return captured

    def give_back(self, captured: Captured, *, is_committed: bool = True) -> None:
        """Return a capture that is no longer needed, and release all that only it keeps alive."""
        if captured.let_go(is_committed=is_committed):
            self._free.append(captured)

    def undone(self) -> "State":
        """Return a part of a transaction that rolls back changes of this state."""
        state = State(lambda: self.roots)
        state._replay = self
        return state

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Roll back all changes made inside the context."""
        now = self.take()
        # Versions stay, because writes are undone and autograd may still use its saved tensors.
        with keeping_versions(now.tensors):
            try:
                yield
            finally:
                now.put_back()
                self.give_back(now)

    @contextlib.contextmanager
    def as_it_stood(self, before: Captured) -> Iterator[None]:
        """Restore an earlier state inside the context."""
        with self.leaving_no_trace(), keeping_versions(before.tensors):
            before.put_back()
            yield
