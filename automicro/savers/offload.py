"""Offloading: tensors saved for the backward wait in host memory."""

# Hooks of autograd receive every tensor that a forward saves. The whole storage of the tensor is
# copied to the host, once for all tensors that share it, and back when the backward needs it.

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from automicro.batch.device import on_host, side_stream
from automicro.memory.device import copies_overlap
from automicro.torch_private import FakeTensor, counter_of, version_of
from automicro.torch_private_distributed import is_fsdp_module
from automicro.torch_private_execution import refuses_hooks

OFFLOAD = "offload"
"""Its name in ``when_too_large``."""
SMALL_BYTES = 1 << 16
"""Smaller storages stay on the device, because a copy costs more than they hold."""

_MOST_ON_THE_WAY = 2  # storages that a side stream is still reading


class _Packed(NamedTuple):
    """A placeholder for a tensor that the backward needs."""

    # The tensor, detached. If its storage is on the host: an empty one with the same version
    # counter and type.
    tensor: Tensor
    version: int  # version of the tensor when it was saved
    place: tuple[Any, Any, int] = ((), (), 0)  # size, stride and offset in the storage
    stored: "_Stored | None" = None  # its storage on the host; None if it stays on the device


class _Stored:
    """A storage on the host, which is also on the device while a tensor there uses it."""

    def __init__(
        self, host: Tensor, source: torch.UntypedStorage, device: torch.device, copied: Any
    ) -> None:
        self._host = host
        self._source = weakref.ref(source)
        # Passed separately, because the storage of a fake tensor lacks its device.
        self._device = device
        self._copied = copied  # an event of the side stream, or None
        self._there: weakref.ref[torch.UntypedStorage] | None = None

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is a copy of this storage, because ids of storages are reused."""
        return self._source() is storage

    def on_device(self) -> Tensor:
        """Return all bytes as one tensor on the device."""
        storage = None if self._there is None else self._there()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        whole = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
        # The copy to the host runs on another stream and might not be finished.
        if self._copied is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(
                self._copied
            )
        whole.copy_(self._host, non_blocking=True)
        # A weak reference, so that the memory is freed when the backward no longer uses it.
        self._there = weakref.ref(whole.untyped_storage())
        return whole


class OffloadHooks:
    """The hooks for saved tensors of one attempt."""

    # On an accelerator, host memory is pinned, and copies to it run on a side stream. That stream
    # waits for the computation of the tensor, and the main stream waits for the copy before the
    # memory of the storage is reused, at most two storages later. Copies back run on the main
    # stream, in order. With a `MemoryBudget` for the CPU, copies are in host memory, which it does
    # not count. Parameters, buffers, small tensors and tensor subclasses stay.
    #
    # As without hooks, the backward refuses a tensor that was changed after it was saved.

    def __init__(
        self,
        staying: Iterable[Tensor],
        host: Callable[[], AbstractContextManager[Any]] = on_host,
    ) -> None:
        self._staying: dict[int, torch.UntypedStorage] = {}
        self.keep(staying)
        self._host = host
        # By id of a storage and its version at the time of the copy.
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Stored] = (
            weakref.WeakValueDictionary()
        )
        self._on_the_way: deque[tuple[Any, torch.UntypedStorage]] = deque()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors on the device from now on."""
        for tensor in tensors:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none
                storage = tensor.untyped_storage()
                # Holding the storage itself prevents another one from getting its id.
                self._staying[id(storage)] = storage

    def pack(self, tensor: Tensor) -> Any:
        """Return the placeholder for a saved tensor."""
        # It has no version counter, which would reveal a change.
        if tensor.is_inference():
            return tensor
        version = version_of(tensor)
        storage = tensor.untyped_storage() if _is_plain(tensor) else None
        if storage is None or storage.nbytes() < SMALL_BYTES or id(storage) in self._staying:
            # Detached: an output saved by its own operation would keep itself alive forever.
            return _Packed(tensor.detach(), version)
        with torch.no_grad():
            stored = self._stored(tensor, storage, version)
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return _Packed(counter_of(tensor), version, place, stored)

    def _stored(self, tensor: Tensor, storage: torch.UntypedStorage, version: int) -> _Stored:
        # A storage that was changed is copied again, because the backward needs both contents.
        stored = self._known.get((id(storage), version))
        if stored is None or not stored.is_of(storage):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stored = self._known[id(storage), version] = self._copied(whole, storage)
        return stored

    def _copied(self, whole: Tensor, storage: torch.UntypedStorage) -> _Stored:
        device = whole.device
        # Pinned memory might run out. Then the copy is blocking, with the same result.
        host = _pinned(whole.shape) if copies_overlap(device) else None
        if host is None:
            with self._host():
                host = torch.empty(whole.shape, dtype=torch.uint8, device="cpu")
            host.copy_(whole)
            return _Stored(host, storage, device, None)
        module = torch.get_device_module(device)
        current, side = module.current_stream(device), side_stream(device)
        side.wait_stream(current)
        with module.stream(side):
            host.copy_(whole, non_blocking=True)
        copied = side.record_event()
        self._on_the_way.append((copied, storage))
        while len(self._on_the_way) > _MOST_ON_THE_WAY:
            self._arrive()
        return _Stored(host, storage, device, copied)

    def _arrive(self) -> None:
        copied, storage = self._on_the_way.popleft()
        device = storage.device
        torch.get_device_module(device).current_stream(device).wait_event(copied)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor for the backward, or raise an error if it was changed."""
        # Release storages with running copies; their memory is free when the copies are finished.
        while self._on_the_way:
            self._arrive()
        if isinstance(packed, Tensor):
            return packed
        tensor: Tensor
        tensor, version, place, stored = packed
        if version_of(tensor) != version:
            size = list(tensor.size() if stored is None else place[0])
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {size}] is at version {version_of(tensor)}; "
                f"expected version {version} instead. Hint: enable anomaly detection to find the "
                "operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        if stored is None:
            return tensor
        with torch.no_grad():
            whole = stored.on_device()
            itemsize = tensor.dtype.itemsize
            # The end of a storage might hold less than one element of this type.
            typed = whole[: whole.numel() // itemsize * itemsize].view(tensor.dtype)
            found: Tensor = typed.as_strided(*place)
            return found

    def __call__(self) -> AbstractContextManager[None]:
        """Return the context for forward and backward."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def _pinned(shape: torch.Size) -> Tensor | None:
    """Return bytes in pinned host memory, or None if there is no more of it."""
    with contextlib.suppress(RuntimeError):
        return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether bytes, sizes and strides describe a tensor completely."""
    return (
        type(tensor) in (Tensor, nn.Parameter, FakeTensor)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


@dataclass
class Offload:
    """Keeps tensors saved for the backward in host memory; see `OffloadHooks`.

    >>> model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    >>> with Offload([model]).applied():
    ...     model(torch.ones(100, 300)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([300, 300])
    """

    modules: Sequence[nn.Module]
    host: Callable[[], AbstractContextManager[Any]] = on_host
    name: str = field(default=OFFLOAD, init=False)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Wrap forward and backward in the hooks."""
        every = [each for root in self.modules for each in root.modules()]
        hooks = OffloadHooks((each for module in every for each in _tensors_of(module)), self.host)

        def keep_gathered(module: nn.Module, inputs: Any) -> None:
            # Gathered parameters differ from the shards; they are freed and gathered again.
            hooks.keep(each for part in module.modules() for each in _tensors_of(part))

        with contextlib.ExitStack() as stack:
            for module in filter(is_fsdp_module, every):
                stack.enter_context(module.register_forward_pre_hook(keep_gathered))
            try:
                with hooks():
                    yield
            except RuntimeError as error:
                if not refuses_hooks(error):
                    raise
                raise RuntimeError(
                    "the model runs transforms of torch.func, which do not let tensors saved for "
                    "the backward go to the host. Leave 'offload' out of when_too_large, as in "
                    "when_too_large='recompute'"
                ) from error

    def describe(self) -> str:
        """Return a description in half a sentence."""
        return "tensors saved for the backward wait in host memory"


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
