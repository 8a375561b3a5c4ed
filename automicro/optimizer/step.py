"""One step of an optimizer: scale the loss, clip the gradients, update the parameters.

The scale does not belong to any attempt. It is created before the first, read by each backward, and
changed only after a step, so a rollback leaves it unchanged. Dividing the gradients by it writes in
place, which happens once or is reported as half done (`write_in_place`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automicro.errors import OptimizerStepError, text_of
from automicro.memory.oom import Failure, caught, classify, release
from automicro.ranks.interface import OneRank, Ranks
from automicro.sharding import has_shards, is_pending, is_sharded, local
from automicro.torch_private_execution import overflows
from automicro.values import read_scalars

T = TypeVar("T")


def write_in_place(action: Callable[[], T], device: torch.device, half_applied: str) -> T:
    """Run an action that writes in place, once; raise OptimizerStepError if memory runs out."""
    found, failure = caught(action)
    if failure is None:
        return cast(T, found)
    try:
        # Only running out of memory is handled here; all other errors pass through unchanged.
        if not isinstance(failure, Exception) or classify(failure) is not Failure.RETRYABLE:
            raise failure
        release(failure, device)
        raise OptimizerStepError(f"{half_applied} It said: {text_of(failure)}") from failure
    finally:
        del failure  # break the reference cycle with the traceback


class GradientScaler:
    """A `torch.amp.GradScaler` whose step reports whether the optimizer stepped.

    Example:
        >>> from automicro.trainer.optimizer import step_optimizer
        >>> device = torch.device("cpu")
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradientScaler(device)
        >>> scaler.backward(weight.sum())
        >>> step_optimizer(optimizer, device, scaler=scaler)
        True
        >>> weight.tolist(), scaler.scale
        ([0.5, 0.5], 65536.0)

    Args:
        device: device of the loss.
        init_scale: the initial scale. It is halved after each step in which a gradient overflowed,
            and doubled after ``growth_interval`` consecutive steps without an overflow.
        growth_interval: number of steps.
        ranks: ranks that train together. All ranks that share a gradient know whether it
            overflowed. If gradients are sharded, a rank that fails here must notify the others.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        ranks: Ranks | None = None,
    ) -> None:
        self._device = device
        self._ranks = ranks or OneRank()
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=init_scale, growth_interval=growth_interval
        )
        # Created now, because the first use makes two tensors. Running out of memory between them,
        # inside an attempt, would leave a scaler that can never step.
        self._scaler.scale(torch.zeros((), device=device))
        self._unscaled: set[int] = set()
        self._overflowed: dict[int, bool] = {}

    @property
    def scale(self) -> float:
        """The current scale of the loss. Reading it waits for the device."""
        return self._scaler.get_scale()

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the scaled loss: the ``backward`` for a `Microbatcher`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, unless this is done already. Call it before clipping.

        Raises:
            OptimizerStepError: memory ran out and gradients might be half divided.
            ValueError: parameters are in half precision.
        """
        # torch's scaler refuses a second call, and a batch might have no gradients.
        if id(optimizer) in self._unscaled or not _has_gradient(optimizer):
            return
        # All ranks find out together whether shards overflowed, and the vote before it keeps them
        # from waiting for a rank that failed.
        if has_shards(p for group in optimizer.param_groups for p in group["params"]):
            self._ranks.ready("dividing the gradient by the loss scale")
        try:
            write_in_place(
                lambda: self._scaler.unscale_(optimizer),
                self._device,
                "dividing the gradient by the loss scale ran out of memory and may be half "
                "applied: some gradients may be divided and others not. Parameters and optimizer "
                "state are as before: clear the gradients and skip this batch, or resume from a "
                "checkpoint.",
            )
        except ValueError as error:
            raise ValueError(
                "precision='fp16' needs parameters in float32, but some gradients are in float16. "
                "Call model.float() before the optimizer is built: autocast computes in half "
                "precision itself"
            ) from error
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless a gradient overflowed, and return whether the optimizer stepped.

        Call it through `step_optimizer`, which handles running out of memory.
        """
        self.read(optimizer)
        if self._overflowed.get(id(optimizer)):
            return False
        optimizer.step()
        return True

    def read(self, optimizer: torch.optim.Optimizer, numbers: Sequence[Tensor] = ()) -> list[float]:
        """Return the values of 0-d tensors, and check for overflows with the same read.

        Each read waits for the device. `step` needs none after this one.
        """
        self.unscale(optimizer)
        overflow: list[Tensor] = []
        if id(optimizer) in self._unscaled and id(optimizer) not in self._overflowed:
            overflow = overflows(self._scaler, optimizer)
        # A single wait for the device, instead of one for each value.
        values = read_scalars([*numbers, *overflow])
        if overflow:
            self._overflowed[id(optimizer)] = any(values[len(numbers) :])
        return values[: len(numbers)]

    def update(self) -> None:
        """Update the scale after a step: halve it after an overflow, double it after a long time.

        Raises:
            OptimizerStepError: memory ran out, and the scale might have changed.
        """
        if not self._unscaled:
            return
        write_in_place(
            self._scaler.update,
            self._device,
            "updating the loss scale ran out of memory and may be half applied: the optimizer has "
            "finished this batch, but the loss scale may be unchanged. Resume from a checkpoint.",
        )
        self._clear()

    def forget(self) -> None:
        """Drop a batch whose gradients were unscaled but not used for a step; the scale stays.

        It has no effect if no gradients were unscaled.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight])
            >>> scaler = GradientScaler(torch.device("cpu"))
            >>> scaler.backward(weight.sum() * float("inf"))
            >>> scaler.unscale(optimizer)
            >>> optimizer.zero_grad()
            >>> scaler.forget()
            >>> scaler.scale
            65536.0
        """
        if self._unscaled:
            # A plain update would check for overflows, and lower the scale for a batch that is left
            # out.
            one = torch.ones((), device=self._device)
            self._scaler.update(self._scaler.scale(one))  # the current scale
            self._clear()

    def _clear(self) -> None:
        self._unscaled.clear()
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and counters as plain values. Call it between batches."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the scale of an earlier run.

        Raises:
            ValueError: not the state of a scaler.
        """
        missing = sorted(self._scaler.state_dict().keys() - state.keys())
        if missing:
            raise ValueError(
                f"the state of the gradient scaler lacks {missing}. Pass what "
                "GradientScaler.state_dict() returned"
            )
        self.forget()
        self._scaler.load_state_dict(dict(state))


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


_HALF_APPLIED = (
    "clipping the gradient ran out of memory and may be half applied: some gradients may be scaled "
    "and others not. Parameters and optimizer state are as before: clear the gradients and skip "
    "this batch, or resume from a checkpoint."
)


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
) -> Tensor:
    """Scale all gradients of an optimizer to at most a given norm, and return the norm before.

    The result is bit-identical to ``torch.nn.utils.clip_grad_norm_``. If gradients are sharded over
    ranks, the norm is that of the whole gradient. All ranks must call this, and a rank that fails
    must notify the others with ``ranks.fail``, because they wait for it before they communicate.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> clip_gradients(optimizer, 1.0, torch.device("cpu")).item()
        5.0

    Raises:
        OptimizerStepError: memory ran out and gradients might be half scaled. The optimizer has not
            stepped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if has_shards(parameters):
        return _clip_shards(parameters, max_norm, device, ranks or OneRank())
    return write_in_place(
        lambda: nn.utils.clip_grad_norm_(parameters, max_norm), device, _HALF_APPLIED
    )


def _clip_shards(
    parameters: list[nn.Parameter], max_norm: float, device: torch.device, ranks: Ranks
) -> Tensor:
    # Not with torch's clipping, which runs collectives without a preceding vote.
    def clip() -> Tensor:
        _add_up_gradients(parameters, ranks)
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Before the vote, because a rank that runs out of memory here can still notify the others.
        own = squares_by_layout(gradients)
        ranks.ready("clipping the gradient")
        with ranks.voted():
            norm = norm_of_all(own)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # same formula as in torch
        for gradient in gradients:
            part = local(gradient)
            part.mul_(factor.to(part.dtype))
        return norm

    return write_in_place(clip, device, _HALF_APPLIED)


def _add_up_gradients(parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Sum gradients whose sum over ranks is pending; the squares of their parts do not add up."""
    pending = [(p, p.grad) for p in parameters if p.grad is not None and is_pending(p.grad)]
    if pending:
        parts = [local(gradient).clone() for _, gradient in pending]
        ranks.ready("summing gradients")
        with ranks.voted():
            for (parameter, gradient), part in zip(pending, parts, strict=True):
                parameter.grad = added_up(gradient, part)


def step_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, *, scaler: GradientScaler | None = None
) -> bool:
    """Step once and return whether the optimizer stepped: a scaler skips overflowed gradients."""
    if scaler is not None:
        scaler.unscale(optimizer)
    has_stepped = write_in_place(
        functools.partial(_step, optimizer, scaler),
        device,
        f"{type(optimizer).__name__}.step() ran out of memory and may be half applied: some "
        "parameters or states may have changed. Resume from a checkpoint, with foreach=False or "
        "an optimizer with less state.",
    )
    if scaler is not None:
        scaler.update()
    return has_stepped


def _step(optimizer: torch.optim.Optimizer, scaler: GradientScaler | None) -> bool:
    if scaler is not None:
        return scaler.step(optimizer)
    optimizer.step()
    return True


def added_up(tensor: Any, part: Tensor) -> Tensor:
    """Return a pending tensor with its value, summed in ``part``. All ranks must call this."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = tensor.device_mesh, list(tensor.placements)
    for dim, each in enumerate(placements):
        if each.is_partial():
            op = getattr(dist.ReduceOp, each.reduce_op.upper())
            dist.all_reduce(part, op=op, group=mesh.get_group(dim))
            placements[dim] = Replicate()
    form = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, mesh, placements, run_check=False, **form)


def squares_by_layout(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Any]]]:
    """Return sums of squares of this rank's parts, each with the groups that hold the rest.

    >>> squares_by_layout([torch.tensor([3.0, 4.0])])
    [(tensor(25., dtype=torch.float64), [])]
    """
    found: dict[Any, tuple[list[Tensor], list[Any]]] = {}
    for tensor in tensors:
        key, groups = None, []
        if is_sharded(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            key = (mesh, placements)
            # Replicas hold the same numbers, which must count once.
            dims = [dim for dim, each in enumerate(placements) if not each.is_replicate()]
            groups = [mesh.get_group(dim) for dim in dims]
        norms = found.setdefault(key, ([], groups))[0]
        # The square of a norm above 1.8e19 overflows float32.
        norms.append(torch.linalg.vector_norm(local(tensor)).to(torch.float64))
    return [(torch.stack(norms).square().sum(), groups) for norms, groups in found.values()]


def norm_of_all(squares: Sequence[tuple[Tensor, list[Any]]]) -> Tensor:
    """Return the norm over all ranks. All ranks must call this.

    >>> norm_of_all(squares_by_layout([torch.tensor([3.0, 4.0])])).item()
    5.0
    """
    # In the order of the tensors, which is the same on all ranks; otherwise they would deadlock.
    for square, groups in squares:
        for group in groups:
            dist.all_reduce(square, group=group)
    return torch.stack([square for square, _ in squares]).sum().sqrt()
