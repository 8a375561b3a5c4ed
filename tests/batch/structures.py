"""Batches of eight rows in every structure, and the expected contents of their microbatches."""

import argparse
import collections
import dataclasses
import enum
import functools
import types
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

ROWS = 8


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    names: list[str]
    scale: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)
    never_set: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2

    @functools.cached_property
    def total(self) -> float:
        return float(self.x.sum())


class Store(MutableMapping):
    """A mapping that keeps its items in a separate dict, which copies share."""

    def __init__(self, items: dict) -> None:
        self._items = items
        self.source = "store"

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Unwritable(Mapping):
    def __init__(self, items: dict) -> None:
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Tagged(dict):
    tag = ""


class Boxes(list):
    source = ""


class Graphs:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@attrs.define(frozen=True)
class Attrs:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "attrs"


class Image(torch.Tensor):
    """A tensor subclass with an attribute that torch does not carry over."""

    unit: str


class Text:
    """An opaque user-defined row."""

    def __init__(self, text: str) -> None:
        self.text = text


class Picture:
    """An image like those of PIL, whose state is not in its attributes."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return self.value


class Both(tuple):
    """A tuple whose constructor takes no sequence."""

    def __new__(cls, first: Any, second: Any) -> "Both":
        return super().__new__(cls, (first, second))


class Color(enum.Enum):
    RED = 1


def x(*shape: int) -> torch.Tensor:
    shape = shape or (ROWS, 3)
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def y() -> torch.Tensor:
    return torch.arange(ROWS)


def sequences(lengths=(2, 5, 1, 3, 4, 3, 2, 6)) -> list[torch.Tensor]:
    return [x(length, 2) + 100 * row for row, length in enumerate(lengths)]


def tagged() -> Tagged:
    value = Tagged(x=x(), y=y())
    value.tag = "kept"
    return value


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor(sequences(), layout=torch.jagged)


def image() -> torch.Tensor:
    value = x().as_subclass(Image)
    value.unit = "mm"
    return value


def records() -> np.ndarray:
    value = np.zeros(ROWS, dtype=[("a", float), ("b", int)])
    value["a"], value["b"] = np.arange(ROWS) / 3, np.arange(ROWS)
    return value


def compressed(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that these layouts are in beta
        return torch.tril(x(ROWS, ROWS)).to_sparse(layout=layout)


def lazy_stack() -> Any:
    rows = [TensorDict({"x": x(3) + row, "y": torch.tensor(row)}) for row in range(ROWS)]
    return LazyStackedTensorDict.lazy_stack(rows)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "tensor": x,
    "array": lambda: x().numpy(),
    "names": lambda: [f"row {i}" for i in range(ROWS)],
    "tuple": lambda: (x(), y()),
    "list": lambda: [x(), y()],
    "dict": lambda: {"x": x(), "y": y(), "names": list("abcdefgh")},
    "collated texts": lambda: [x(), tuple("abcdefgh")],
    "defaultdict": lambda: collections.defaultdict(list, x=x(), y=y()),
    "dict subclass": tagged,
    "user dict": lambda: collections.UserDict({"x": x(), "y": y()}),
    "proxy": lambda: types.MappingProxyType({"x": x(), "y": y()}),
    "own mapping": lambda: Store({"x": x(), "y": y()}),
    "own read-only mapping": lambda: Unwritable({"x": x(), "y": y()}),
    "batch encoding": lambda: BatchEncoding({"input_ids": x(), "labels": y()}),
    "model output": lambda: SequenceClassifierOutput(logits=x(), hidden_states=(x(), x(ROWS, 2))),
    "named tuple": lambda: Pair(x(), {"a": y(), "b": None}),
    "torch return type": lambda: torch.max(x(), dim=1),
    "frozen dataclass": lambda: Frozen(x(), list("abcdefgh")),
    "slotted dataclass": lambda: Slotted(x(), y()),
    "derived field": lambda: Derived(x()),
    "scalars beside": lambda: (x(), y(), 0.5, "train", None, 7, torch.tensor(3.0), True, 2 + 1j),
    "odd objects beside": lambda: {
        "x": x(),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
        "slice": slice(2),
        "color": Color.RED,
        "activation": torch.relu,
        "module": torch.nn.ReLU,
        "zero_d": np.float32(1.0),
        "empty": [],
        "nothing": {},
    },
    "size in a tuple": lambda: {"x": x(), "image_size": (224, 224)},
    "samples as dicts": lambda: [{"x": x(3) + i, "y": i} for i in range(ROWS)],
    "images of own sizes": lambda: [x(1 + i % 3, 2) for i in range(ROWS)],
    "detection": lambda: (
        tuple(x(3, 2 + i) for i in range(ROWS)),
        tuple({"boxes": x(i, 4), "labels": torch.arange(i)} for i in range(ROWS)),
    ),
    "views beside": lambda: {"views": [x(), x() + 1], "y": y()},
    "items beside": lambda: {"images": [x(3, 2) + i for i in range(ROWS)], "y": y()},
    "list subclass": lambda: {"x": x(), "boxes": Boxes(range(ROWS))},
    "masks or none": lambda: {"x": x(), "masks": [None, *(x(2) for _ in range(ROWS - 1))]},
    "unknown objects per row": lambda: {"x": x(), "objects": [object() for _ in range(ROWS)]},
    "deep": lambda: {"a": {"b": (x(), [x() + 1, {"c": y()}])}, "d": Pair(x(), [y(), y()])},
    "packed": lambda: {"seq": pack_sequence(sequences(), enforce_sorted=False), "y": y()},
    "packed sorted": lambda: pack_sequence(sequences(range(ROWS + 1, 1, -1))),
    "jagged": lambda: (jagged(), y()),
    "own tuple": lambda: Both(x(), y()),
    "texts and a tensor": lambda: (list("abcdefgh"), y()),
    "samples as objects": lambda: [Text(letter) for letter in "abcdefgh"],
    "samples as images": lambda: [Picture(n / 7) for n in range(ROWS)],
    "samples as pairs": lambda: list(zip("abcdefgh", range(ROWS), strict=True)),
    "lists of numbers": lambda: {"x": [[n / 7, 1.0] for n in range(ROWS)], "y": list(range(ROWS))},
    "records": lambda: {"records": records(), "x": x()},
    "array of objects": lambda: {"x": x(), "o": np.array(list("abcdefgh"), dtype=object)},
    "read-only array": lambda: (np.broadcast_to(np.arange(3.0), (ROWS, 3)), y()),
    "masked array": lambda: {"m": np.ma.masked_less(x().numpy(), 3), "y": y()},
    "no elements": lambda: {"x": x(), "nothing": x(ROWS, 0)},
    "arguments": lambda: argparse.Namespace(x=x(), y=y()),
    "namespace": lambda: types.SimpleNamespace(x=x(), y=y()),
    "attrs": lambda: Attrs(x(), y()),
    "tensor subclass": lambda: {"image": image(), "y": y()},
    "tensordict": lambda: TensorDict({"x": x(), "deep": {"y": y()}}, batch_size=[ROWS]),
    "lazy stack": lazy_stack,
    "samples as tensordicts": lambda: list(
        TensorDict({"x": x(), "y": y()}, batch_size=[ROWS]).unbind(0)
    ),
    "csr": lambda: {"x": compressed(torch.sparse_csr), "y": y()},
    "csc": lambda: {"x": compressed(torch.sparse_csc), "y": y()},
    "sparse": lambda: (torch.eye(ROWS).to_sparse_coo(), y()),
}


def rows_of(value: Any, rows: int) -> list[Any]:
    """Return the rows of a leaf in a form that differs from that of shared values."""
    if isinstance(value, PackedSequence):
        return [row.tolist() for row in unpack_sequence(value)]
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [row.tolist() for row in value.unbind()]
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return value.to_dense().tolist()
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return list(value)


def assert_partition(batch: Any, pieces: list[Any], sizes: list[int]) -> None:
    """Check that the pieces have the batch's types and hold each row exactly once, in order."""
    assert [type(piece) for piece in pieces] == [type(batch)] * len(pieces)
    if isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase):
        assert [list(piece) for piece in pieces] == [list(batch)] * len(pieces)
        for key in batch:
            assert_partition(batch[key], [piece[key] for piece in pieces], sizes)
    elif isinstance(batch, TensorDictBase):
        for key in batch.keys():  # noqa: SIM118, a TensorDict iterates over rows
            assert_partition(batch[key], [piece[key] for piece in pieces], sizes)
    elif isinstance(batch, types.SimpleNamespace | argparse.Namespace | Attrs):
        for name in ("x", "y"):
            parts = [getattr(piece, name) for piece in pieces]
            assert_partition(getattr(batch, name), parts, sizes)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                parts = [getattr(piece, field.name) for piece in pieces]
                assert_partition(getattr(batch, field.name), parts, sizes)
    elif isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence | torch.Size):
        if [len(piece) for piece in pieces] == sizes and len(batch) == sum(sizes):
            assert all(a is b for a, b in zip(batch, [e for p in pieces for e in p], strict=True))
        else:
            for index, part in enumerate(batch):
                assert_partition(part, [piece[index] for piece in pieces], sizes)
    elif isinstance(batch, torch.Tensor | np.ndarray | PackedSequence) and (
        isinstance(batch, PackedSequence) or batch.ndim
    ):
        rows = [rows_of(piece, size) for piece, size in zip(pieces, sizes, strict=True)]
        assert [len(part) for part in rows] == sizes
        assert [row for part in rows for row in part] == rows_of(batch, sum(sizes))
    else:
        assert all(piece is batch for piece in pieces)


def numbers_of(value: Any, *, is_row: bool = False) -> list[torch.Tensor]:
    """Return all numbers in the rows as flat tensors, without shared values."""
    if isinstance(value, PackedSequence):
        return [value.data.flatten().double()]
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [row.flatten().double() for row in value.unbind()]
        dense = value.to_dense() if value.layout is not torch.strided else value
        return [dense.flatten().double()] if value.dim() else []
    if isinstance(value, np.ndarray) and value.dtype != object:
        named = value.dtype.names
        columns = [value] if named is None else [value[name] for name in named]
        return [torch.tensor(np.asarray(column).astype(float)).flatten() for column in columns]
    # Compare the module name, because a Microbatcher inspects every class its forward names.
    if type(value).__module__.startswith("tensordict."):
        leaves = value.values(include_nested=True, leaves_only=True)
        return [leaf.flatten().double() for leaf in leaves]
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, str | int | float):
        number = sum(map(ord, value)) if isinstance(value, str) else value
        return [torch.tensor([float(number)], dtype=torch.float64)] if is_row else []
    elif value is None or isinstance(value, torch.Size | type):
        return []
    elif isinstance(value, np.ndarray | list | tuple):
        parts = list(value)
        holds_tensors = any(isinstance(part, torch.Tensor) for part in parts)
        is_row = is_row or (not isinstance(value, tuple) and not holds_tensors)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        if dataclasses.is_dataclass(value) or hasattr(value, "__attrs_attrs__"):
            names = getattr(type(value), "__match_args__", ())
            parts = [getattr(value, name) for name in names if hasattr(value, name)]
    return [number for part in parts for number in numbers_of(part, is_row=is_row)]
