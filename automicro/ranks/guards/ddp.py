"""Guard for `DistributedDataParallel`, which reduces gradients in the last microbatch."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from automicro.ranks.guards.collectives import Call, own_collectives
from automicro.ranks.guards.guard import WrapperGuard, refuse_stranger
from automicro.ranks.interface import StrayedError, Sync
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import Use
from automicro.torch_private import keeping_versions
from automicro.torch_private_distributed import (
    GradBucket,
    arrive,
    buffer_comm_hook,
    comm_hooks,
    expect_gradients,
    joins_uneven_inputs,
    local_used_map,
    missing_gradients,
    rebuild_buckets,
    reduced_parameters,
    reset_reducer,
)

_NOT_CALLED: Any = None
_CALL_ALIKE = (
    "Give every rank the same model, and let every rank call it, inside DistributedDataParallel, "
    "for every batch for which any rank calls it."
)

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class VotingHook:
    """DDP communication hook that calls a guard before each bucket."""

    def __init__(self, hook: Hook | None = None) -> None:
        self.hook = hook
        # DDP reads these names, and forbids bf16 compression if the name implies it and the network
        # lacks it.
        self.__name__ = self.__qualname__ = getattr(hook, "__name__", "voting_hook")
        # Weak, because torch holds this hook outside the garbage collector's reach and the guard
        # holds the model, which would never be freed.
        self._guard: weakref.ref[DdpGuard] | None = None
        self.pending: list[torch.futures.Future[Tensor]] = []

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        guard = self.guard
        if guard is not None:
            guard.before(bucket)
        with own_collectives():
            future = (self.hook or _average)(state, bucket)
        self.pending.append(future)
        return future

    @property
    def guard(self) -> "DdpGuard | None":
        """The guard that is called, or None."""
        return None if self._guard is None else self._guard()

    @guard.setter
    def guard(self, guard: "DdpGuard") -> None:
        self._guard = weakref.ref(guard)

    @property
    def is_guarded(self) -> bool:
        """Whether a guard is called."""
        return self.guard is not None

    @property
    def was_guarded(self) -> bool:
        """Whether a guard is or was called."""
        return self._guard is not None

    def drain(self) -> None:
        """Wait for running reductions, which write into buckets that are used again."""
        for future in self.pending:
            future.wait()
        self.pending.clear()


def _average(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return _mean_of(state, bucket.buffer())


def _mean_of(group: dist.ProcessGroup | None, buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Average a bucket over ranks with the same rounding as DDP without a hook."""
    # Divided before the sum, which rounds differently from a division after it.
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return reduced


class DdpGuard(WrapperGuard):
    """Guard for one model wrapped by DDP."""

    # All microbatches but the last run without synchronization. The first time buckets are reduced,
    # a vote precedes each. Once buckets are known, a failed rank reduces zeros in their place, and
    # an attempt has only the vote at its end.

    def __init__(self, model: DistributedDataParallel, votes: Votes) -> None:
        _refuse(model, votes)
        super().__init__(votes)
        self._model = model
        self._hook = _voting_hook_of(model)
        self._hook.guard = self
        # The zeros that a failed rank reduces would also pass through a user's hook.
        self._can_replay = self._hook.hook is None
        self._parameters = reduced_parameters(model)
        self._nothing_unused = [False] * len(self._parameters)
        self.unused: Sequence[bool] = self._nothing_unused
        self._had_gradient: list[bool] = []
        self._was_called = False
        self._expects_gradients = False
        self._is_reduced = False
        self._buckets: list[Tensor] = []
        self._known = False
        # With find_unused_parameters, torch does not rebuild its buckets.
        self._is_rebuilt = model.find_unused_parameters
        self._launched = 0
        self._stale_buffers = model.broadcast_buffers and model.require_forward_param_sync
        self._flat: list[tuple[Tensor, list[Tensor]]] = []
        self._last = 0
        self._map_is_due = False

    communicates_in_forward = False  # buffers are sent when an attempt begins

    def uses(self) -> list[Use]:
        group = self._model.process_group
        devices = dict.fromkeys(each.device for each in self._parameters.values())
        kinds = ["all_reduce", *(["broadcast"] if _buffers_by_type(self._model) else [])]
        return [Use(kind, group, device) for device in devices for kind in kinds]

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        known = {id(each) for each in self._parameters.values()}
        ignored = self._model.parameters_to_ignore
        new = [
            name
            for name, each in self._model.module.named_parameters()
            if each.requires_grad and id(each) not in known and name not in ignored
        ]
        if new:
            raise ValueError(
                f"{len(new)} parameters ({', '.join(map(repr, new[:3]))}) were added to the model "
                "or unfrozen after it was wrapped in DistributedDataParallel, so their gradients "
                "would not be averaged over ranks; change the model before wrapping it, or wrap "
                "it again and create a new Microbatcher or Trainer"
            )

    @property
    def is_replaying(self) -> bool:
        return self._is_open and self._training and not self._votes_here

    def owns(self, call: Call) -> bool:
        # After the last bucket torch reduces the map of used parameters, with the reducer locked.
        is_due, self._map_is_due = self._map_is_due, False
        return is_due and call.name == "all_reduce" and call.shape.endswith(" int32")

    def prepare(self) -> None:
        if joins_uneven_inputs(self._model):
            raise ValueError(
                "the model is in a join context (model.join(), accelerate's join_uneven_inputs), "
                "in which ranks without data answer only DistributedDataParallel and no vote; "
                "leave it out, wrap the model again, and let a rank without a batch continue "
                "with backward(None) until num_global_samples is 0"
            )
        super().prepare()
        self._flat = []
        if self._stale_buffers:
            self._flat = [
                (torch.cat([buffer.detach().flatten() for buffer in buffers]), buffers)
                for buffers in _buffers_by_type(self._model)
            ]

    def meet(self, *, training: bool) -> None:
        # DDP would do this in the next forward, where a rank might be missing.
        self._send_buffers()
        if training and not self._is_rebuilt:
            # Cleared first, because new buckets need as much memory as the old ones.
            self._known = False
            self._buckets = []
            self._is_rebuilt = rebuild_buckets(self._model)

    def open(self, num_microbatches: int, *, training: bool, sync: Sync) -> None:
        # A forward would broadcast buffers while a rank might be missing; `meet` has already done
        # so.
        self._model.require_forward_param_sync = False
        self._last = num_microbatches - 1
        self._training = training
        if training:
            self._had_gradient = [each.grad is not None for each in self._parameters.values()]
        self._launched = 0
        self.unused = self._nothing_unused
        self._was_called = self._is_reduced = False
        self.has_strayed = self._map_is_due = False
        self._votes_here = not (self._known and self._can_replay)
        self._is_open = True

    @contextlib.contextmanager
    def microbatch(self, index: int, *, weightless: bool = False) -> Iterator[None]:
        # A forward sets this flag to whether it expects a backward with reductions.
        self._model.require_forward_param_sync = _NOT_CALLED
        self._expects_gradients = False
        if self._training and index < self._last:
            with self._model.no_sync():
                yield
        else:
            yield
        if self._model.require_forward_param_sync is not _NOT_CALLED:
            self.after_forward()
        self._model.require_forward_param_sync = False
        if self._training and index == self._last and not self._is_reduced:
            self._reduce_rest(is_expected=self._expects_gradients)

    def after_forward(self) -> None:
        """Record that a forward ran, and whether any so far expects gradients."""
        if self._is_open:
            self._was_called = True
            self._expects_gradients |= bool(self._model.require_forward_param_sync)
            self._model.require_forward_param_sync = False  # the next forward must not send buffers

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        self._is_open = False
        self._hook.pending.clear()
        self._known = (self._is_reduced or self._known) and not any_strayed
        if self._training:
            # Statistics of each rank have changed with its own rows.
            self._stale_buffers = self._model.broadcast_buffers
            self._leave_out(unused)

    def play_rest(self) -> None:
        if not self._training or self._votes_here:
            return
        with own_collectives():
            # Running reductions still write into buckets.
            self._hook.drain()
            for buffer in self._buckets[self._launched :]:
                self._hook.pending.append(_mean_of(self._model.process_group, buffer.zero_()))
            # Peers reduce this map after their last bucket, so it is replayed last.
            used = local_used_map(self._model)
            if used is not None and self._launched < len(self._buckets):
                dist.all_reduce(torch.zeros_like(used), group=self._model.process_group)

    def recover(self) -> None:
        self._is_open = False
        # First, because running reductions write into buckets that the next attempt reuses.
        self._hook.drain()
        if self._training:
            reset_reducer(self._model)
        self._model.require_forward_param_sync = False

    def before(self, bucket: GradBucket) -> None:
        if not self._is_open:
            if self._votes.is_in_attempt:
                refuse_stranger(self._model)
            return
        index, buffer = bucket.index(), bucket.buffer()
        if self._votes_here:
            point = f"reducing bucket {index} of gradients, {buffer.numel()} numbers"
            self._votes.cast(point, remedy=_CALL_ALIKE)
            # A sparse bucket (of an embedding) is a new tensor every time.
            self._can_replay &= not buffer.is_sparse
            del self._buckets[index:]
            self._buckets.append(buffer)
        elif not (
            index == self._launched < len(self._buckets)
            and buffer.data_ptr() == self._buckets[index].data_ptr()
        ):
            self.has_strayed = True
        self._launched = index + 1
        self._is_reduced = bucket.is_last()
        self._map_is_due = self._is_reduced and self._model.find_unused_parameters

    def _reduce_rest(self, *, is_expected: bool) -> None:
        """Reduce all gradients that the last microbatch did not reduce."""
        # If a parameter is not used in the last microbatch, DDP would wait for its gradient
        # forever.
        received = [name for name, each in self._parameters.items() if each.grad is not None]
        if not is_expected and not received:
            if not self._votes_here:
                raise StrayedError("this time no gradient is to be reduced")
            return
        if not self._was_called:
            raise ValueError(_went_past(received))
        missing = missing_gradients(self._model, self._parameters) if is_expected else []
        names = missing or list(self._parameters)
        root = arrive([self._parameters[name] for name in names])
        if not missing:
            expect_gradients(self._model, root)
        if not self._model.find_unused_parameters:  # otherwise torch detects them
            self.unused = [
                name in names and each.grad is None for name, each in self._parameters.items()
            ]
        # Its hooks reduce the remaining buckets.
        root.backward()  # type: ignore[no-untyped-call]
        if not self._is_reduced:
            raise RuntimeError(
                "DistributedDataParallel did not reduce the gradients of "
                f"{', '.join(map(repr, names[:3]))}, which no backward of the last microbatch "
                "reached; wrap the model with find_unused_parameters=True"
            )

    def _leave_out(self, unused: Sequence[bool]) -> None:
        """Remove gradients of parameters that no rank used, as without DDP."""
        # An optimizer skips a parameter without a gradient, but steps (weight decay, momentum) for
        # a zero gradient.
        if not any(unused):
            return
        for parameter, is_unused, had in zip(
            self._parameters.values(), unused, self._had_gradient, strict=True
        ):
            if is_unused and not had:
                parameter.grad = None

    def _send_buffers(self) -> None:
        for flat, buffers in self._flat:
            dist.broadcast(flat, group=self._model.process_group, group_src=0)
            with torch.no_grad(), keeping_versions(buffers):
                values = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value.view(buffer.shape))
        self._flat = []
        self._stale_buffers = False


def _went_past(received: Sequence[str]) -> str:
    named = ", ".join(map(repr, received[:3])) + ", …" * (len(received) > 3)
    return (
        f"{len(received)} parameters ({named}) received gradients in a forward that bypassed "
        "DistributedDataParallel, so they are not averaged over ranks; call the wrapper itself, "
        "model(…), and not model.module(…), or move another method's work into forward"
    )


def _tell_of_forward(model: nn.Module, inputs: Any, outputs: Any) -> None:
    # Not a method, because it is copied and pickled with its model.
    assert isinstance(model, DistributedDataParallel)
    for hook, _ in comm_hooks(model):
        if isinstance(hook, VotingHook) and hook.guard is not None:
            hook.guard.after_forward()


def _buffers_by_type(model: DistributedDataParallel) -> list[list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for name, buffer in model.module.named_buffers():
        if name not in model.parameters_to_ignore:
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(groups.values())


def _voting_hook_of(model: DistributedDataParallel) -> VotingHook:
    hooks = comm_hooks(model)
    if not hooks:
        hook = VotingHook()
        model.register_comm_hook(model.process_group, hook)
        model.register_forward_hook(_tell_of_forward)
        return hook
    hook = hooks[0][0]
    if isinstance(hook, VotingHook):
        if not hook.was_guarded:
            model.register_forward_hook(_tell_of_forward)
        return hook
    raise ValueError(
        f"the model's DDP wrapper has the communication hook "
        f"{getattr(hook, '__qualname__', hook)!r}, and torch allows no vote to be added before it; "
        "register it as model.register_comm_hook(state, VotingHook(hook)) with "
        "automicro.ranks.guards.ddp.VotingHook, or leave it out"
    )


def _refuse(model: DistributedDataParallel, votes: Votes) -> None:
    refused = {
        "static_graph=True": (model.static_graph, "leave it out: it does not work with no_sync()"),
        "delay_all_reduce_named_params": (
            bool(getattr(model, "_delay_all_reduce_params", None)),
            "leave it out",
        ),
        "a buffer communication hook": (
            buffer_comm_hook(model) is not None,
            "leave it out, or use broadcast_buffers=False",
        ),
        "mixed_precision": (model.mixed_precision is not None, "use autocast (precision='bf16')"),
        f"a process group of {dist.get_world_size(model.process_group)} ranks": (
            dist.get_world_size(model.process_group) != votes.world_size,
            f"wrap it for all {votes.world_size} ranks, so that all take part in the vote",
        ),
    }
    for what, (is_so, remedy) in refused.items():
        if is_so:
            raise ValueError(
                f"a model wrapped by DistributedDataParallel with {what} cannot roll back an "
                f"attempt that ran out of memory on one rank; {remedy}"
            )
