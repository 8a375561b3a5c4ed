"""Whether a checkpoint fits a model: which tensors differ, and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from automicro.checkpoints.structure import tensors_of
from automicro.torch_private import is_uninitialized

_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Where the tensors of a saved state and of the current one do not fit. False if they do.

    Attributes:
        missing: names that the current state has and the saved one lacks.
        unexpected: names that the saved state has and the current one lacks.
        shapes: what differs by name, in words.
        dtypes: what differs by name, in words.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: Mapping[str, str]
    dtypes: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def __str__(self) -> str:
        found = {
            "it lacks": self.missing,
            "only it has": self.unexpected,
            "shapes differ": [f"{name} ({words})" for name, words in self.shapes.items()],
            "dtypes differ": [f"{name} ({words})" for name, words in self.dtypes.items()],
        }
        return "; ".join(f"{what}: {_first(names)}" for what, names in found.items() if names)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Differences:
    """Compare the tensors of two states by their place.

    Args:
        saved: nested dicts, lists and tuples with tensors in them.
        current: the same.

    Example:
        >>> import torch
        >>> saved = {"model": {"w": torch.empty(2, 3), "old": torch.empty(1)}}
        >>> print(differences(saved, {"model": {"w": torch.empty(2, 4), "new": torch.empty(1)}}))
        it lacks: model.new; only it has: model.old; shapes differ: model.w (2×3, here 2×4)
    """
    there, here = tensors_of(saved), tensors_of(current)
    # A lazy module takes on whatever shape there was.
    both = [name for name in there if name in here and not is_uninitialized(here[name])]
    return Differences(
        missing=tuple(name for name in here if name not in there),
        unexpected=tuple(name for name in there if name not in here),
        shapes={
            name: f"{_shape(there[name].shape)}, here {_shape(here[name].shape)}"
            for name in both
            if there[name].shape != here[name].shape
        },
        dtypes={
            name: f"{_dtype(there[name].dtype)}, here {_dtype(here[name].dtype)}"
            for name in both
            if there[name].dtype != here[name].dtype
        },
    )


def _shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "one number"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _first(names: Iterable[str]) -> str:
    """The first few, and how many more there are.

    >>> _first(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    every = list(names)
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ", ".join(every[:_MOST_NAMED]) + more
