"""Captured tensors: copied and restored into the same memory, or only compared by version."""

import collections
import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from automicro.memory.device import copies_overlap
from automicro.torch_private import (
    all_hooks,
    all_versions,
    copy_into,
    is_uninitialized,
    keeping_versions,
    version_of,
    without_modes,
)
from automicro.values import differs

SMALL_BYTES = 2**16  # tensors up to this size (buffers: LARGE_BYTES) are copied on their device
LARGE_BYTES = 2**24  # larger tensors are copied to the host, and only if they are buffers
MOST_BYTES = 2**28  # of all copies of a capture on a device; further ones go to the host


def seen_version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None if torch does not count it."""
    return None if tensor.is_inference() else version_of(tensor)


class _Small(NamedTuple):
    """Tensors of one dtype on one device, and their memory, copied by one kernel."""

    tensors: list[Tensor]
    memories: list[Tensor]
    copy: Tensor  # of all, concatenated

    def copies(self) -> Sequence[Tensor]:
        """Return the copy of each tensor."""
        parts = torch.split(self.copy, [each.numel() for each in self.memories])
        return [part.view_as(each) for part, each in zip(parts, self.memories, strict=True)]


class _Large(NamedTuple):
    """A tensor, its memory, and a copy of it at a version."""

    tensor: Tensor
    memory: Tensor
    copy: Tensor | None  # None: only the version is compared
    version: int | None = None
    is_kept: bool = False  # whether the copy comes from an earlier capture


class Copies:
    """Copies of tensors, made by few kernels and restored into the same memory."""

    def __init__(
        self, tensors: Sequence[Tensor], buffers: Mapping[int, Any], *, watches_others: bool = False
    ) -> None:
        # The copy of a large tensor is reused while its version stays, once a commit has shown by
        # content that the tensor is not written to without a new version.
        self.tensors = tensors
        self._odd: list[tuple[Tensor, Tensor]] = []  # sparse, quantized, nested, sharded
        self._aliased: list[tuple[Tensor, Tensor]] = []  # all others, with their original memory
        self._large: list[_Large] = []
        self._small: list[_Small] = []
        self._versions = list(map(seen_version, tensors))
        if not tensors:
            return
        # The limit keeps copies on a full device from making the attempt fail.
        bytes_left = MOST_BYTES
        with without_modes():  # a memory budget does not count data that no forward uses
            aliases = [each.detach() for each in tensors]
        groups = collections.defaultdict[Any, list[tuple[Tensor, Tensor]]](list)
        for tensor, alias in zip(tensors, aliases, strict=True):
            if not _is_dense(alias):
                if not alias.is_meta:
                    self._odd.append((tensor, alias.clone()))
                continue
            self._aliased.append((tensor, alias))
            memory, is_buffer = _in_a_line(alias), id(tensor) in buffers
            most = LARGE_BYTES if is_buffer else SMALL_BYTES
            if memory.nbytes > min(most, bytes_left):
                is_copied = is_buffer or (not watches_others and memory.nbytes <= LARGE_BYTES)
                self._large.append(_large(tensor, memory, is_copied=is_copied))
                continue
            bytes_left -= memory.nbytes
            # One kernel for each dtype and device, for any number of buffers.
            groups[alias.device, alias.dtype].append((tensor, memory))
        with torch.inference_mode():  # allows writes to all tensors
            for group in groups.values():
                small, memories = map(list, zip(*group, strict=True))
                copy = torch.cat([each.reshape(-1) for each in memories])
                self._small.append(_Small(small, memories, copy))

    @property
    def counted(self) -> list[Tensor]:
        """The tensors whose writes torch counts."""
        return [each for each in self.tensors if not each.is_inference()]

    def written(self) -> list[Tensor]:
        """Return tensors without a copy that were written to."""
        return [each.tensor for each in self._large if each.copy is None and _has_moved(each)]

    def settle(self) -> None:
        """Keep the copies of large tensors that have not changed; call it before a commit."""
        for each in self._large:
            is_new = each.copy is not None and not each.is_kept
            # Most large buffers never change, so one copy of them is enough for a run.
            if is_new and not (_has_moved(each) or _has_changed(each)):
                _kept[each.tensor] = each.version, each.copy

    def put_back(self) -> Iterator[tuple[Tensor, str]]:
        """Restore all tensors; yield those that could not be restored, with the reason."""
        # Versions stay, so that code that compares them does not see the restoration as a change.
        with keeping_versions(self.counted):
            with torch.inference_mode():
                for group in self._small:
                    copy_into(group.memories, group.copies())
            for tensor, copy in self._odd:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(copy)
            for each in self._large:
                if each.copy is None:
                    continue
                # If the version is unchanged, the memory still equals a reused copy.
                if _has_moved(each) or not each.is_kept:
                    with torch.inference_mode(), without_modes():
                        each.memory.copy_(each.copy)
                elif _has_changed(each):
                    # The copy is of an earlier capture, and the write may be older than this one.
                    yield each.tensor, _PAST_VERSION
        for tensor, alias in self._moved():
            # Bypass autograd, which would refuse to change tensors that it has saved.
            tensor.data = alias

    def _moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the tensors that were resized or given other memory, with their own memory."""
        return (pair for pair in self._aliased if _where(pair[0]) != _where(pair[1]))

    def changed(self, *, by_content: bool = True) -> Iterator[Tensor]:
        """Yield the changed tensors: by content, which waits for the device, or by version."""
        moved = {id(tensor) for tensor, _ in self._moved()}
        if not by_content:
            held = zip(self.tensors, self._versions, strict=True)
            yield from (e for e, then in held if id(e) in moved or seen_version(e) != then)
            return
        yield from (tensor for tensor, copy in self._odd if differs(copy, tensor.detach()))
        for group in self._small:
            parts = zip(group.tensors, group.memories, group.copies(), strict=True)
            yield from (e for e, now, copy in parts if id(e) in moved or differs(copy, now))
        yield from (e.tensor for e in self._large if id(e.tensor) in moved or _has_changed(e))


NO_COPIES = Copies([], {})  # shared, because most captures hold no tensor


def is_freed(value: Any) -> bool:
    """Whether a wrapper that shards has freed the memory that it had gathered.

    >>> is_freed(torch.ones(2)), is_freed(torch.ones(0)), is_freed(2)
    (False, False, False)
    """
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return bool(value.numel() > 0 and value.untyped_storage().nbytes() == 0)


# The version and a copy of each tensor that was found not to change.
_kept = WeakTensorKeyDictionary()
_FLAG = operator.attrgetter("requires_grad")
_DENSE = (Tensor, nn.Parameter)
_PAST_VERSION = "it was changed without a new version (such as through .data), unlike before"


def _in_a_line(alias: Tensor) -> Tensor:
    """Return the memory of a tensor, even if its elements overlap or have gaps."""
    if alias.is_contiguous() or not alias.numel():
        return alias
    steps = zip(alias.shape, alias.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps)
    # If elements are far apart, copying the gaps would cost more than strides.
    return alias.as_strided((span,), (1,)) if span <= 2 * alias.numel() else alias


def _where(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _is_dense(alias: Tensor) -> bool:
    # Subclasses may keep their data elsewhere.
    if type(alias) is not Tensor or alias.layout is not torch.strided or alias.is_meta:
        return False
    return not (alias.is_quantized or alias.is_nested or alias.is_conj() or alias.is_neg())


def _large(tensor: Tensor, memory: Tensor, *, is_copied: bool) -> _Large:
    version = seen_version(tensor)
    known, copy = _kept.get(tensor, (None, None))  # type: ignore[no-untyped-call]
    is_kept = version is not None and version == known
    # Without a version, writes are invisible, so it is always copied.
    if not is_kept:
        copy = _copied(memory) if is_copied or version is None else None
    return _Large(tensor, memory, copy, version, is_kept)


def _has_moved(place: _Large) -> bool:
    return place.version is None or place.version != seen_version(place.tensor)


def _copied(memory: Tensor) -> Tensor:
    """Copy to the host, because the device may lack memory for another copy."""
    with without_modes():
        if copies_overlap(memory.device):
            with contextlib.suppress(RuntimeError):  # pinned memory may be exhausted
                copy = torch.empty_like(memory, device="cpu", pin_memory=True)
                # No wait is needed, because reads follow on the same stream.
                return copy.copy_(memory, non_blocking=True)
        return memory.to("cpu", copy=True)


def _has_changed(place: _Large) -> bool:
    if place.copy is None:
        return _has_moved(place)
    with without_modes():
        return differs(place.copy, place.memory.to(place.copy.device))


class Leaves:
    """The flags, hooks and memory of parameters, but not their values."""

    # Versions of frozen parameters are compared, because a forward may move a teacher, which is not
    # a parameter of the optimizer.
    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        # Only these can have their memory restored.
        self._dense = [each for each in leaves if type(each) in _DENSE and _is_dense(each.detach())]
        self._places: list[list[Any]] = []
        self._forms: list[Any] = []
        self._flags: list[bool] = []
        self.small: list[Tensor] = []  # frozen ones that are copied with other tensors
        self._frozen: list[Tensor] = []
        self._hooks = all_hooks(leaves)
        self.refresh()

    def refresh(self) -> bool:
        """Record the current state; return False if hooks were registered or removed."""
        if all_hooks(self._leaves) != self._hooks:
            return False
        flags, self._flags = self._flags, list(map(_FLAG, self._leaves))
        # Flags rarely change, and sorting all parameters by them at each step would be slow.
        if self._flags != flags:
            frozen = compress(self._leaves, map(operator.not_, self._flags))
            there = [e for e in frozen if not (is_uninitialized(e) or e.is_inference())]
            small = {id(each) for each in self._dense if each.nbytes <= SMALL_BYTES}
            self.small = [each for each in there if id(each) in small]
            self._frozen = [each for each in there if id(each) not in small]
        self._versions = all_versions(self._frozen)
        # Reading all forms at each step would be slow.
        looks = (Tensor.data_ptr, Tensor.numel, Tensor.stride)
        before, self._places = self._places, [list(map(each, self._dense)) for each in looks]
        if self._places != before:
            self._forms = [(_where(each), each.storage_offset()) for each in self._dense]
        # Kept alive, so that their addresses are not reused.
        self._memory = list(map(Tensor.untyped_storage, self._dense))
        return True

    def let_go(self) -> None:
        """Release all memory."""
        self._memory = []

    def put_back(self) -> None:
        """Restore everything except values."""
        for leaf, memory, (where, offset) in self._moved():
            _, shape, dtype, stride = where
            empty = torch.empty(0, dtype=dtype, device=memory.device)
            leaf.data = empty.set_(memory, offset, shape, stride)
        for leaf in self._switched():
            leaf.requires_grad_(not leaf.requires_grad)
        for _, hooks in self._hooked():
            hooks.clear()

    def _hooked(self) -> Iterator[tuple[Tensor, Any]]:
        """Return parameters that had no table of hooks and have one now."""
        held = zip([*self._leaves] * 2, all_hooks(self._leaves), self._hooks, strict=True)
        return ((leaf, now) for leaf, now, then in held if now and now is not then)

    def _switched(self) -> Iterator[Tensor]:
        """Return parameters whose flag changed."""
        return compress(self._leaves, map(operator.ne, map(_FLAG, self._leaves), self._flags))

    def _moved(self) -> Iterator[tuple[Tensor, Any, Any]]:
        """Yield parameters with other memory, with their own, unless a wrapper has freed it."""
        for leaf, memory, form in zip(self._dense, self._memory, self._forms, strict=True):
            if _where(leaf) != form[0] and memory.nbytes():
                yield leaf, memory, form

    def changed(self) -> Iterator[Tensor]:
        """Yield parameters with another flag, other hooks or other memory."""
        yield from self._switched()
        yield from (leaf for leaf, *_ in chain(self._hooked(), self._moved()))

    def written(self) -> Iterator[Tensor]:
        """Return frozen parameters that were written to."""
        moved = map(operator.ne, self._versions, all_versions(self._frozen))
        return compress(self._frozen, moved)
