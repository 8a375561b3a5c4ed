"""What modules keep beside parameters and buffers, and whether a forward changes it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.content import same_content
from automicro.reach import OF_EVERY_MODULE, is_generator
from automicro.transaction import state_of

_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Frozen:
    """A value as it was: compared by content, whatever happens to the value.

    Example:
        >>> counts = {"steps": [1, 2]}
        >>> before = Frozen(counts)
        >>> counts["steps"].append(3)
        >>> list(before.changes(Frozen(counts), "counts"))
        ['counts.steps']
    """

    def __init__(self, value: Any, depth: int = _DEPTH) -> None:
        self.type = type(value)
        self.parts: dict[Any, Frozen] = {}
        self.content: Any = None
        if isinstance(value, Tensor):
            self.content = value.detach().clone()
        elif isinstance(value, _PLAIN):
            self.content = value
        elif is_generator(value):
            state = state_of(value)
            self.content = state.tolist() if isinstance(state, Tensor) else repr(state)
        elif isinstance(value, np.ndarray):
            self.content = value.tobytes(), value.shape
        elif isinstance(value, nn.Module | type) or callable(value) or depth == 0:
            self.content = id(value)
        else:
            self.parts = {name: Frozen(part, depth - 1) for name, part in _parts(value)}

    def changes(self, other: "Frozen", path: str) -> Iterator[str]:
        """Paths of what differs, containers that grew or shrank as a whole."""
        if self.type is not other.type or self.parts.keys() != other.parts.keys():
            yield path
        elif self.parts:
            for name, part in self.parts.items():
                yield from part.changes(other.parts[name], f"{path}.{name}" if path else str(name))
        elif isinstance(self.content, Tensor):
            if not same_content(self.content, other.content):
                yield path
        elif self.content != other.content and self.content == self.content:
            yield path


def freeze_attributes(roots: Mapping[str, nn.Module]) -> dict[tuple[str, str], Frozen]:
    """The plain attributes of all modules, by the module's name and the attribute's."""
    return {
        (owner, name): Frozen(value)
        for owner, module in named_modules(roots)
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE
    }


def changed_attributes(
    before: Mapping[tuple[str, str], Frozen], after: Mapping[tuple[str, str], Frozen]
) -> list[tuple[str, str]]:
    """Attributes that were changed, added or removed."""
    return [
        key
        for key in {**before, **after}
        if key not in before
        or key not in after
        or next(before[key].changes(after[key], ""), None) is not None
    ]


def named_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module in these, each once, by its name behind the root's prefix."""
    memo: set[nn.Module] = set()
    for prefix, root in roots.items():
        for name, module in root.named_modules(memo):
            yield f"{prefix}{name}", module


def describe(owner: str, name: str) -> str:
    """An attribute's path."""
    return f"{owner}.{name}".lstrip(".")


def own_generators(roots: Mapping[str, nn.Module]) -> list[tuple[str, Any]]:
    """Generators that modules keep as attributes, by their paths."""
    return [
        (describe(owner, name), value)
        for owner, module in named_modules(roots)
        for name, value in vars(module).items()
        if is_generator(value)
    ]


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, set | frozenset):
        yield from ((repr(part), None) for part in sorted(value, key=repr))
    elif isinstance(value, Sequence) or hasattr(value, "popleft"):
        yield from enumerate(value)
    else:
        yield from getattr(value, "__dict__", {"": id(value)}).items()
