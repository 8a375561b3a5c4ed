"""The context of a run, one object for each concern; and the numbers that it logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from automicro.events.callback import Callbacks
from automicro.events.run import LoopState, PhaseState, Run
from automicro.loggers import LoggerGroup
from automicro.memory.device import peak_bytes
from automicro.policy.policy import Exploration
from automicro.ranks.interface import Ranks
from automicro.step.results import EvalResult, StepResult
from automicro.trainer.failed_batch import Failures
from automicro.trainer.optimizer import OptimizerMode
from automicro.trainer.progress import Progress, Speed


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """The outcome of one optimization batch.

    Attributes:
        result: of its forward and backward.
        losses: the parts of its loss by name, read.
        grad_norm: of its gradient before clipping; None where it is not clipped.
        learning_rates: that its step took, for each group of parameters.
    """

    result: StepResult
    losses: Mapping[str, float]
    grad_norm: float | None
    learning_rates: tuple[float, ...]


class Recorder:
    """Hands numbers to the loggers, and to callbacks as ``run.values``.

    Args:
        loggers: take them down.
        run: what callbacks log goes through it, and what they read.
        callbacks: they may read; where there are neither these nor loggers, nothing is gathered.
    """

    def __init__(self, loggers: LoggerGroup, run: Run, callbacks: Callbacks) -> None:
        self._loggers = loggers
        self._run = run
        self._is_read = len(loggers) > 0 or len(callbacks) > 0

    def start(self, settings: Mapping[str, Any], *, resume_step: int | None) -> None:
        """Begin to log. What was said before, outside of training, is of no step of it."""
        self.forget()
        self._loggers.start(settings, resume_step=resume_step)

    def close(self) -> None:
        """Log what callbacks said last, and end."""
        self.flush()
        self._loggers.close()

    def batch(
        self,
        trained: TrainedBatch,
        *,
        speed: Speed,
    ) -> None:
        """The numbers of one optimization batch."""
        if not self._is_read:
            return
        state, result = self._run.state, trained.result
        values: dict[str, Any] = {
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
            "train/peak_memory_bytes": peak_bytes(self._run.device),
            **_explored(result.exploration),
        }
        self._take(values)

    def epoch(self, metrics: Mapping[str, float]) -> None:
        """The metrics of training over an epoch."""
        self._take({f"train/{name}": value for name, value in metrics.items()})

    def evaluation(
        self, name: str, values: Mapping[str, float], last: EvalResult, phase: PhaseState
    ) -> dict[str, float]:
        """The loss and the metrics of an evaluation, as they are logged."""
        prefix = f"eval/{name}/" if name else "eval/"
        named = {f"{prefix}{key}": value for key, value in values.items()}
        sizes = {
            f"{prefix}microbatch_size": last.microbatch_size,
            "eval/ooms": phase.ooms,
        }
        self._take(named | sizes)
        return named

    def flush(self) -> None:
        """Hand on what callbacks have logged since."""
        if values := self._run.requests.take("unlogged"):
            self._loggers.log(values, step=self._run.state.batch)
        for name, picture in self._run.requests.take("unshown").items():
            self._loggers.show(name, picture, step=self._run.state.batch)

    def forget(self) -> None:
        """Leave out what callbacks have logged since."""
        self._run.requests.take("unlogged")
        self._run.requests.take("unshown")

    def _take(self, values: Mapping[str, Any]) -> None:
        if self._is_read:
            known = {name: value for name, value in values.items() if value is not None}
            self._run.log({name: float(value) for name, value in known.items()})


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
    """A run, its listeners, and its ranks.

    Attributes:
        run: as callbacks see it: read-only, with their requests.
        state: where training stands; its parts write it.
        callbacks: told of every event.
        recorder: logs the numbers.
        ranks: all that train the model.
        failures: keep a batch that does not fit.
        mode: which weights of its optimizer the model has, where there are two.
        progress: where to say how it goes, while something runs.
    """

    run: Run
    state: LoopState
    callbacks: Callbacks
    recorder: Recorder
    ranks: Ranks
    failures: Failures
    mode: OptimizerMode
    progress: Progress = field(default_factory=Progress)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.run.device

    @property
    def has_peers(self) -> bool:
        """Whether other ranks train the same model."""
        return self.ranks.world_size > 1

    def tell(self, event: str, *subject: Any) -> None:
        """Tell callbacks of an event."""
        self.callbacks.fire(event, self.run, *subject)
