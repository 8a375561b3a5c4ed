"""Buffers: copied before an attempt, put back after a failed one.

Tensor versions do not show every change (BatchNorm's kernel writes ``running_mean`` without
touching its version, and so does anything that writes through ``.data``), so buffers are copied.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from automicro.content import same_content
from automicro.memory import active_budget, is_uninitialized

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
        self._stable: dict[int, int] = {}  # id of a large, unchanging buffer -> its version
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
        return self._stable.get(id(buffer), -1) == buffer._version

    def learn(self, changed: list[str], unchanged: Iterable[Tensor]) -> None:
        """Take note of what a committed attempt changed and what it did not."""
        self.changed = changed
        self._stable = {
            id(buffer): buffer._version for buffer in unchanged if buffer.nbytes > LARGE_BYTES
        }


class Buffers:
    """The buffers of modules: changed in place, replaced, added or removed, all is undone."""

    def __init__(self, memory: BufferMemory) -> None:
        self._memory = memory
        self._tables: list[tuple[str, nn.Module, dict[str, Tensor | None]]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self) -> None:
        for name, module in self._memory.owners():
            # The table itself is remembered, also where it is empty: a forward may register one.
            self._tables.append((name, module, dict(module._buffers)))
            for buffer in module._buffers.values():
                if buffer is not None and self._must_copy(buffer):
                    self._copies[id(buffer)] = (buffer, _copy(buffer))

    def commit(self) -> None:
        if self._memory.changed is None:
            self._memory.learn(self.changed_names(), self._unchanged())
        self._forget()

    def roll_back(self) -> None:
        for _, module, table in self._tables:
            if not _same_objects(module._buffers, table):
                module._buffers.clear()
                module._buffers.update(table)
        with torch.no_grad():
            for buffer, copy in self._copies.values():
                if buffer.shape != copy.shape or buffer.stride() != copy.stride():
                    fresh = copy.to(buffer.device, copy=True)  # the buffer was resized
                    buffer.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
                else:
                    buffer.copy_(copy)
        self._forget()

    def changed_names(self) -> list[str]:
        """Names of the buffers whose content or identity differs from before the attempt."""
        changed = []
        for owner, module, table in self._tables:
            for name in {**table, **module._buffers}:
                before, now = table.get(name), module._buffers.get(name)
                if now is not before or (now is not None and not self._holds(now)):
                    changed.append(f"{owner}.{name}".lstrip("."))
        return changed

    def _must_copy(self, buffer: Tensor) -> bool:
        if id(buffer) in self._copies or is_uninitialized(buffer):
            return False
        return not self._memory.is_stable(buffer)

    def _unchanged(self) -> list[Tensor]:
        return [buffer for buffer, _ in self._copies.values() if self._holds(buffer)]

    def _holds(self, buffer: Tensor) -> bool:
        if id(buffer) not in self._copies:
            return True
        return same_content(buffer, self._copies[id(buffer)][1])

    def _forget(self) -> None:
        self._tables.clear()
        self._copies.clear()


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
