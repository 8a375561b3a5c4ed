"""Finds padded tensors of a batch and the true length of each row, and cuts padding of slices."""

# Tensors with a common length are a *group*: ``input_ids`` with its mask, or audio with its
# ``audio_lengths``. Groups are found by the usual names of arguments, or declared. A tensor that
# has the padded length of a group, but is not known to belong to it, raises an error with its name:
# whether it is cut or not, the result might be wrong.

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.batch.tensors import replace_tensors, tensor_leaves
from automicro.errors import BatchError

MASKS = ("attention_mask", "padding_mask", "decoder_attention_mask")
"""Names of tensors that are 1 at the values of a row and 0 at its padding."""

_BESIDE_DECODER_MASK = frozenset({"decoder_input_ids", "decoder_inputs_embeds", "labels"})
_BESIDE_MASK = frozenset(
    {
        *("input_ids", "inputs_embeds", "input_values", "input_features", "position_ids"),
        *("token_type_ids",),
        *("labels", "shift_labels", "mlm_labels", "loss_mask", "label_mask", "completion_mask"),
        *("special_tokens_mask", "assistant_masks", "global_attention_mask", "bbox", "langs"),
        *("mm_token_type_ids", "offset_mapping", "word_ids", "segment_ids", "loss_weights"),
    }
)
_LENGTHS = ("_lengths", "_length", "_lens", "_len")
_REMEDY = (
    "pass padding={{{path!r}: {example!r}}} if it is padded to the same length, or "
    "padding={{{path!r}: None}} if it is not padded and has to stay whole"
)

Declared = Mapping[str, str | tuple[str, int] | None]


@dataclass
class Group:
    """Tensors of a batch that are padded to one length."""

    name: str  # name of the mask or tensor of lengths
    padded: int  # length of the padded tensors
    starts: "np.ndarray[Any, Any]"  # first position of each row, int64 of (rows,)
    stops: "np.ndarray[Any, Any]"  # position after the last of each row, int64 of (rows,)
    parts: dict[str, int]  # dimension of the length, by path of the tensor

    @property
    def lengths(self) -> "np.ndarray[Any, Any]":
        """The length of each row; at least 1."""
        # Budgets are divided by costs, and a slice keeps at least one position.
        return np.asarray(np.maximum(self.stops - self.starts, 1))

    def window(self, rows: Sequence[int] | slice) -> tuple[int, int]:
        """Return the first position, and the one after the last, that any of these rows uses."""
        start, stop = int(self.starts[rows].min()), int(self.stops[rows].max())
        return (start, stop) if stop > start else (0, 1)

    def take(self, order: "np.ndarray[Any, Any]") -> "Group":
        """Return the same group for rows in another order."""
        return replace(self, starts=self.starts[order], stops=self.stops[order])


@dataclass
class _Read:
    """The tensors of a batch, and the groups found among them."""

    leaves: dict[str, Tensor]  # by path
    names: dict[str, str]  # the last part of each path
    taken: set[str]  # paths that are declared or belong to a group
    num_rows: int
    groups: list[Group] = field(default_factory=list)

    def free(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that do not belong to a group yet, also while groups are added."""
        return (each for each in self.leaves.items() if each[0] not in self.taken)

    def put(self, path: str, source: str, dim: int) -> Group:
        """Add a tensor to the group of its mask or lengths, and return the group."""
        padded, told = self.leaves[path].shape[dim], self.leaves[source]
        same = (each for each in self.groups if (each.name, each.padded) == (source, padded))
        group = next(same, None)
        if group is None:
            group = _group(source, told, padded, self.num_rows)
            self.groups.append(group)
        group.parts |= {path: dim} if told.dim() == 1 else {path: dim, source: 1}
        self.taken.update(group.parts)
        return group


class Padding:
    """Reads the lengths of the rows of a batch.

    >>> padding = Padding()
    >>> batch = {
    ...     "input_ids": torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]]),
    ...     "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
    ... }
    >>> [group] = padding.read(batch, num_rows=2)
    >>> group.lengths.tolist(), group.padded
    ([2, 3], 4)
    >>> first = {name: tensor[:1] for name, tensor in batch.items()}
    >>> cut_padding(first, [group], slice(0, 1))["input_ids"]
    tensor([[5, 6]])
    """

    def __init__(self, declared: Declared | None = None, *, ignore_index: int = -100) -> None:
        self._declared = _check(declared)
        self._sources = {each[0] for each in self._declared.values() if each is not None}
        self._ignore_index = ignore_index
        # Pairs of a tensor and a group that had different lengths in an earlier batch.
        self._apart: set[tuple[str, str]] = set()
        # Padded dimensions of audio and the like, found in earlier batches.
        self._dims: dict[str, int] = {}
        self._decoded: set[str] = set()  # paths of labels that are padded separately from inputs

    def read(
        self, batch: Any, num_rows: int, *, row_dims: Mapping[str, int] | None = None
    ) -> list[Group]:
        """Return the groups of a batch; none if the batch shows no lengths."""
        # Reading lengths on a device waits for that device.
        leaves = {
            path: tensor
            for path, tensor in tensor_leaves(batch)
            if tensor.layout is torch.strided
            and not tensor.is_nested
            and not (row_dims or {}).get(path, 0)
        }
        names = {path: _last(path, batch) for path in leaves}
        read = _Read(leaves, names, set(self._declared), num_rows)
        self._read_masks(read)
        self._read_labels(read)
        self._read_lengths(read)
        self._add_declared(read)
        self._refuse_unknown(read)
        return read.groups

    def _add_declared(self, read: "_Read") -> None:
        for path, meaning in self._declared.items():
            if meaning is None:
                continue
            source, dim = meaning
            for each in (path, source):
                if each not in read.leaves:
                    raise BatchError(
                        f"padding names {each!r}, which is not a tensor of the batch. Use one "
                        f"of {', '.join(map(repr, read.leaves))}"
                    )
            tensor = read.leaves[path]
            if not 1 <= dim < tensor.dim():
                raise BatchError(
                    f"padding names dimension {dim} of {path!r}, whose shape is "
                    f"{tuple(tensor.shape)}. Name a dimension after the dimension of the rows, "
                    f"as in padding={{{path!r}: ({source!r}, 1)}}"
                )
            read.put(path, source, dim)

    def _read_masks(self, read: "_Read") -> None:
        for path, mask in read.free():
            if read.names[path] not in MASKS or mask.dim() != 2 or len(mask) != read.num_rows:
                continue
            group = read.put(path, path, 1)
            is_decoder = read.names[path].startswith("decoder")
            beside = _BESIDE_DECODER_MASK if is_decoder else _BESIDE_MASK
            for other, tensor in read.free():
                if read.names[other] not in beside:
                    continue
                if tensor.dim() > 1 and tensor.shape[:2] == mask.shape:
                    read.put(other, path, 1)
                    self._add_labels(group, tensor, read.names[other])

    def _read_labels(self, read: "_Read") -> None:
        """Read the labels of a decoder that creates its inputs from them."""
        for path, tensor in read.free():
            is_text = tensor.dim() == 2 and len(tensor) == read.num_rows
            if not (read.groups and read.names[path] == "labels" and is_text):
                continue
            if tensor.is_floating_point():
                continue
            own = [
                other
                for other, beside in read.free()
                if read.names[other] in _BESIDE_DECODER_MASK and beside.shape[:2] == tensor.shape
            ]
            if len(own) > 1 or bool((tensor == self._ignore_index).any()):
                self._decoded.add(path)  # otherwise they might be several labels for each row
            if path in self._decoded:
                group = _whole(path, tensor.shape[1], read.num_rows)
                # Only the labels themselves show their lengths.
                group.stops[:] = 0
                self._add_labels(group, tensor, "labels")
                group.parts = dict.fromkeys(own, 1)
                read.groups.append(group)
                read.taken.update(own)

    def _add_labels(self, group: Group, tensor: Tensor, name: str) -> None:
        """Extend rows to their last label that counts, even if the mask marks it as padding."""
        if name.endswith("labels") and tensor.dim() == 2 and not tensor.is_floating_point():
            starts, stops = _extents(tensor != self._ignore_index)
            np.minimum(group.starts, starts, out=group.starts, where=stops > 0)
            np.maximum(group.stops, stops, out=group.stops)

    def _read_lengths(self, read: "_Read") -> None:
        for path, lengths in read.free():
            end = next(filter(read.names[path].endswith, _LENGTHS), None)
            is_count = not (lengths.is_floating_point() or lengths.dtype == torch.bool)
            if end is None or lengths.shape != (read.num_rows,) or not is_count:
                continue
            stem = read.names[path].removesuffix(end)
            wanted = {stem, f"{stem}s", *(f"{stem}_{end}" for end in ("ids", "values", "features"))}
            candidates = [
                other
                for other, tensor in read.leaves.items()
                if read.names[other] in wanted and tensor.dim() > 1
            ]
            partners = [other for other in candidates if other not in read.taken]
            if not partners and not candidates and path not in self._sources:
                raise BatchError(
                    f"{path!r} looks like the lengths of rows, but no tensor has that name. Name "
                    f"the tensor that is padded to them, as in padding={{'audio': {path!r}}}, or "
                    f"pass padding={{{path!r}: None}} if they are not lengths"
                )
            for other in partners:
                dim = self._padded_dim(other, read.leaves[other], path, int(lengths.max()))
                read.put(other, path, dim)

    def _padded_dim(self, path: str, tensor: Tensor, lengths: str, longest: int) -> int:
        if tensor.dim() == 2:
            return 1
        exact = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == longest]
        if len(exact) == 1:
            self._dims[path] = exact[0]
        # The longest row might be shorter than the padding; then an earlier batch has shown the
        # dimension.
        if path in self._dims:
            return self._dims[path]
        raise BatchError(
            f"{lengths!r} contains lengths up to {longest}, but the padded dimension of "
            f"{path!r} of shape {tuple(tensor.shape)} cannot be determined. Name it, as in "
            f"padding={{{path!r}: ({lengths!r}, 1)}}"
        )

    def _refuse_unknown(self, read: "_Read") -> None:
        known = {part for group in read.groups for part in group.parts} | self._declared.keys()
        others = [each for each in read.leaves.items() if each[0] not in known]
        for (path, tensor), group in itertools.product(others, read.groups):
            has_rows = tensor.shape[:1] == (len(group.stops),)
            # `has_rows` skips dimension 0, which might have that size by chance.
            if group.padded not in tensor.shape[has_rows:]:
                self._apart.add((path, group.name))
            elif (path, group.name) not in self._apart and group.padded > 1:
                raise BatchError(
                    f"{path!r} of shape {tuple(tensor.shape)} might be padded to {group.padded} "
                    f"like {next(iter(group.parts))!r}, or have that size by chance: "
                    + _REMEDY.format(path=path, example=group.name)
                )


def cut_padding(microbatch: Any, groups: Sequence[Group], rows: slice) -> Any:
    """Return a microbatch without the padding that all of its rows share."""
    leaves = dict(tensor_leaves(microbatch))
    shorter: dict[int, Tensor] = {}
    for group in groups:
        start, stop = group.window(rows)
        if start == 0 and stop >= group.padded:
            continue
        for path, dim in group.parts.items():
            tensor = leaves[path]
            # Contiguous, because models call view() on their inputs.
            shorter[id(tensor)] = tensor.narrow(dim, start, stop - start).contiguous()
    if not shorter:
        return microbatch
    return replace_tensors(microbatch, shorter)


def restore_padding(
    tensor: Tensor, dims: Mapping[int, tuple[int, int]], *, fill: float = 0
) -> Tensor:
    """Return a tensor with zeros, or another value, at the positions where padding was cut.

    >>> restore_padding(torch.ones(1, 2), {1: (1, 4)})
    tensor([[0., 1., 1., 0.]])
    """
    for dim, (start, padded) in dims.items():
        shape = list(tensor.shape)
        shape[dim] = padded
        whole = tensor.new_full(shape, 0 if tensor.dtype == torch.bool else fill)
        whole.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
        tensor = whole
    return tensor


def _check(declared: Declared | None) -> dict[str, tuple[str, int] | None]:
    if not isinstance(declared, Mapping | None):
        raise TypeError(
            f"padding is a {type(declared).__name__}, not a mapping. Map each padded tensor to "
            f"its lengths, as in padding={{'audio': 'audio_lengths'}}"
        )
    found: dict[str, tuple[str, int] | None] = {}
    for path, meaning in (declared or {}).items():
        pair: Any = (meaning, 1) if isinstance(meaning, str) else meaning
        is_pair = isinstance(pair, tuple | list) and list(map(type, pair)) == [str, int]
        if not (is_pair or pair is None):
            raise TypeError(
                f"padding[{path!r}] is {meaning!r}. Give the path of its lengths or of its "
                "mask, with the padded dimension if needed, as in ('audio_lengths', 2), or None "
                "if it must not be cut"
            )
        found[str(path)] = None if pair is None else (pair[0], pair[1])
    return found


def _last(path: str, batch: Any) -> str:
    """Return the last part of a path; the second item of a pair counts as labels."""
    if path == "1" and isinstance(batch, tuple | list) and len(batch) == 2:
        return "labels"
    return path.rpartition(".")[2]


def _whole(name: str, padded: int, num_rows: int) -> Group:
    starts, stops = np.zeros(num_rows, np.int64), np.full(num_rows, padded, np.int64)
    return Group(name, padded, starts, stops, {})


def _group(name: str, told: Tensor, padded: int, num_rows: int) -> Group:
    """Return the group for a mask or a tensor of lengths."""
    group = _whole(name, padded, num_rows)
    if told.dim() == 1:
        group.stops = told.detach().cpu().numpy().astype(np.int64)
        if len(group.stops) != num_rows or (group.stops > padded).any() or (group.stops < 0).any():
            raise BatchError(
                f"{name!r} has lengths up to {int(group.stops.max())} for {len(group.stops)} "
                f"rows, but tensors padded to them have length {padded} and {num_rows} rows. "
                "Check the collate function, or name other lengths with padding=…"
            )
        return group
    if told.shape[:2] != (num_rows, padded):
        raise BatchError(
            f"{name!r} of shape {tuple(told.shape)} is not a mask of {num_rows} rows of length "
            f"{padded}. Name other lengths with padding=…"
        )
    group.starts, group.stops = _extents(told.reshape(num_rows, padded, -1)[..., 0] != 0)
    return group


def _extents(mask: Tensor) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Return beginnings and ends of rows; beginnings are 0 unless all padding is on the left."""
    found = mask.detach().cpu().numpy()
    padded = found.shape[1]
    has_any = found.any(1)
    stops = np.where(has_any, padded - found[:, ::-1].argmax(1), 0)
    starts = np.where(has_any, found.argmax(1), 0)
    if not (stops[has_any] == padded).all():
        starts = np.zeros_like(starts)
    return starts.astype(np.int64), stops.astype(np.int64)
