"""Collectives that a model runs itself: SyncBatchNorm, tensor parallelism, one's own."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automicro.distributed.votes import Votes
from automicro.torch_private import OperationMode, is_compiled
from automicro.torch_private_distributed import mesh_dims

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_WAITS = ("wait_tensor", "barrier")


def runs_collectives(modules: Iterable[nn.Module]) -> bool:
    """Whether modules are known to communicate in forward or backward, beside DDP and FSDP2.

    >>> runs_collectives([nn.Linear(2, 2)])
    False
    """
    for root in modules:
        sharded: set[int] = set()
        for module in root.modules():
            if isinstance(module, nn.SyncBatchNorm):
                return True
            if isinstance(module, FSDPModule):
                dims = mesh_dims(module)
                own = [p for p in module.parameters() if isinstance(p, DTensor)]
                sharded |= {id(p) for p in own if p.device_mesh.ndim <= dims}
        if any(isinstance(p, DTensor) and id(p) not in sharded for p in root.parameters()):
            return True
    return False


class CollectivesGuard:
    """Votes before every collective that torch dispatches, in forward and backward.

    All ranks must run the same collectives in the same order, as they have to anyway. It sees
    eager code only.

    Args:
        modules: the model, and others that take part.
        votes: among all ranks.

    Raises:
        ValueError: a module is compiled, and its collectives are out of sight.
    """

    has_strayed = False
    unused: Sequence[bool] = ()
    communicates_in_forward = True

    def __init__(self, modules: Iterable[nn.Module], votes: Votes) -> None:
        if any(is_compiled(module) for root in modules for module in root.modules()):
            raise ValueError(
                "the model is compiled and runs collectives of its own (SyncBatchNorm, tensor "
                "parallelism), which cannot be guarded inside compiled code; leave torch.compile "
                "out, or use a fixed microbatch size that fits on every rank"
            )
        self._mode = _VotingMode(votes)

    def stay_guarded(self) -> None:
        """It never replays."""

    def settle(self) -> None:
        """There is no wrapper."""

    def prepare(self) -> None:
        """Nothing is needed."""

    def open(self, num_microbatches: int, *, training: bool) -> None:
        """Nothing is known in advance."""

    @contextlib.contextmanager
    def microbatch(self, index: int, *, weightless: bool = False) -> Iterator[None]:
        with self._mode:
            yield

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        """Nothing is learned."""

    def play_rest(self) -> None:
        """The peers' next collective begins with a vote."""

    def recover(self) -> None:
        """There is no wrapper."""


class _VotingMode(OperationMode):
    def __init__(self, votes: Votes) -> None:
        super().__init__()
        self._votes = votes

    def run(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if getattr(func, "namespace", None) in _NAMESPACES:
            name = func.overloadpacket.__name__
            if name not in _WAITS:
                _reserve(name, args)
                self._votes.cast(f"{name} in the model")
        return func(*args, **kwargs)


def _reserve(name: str, args: tuple[Any, ...]) -> None:
    """Run out of memory now, and not between the vote and the collective.

    A functional collective allocates its result itself. What is freed right away is what the
    allocator gives it next.
    """
    if not args or not isinstance(args[0], Tensor):
        return
    tensor = args[0]
    factors = {
        "all_reduce": 1.0,
        "broadcast": 1.0,
        "all_to_all_single": 1.0,
        "all_gather_into_tensor": float(args[1]) if len(args) > 1 and _is_number(args[1]) else 1,
        "reduce_scatter_tensor": 1.0,
    }
    if name in factors:
        torch.empty(
            math.ceil(tensor.numel() * factors[name]), dtype=tensor.dtype, device=tensor.device
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int)
