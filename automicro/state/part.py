"""What a caller's code can reach, as a part of a transaction."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from automicro.errors import StateWarning, warn
from automicro.state.capture import Captured, capture
from automicro.state.values import is_plain
from automicro.transaction.transaction import Part

Roots = Mapping[str, Any]


class State:
    """Everything that some roots reach: what a failed attempt did to it is undone.

    Args:
        roots: gives modules, functions and further values by name, when an attempt begins.
        declared: names of roots all of whose values must come back.

    Example:
        >>> told = ["before"]
        >>> state = State(lambda: {"told": told})
        >>> state.begin()
        >>> told.append("in an attempt that fails")
        >>> state.roll_back()
        >>> told
        ['before']
    """

    def __init__(self, roots: Callable[[], Roots], *, declared: Iterable[str] = ()) -> None:
        self._roots = roots
        self._declared = tuple(declared)
        self._captured: Captured | None = None
        self._of: Roots = {}
        self._is_new = True
        self._named: set[str] = set()

    def begin(self) -> None:
        """Capture it.

        Raises:
            TypeError: a declared root holds what cannot be put back.
        """
        roots = self._roots()
        captured = None if not _are_same(roots, self._of) else self._captured
        self._of, self._captured = roots, None
        self._captured = capture(roots) if captured is None else captured.again()
        self._is_new = self._captured is not captured
        if self._is_new and self._declared and self._captured.left_out:
            self._refuse(self._captured)

    def prepare(self) -> None:
        """Nothing can fail."""

    def commit(self) -> None:
        captured = self._captured
        if captured is None:
            return
        if self._is_new and not captured.is_settled():
            self._captured = None  # what the attempt has replaced is not kept alive
            return
        captured.let_go()

    def roll_back(self) -> None:
        """Put it back.

        Raises:
            RollbackError: something was changed that is watched, and not copied.

        Warns:
            StateWarning: something cannot be put back; said once for each.
        """
        if self._captured is None:
            return
        self._captured.put_back()
        if self._captured.left_out:
            self._name(self._captured)

    def is_changed(self, tensor: Tensor, *, by_content: bool = True) -> bool:
        """Whether a tensor is another than at `begin`; see `Captured.is_changed`."""
        captured = self._captured
        return captured is not None and captured.is_changed(tensor, by_content=by_content)

    def _name(self, captured: Captured) -> None:
        names = captured.names()
        for value, why in captured.left_out:
            path = names.get(id(value), ("?", ""))[0]
            if path in self._named:
                continue
            self._named.add(path)
            warn(
                f"{path} (of type {type(value).__name__}) stays as a failed attempt has left it, "
                f"because {why}. Keep what a step changes in numbers, lists, tensors or objects, "
                "or pass state=[...] with an object that has begin, prepare, commit and roll_back",
                StateWarning,
            )

    def _refuse(self, captured: Captured) -> None:
        names = captured.names()
        for value, why in captured.left_out:
            path = names.get(id(value), ("?", ""))[0]
            root = path.partition(".")[0].partition("[")[0]
            if root in self._declared:
                raise TypeError(
                    f"{path} is of type {type(value).__name__}, which cannot be put back after a "
                    f"failed attempt, because {why}. Keep what a step changes in numbers, lists, "
                    "tensors or objects, or give an object with begin, prepare, commit and "
                    "roll_back"
                )


_PART = ("begin", "prepare", "commit", "roll_back")


def read_state(values: Iterable[Any]) -> tuple[list[Part], dict[str, Any]]:
    """What a caller gave as further state: parts of a transaction, and roots by name.

    Raises:
        TypeError: a value that nothing can change, so that another must have been meant.
    """
    parts: list[Part] = []
    roots: dict[str, Any] = {}
    for index, value in enumerate(values):
        if is_plain(value) and not hasattr(value, "__dict__"):
            raise TypeError(
                f"state=[…] holds {value!r} (of type {type(value).__name__}), which nothing can "
                "change in place; pass the object that holds it"
            )
        if all(callable(getattr(value, name, None)) for name in _PART):
            parts.append(value)
        else:
            roots[f"state[{index}]"] = value
    return parts, roots


def _are_same(one: Roots, other: Roots) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
