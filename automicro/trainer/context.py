"""The context of a run, with one object for each concern, and the values that it logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from automicro.events.callback import Callbacks
from automicro.events.run import LoopState, Run
from automicro.loggers import LoggerGroup
from automicro.memory.device import peak_bytes
from automicro.policy.policy import Exploration
from automicro.ranks.interface import Ranks
from automicro.step.results import StepResult
from automicro.trainer.failed_batch import Failures
from automicro.trainer.optimizer import OptimizerMode
from automicro.trainer.progress import Progress, Speed


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """The outcome of one optimization batch."""

    result: StepResult
    losses: Mapping[str, float]
    grad_norm: float | None  # before clipping; None without clipping
    learning_rates: tuple[float, ...]


def values_of_batch(trained: TrainedBatch, run: Run, speed: Speed) -> dict[str, Any]:
    """Collect the values to log for one optimization batch; None for values that it lacks."""
    state, result = run.state, trained.result
    return {
        "train/loss": state.loss,
        **{f"train/loss/{name}": part for name, part in trained.losses.items()},
        **_named_rates(trained.learning_rates),
        "train/grad_norm": trained.grad_norm,
        "train/samples_per_second": speed.samples,
        "train/tokens_per_second": speed.tokens,
        "train/microbatch_size": result.microbatch_size,
        "train/num_microbatches": result.num_microbatches,
        "train/is_measuring": result.is_measuring,
        "train/attempts": result.attempts,
        "train/ooms": state.train.ooms,
        "train/nested_ooms": state.train.nested_ooms if result.nested_sizes else None,
        "train/global_batch": result.num_global_samples,
        "train/peak_memory_bytes": peak_bytes(run.device),
        **_explored(result.exploration),
    }


def _explored(exploration: Exploration | None) -> dict[str, float]:
    if exploration is None or not exploration.is_news:
        return {}
    return {
        "train/explore/microbatch_size": exploration.microbatch_size,
        "train/explore/speedup": exploration.speedup,
        "train/explore/confidence": exploration.confidence,
    }


def _named_rates(rates: Sequence[float]) -> dict[str, float]:
    if len(set(rates)) == 1:
        return {"train/lr": rates[0]}
    return {f"train/lr/{index}": rate for index, rate in enumerate(rates)}


@dataclass(kw_only=True)
class RunContext:
    """A run, its listeners, and its ranks."""

    run: Run
    state: LoopState
    callbacks: Callbacks
    loggers: LoggerGroup
    ranks: Ranks
    failures: Failures
    mode: OptimizerMode  # which weights the model has, for an optimizer that keeps two sets
    progress: Progress = field(default_factory=Progress)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.run.device

    @property
    def has_peers(self) -> bool:
        """Whether other ranks train the same model."""
        return self.ranks.world_size > 1

    def tell(self, event: str, *subject: Any) -> None:
        """Send an event to the callbacks."""
        self.callbacks.fire(event, self.run, *subject)

    @property
    def is_read(self) -> bool:
        """Whether any logger or callback reads values; if not, they need not be computed."""
        return len(self.loggers) > 0 or len(self.callbacks) > 0

    def log(self, values: Mapping[str, Any]) -> None:
        """Pass values to the loggers, and to callbacks as ``run.values``."""
        if self.is_read:
            known = {name: value for name, value in values.items() if value is not None}
            self.run.log({name: float(value) for name, value in known.items()})

    def flush(self) -> None:
        """Send the values and pictures logged since the last flush to the loggers."""
        if values := self.run.requests.take("unlogged"):
            self.loggers.log(values, step=self.state.batch)
        for name, picture in self.run.requests.take("unshown").items():
            self.loggers.show(name, picture, step=self.state.batch)

    def forget(self) -> None:
        """Discard the values and pictures logged since the last flush."""
        self.run.requests.take("unlogged")
        self.run.requests.take("unshown")
