"""Tensors saved for the backward wait in host memory.

Autograd's hooks for saved tensors hand over every tensor that a forward saves. Its whole storage
goes to the host, once for all tensors that share it, and comes back where the backward asks for it.
"""

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
from automicro.torch_private import FakeTensor, counter_of, refuses_hooks, version_of
from automicro.torch_private_distributed import is_fsdp_module

OFFLOAD = "offload"
"""Its name in ``when_too_large``."""
SMALL_BYTES = 1 << 16
"""Storages below it stay where they are: a copy costs more than they hold."""

_MOST_ON_THE_WAY = 2  # storages that a side stream still reads


class _Packed(NamedTuple):
    """A tensor that waits for the backward.

    Attributes:
        tensor: itself, detached; or of one whose storage went to the host what shares its version
            and its type, and holds no memory.
        version: when it was saved.
        place: its size, stride and offset in its storage.
        stored: its storage on the host; None where it stays.
    """

    tensor: Tensor
    version: int
    place: tuple[Any, Any, int] = ((), (), 0)
    stored: "_Stored | None" = None


class _Stored:
    """One storage on the host, and on the device again while anybody uses it there."""

    def __init__(
        self, host: Tensor, source: torch.UntypedStorage, device: torch.device, copied: Any
    ) -> None:
        self._host = host
        self._source = weakref.ref(source)
        self._device = device  # a stand-in's, which its storage does not know
        self._copied = copied  # an event of the side stream; None where there is none
        self._there: weakref.ref[torch.UntypedStorage] | None = None

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is a copy of this storage: another may have its id by now."""
        return self._source() is storage

    def on_device(self) -> Tensor:
        """All its bytes, as one tensor."""
        storage = None if self._there is None else self._there()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        whole = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
        # The copy to the host runs on another stream, and may not be over.
        if self._copied is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(
                self._copied
            )
        whole.copy_(self._host, non_blocking=True)
        # Weakly: when the backward is done with it, its memory is free.
        self._there = weakref.ref(whole.untyped_storage())
        return whole


class OffloadHooks:
    """Hooks for one attempt.

    On an accelerator host memory is pinned, and copies to it run on a stream of their own: that
    stream waits for what computes the tensor, and the computing stream waits for it before a
    storage's memory serves something else, at most two storages later. Copies back run where the
    work is, in its order. On a `MemoryBudget` of the CPU the copies lie on the host, which it does
    not count. Tensors stay that are parameters, buffers, small, or of a class of their own.

    As without hooks, a tensor that was written to after it was saved is refused in the backward.
    """

    def __init__(
        self,
        staying: Iterable[Tensor],
        host: Callable[[], AbstractContextManager[Any]] = on_host,
    ) -> None:
        self._staying: dict[int, torch.UntypedStorage] = {}
        self.keep(staying)
        self._host = host
        # By the id of a storage and its version when it was copied.
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Stored] = (
            weakref.WeakValueDictionary()
        )
        self._on_the_way: deque[tuple[Any, torch.UntypedStorage]] = deque()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of tensors stay from now on."""
        for tensor in tensors:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none
                storage = tensor.untyped_storage()
                # The storage itself is held, so that no other one can get its id.
                self._staying[id(storage)] = storage

    def pack(self, tensor: Tensor) -> Any:
        """The placeholder that waits for the backward in place of a tensor."""
        # It has no version, by which a write would show.
        if tensor.is_inference():
            return tensor
        version = version_of(tensor)
        storage = tensor.untyped_storage() if _is_plain(tensor) else None
        if storage is None or storage.nbytes() < SMALL_BYTES or id(storage) in self._staying:
            # Detached: an output that its own operation saves would keep that alive for ever.
            return _Packed(tensor.detach(), version)
        with torch.no_grad():
            stored = self._stored(tensor, storage, version)
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return _Packed(counter_of(tensor), version, place, stored)

    def _stored(self, tensor: Tensor, storage: torch.UntypedStorage, version: int) -> _Stored:
        # What was written to meanwhile is copied anew: the backward needs both contents.
        stored = self._known.get((id(storage), version))
        if stored is None or not stored.is_of(storage):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stored = self._known[id(storage), version] = self._copied(whole, storage)
        return stored

    def _copied(self, whole: Tensor, storage: torch.UntypedStorage) -> _Stored:
        device = whole.device
        # Memory that can be pinned may run out. Then the copy is waited for, and as good.
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
        """The tensor, for the backward.

        Raises:
            RuntimeError: it was written to in the meantime.
        """
        # Those on the way are let go of here: their memory may be used once the copies are over.
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
            # A storage may end with bytes that make no whole element of this type.
            typed = whole[: whole.numel() // itemsize * itemsize].view(tensor.dtype)
            found: Tensor = typed.as_strided(*place)
            return found

    def __call__(self) -> AbstractContextManager[None]:
        """Around forward and backward."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def _pinned(shape: torch.Size) -> Tensor | None:
    """Bytes on the host that a device copies to by itself; None where no more can be had."""
    with contextlib.suppress(RuntimeError):
        return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether bytes, sizes and strides are all that a tensor is."""
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
    """Tensors saved for the backward wait in host memory; see `OffloadHooks`.

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
        """Around forward and backward.

        Raises:
            RuntimeError: a transform of ``torch.func`` in the model refuses hooks for saved
                tensors.
        """
        every = [each for root in self.modules for each in root.modules()]
        hooks = OffloadHooks((each for module in every for each in _tensors_of(module)), self.host)

        def keep_gathered(module: nn.Module, inputs: Any) -> None:
            # Sharded parameters are others while they are gathered. They are freed and gathered
            # anew.
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
                    "the model runs transforms of torch.func, under which nothing that is saved "
                    "for the backward can go to the host; leave 'offload' out of when_too_large, "
                    "as in when_too_large='recompute'"
                ) from error

    def describe(self) -> str:
        """Describe it in half a sentence."""
        return "what is saved for the backward waits in host memory"


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
