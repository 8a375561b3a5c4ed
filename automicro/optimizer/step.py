"""One step of an optimizer: the loss scaled for it, gradients clipped, parameters updated.

The scale belongs to no attempt: it is made before the first, read by each backward, and changes
only after a step, so an attempt that is undone leaves it as it was. Dividing the gradients by it
writes in place, which is done once or reported as half done (`write_in_place`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from automicro.errors import OptimizerStepError, text_of
from automicro.memory.oom import Failure, caught, classify, release
from automicro.ranks.interface import OneRank, Ranks
from automicro.sharding import has_shards, local, norm_of_all, squares_by_layout
from automicro.torch_private import overflows
from automicro.values import read_scalars

T = TypeVar("T")


def write_in_place(action: Callable[[], T], device: torch.device, half_applied: str) -> T:
    """Run something that writes in place, once.

    Raises:
        OptimizerStepError: memory ran out. Other exceptions pass through.

    >>> write_in_place(lambda: 3, torch.device("cpu"), "may be half applied")
    3
    """
    found, failure = caught(action)
    if failure is None:
        return cast(T, found)
    try:
        # Only memory is in question: any other error is the caller's, as it is.
        if not isinstance(failure, Exception) or classify(failure) is not Failure.RETRYABLE:
            raise failure
        release(failure, device)
        raise OptimizerStepError(f"{half_applied} It said: {text_of(failure)}") from failure
    finally:
        del failure  # it holds this frame: a cycle


class GradientScaler:
    """A `torch.amp.GradScaler` whose step tells whether the optimizer stepped.

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
        device: where the loss lies.
        init_scale: the first scale; it is halved after each step in which a gradient overflowed,
            and doubled after ``growth_interval`` steps in a row without.
        growth_interval: steps.
        ranks: that train together. Whether a gradient overflowed is known to all that share it;
            where gradients are sharded, one that fails here has to tell the others.
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
        # Now, because the first use makes two tensors: out of memory between them, inside an
        # attempt, would leave a scaler that can never step.
        self._scaler.scale(torch.zeros((), device=device))
        self._unscaled: set[int] = set()
        self._overflowed: dict[int, bool] = {}

    @property
    def scale(self) -> float:
        """The present scale of the loss. Reading it waits for the device."""
        return self._scaler.get_scale()

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss times the scale: for the ``backward`` of a `Microbatcher`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, if that is not done yet. Call it before clipping.

        Raises:
            OptimizerStepError: memory ran out and gradients may be half divided.
            ValueError: parameters in half precision.
        """
        # torch's scaler refuses a second time, and a batch may be without any gradient.
        if id(optimizer) in self._unscaled or not _has_gradient(optimizer):
            return
        # All ranks find out together whether shards overflowed: none waits for one that failed.
        if has_shards(p for group in optimizer.param_groups for p in group["params"]):
            self._ranks.ready("dividing the gradient by the loss scale")
        try:
            write_in_place(
                lambda: self._scaler.unscale_(optimizer),
                self._device,
                "dividing the gradient by the loss scale ran out of memory and may be half "
                "applied: some gradients may be divided and others not. Parameters and optimizer "
                "state are as before: clear the gradients and leave this batch out, or continue "
                "from a checkpoint.",
            )
        except ValueError as error:
            raise ValueError(
                "precision='fp16' needs parameters in float32, and some gradients are in float16: "
                "call model.float() before the optimizer is built; autocast computes in half "
                "precision by itself"
            ) from error
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, unless a gradient overflowed, and return whether the optimizer stepped.

        Call it through `step_optimizer`, which knows what to do where memory runs out.
        """
        self.read(optimizer)
        if self._overflowed.get(id(optimizer)):
            return False
        optimizer.step()
        return True

    def read(self, optimizer: torch.optim.Optimizer, numbers: Sequence[Tensor] = ()) -> list[float]:
        """The values of 0-d tensors; in the same read, whether a gradient overflowed.

        Each reading waits for the device. `step` needs none after this one.
        """
        self.unscale(optimizer)
        overflow: list[Tensor] = []
        if id(optimizer) in self._unscaled and id(optimizer) not in self._overflowed:
            overflow = overflows(self._scaler, optimizer)
        # One wait for the device, in place of one for each.
        values = read_scalars([*numbers, *overflow])
        if overflow:
            self._overflowed[id(optimizer)] = any(values[len(numbers) :])
        return values[: len(numbers)]

    def update(self) -> None:
        """After the step: halve the scale if a gradient overflowed, double it if long none did.

        Raises:
            OptimizerStepError: memory ran out, and the scale may have changed.
        """
        if not self._unscaled:
            return
        write_in_place(
            self._scaler.update,
            self._device,
            "updating the loss scale ran out of memory and may be half applied: the optimizer is "
            "done with this batch, but the scale may be the one before it. Continue from a "
            "checkpoint.",
        )
        self._clear()

    def forget(self) -> None:
        """Take note that a batch is left out: its gradients are dropped, the scale stays.

        Needed where a batch was unscaled and no step follows; does nothing otherwise.

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
            # Its own update would ask for overflows, and lower the scale for a batch that is left
            # out.
            one = torch.ones((), device=self._device)
            self._scaler.update(self._scaler.scale(one))  # the scale it has
            self._clear()

    def _clear(self) -> None:
        self._unscaled.clear()
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters, as plain values. Call it between batches."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale of an earlier run.

        Raises:
            ValueError: not the state of a scaler.
        """
        missing = sorted(self._scaler.state_dict().keys() - state.keys())
        if missing:
            raise ValueError(
                f"the state of the gradient scaler lacks {missing}; pass what "
                "GradientScaler.state_dict() returned"
            )
        self.forget()
        self._scaler.load_state_dict(dict(state))


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


_HALF_APPLIED = (
    "clipping the gradient ran out of memory and may be half applied: some gradients may be scaled "
    "and others not. Parameters and optimizer state are as before: clear the gradients and leave "
    "this batch out, or continue from a checkpoint."
)


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
) -> Tensor:
    """Scale all gradients of an optimizer to a norm of at most this; return the norm before.

    Bit-identical to ``torch.nn.utils.clip_grad_norm_``. Of gradients that are sharded over ranks
    the norm is that of the whole: all ranks call it, and one that fails has to tell the others
    with ``ranks.fail``, who wait for it before they communicate.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> clip_gradients(optimizer, 1.0, torch.device("cpu")).item()
        5.0

    Raises:
        OptimizerStepError: memory ran out and gradients may be half scaled. The optimizer has not
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
    # By hand: torch's own clipping runs collectives that no vote comes before.
    gradients = [p.grad for p in parameters if p.grad is not None]

    def clip() -> Tensor:
        # Before the vote: a rank that runs out of memory here can still tell the others.
        own = squares_by_layout(gradients)
        ranks.ready("clipping the gradient")
        with ranks.voted():
            norm = norm_of_all(own)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch has it
        for gradient in gradients:
            part = local(gradient)
            part.mul_(factor.to(part.dtype))
        return norm

    return write_in_place(clip, device, _HALF_APPLIED)


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    scaler: GradientScaler | None = None,
) -> bool:
    """Step once; with a scaler also unscale, if that is still to be done, and update the scale.

    Returns whether the optimizer stepped: a scaler leaves out gradients that overflowed.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> step_optimizer(torch.optim.SGD([weight], lr=0.5), torch.device("cpu"))
        True
        >>> weight.tolist()
        [0.5, 0.5]

    Raises:
        OptimizerStepError: memory ran out and the step may be half applied.
    """
    if scaler is not None:
        scaler.unscale(optimizer)
    has_stepped = write_in_place(
        functools.partial(_step, optimizer, scaler),
        device,
        f"{type(optimizer).__name__}.step() ran out of memory and may be half applied: some "
        "parameters or states may have changed. Continue from a checkpoint, with foreach=False or "
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
