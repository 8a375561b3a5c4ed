"""Guard for FSDP2 (`fully_shard`), which communicates in every microbatch."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automicro.memory.oom import once_more
from automicro.ranks.guards.collectives import Call, own_collectives
from automicro.ranks.guards.guard import WrapperGuard, refuse_stranger
from automicro.ranks.interface import HeldBackError, StrayedError, Sync
from automicro.ranks.votes import Votes
from automicro.ranks.warm_up import Use
from automicro.torch_private_distributed import (
    can_hold_back,
    clear_whole_gradients,
    collectives_of,
    drop_unsharded,
    groups_of_shards,
    has_many_groups,
    has_reduction_hook,
    holds_back,
    holds_two_types,
    replicas_average,
    replicate_group,
    reset_sharded,
    uses_symmetric_memory,
    whole_numel,
    whole_parameters,
    withholds_gradients,
)

_SHARD_WHAT_IS_USED = (
    "Every microbatch of every rank must use the same sharded modules. Shard a layer that is used "
    "only sometimes together with its surroundings: apply fully_shard to a module that is always "
    "used instead of that layer, and call "
    "model.set_reduce_scatter_unused_params(True)."
)


class Collective(NamedTuple):
    """One collective of a microbatch, with all data needed to take part in it."""

    kind: str  # "all-gather" or "reduce-scatter"
    where: int  # index of its module
    numel: int  # of the input tensor
    dtype: torch.dtype  # of the input tensor


class _Guarded:
    """Collectives of one module and one kind, which the guard votes on, or records for replay."""

    def __init__(self, guard: "FsdpGuard", where: int, inner: Any) -> None:
        self.guard = guard
        self.where = where
        self.inner = inner

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.guard.allocate(self.inner, size, dtype=dtype, device=device)

    def __call__(
        self, *, input_tensor: Tensor, group: dist.ProcessGroup, op: Any = None, **given: Any
    ) -> dist.Work | None:
        kind, reduction = "all-gather", None
        if op is not None:
            kind, given["op"] = "reduce-scatter", op
            reduction = self.guard.reduction(self, group, op, input_tensor.device)
        step = Collective(kind, self.where, input_tensor.numel(), input_tensor.dtype)
        self.guard.before(step, group, reduction)
        with own_collectives():
            # A weight of zero would not do: zero times NaN is NaN, on every rank.
            if reduction is not None and self.guard.weighs_nothing(self.where):
                input_tensor.zero_()
            work: dist.Work | None = self.inner(input_tensor=input_tensor, group=group, **given)
        self.guard.after(step)
        return work


class _Reduction(NamedTuple):
    comm: Any  # allocates and scatters as the peers' does
    group: dist.ProcessGroup
    op: Any
    device: torch.device
    replicas: dist.ProcessGroup | None
    replicas_op: Any


_Key = tuple[bool, bool, bool, Sync]


class FsdpGuard(WrapperGuard):
    """Guard for all modules of a model that `fully_shard` was applied to."""

    # The first microbatch of each kind votes before every collective and records them. Later
    # microbatches have one vote, at the end (for the last one, the vote of the attempt). A rank
    # that ran out of memory replays the rest: it gathers its real shards and scatters zeros.

    def __init__(self, modules: Iterable[nn.Module], votes: Votes) -> None:
        super().__init__(votes)
        modules = list(modules)
        found = {
            id(module): (name, module)
            for root in modules
            for name, module in root.named_modules()
            if isinstance(module, FSDPModule)
        }
        self._names = [name for name, _ in found.values()]
        self._modules: list[FSDPModule] = [module for _, module in found.values()]
        self._roots = _outermost(self._modules)
        for where, module in enumerate(self._modules):
            self._take_over(where, module)
        self._schedules: dict[_Key, list[Collective]] = {}
        self._fresh: dict[_Key, list[Collective]] = {}
        self._trace: list[Collective] = []
        self._reductions: dict[int, _Reduction] = {}
        self._gather_groups: dict[int, dist.ProcessGroup] = {}
        self._key: _Key = (True, True, True, Sync.EACH)
        self._num_microbatches = 0
        self._sync = self._held = Sync.EACH
        self._can_hold_back = False
        self._is_uneven = False  # microbatches have gradients of different parameters
        self._index = 0
        self._is_playing = False
        self._next_sum: dist.ProcessGroup | None = None
        self._is_weightless = False
        self._zeroed: set[int] = set()  # modules whose parameters get zero gradients

    @property
    def latest(self) -> Sync:
        # Gradients held back must be of the same parameters in all microbatches.
        waits = self._can_hold_back and not self._is_uneven
        waits = waits and not any(map(has_reduction_hook, self._modules))
        return Sync.LAST if waits else Sync.EACH

    def uses(self) -> list[Use]:
        found: list[Use] = []
        for module in self._modules:
            shards = groups_of_shards(module)
            if shards is None:
                continue
            device, gathered, scattered = shards
            found += [Use("all_gather", group, device) for group in gathered]
            replicas = replicate_group(module)
            # The reduce operation is known only at the first gradient.
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                found += [Use("reduce_scatter", group, device, op) for group in scattered]
                if replicas is not None:
                    found.append(Use("all_reduce", replicas, device, op))
        return found

    @property
    def is_replaying(self) -> bool:
        return self._is_open and not self._votes_here

    def owns(self, call: Call) -> bool:
        # Torch sums over replicas right after it has scattered over shards.
        group, self._next_sum = self._next_sum, None
        if group is None or call.name != "all_reduce":
            return False
        return call.members == tuple(dist.get_process_group_ranks(group))

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        new = [
            name
            for root in self._roots
            if isinstance(root, nn.Module)
            for name, each in root.named_parameters()
            if each.requires_grad and not isinstance(each, DTensor)
        ]
        if new:
            raise ValueError(
                f"{len(new)} parameters ({', '.join(map(repr, new[:3]))}) were added to the model "
                "after fully_shard was applied to it, so their gradients would not be averaged "
                "over ranks; change the model before sharding it, or shard them too and create a "
                "new Microbatcher or Trainer"
            )

    def settle(self) -> None:
        # After a forward without gradients the outermost modules stay gathered.
        for module in self._modules:
            module.reshard()

    def prepare(self) -> None:
        if not self._has_looked:
            self._can_hold_back = all(map(can_hold_back, self._modules))
        super().prepare()

    def meet(self, *, training: bool) -> None:
        if training and any(map(withholds_gradients, self._modules)):
            raise ValueError(
                "the sharded model holds whole gradients back (set_requires_gradient_sync(False), "
                "accelerate's no_sync), so those of earlier batches would be lost; leave it on: "
                "gradients of several batches add up in their shards, and accumulate([…]) makes "
                "one step of them"
            )

    def open(self, num_microbatches: int, *, training: bool, sync: Sync) -> None:
        self._num_microbatches = num_microbatches
        self._training = training
        self._sync = sync if training and num_microbatches > 1 else Sync.EACH
        self._fresh = {}
        self._is_open = True
        self._begin(0)

    @contextlib.contextmanager
    def microbatch(self, index: int, *, weightless: bool = False) -> Iterator[None]:
        assert index == self._index, "microbatches run in order"
        self._is_weightless = weightless
        holds_whole = self._sync is Sync.LAST
        if holds_whole and self._reduces_all:
            self._is_uneven |= any(map(holds_two_types, self._modules))
            self._require_even()
        hooks = self._zero_whole_gradients() if weightless and holds_whole else []
        self._hold_back(Sync.EACH if self._reduces_all else self._sync)
        try:
            yield
        finally:
            self._is_weightless = False
            for hook in hooks:
                hook.remove()
        if weightless and holds_whole and not self._reduces_all:
            for where in set(range(len(self._modules))) - self._zeroed:
                clear_whole_gradients(self._modules[where])
        if self._sync is not Sync.EACH and self._reduces_all:
            self._is_uneven |= any(map(holds_back, self._modules))
        self._require_even()
        if self._votes_here:
            self._fresh[self._key] = self._trace
        elif rest := self._rest():
            raise StrayedError(f"microbatch {index} ended before {self._describe(rest[0])}")
        if index + 1 < self._num_microbatches:
            self._votes.cast(f"end of microbatch {index}")
            self._begin(index + 1)
        else:
            # Code before the vote of the attempt has no collectives to replay.
            self._votes_here = True

    @property
    def _reduces_all(self) -> bool:
        """Whether no gradient of this microbatch waits for a later one."""
        return self._sync is Sync.EACH or self._index == self._num_microbatches - 1

    def _hold_back(self, sync: Sync) -> None:
        """Make modules hold gradients back until `recover` or the last microbatch."""
        if sync is self._held:
            return
        self._held = sync
        for module in self._modules:
            module.set_requires_gradient_sync(sync is not Sync.LAST, recurse=False)
            module.set_requires_all_reduce(sync is Sync.EACH, recurse=False)

    def _zero_whole_gradients(self) -> list[Any]:
        """Zero the gradients of a weightless microbatch before they are added; they can be NaN."""
        hooks = []
        self._zeroed = set()
        for where, module in enumerate(self._modules):
            # A module that was never gathered has no whole parameters, so none of its gradients is
            # held back.
            for parameter in whole_parameters(module):
                self._zeroed.add(where)
                if parameter.requires_grad:
                    hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]
        return hooks

    def weighs_nothing(self, where: int) -> bool:
        """Return whether a module must reduce zeros, whatever its gradient."""
        return self._is_weightless and not (self._sync is Sync.LAST and where in self._zeroed)

    def _require_even(self) -> None:
        if self._is_uneven and self._sync is not Sync.EACH:
            raise HeldBackError("microbatches have gradients of other parameters than the last one")

    def commit(self, *, any_strayed: bool, unused: Sequence[bool]) -> None:
        self._is_open = False
        if not self._training:
            self.settle()
        if self._can_replay:
            self._schedules |= self._fresh

    def play_rest(self) -> None:
        if self._votes_here or not self._is_open:
            return
        rest = self._rest()
        # Closed first, so that `before` does not vote on replayed collectives.
        self._is_open = False
        self._reset()
        self._is_playing = True
        try:
            with own_collectives(), torch.no_grad():
                for step in rest:
                    if step.kind == "all-gather":
                        # The real shards, because peers compute with the gathered parameters.
                        self._modules[step.where].unshard()
                        self._modules[step.where].reshard()
                    else:
                        self._scatter_zeros(step)
        finally:
            self._is_playing = False

    def allocate(self, comm: Any, size: Any, **memory: Any) -> torch.Tensor:
        """Allocate memory for a collective, with one retry if peers wait for a replay."""
        request: Callable[[], torch.Tensor] = functools.partial(comm.allocate, size, **memory)
        if not self._is_playing:
            return request()
        return once_more(request, memory["device"], doing="replaying collectives for peers")

    def recover(self) -> None:
        self._is_open = False
        self._hold_back(Sync.EACH)
        self._reset()

    def before(
        self,
        step: Collective,
        group: dist.ProcessGroup,
        reduction: _Reduction | None = None,
    ) -> None:
        """Handle a collective that is about to be enqueued, with its memory allocated."""
        if not self._is_open:
            if self._votes.is_in_attempt:
                refuse_stranger(self._roots[0])  # type: ignore[arg-type]
            return
        if self._votes_here:
            if reduction is not None and self._adds_up_shards(reduction):
                # Torch adds them by position only, even if parameters differ.
                self._is_uneven |= step.numel != whole_numel(self._modules[step.where])
                self._require_even()
            self._votes.cast(self._describe(step), remedy=_SHARD_WHAT_IS_USED)
            if reduction is None:
                # In a replay, a module gathers over its own group, not over the group used after
                # forward.
                self._can_replay &= self._gather_groups.setdefault(step.where, group) is group
            else:
                self._reductions[step.where] = reduction
        elif not self._is_next(step):
            # Peers might wait forever in the one that was known.
            raise StrayedError(f"{self._describe(step)} was not known")

    def _adds_up_shards(self, reduction: _Reduction) -> bool:
        return self._sync is Sync.REPLICAS_LAST and reduction.replicas is not None

    def reduction(
        self, guarded: _Guarded, group: dist.ProcessGroup, op: Any, device: torch.device
    ) -> _Reduction:
        """Return how a module reduces its gradients."""
        module = self._modules[guarded.where]
        averages = replicas_average(module, op)
        return _Reduction(
            comm=guarded.inner,
            group=group,
            op=op,
            device=device,
            replicas=replicate_group(module),
            replicas_op=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
        )

    def after(self, step: Collective) -> None:
        """Handle a collective that was enqueued."""
        if self._is_open:
            self._trace.append(step)
            # The sum over replicas that follows belongs to this one, see `owns`.
            if step.kind == "reduce-scatter" and self._reduces_all:
                self._next_sum = replicate_group(self._modules[step.where])

    def _rest(self) -> list[Collective]:
        """Return the remaining known collectives of the microbatch."""
        return self._schedules[self._key][len(self._trace) :]

    def _is_next(self, step: Collective) -> bool:
        known, place = self._schedules[self._key], len(self._trace)
        return place < len(known) and known[place] == step

    def _describe(self, step: Collective) -> str:
        name = self._names[step.where] or "the whole model"
        return f"{step.kind} of {name!r}, {step.numel} numbers"

    def _begin(self, index: int) -> None:
        self._index = index
        self._next_sum = None
        is_last = index == self._num_microbatches - 1
        # Microbatches that agree in all of these should run the same collectives.
        self._key = (self._training, index == 0, is_last, self._sync)
        self._trace = []
        self._votes_here = not self._can_replay or self._key not in self._schedules

    def _scatter_zeros(self, step: Collective) -> None:
        to = self._reductions[step.where]
        memory = {"dtype": step.dtype, "device": to.device}
        zeros = self.allocate(to.comm, (step.numel,), **memory).zero_()
        share_numel = step.numel // dist.get_world_size(to.group)
        share = self.allocate(to.comm, (share_numel,), **memory)
        to.comm(output_tensor=share, input_tensor=zeros, group=to.group, op=to.op)
        if to.replicas is not None and self._reduces_all:
            dist.all_reduce(share, op=to.replicas_op, group=to.replicas)

    def _reset(self) -> None:
        for root in self._roots:
            reset_sharded(root)
        drop_unsharded(module for module in self._modules if isinstance(module, nn.Module))

    def _take_over(self, where: int, module: FSDPModule) -> None:
        if not hasattr(module, "reset_iter_state"):
            raise ValueError(
                f"torch {torch.__version__} cannot restore a model that fully_shard was applied "
                "to after running out of memory; upgrade to torch 2.13, or use "
                "DistributedDataParallel"
            )
        name = self._names[where]
        if has_many_groups(module):
            raise ValueError(
                f"the parameters of {name!r} are sharded over several meshes (shard_placement_fn), "
                "whose collectives cannot be guarded one by one; shard each over one mesh"
            )
        inner = collectives_of(module)
        if inner is None:
            return
        # It might contain the guard of a process group that has ended.
        gather, scatter = (each.inner if isinstance(each, _Guarded) else each for each in inner)
        if uses_symmetric_memory(gather) or uses_symmetric_memory(scatter):
            raise ValueError(
                f"{name or 'the whole model'!r} communicates through symmetric memory, which all "
                "ranks register together at first use: after running out of memory a rank might "
                "use different blocks, and all would wait forever; leave out "
                "set_symm_mem_for_comm"
            )
        module.set_custom_all_gather(_Guarded(self, where, gather))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_Guarded(self, where, scatter))  # type: ignore[arg-type]


def _outermost(modules: list[FSDPModule]) -> list[FSDPModule]:
    inside = {
        id(inner)
        for module in modules
        if isinstance(module, nn.Module)
        for inner in module.modules()
        if inner is not module
    }
    return [module for module in modules if id(module) not in inside]
