"""Who holds how much at each moment of a step that really runs, by module."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from automicro.memory.budget import refuse_compiled, tensors_of
from automicro.memory.ledger import GRANULE
from automicro.torch_private import OperationMode, in_backward

_BACKWARD, _OUTSIDE = "backward", "outside of modules"
_MOST_SAMPLES = 1000


def record_step(
    step: Callable[[], object],
    *,
    modules: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    batch: object = None,
) -> list[tuple[float, dict[str, int]]]:
    """Run a step, and tell after its operations how much each owner holds.

    Every storage is counted once, rounded up to 512 bytes, from the operation that makes it until
    nothing refers to it, saved tensors of autograd included. It is its innermost module's; what
    turns out to be a gradient or optimizer state is that. What kernels take for themselves is not
    seen. Nothing is changed: the step is the caller's own, and computes what it computes without.

    Args:
        step: forward, backward and what else belongs to it, without arguments.
        modules: whose names are used; those of the first one as they are.
        optimizer: whose state is told apart.
        batch: tensors, in lists and mappings, that are the batch's.

    Returns:
        Numbers of operations, and bytes by owner, for `automicro.pictures.timeline`: of operations
        that fall together the one with the most held.

    Raises:
        ValueError: a module is compiled; see `refuse_compiled`.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> x = torch.randn(32, 64)
        >>> samples = record_step(lambda: model(x).sum().backward(), modules=[model], batch=x)
        >>> sorted(samples[-1][1].items())
        [('batch', 8192), ('gradients', 17920), ('parameters', 17920)]
        >>> max(held.get("0", 0) for _, held in samples)  # what the first layer computed
        8192
    """
    modules = list(modules)
    for module in modules:
        refuse_compiled(module)
    recorder = _Recorder()
    recorder.own("parameters", (each for module in modules for each in module.parameters()))
    recorder.own("buffers", (each for module in modules for each in module.buffers()))
    recorder.own("gradients", _gradients(modules))
    if optimizer is not None:
        recorder.own("optimizer", tensors_of([optimizer]))
    if batch is not None:
        recorder.own("batch", _tensors_in(batch))
    with recorder, _watching(modules, recorder.inside), _told_of_gradients(modules, recorder):
        step()
    if optimizer is not None:
        recorder.own("optimizer", tensors_of([optimizer]))
    return recorder.samples()


class _Recorder(OperationMode):
    """Writes down when each storage comes and goes, and whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self._events: list[tuple[int, int]] = []  # number of the storage, bytes more or less
        self._owners: list[str] = []
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and write down what it makes."""
        output = func(*args, **kwargs)
        owner = self.inside[-1] if self.inside else _BACKWARD if in_backward() else _OUTSIDE
        for tensor in _tensors_in(output):
            self._see(tensor, owner)
        return output

    def own(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Say whose tensors are, also those that were seen already."""
        for tensor in tensors:
            self._owners[self._see(tensor, owner)] = owner

    def _see(self, tensor: Tensor, owner: str) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._live:
            number = len(self._owners)
            num_bytes = -(-storage.nbytes() // GRANULE) * GRANULE
            self._owners.append(owner)
            self._events.append((number, num_bytes))

            def forget(_: object) -> None:
                self._live.pop(key, None)
                self._events.append((number, -num_bytes))

            self._live[key] = number, weakref.ref(storage, forget)
        return self._live[key][0]

    def samples(self) -> list[tuple[float, dict[str, int]]]:
        """Play the events with the owners as they are known in the end."""
        held: dict[str, int] = {}
        samples: list[tuple[float, dict[str, int]]] = []
        width = max(len(self._events) // _MOST_SAMPLES, 1)
        total, most, fullest = 0, -1, dict(held)
        for index, (number, delta) in enumerate(list(self._events), start=1):
            owner = self._owners[number]
            held[owner] = held.get(owner, 0) + delta
            total += delta
            if total > most:
                most, fullest = total, {each: size for each, size in held.items() if size}
            if index % width == 0 or index == len(self._events):
                samples.append((float(index), fullest))
                most = -1
        return samples


@contextlib.contextmanager
def _watching(modules: Iterable[nn.Module], inside: list[str]) -> Iterator[None]:
    """Keep the names of the modules that compute, the innermost last."""
    names: dict[int, str] = {}
    for root in modules:
        for name, module in root.named_modules():
            names.setdefault(id(module), name or type(module).__name__)

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            inside.append(names[id(module)])

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and inside:
            inside.pop()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        inside.clear()


@contextlib.contextmanager
def _told_of_gradients(modules: Iterable[nn.Module], recorder: _Recorder) -> Iterator[None]:
    """Say of each gradient that it is one, before the step can let go of it."""

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.own("gradients", _tensors_in(parameter.grad))

    found = {id(each): each for module in modules for each in module.parameters()}
    handles = [
        each.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for each in found.values()
        if each.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gradients(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (each.grad for each in module.parameters() if each.grad is not None)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
