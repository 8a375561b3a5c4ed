"""An exponential moving average of the weights."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from automicro.durations import Duration, read_duration
from automicro.errors import removed
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.memory.device import active_budget
from automicro.sharding import is_sharded, local
from automicro.showing import short


@removed(half_life="Pass decay=0.5 ** (1 / n), for a half-life of n updates")
class ExponentialMovingAverage(Callback):
    """Keeps an exponential moving average (EMA) of the model's weights.

    Each update computes ``average = decay · average + (1 - decay) · weights``, for all parameters
    and for floating point buffers (BatchNorm's statistics); other buffers are not averaged. The
    average starts from the weights at the start of the first `fit`.

    Evaluations use the average. Parameters are pointed to it and back, so training continues with
    the same weights, bit for bit, and nothing is copied. If an evaluation ends with an error, the
    training weights are restored at the next event, or by `restore`. `Trainer.predict` uses the
    training weights; to predict with the average, load `average_state_dict` into the model.

    Memory: the size of parameters and floating point buffers once more, on the device, during the
    whole run. Weights in half precision are averaged in float32, because small updates would be
    rounded away. This takes twice their size, and an evaluation adds a copy of the average in half
    precision. Updates allocate nothing else. With FSDP2, an evaluation copies the shards of a rank,
    so it takes their size once more.

    Args:
        decay: share of the average that each update keeps. For weights that count half after
            ``n`` updates, ``0.5 ** (1 / n)``.
        update_interval: how often to update the average.
        evaluate: whether evaluations use the average.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> average = ExponentialMovingAverage(decay=0.99, update_interval="10ba")
        >>> average.average_state_dict()
        Traceback (most recent call last):
        ...
        RuntimeError: there is no average yet. It begins with fit()
    """

    def __init__(
        self,
        *,
        decay: float = 0.999,
        update_interval: str | Duration = "1ba",
        evaluate: bool = True,
    ) -> None:
        given: Any = decay
        if not isinstance(given, Real) or not 0 <= decay < 1:
            raise ValueError(
                f"decay={decay!r} is not a number of at least 0 and below 1. Pass one such as 0.999"
            )
        self._decay = float(decay)
        self._interval = read_duration("update_interval", update_interval)
        self._evaluate = evaluate
        self._model: nn.Module | None = None
        self._average: dict[str, Tensor] | None = None
        self._is_placed = False  # whether the average is a copy on the model's device
        self._updated_at = 0  # in the interval's unit
        self._set_aside: list[tuple[Tensor, Tensor]] = []  # tensors and their training weights

    def average_state_dict(self) -> dict[str, Any]:
        """Return a state dict of the model with averages instead of weights, to save or load.

        Its tensors are not copied, so they change as training continues.

        Raises:
            RuntimeError: there is no average yet.
        """
        if self._average is None or self._model is None:
            raise RuntimeError("there is no average yet. It begins with fit()")
        # keep_vars, because averages are looked up by the identity of parameters: hooks might
        # rename entries of a state dict.
        state: dict[str, Any] = self._model.state_dict(keep_vars=True)
        average = self._average
        by_id = {id(each): average[name] for name, each in _averaged(self._model).items()}
        for name, value in state.items():
            if isinstance(value, Tensor):
                mean = by_id.get(id(value))
                state[name] = value.detach() if mean is None else mean.to(value.dtype)
        return state

    def restore(self) -> None:
        """Restore the training weights after an evaluation that did not end."""
        for tensor, data in self._set_aside:
            if is_sharded(tensor):
                _write_shard(tensor, data)
            else:
                tensor.data = data
        self._set_aside = []

    def fit_start(self, run: Run) -> None:
        """Start or resume the average."""
        self.restore()
        self._adopt(run)
        budget = active_budget()
        if budget is not None and run.device.type == "cpu":
            # The simulated device of this fit is a new one, and an average from an earlier fit
            # takes memory on it as well.
            budget.track(self._average)

    def _restore_at(self, *_: Any, **__: Any) -> None:
        """Restore the training weights if necessary."""
        self.restore()

    epoch_start = batch_start = checkpoint_start = eval_end = fit_end = _restore_at

    def eval_start(self, run: Run) -> None:
        """Switch the model to the average."""
        self.restore()
        if not self._evaluate or self._average is None:
            return
        self._adopt(run)
        for name, tensor in _averaged(run.model).items():
            # With equal precision this is the average itself, without a copy.
            average = self._average[name].to(tensor.dtype)
            if is_sharded(tensor):
                # FSDP holds on to the memory of a shard, so the average is written into it.
                self._set_aside.append((tensor, tensor.detach().clone()))
                _write_shard(tensor, average)
                continue
            self._set_aside.append((tensor, tensor.data))
            tensor.data = average

    def state_dict(self) -> dict[str, Any]:
        """Return the average by name, and the progress at its last update."""
        return {
            "average": None if self._average is None else dict(self._average),
            "updated_at": self._updated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore an average; it is copied to the model's device on first use."""
        self._average = None if state["average"] is None else dict(state["average"])
        self._is_placed = False
        self._updated_at = state["updated_at"]

    @torch.no_grad()
    def _adopt(self, run: Run) -> None:
        """Bind the average to the run's model, and copy what it starts from to its device."""
        if self._model is not None and self._model is not run.model:
            raise ValueError(
                "this ExponentialMovingAverage averages the weights of another model. Make a new "
                "one for each model"
            )
        self._model = run.model
        if self._is_placed:
            return
        tensors = _averaged(run.model)
        if self._average is None:
            self._updated_at = run.state.done(self._interval.unit)
        start = tensors if self._average is None else self._average
        _require_same_names(start, tensors)
        self._average = {
            # Always a copy, because the loaded tensors might belong to a shared checkpoint.
            name: start[name].detach().to(tensor.device, _dtype_for(tensor), copy=True)
            for name, tensor in tensors.items()
        }
        self._is_placed = True

    @torch.no_grad()
    def _update_if_due(self, run: Run, *_: Any, **__: Any) -> None:
        """Update the average if an interval has passed."""
        done, every = run.state.done(self._interval.unit), self._interval.value
        if self._average is None or done // every <= self._updated_at // every:
            return
        self._updated_at = done
        tensors = _averaged(run.model)
        _require_same_names(self._average, tensors)
        alike = []
        for name, tensor in tensors.items():
            average = self._average[name]
            if average.dtype == tensor.dtype:
                alike.append((average, tensor))
            else:
                average.lerp_(tensor.to(average.dtype), 1 - self._decay)
        # One call, because a kernel for each parameter would cost more than the update itself.
        if alike:
            update = get_ema_multi_avg_fn(self._decay)  # type: ignore[no-untyped-call]
            update(*map(list, zip(*alike, strict=True)), 0)

    batch_end = epoch_end = _update_if_due


@torch.no_grad()
def _write_shard(parameter: Tensor, value: Tensor) -> None:
    local(parameter).copy_(local(value))


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    # By name and not by identity, because an average has to fit a model loaded from a checkpoint.
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: tensor
        for name, tensor in named.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _dtype_for(tensor: Tensor) -> torch.dtype:
    # In half precision, 0.999 · average + 0.001 · weights rounds to the average, which never
    # changes.
    return torch.promote_types(tensor.dtype, torch.float32)


def _require_same_names(averages: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    here = {name: each.shape for name, each in tensors.items()}
    there = {name: each.shape for name, each in averages.items()}
    if differing := sorted(name for name in here | there if here.get(name) != there.get(name)):
        raise ValueError(
            f"the average is of a model with other weights: they differ in {short(differing)}. "
            "Continue with the model of the checkpoint, or with a new ExponentialMovingAverage"
        )
