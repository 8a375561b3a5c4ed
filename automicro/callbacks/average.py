"""An exponential moving average of the weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.memory.budget import active_budget
from automicro.sharding import is_sharded, local
from automicro.torch_private import is_uninitialized
from automicro.units import Duration, Unit, read_duration

_DECAY = 0.999


class ExponentialMovingAverage(Callback):
    """Keeps an average of the model's weights in which older ones count less and less.

    At each update ``average = decay · average + (1 - decay) · weights``, of all parameters and of
    the buffers that hold floating point numbers (BatchNorm's statistics); other buffers are the
    model's own. The average begins as the weights at the start of the first `fit`, or at the first
    batch's end where the model is lazy.

    Evaluations see the average, and training goes on with the very weights that it had: both stay
    where they are, and parameters point to one or the other, so nothing is copied and no bit
    changes. After an evaluation that ends with an error, the training weights are back at the next
    event, or with `restore`. `Trainer.predict` uses the model's own weights; load
    `average_state_dict` into the model to predict with the average.

    Memory: as much as parameters and floating point buffers once more, on the device, from the
    start to the end. Weights of half precision have their average in float32, twice as much,
    because small updates would be rounded away; in an evaluation there is one copy of the average
    in half precision as well. An update allocates nothing else. Shards of FSDP2 are copied for an
    evaluation, which takes as much memory as a rank's shards once more.

    Args:
        decay: how much of the average stays at each update; 0.999 unless there is a half-life.
        half_life: after how much training weights count half; in place of a decay. In epochs only
            where the interval is, too.
        update_interval: how often to update.
        evaluate: whether evaluations see the average.

    Raises:
        TypeError, ValueError: arguments that make no sense.

    Example:
        >>> average = ExponentialMovingAverage(half_life="100ba", update_interval="10ba")
        >>> round(average.decay_after(10), 4)
        0.933
        >>> average.average_state_dict()
        Traceback (most recent call last):
        ...
        RuntimeError: there is no average yet; it begins with fit()
    """

    def __init__(
        self,
        *,
        decay: float | None = None,
        half_life: str | Duration | None = None,
        update_interval: str | Duration = "1ba",
        evaluate: bool = True,
    ) -> None:
        if decay is not None and half_life is not None:
            raise ValueError(
                f"decay={decay} and half_life={str(half_life)!r} say the same thing; pass one"
            )
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(
                f"decay={decay} must be at least 0 and below 1; pass a number such as {_DECAY}"
            )
        self._interval = read_duration("update_interval", update_interval)
        self._half_life = None if half_life is None else read_duration("half_life", half_life)
        # Within an epoch the count of epochs stands still, so the average would not age.
        if self._half_life is not None and Unit.EPOCHS is self._half_life.unit is not (
            self._interval.unit
        ):
            raise ValueError(
                f"half_life='{self._half_life}' counts whole epochs, so updates every "
                f"'{self._interval}' inside of one would change nothing; say the half-life in "
                "batches, or update_interval in epochs"
            )
        self._decay = _DECAY if decay is None else float(decay)
        self._evaluate = evaluate
        self._model: nn.Module | None = None
        self._average: dict[str, Tensor] | None = None
        self._is_placed = True  # False for one that was loaded and not yet used
        self._updated_at = 0  # in the interval's unit
        self._aged_at = 0  # in the half-life's unit
        self._set_aside: list[tuple[Tensor, Tensor]] = []  # what evaluates, its training weights

    def decay_after(self, amount: int) -> float:
        """The share of the average that an update keeps.

        Args:
            amount: of training since the last update, in the unit of the half-life.
        """
        if self._half_life is None:
            return self._decay
        decay: float = 0.5 ** (amount / self._half_life.value)
        return decay

    def average_state_dict(self) -> dict[str, Any]:
        """A state dict of the model with the average in place of its weights, to save or load.

        Its tensors are the average's own, which go on changing with training.

        Raises:
            RuntimeError: there is no average yet.
        """
        if self._average is None or self._model is None:
            raise RuntimeError("there is no average yet; it begins with fit()")
        # With the parameters themselves, as averages are found by identity: names in a state dict
        # may differ from those of parameters, under hooks.
        state: dict[str, Any] = self._model.state_dict(keep_vars=True)
        average = self._average
        by_id = {id(each): average[name] for name, each in _averaged(self._model).items()}
        for name, value in state.items():
            if isinstance(value, Tensor):
                mean = by_id.get(id(value))
                state[name] = value.detach() if mean is None else mean.to(value.dtype)
        return state

    def restore(self) -> None:
        """Put the training weights back, where an evaluation did not end."""
        for tensor, data in self._set_aside:
            if is_sharded(tensor):
                _write_shard(tensor, data)
            else:
                tensor.data = data
        self._set_aside = []

    def fit_start(self, run: Run) -> None:
        """Begin, or go on."""
        self.restore()
        self._adopt(run)
        budget = active_budget()
        if self._average is not None and budget is not None and run.device.type == "cpu":
            # The simulated device of this fit is another one, and its memory holds the average as
            # well.
            budget.track(self._average)  # of an earlier fit
        if self._average is None and not any(map(is_uninitialized, _tensors(run.model))):
            self._begin(run)

    def _restore_at(self, *_: Any, **__: Any) -> None:
        """Make sure of the training weights."""
        self.restore()

    epoch_start = batch_start = checkpoint_start = eval_end = fit_end = _restore_at

    def eval_start(self, run: Run) -> None:
        """Let the evaluation see the average."""
        self.restore()
        self._adopt(run)
        if not self._evaluate or self._average is None:
            return
        for name, tensor in _averaged(run.model).items():
            # Of one precision it is the average itself: nothing is copied.
            average = self._average[name].to(tensor.dtype)
            if is_sharded(tensor):
                # FSDP keeps the very memory of a shard, so it is written to instead.
                self._set_aside.append((tensor, tensor.detach().clone()))
                _write_shard(tensor, average)
                continue
            self._set_aside.append((tensor, tensor.data))
            tensor.data = average

    def state_dict(self) -> dict[str, Any]:
        """The average by name, and when it was updated."""
        return {
            "average": None if self._average is None else dict(self._average),
            "updated_at": self._updated_at,
            "aged_at": self._aged_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with an average; it is copied to where the model is."""
        self._average = None if state["average"] is None else dict(state["average"])
        self._is_placed = False
        self._updated_at = state["updated_at"]
        self._aged_at = state["aged_at"]

    def _adopt(self, run: Run) -> None:
        """Take the run's model for that of the average, and copy a loaded one to where it is."""
        if self._model is not None and self._model is not run.model:
            raise ValueError(
                "this ExponentialMovingAverage averages the weights of another model; make a new "
                "one for each model"
            )
        self._model = run.model
        if self._average is None or self._is_placed:
            return
        tensors = _averaged(run.model)
        _require_same_names(self._average, tensors)
        self._average = {
            # A copy in any case: what was loaded may belong to a checkpoint that others read.
            name: self._average[name].to(tensor.device, _dtype_for(tensor), copy=True)
            for name, tensor in tensors.items()
        }
        self._is_placed = True

    @torch.no_grad()
    def _begin(self, run: Run) -> None:
        self._average = {
            name: tensor.detach().to(dtype=_dtype_for(tensor), copy=True)
            for name, tensor in _averaged(run.model).items()
        }
        self._note_progress(run)

    def _update_if_due(self, run: Run, *_: Any, **__: Any) -> None:
        """Update the average if that is due."""
        if self._average is None:
            self._begin(run)
        elif self._passed(run) > self._updated_at // self._interval.value:
            unit = None if self._half_life is None else self._half_life.unit
            amount = 1 if unit is None else run.state.done(unit) - self._aged_at
            self._update(self._average, run.model, self.decay_after(amount))
            self._note_progress(run)

    batch_end = epoch_end = _update_if_due

    def _passed(self, run: Run) -> int:
        return run.state.done(self._interval.unit) // self._interval.value

    def _note_progress(self, run: Run) -> None:
        self._updated_at = run.state.done(self._interval.unit)
        if self._half_life is not None:
            self._aged_at = run.state.done(self._half_life.unit)

    @torch.no_grad()
    def _update(self, averages: dict[str, Tensor], model: nn.Module, decay: float) -> None:
        tensors = _averaged(model)
        _require_same_names(averages, tensors)
        by_type: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, tensor in tensors.items():
            # All of one type and device in one call: a kernel for each parameter would cost more
            # than the update itself.
            if averages[name].dtype == tensor.dtype:
                by_type.setdefault((tensor.dtype, tensor.device), []).append(name)
            else:
                averages[name].lerp_(tensor.to(averages[name].dtype), 1 - decay)
        # Of torch, so that it is fused where torch can do that.
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        for names in by_type.values():
            update([averages[name] for name in names], [tensors[name] for name in names], 0)


@torch.no_grad()
def _write_shard(parameter: Tensor, value: Tensor) -> None:
    local(parameter).copy_(local(value))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    # By name and not by identity: the average must fit a model that a checkpoint is loaded into.
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: tensor
        for name, tensor in named.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _dtype_for(tensor: Tensor) -> torch.dtype:
    # In half precision, 0.999 · average + 0.001 · weights rounds to the average, which never moves.
    return torch.promote_types(tensor.dtype, torch.float32)


def _require_same_names(averages: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    here = {name: each.shape for name, each in tensors.items()}
    there = {name: each.shape for name, each in averages.items()}
    differing = sorted(name for name in here | there if here.get(name) != there.get(name))
    if differing:
        raise ValueError(
            "the average is of a model with other weights: they differ in "
            f"{', '.join(differing[:5])}{' …' if len(differing) > 5 else ''}; continue with the "
            "model of the checkpoint, or with a new ExponentialMovingAverage"
        )
