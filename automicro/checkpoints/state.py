"""The state of a run, split into structure and tensors, and each rank's share of it.

The structure is the state with every tensor on the meta device: its place, shape, dtype and
strides, without its data.

Rank 0 saves the state of the run. Every rank saves its part of sharded tensors, and every other
rank also saves its own state, such as random numbers.
"""

import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.errors import CheckpointError
from automicro.sharding import is_pending, is_sharded
from automicro.torch_private import is_uninitialized

# Types that `torch.load` reads with weights_only=True and without registered classes.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ARRAY = "array of numpy"  # the key of the array's dtype, next to its shape and its bytes


def take_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split a state into its structure and its tensors by place, such as ``model.0.weight``.

    >>> structure, tensors = take_apart({"model": {"w": torch.ones(2)}, "epoch": 3})
    >>> structure["model"]["w"].device, structure["epoch"], tensors
    (device(type='meta'), 3, {'model.w': tensor([1., 1.])})
    """
    tensors: dict[str, Tensor] = {}

    def keep(place: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _plain(place, leaf)
        # torch.distributed.checkpoint can store dense tensors only.
        tensors[place] = dense = _dense(place, leaf)
        if is_sharded(dense):
            return torch.empty(dense.shape, dtype=dense.dtype, device="meta")  # the global shape
        return torch.empty_like(dense, device="meta")

    return _map(dict(state), keep), tensors


def put_together(structure: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rebuild a state from the structure and the tensors of `take_apart`.

    >>> put_together({"w": torch.empty(1, device="meta"), "n": 3}, {"w": torch.ones(1)})
    {'w': tensor([1.]), 'n': 3}
    """

    def fill(place: str, leaf: Any) -> Any:
        return tensors[place] if isinstance(leaf, Tensor) else leaf

    return _map(dict(structure), fill, _array_of)


def _array_of(found: dict[Any, Any]) -> Any:
    """Rebuild the array that `_packed` stored as a dict; return any other dict unchanged."""
    if _ARRAY not in found:
        return found
    data = found["data"].numpy(force=True).tobytes()
    return np.frombuffer(data, found[_ARRAY]).reshape(found["shape"]).copy()


def _packed(array: np.ndarray) -> dict[str, Any]:
    # Stored as bytes, because torch does not have all dtypes of NumPy.
    data = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    return {_ARRAY: array.dtype.str, "shape": array.shape, "data": data}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Collect the tensors of a state by place; other values can be of any type.

    >>> tensors_of({"model": {"w": torch.ones(1)}, "anything": object()})
    {'model.w': tensor([1.])}
    """
    tensors: dict[str, Tensor] = {}

    def keep(place: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            tensors[place] = leaf

    _map(dict(state), keep)
    return tensors


def _map(
    state: dict[str, Any],
    change: Callable[[str, Any], Any],
    close: Callable[[dict[Any, Any]], Any] = lambda found: found,
) -> dict[str, Any]:
    """Copy the containers of a state, replacing each leaf and each closed dict."""
    taken: set[str] = set()

    def walk(parts: tuple[str, ...], value: Any) -> Any:
        if type(value) is OrderedDict:
            copy = OrderedDict(items(parts, value))
            # `Module.state_dict` stores the versions of the modules as an attribute.
            for name, attribute in vars(value).items():
                setattr(copy, name, walk((*parts, name), attribute))
            return copy
        if type(value) in (dict, defaultdict):
            return close(dict(items(parts, value)))
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return walk(parts, _packed(value))
        if type(value) in (list, tuple):
            if all(type(each) is int for each in value):  # can be long, such as an order of rows
                return type(value)(value)
            return type(value)(walk((*parts, str(i)), each) for i, each in enumerate(value))
        return change(_unique(".".join(parts), taken), value)

    def items(parts: tuple[str, ...], value: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
        for key, each in value.items():
            inner = (*parts, str(key))
            yield change(f"the key of {'.'.join(inner)}", key), walk(inner, each)

    changed: dict[str, Any] = walk((), state)
    return changed


def _unique(place: str, taken: set[str]) -> str:
    """Make a place unique: {"a.b": 1, "a": {"b": 2}} has the place "a.b" twice."""
    candidate, count = place, 1
    while candidate in taken:
        count += 1
        candidate = f"{place}#{count}"
    taken.add(candidate)
    return candidate


def _plain(place: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is tuple:
        return tuple(_plain(place, each) for each in value)
    if type(value) in (set, Counter):
        for each in value:
            _plain(place, each)
        return value
    if type(value) not in _PLAIN:
        raise CheckpointError(
            f"{place} is of type {type(value).__name__}, which cannot be loaded without running "
            "code. Give it a state_dict() of tensors, numbers, text, and dicts, lists and tuples "
            "of them, or leave it out"
        )
    return value


def _dense(place: str, leaf: Tensor) -> Tensor:
    if is_uninitialized(leaf):
        why = "of a lazy module that has no shape yet; run one forward before saving it"
    elif is_sharded(leaf) and is_pending(leaf):
        why = "a DTensor with a partial placement; change it with redistribute()"
    elif leaf.is_meta:
        why = "on the meta device, without data; give the model its parameters before saving it"
    elif leaf.layout is not torch.strided or leaf.is_quantized:
        why = "sparse or quantized; save tensor.to_dense() or tensor.dequantize()"
    else:
        return leaf.detach()
    raise CheckpointError(f"{place} is {why}")


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of a checkpoint."""

    structure: Mapping[str, Any]  # of the run's state on rank 0, of the rank's own on others
    tensors: Mapping[str, Tensor]  # by the names under which they are stored
    names: int  # checksum of the places and shapes of all sharded tensors, equal on all ranks

    @classmethod
    def of(
        cls, state: Mapping[str, Any], *, own: Mapping[str, Any] | None = None, rank: int = 0
    ) -> "Share":
        """Compute the share of a rank."""
        structure, tensors = take_apart(state)
        sharded = {name: each for name, each in tensors.items() if is_sharded(each)}
        names = zlib.crc32(repr([(name, *each.shape) for name, each in sharded.items()]).encode())
        if rank:
            structure, plain = take_apart(own or {})
            tensors = sharded | {name_of_own(rank, place): each for place, each in plain.items()}
        return cls(structure=structure, tensors=tensors, names=names)


def name_of_own(rank: int, place: str) -> str:
    """Name under which a tensor of a rank's own state is stored.

    >>> name_of_own(1, "rng.torch")
    'rank-1.rng.torch'
    """
    return f"rank-{rank}.{place}"
