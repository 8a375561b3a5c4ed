"""Buffers: copied before an attempt, put back after a failed one.

Tensor versions do not show every change (BatchNorm's kernel writes ``running_mean`` without
touching its version, and so does anything that writes through ``.data``), so buffers are copied.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from automicro.errors import RollbackError
from automicro.modules import ModuleIndex
from automicro.reach import OF_EVERY_MODULE
from automicro.torch_private import buffer_table, have_buffers, is_uninitialized, keeping_versions
from automicro.transaction.parameters import (
    LARGE_BYTES,
    TensorCopy,
    seen_version,
    size_in_bytes,
    small_copies,
)
from automicro.transaction.surroundings import Added


class BufferHistory:
    """What earlier attempts taught about the buffers of some modules.

    A buffer over 16 MiB is copied to the host. Once a committed attempt has shown by content that
    it does not change, that copy is kept, and not taken again until the buffer's version moves:
    where that happens in an attempt that fails, the copy is put back.

    Args:
        index: of all modules that may hold some.
    """

    def __init__(self, index: ModuleIndex) -> None:
        self.index = index
        # By id of a large, unchanging buffer: the buffer, as ids are used again, its version and
        # its copy.
        self._stable: dict[int, tuple[weakref.ref[Tensor], int | None, Tensor]] = {}
        self._changing: dict[int, weakref.ref[Tensor]] = {}

    def kept(self, buffer: Tensor) -> Tensor | None:
        """The copy of a large buffer that has not changed; None for one that has to be copied."""
        known = self._stable.get(id(buffer))
        if known is None or known[0]() is not buffer or known[1] != seen_version(buffer):
            return None
        return known[2]

    def may_settle(self, buffer: Tensor) -> bool:
        """Whether it is of use to compare a large buffer with its copy."""
        known = self._changing.get(id(buffer))
        return known is None or known() is not buffer

    def learn(self, unchanged: Iterable[TensorCopy], changed: Iterable[TensorCopy]) -> None:
        """Take note of which large buffers a committed attempt changed, and which it did not."""
        for copy in changed:
            self._stable.pop(id(copy.tensor), None)
            self._changing[id(copy.tensor)] = weakref.ref(copy.tensor)
        for copy in unchanged:
            key = id(copy.tensor)
            forget = weakref.ref(copy.tensor, lambda _, key=key: self._forget(key))  # type: ignore[misc]
            self._stable[key] = (forget, copy.version, copy.copy)

    def _forget(self, key: int) -> None:
        known = self._stable.get(key)
        if known is not None and known[0]() is None:
            del self._stable[key]


class Buffers:
    """The buffers of modules: changed in place, replaced, added or removed, all is undone.

    So are numbers, flags and text that such modules keep in plain attributes: they say what the
    buffers are (``max_seq_len_cached`` of a rotary embedding, a flag that a table was made). They
    may say what a tensor in a plain attribute is, too, so that one is the same again; and that
    hooks or modules were added, so these are taken away.

    Args:
        memory: of the modules.
        is_fresh: whether nothing has changed since the modules were indexed, so that the first
            `begin` need not look.
        tensors_only: leave plain attributes as they are, for whoever compares what calls do to
            them.
    """

    def __init__(
        self, memory: BufferHistory, *, is_fresh: bool = False, tensors_only: bool = False
    ) -> None:
        self._memory = memory
        self._is_fresh = is_fresh
        self._tensors_only = tensors_only
        # Also of modules without buffers, for a forward may register some.
        self._tables: Sequence[tuple[str, nn.Module, Mapping[str, Tensor | None]]] = ()
        self._without: Sequence[tuple[str, nn.Module]] = ()
        self._plain: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
        self._added = Added()
        self._copies: dict[int, TensorCopy] = {}
        self._kept: list[tuple[str, TensorCopy]] = []
        self._learned: tuple[list[TensorCopy], list[TensorCopy]] | None = None

    def begin(self) -> None:
        memory, index = self._memory, self._memory.index
        if not self._is_fresh:
            index.refresh()
        self._is_fresh = False
        self._tables, self._without = index.buffer_tables, index.without_buffers
        if not self._tensors_only and index.with_own_buffers:
            for module in index.with_own_buffers:
                space = vars(module)
                self._plain.append((space, _plain_attributes(space), frozenset(space)))
            self._added.add(index.added_tables)
        if not self._tables:
            return
        found: dict[int, tuple[str, Tensor]] = {}
        for name, _, table in self._tables:
            for key, buffer in table.items():
                if buffer is not None and not is_uninitialized(buffer):
                    found.setdefault(id(buffer), (f"{name}.{key}".lstrip("."), buffer))
        copies = small_copies(buffer for _, buffer in found.values())
        for number, (name, buffer) in found.items():
            kept = memory.kept(buffer)
            there = copies.get(number) if kept is None else kept
            copy = self._copies[number] = TensorCopy(buffer, there, large_on_host=True)
            if kept is not None:
                self._kept.append((name, copy))

    def prepare(self) -> None:
        if not self._copies:
            return
        kept = {id(copy) for _, copy in self._kept}
        unchanged: list[TensorCopy] = []
        changed: list[TensorCopy] = []
        for copy in self._copies.values():
            if id(copy) in kept or size_in_bytes(copy.copy) <= LARGE_BYTES:
                continue
            if copy.has_moved:
                continue  # one that moves now and then is copied when it has
            if self._memory.may_settle(copy.tensor):
                (unchanged if copy.holds() else changed).append(copy)
        self._learned = (unchanged, changed)

    def commit(self) -> None:
        if self._learned is not None:
            self._memory.learn(*self._learned)
        self._forget()

    def roll_back(self) -> None:
        for _, module, table in self._tables:
            now = buffer_table(module)
            if not _same_objects(now, table):
                now.clear()
                now.update(table)
        if self._gained_buffers():
            for _, module in self._without:
                buffer_table(module).clear()
        for space, before, names in self._plain:
            for name in _plain_attributes(space).keys() - names:
                del space[name]
            space.update(before)
        self._added.put_back()
        kept = {id(copy) for _, copy in self._kept}
        for copy in self._copies.values():
            if copy.has_moved:
                copy.put_back()
            elif id(copy) not in kept:
                # What may have been written past its version is put back past it: that part of an
                # attempt was undone is no change to whoever asks the version.
                with keeping_versions([] if copy.version is None else [copy.tensor]):
                    copy.put_back()
        for name, copy in self._kept:
            if not copy.holds():
                size = size_in_bytes(copy.tensor)
                raise RollbackError(
                    f"the buffer {name!r} of {size} bytes was written to past its version "
                    "(through .data, say), which earlier batches had not shown, so nothing tells "
                    "what it held before the failed attempt; continue from a checkpoint, and write "
                    "to it under torch.no_grad() instead, or keep what changes in buffers of at "
                    f"most {LARGE_BYTES} bytes"
                )
        self._forget()

    def changed_names(self) -> list[str]:
        """Names of the buffers whose content or identity differs from before the attempt."""
        return self._names_where(lambda copy: not copy.holds())

    def moved_names(self) -> list[str]:
        """The same as far as versions tell, which costs next to nothing."""
        return self._names_where(lambda copy: copy.has_moved)

    def _names_where(self, is_changed: Callable[[TensorCopy], bool]) -> list[str]:
        names = []
        if self._gained_buffers():
            names = [
                f"{owner}.{name}".lstrip(".")
                for owner, module in self._without
                for name in buffer_table(module)
            ]
        for owner, module, table in self._tables:
            table_now = buffer_table(module)
            for name in {**table, **table_now}:
                before, now = table.get(name), table_now.get(name)
                copy = None if now is None else self._copies.get(id(now))
                if now is not before or (copy is not None and is_changed(copy)):
                    names.append(f"{owner}.{name}".lstrip("."))
        return names

    def _gained_buffers(self) -> bool:
        """Whether modules that had no buffers have some now."""
        return have_buffers(module for _, module in self._without)

    def _forget(self) -> None:
        self._tables, self._without = (), ()
        self._plain.clear()
        self._added.clear()
        self._copies.clear()
        self._kept.clear()
        self._learned = None


_PLAIN = (bool, int, float, str, type(None))


def _plain_attributes(space: Mapping[str, Any]) -> dict[str, Any]:
    """Those of one value, and tensors that no graph holds, without what every module has."""
    return {
        name: value
        for name, value in space.items()
        if (type(value) in _PLAIN or (type(value) is Tensor and not value.requires_grad))
        and name not in OF_EVERY_MODULE
    }


def _same_objects(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
