"""Buffers: copied before an attempt, put back after a failed one.

Tensor versions do not show every change (BatchNorm's kernel writes ``running_mean`` without
touching its version, and so does anything that writes through ``.data``), so buffers are copied.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from automicro.content import same_content
from automicro.errors import RollbackError
from automicro.memory import active_budget
from automicro.torch_private import buffer_table, is_uninitialized, version_of

LARGE_BYTES = 16 * 2**20


class BufferMemory:
    """What earlier attempts taught about the buffers of some modules.

    The first copy of a buffer over 16 MiB goes to the host. Once a committed attempt has shown by
    content that it does not change, it is not copied any more, only watched by its version.

    Attributes:
        changed: names of the buffers that the first committed attempt changed, or None before it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        # By id of a large, unchanging buffer: the buffer, as ids are used again, and its version.
        self._stable: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.changed: list[str] | None = None

    def owners(self) -> list[tuple[str, nn.Module]]:
        """Every module that may hold buffers, each once, by name."""
        prefixes = [""] + [f"modules[{index}]." for index in range(len(self._modules) - 1)]
        return list(
            {
                id(module): (prefix + name, module)
                for prefix, root in zip(prefixes, self._modules, strict=True)
                for name, module in root.named_modules()
            }.values()
        )

    def is_stable(self, buffer: Tensor) -> bool:
        """Whether a large buffer need not be copied."""
        known = self._stable.get(id(buffer))
        return known is not None and known[0]() is buffer and known[1] == version_of(buffer)

    def learn(self, changed: list[str], unchanged: Iterable[Tensor]) -> None:
        """Take note of what a committed attempt changed and what it did not."""
        self.changed = changed
        self._stable = {
            id(buffer): (weakref.ref(buffer), version_of(buffer))
            for buffer in unchanged
            if buffer.nbytes > LARGE_BYTES
        }


class Buffers:
    """The buffers of modules: changed in place, replaced, added or removed, all is undone."""

    def __init__(self, memory: BufferMemory) -> None:
        self._memory = memory
        self._tables: list[tuple[str, nn.Module, dict[str, Tensor | None]]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._not_copied: list[tuple[str, Tensor, int]] = []
        self._learned: tuple[list[str], list[Tensor]] | None = None

    def begin(self) -> None:
        for name, module in self._memory.owners():
            # The table itself is remembered, also where it is empty: a forward may register one.
            table = dict(buffer_table(module))
            self._tables.append((name, module, table))
            for key, buffer in table.items():
                if buffer is None or id(buffer) in self._copies or is_uninitialized(buffer):
                    continue
                if self._memory.is_stable(buffer):
                    self._not_copied.append(
                        (f"{name}.{key}".lstrip("."), buffer, version_of(buffer))
                    )
                else:
                    self._copies[id(buffer)] = (buffer, _copy(buffer))

    def prepare(self) -> None:
        if self._memory.changed is None:
            self._learned = (self.changed_names(), self._unchanged())

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
        with torch.no_grad():
            for buffer, copy in self._copies.values():
                if buffer.shape != copy.shape or buffer.stride() != copy.stride():
                    fresh = copy.to(buffer.device, copy=True)  # the buffer was resized
                    buffer.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
                else:
                    buffer.copy_(copy)
        for name, buffer, version in self._not_copied:
            if version_of(buffer) != version:
                raise RollbackError(
                    f"the failed attempt changed the buffer {name!r} of {buffer.nbytes} bytes, "
                    f"which earlier batches had left alone and which was therefore not copied; "
                    f"continue from a checkpoint, and keep what changes in buffers of at most "
                    f"{LARGE_BYTES} bytes"
                )
        self._forget()

    def changed_names(self) -> list[str]:
        """Names of the buffers whose content or identity differs from before the attempt."""
        changed = []
        for owner, module, table in self._tables:
            table_now = buffer_table(module)
            for name in {**table, **table_now}:
                before, now = table.get(name), table_now.get(name)
                if now is not before or (now is not None and not self._holds(now)):
                    changed.append(f"{owner}.{name}".lstrip("."))
        return changed

    def _unchanged(self) -> list[Tensor]:
        return [buffer for buffer, _ in self._copies.values() if self._holds(buffer)]

    def _holds(self, buffer: Tensor) -> bool:
        if id(buffer) not in self._copies:
            return True
        return same_content(buffer, self._copies[id(buffer)][1])

    def _forget(self) -> None:
        self._tables.clear()
        self._copies.clear()
        self._not_copied.clear()
        self._learned = None


def _copy(buffer: Tensor) -> Tensor:
    if buffer.nbytes <= LARGE_BYTES:
        return buffer.detach().clone()
    budget = active_budget()
    if budget is None:
        return buffer.detach().to("cpu", copy=True)
    with budget.host():
        return buffer.detach().clone()


def _same_objects(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
