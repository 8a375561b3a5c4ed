"""Tensors as they were: copied and put back into the same memory, or only watched."""

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from automicro.memory.device import copies_overlap
from automicro.torch_private import (
    all_hooks,
    all_versions,
    copy_into,
    gradient_hooks,
    is_uninitialized,
    keeping_versions,
    version_of,
    without_modes,
)
from automicro.values import differs, put_table, same_objects

SMALL_BYTES = 2**16  # of a tensor that is copied each time where it lies; of a buffer, LARGE_BYTES
LARGE_BYTES = 2**24  # larger copies lie on the host, and only those of buffers are taken
MOST_BYTES = 2**28  # of the copies of a capture on a device; further ones lie on the host


def seen_version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count it."""
    return None if tensor.is_inference() else version_of(tensor)


class _Place(NamedTuple):
    """A tensor, its memory as it was, the same in a line, and what was there at a version."""

    tensor: Tensor
    alias: Tensor
    memory: Tensor
    copy: Tensor | None  # None: only the version is watched
    version: int | None = None
    is_kept: bool = False  # the copy is of an earlier capture


class Copies:
    """What tensors hold: read with few launches, and put back into the same memory.

    A large tensor's copy is kept, and not taken again, while its version stays, once a commit has
    shown by content that it is not written to past its version.

    Args:
        tensors: to copy, none of them trained.
        buffers: ids of those that are buffers of modules, which kernels write past their versions.
        watches_others: whether large ones that are no such buffers are only watched, and stay as
            they become; `written` has those that were written to.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        buffers: Mapping[int, Any],
        *,
        watches_others: bool = False,
    ) -> None:
        self.tensors = tensors
        self._watched: list[Tensor] = []
        self._odd: list[tuple[Tensor, Tensor]] = []  # sparse, quantized, nested, sharded
        self._large: list[_Place] = []
        small: list[tuple[Tensor, Tensor, Tensor]] = []
        bytes_left = MOST_BYTES
        there = [each for each in tensors if not is_uninitialized(each)]
        with without_modes():  # data that no forward uses lie on no device of a budget's
            aliases = [each.detach() for each in there]
        for tensor, alias in zip(there, aliases, strict=True):
            is_dense = alias.layout is torch.strided and not alias.is_quantized
            is_plain = type(alias) is Tensor and not (alias.is_nested or alias.is_conj())
            if not is_dense or not is_plain or alias.is_meta:
                if not alias.is_meta:
                    self._odd.append((tensor, alias.clone()))
                continue
            memory = _in_a_line(alias)
            if watches_others and memory.nbytes > SMALL_BYTES and id(tensor) not in buffers:
                if not tensor.is_inference():
                    self._watched.append(tensor)
                continue
            most = LARGE_BYTES if id(tensor) in buffers else SMALL_BYTES
            if memory.nbytes > most or memory.nbytes > bytes_left:
                self._large.append(_large(tensor, alias, memory, is_buffer=id(tensor) in buffers))
                continue
            bytes_left -= memory.nbytes
            small.append((tensor, alias, memory))
        self._small: list[_Place] = []
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        with torch.inference_mode():  # where all may be written to
            for tensor, alias, memory in small:
                copy = torch.empty_like(memory)
                self._small.append(_Place(tensor, alias, memory, copy, seen_version(tensor)))
                memories, copies = self._groups.setdefault((memory.device, memory.dtype), ([], []))
                memories.append(memory)
                copies.append(copy)
            for memories, copies in self._groups.values():
                copy_into(copies, memories)
        self._versions_watched = all_versions(self._watched)
        self._by_id: dict[int, _Place] = {}

    @property
    def counted(self) -> list[Tensor]:
        """Tensors whose writes torch counts."""
        return [each for each in self.tensors if not each.is_inference()]

    def written(self) -> list[Tensor]:
        """Those that are only watched, and were written to."""
        pairs = zip(self._watched, self._versions_watched, strict=True)
        return [each for each, version in pairs if version_of(each) != version]

    def settle(self) -> None:
        """Keep the copies of large tensors that have not changed; call it before a commit."""
        for each in self._large:
            if each.is_kept or each.copy is None or each.version is None:
                continue
            if each.version == seen_version(each.tensor) and not _has_changed(each):
                _kept[each.tensor] = each.version, each.copy

    def put_back(self) -> Iterator[tuple[Tensor, str]]:
        """Write everything back; gives what is wrong, and cannot be mended.

        What was written past a version is put back past it: that part of an attempt was undone is
        no change to those who ask the version.
        """
        with keeping_versions(self.counted):
            with torch.inference_mode():
                for memories, copies in self._groups.values():
                    copy_into(memories, copies)
            for tensor, copy in self._odd:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(copy)
            for each in self._large:
                why = _put_large_back(each)
                if why is not None:
                    yield each.tensor, why
        for each in (*self._small, *self._large):
            if _where(each.tensor) != _where(each.alias):  # it was resized, or given other memory
                each.tensor.data = each.alias

    def changed(self) -> Iterator[Tensor]:
        """The tensors whose content or memory is another. Waits for the device."""
        for tensor, copy in self._odd:
            if differs(copy, tensor.detach()):
                yield tensor
        for each in (*self._small, *self._large):
            if _where(each.tensor) != _where(each.alias) or _has_changed(each):
                yield each.tensor

    def is_changed(self, tensor: Tensor, *, by_content: bool) -> bool:
        """Whether a tensor that was copied is another now; by its version alone, soon."""
        if not self._by_id:
            self._by_id = {id(each.tensor): each for each in (*self._small, *self._large)}
        place = self._by_id.get(id(tensor))
        if place is None:
            odd = (differs(copy, tensor.detach()) for each, copy in self._odd if each is tensor)
            return by_content and any(odd)
        if place.version != seen_version(tensor) or _where(tensor) != _where(place.alias):
            return True
        return by_content and _has_changed(place)


_NOT_COPIED = "and parameters are not copied; move it after the step"


def is_freed(value: Any) -> bool:
    """Whether a wrapper that shards has freed what it had gathered.

    >>> is_freed(torch.ones(2)), is_freed(torch.ones(0)), is_freed(2)
    (False, False, False)
    """
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return bool(value.numel() > 0 and value.untyped_storage().nbytes() == 0)


# Of tensors that were seen not to change: their version, and a copy.
_kept = WeakTensorKeyDictionary()
_FLAG = operator.attrgetter("requires_grad")


def _in_a_line(alias: Tensor) -> Tensor:
    """The memory of a tensor: right where elements overlap, or lie apart."""
    if alias.is_contiguous() or not alias.numel():
        return alias
    steps = zip(alias.shape, alias.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps)
    return alias.as_strided((span,), (1,)) if span <= 2 * alias.numel() else alias


def _where(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _large(tensor: Tensor, alias: Tensor, memory: Tensor, *, is_buffer: bool) -> _Place:
    version = seen_version(tensor)
    known, copy = _kept.get(tensor, (None, None))  # type: ignore[no-untyped-call]
    is_kept = version is not None and version == known
    if not is_kept:
        is_copied = is_buffer or memory.nbytes <= LARGE_BYTES or version is None
        copy = _copied(memory) if is_copied else None
    return _Place(tensor, alias, memory, copy, version, is_kept)


def _copied(memory: Tensor) -> Tensor:
    """A copy on the host, for the device may have no room for another."""
    with without_modes():
        if copies_overlap(memory.device):
            with contextlib.suppress(RuntimeError):  # there may be no more memory to be pinned
                copy = torch.empty_like(memory, device="cpu", pin_memory=True)
                # Nothing waits for it: it is read behind it on the same stream.
                return copy.copy_(memory, non_blocking=True)
        return memory.to("cpu", copy=True)


def _has_changed(place: _Place) -> bool:
    if place.copy is None:
        return place.version != seen_version(place.tensor)
    with without_modes():
        return differs(place.copy, place.memory.to(place.copy.device))


def _put_large_back(place: _Place) -> str | None:
    has_moved = place.version is None or place.version != seen_version(place.tensor)
    if place.copy is None:
        why = f"its {place.memory.nbytes} bytes are not copied, and were written to"
        return why if has_moved else None
    if has_moved or not place.is_kept:
        with torch.inference_mode(), without_modes():
            place.memory.copy_(place.copy)
    elif _has_changed(place):
        return "it was written to past its version (through .data, say), as no earlier batch has"
    return None


class Leaves:
    """Parameters: their flags, hooks and, of lazy ones, class; not what they hold.

    Frozen ones are watched: a teacher that a forward moves is no parameter of the optimizer's.

    Args:
        leaves: the parameters, and other tensors that are trained.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._lazy = [(each, type(each)) for each in leaves if is_uninitialized(each)]
        self.read()

    def read(self) -> None:
        """Take note of how they are now."""
        self._flags = list(map(_FLAG, self._leaves))
        self._find_frozen()
        self._hooks = all_hooks(self._leaves)
        self._held = [(table, dict(table)) for table in self._hooks if table]

    def _find_frozen(self) -> None:
        flagged = zip(self._leaves, self._flags, strict=True)
        frozen = [leaf for leaf, is_trained in flagged if not is_trained]
        self._frozen = [e for e in frozen if not (is_uninitialized(e) or e.is_inference())]
        self._versions = all_versions(self._frozen)

    def refresh(self) -> bool:
        """Take note of flags; not done where hooks were registered or removed since `read`."""
        hooks = all_hooks(self._leaves)
        if not same_objects(hooks, self._hooks) or any(
            not same_objects(table, saved) for table, saved in self._held
        ):
            return False
        before, self._flags = self._flags, list(map(_FLAG, self._leaves))
        if self._flags != before:
            self._find_frozen()
        self._versions = all_versions(self._frozen)
        return True

    def put_back(self) -> Iterator[tuple[Tensor, str]]:
        """Put back all but content; gives what was written to."""
        for leaf in self.written():
            yield leaf, f"this frozen parameter was written to, {_NOT_COPIED}"
        for leaf, kind in self._lazy:
            if type(leaf) is not kind:  # it was given its shape
                leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
                leaf.__class__ = kind
        for leaf, is_trained in zip(self._leaves, self._flags, strict=True):
            if leaf.requires_grad != is_trained:
                leaf.requires_grad_(is_trained)
        before = {id(table): saved for table, saved in self._held}
        for table in (each for leaf in self._leaves for each in gradient_hooks(leaf)):
            if table is not None:
                put_table(table, before.get(id(table), {}))

    def changed(self) -> Iterator[Tensor]:
        """Those with another flag, other hooks or another class."""
        before = {id(table): saved for table, saved in self._held}
        for leaf, is_trained in zip(self._leaves, self._flags, strict=True):
            tables = [each for each in gradient_hooks(leaf) if each is not None]
            has_others = any(not same_objects(each, before.get(id(each), ())) for each in tables)
            if leaf.requires_grad != is_trained or has_others:
                yield leaf
        yield from (leaf for leaf, kind in self._lazy if type(leaf) is not kind)

    def written(self) -> Iterator[Tensor]:
        """Frozen ones that were written to."""
        yield from compress(
            self._frozen, map(operator.ne, self._versions, all_versions(self._frozen))
        )
