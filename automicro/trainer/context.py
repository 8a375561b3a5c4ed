"""The context of a run, with one object for each concern, and the values that it logs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from automicro.events.callback import Callbacks
from automicro.events.run import LoopState, Run
from automicro.loggers import LoggerGroup
from automicro.memory.device import peak_bytes
from automicro.ranks.interface import Ranks
from automicro.step.results import StepResult
from automicro.trainer.failed_batch import Failures
from automicro.trainer.optimizer import OptimizerMode
from automicro.trainer.progress import Progress, describe_number
from automicro.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """The outcome of one optimization batch."""

    result: StepResult
    losses: Mapping[str, float]
    grad_norm: float | None  # before clipping; None without clipping
    learning_rates: tuple[float, ...]


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
        """Send the values logged since the last flush to the loggers."""
        if values := self.run.requests.take("unlogged"):
            self.loggers.log(values, step=self.state.batch)

    def forget(self) -> None:
        """Discard the values logged since the last flush."""
        self.run.requests.take("unlogged")


Told: TypeAlias = tuple[str, Any, str | None]
"""The name and the value for loggers, and the text for the progress; None without either."""


def told_of_batch(
    trained: TrainedBatch, context: RunContext, speed: tuple[float, float | None]
) -> list[Told]:
    """List all values of one optimization batch; the most important texts come first."""
    run, state, result, rates = context.run, context.state, trained.result, trained.learning_rates
    peak, news = peak_bytes(run.device), result.exploration
    samples, tokens = speed
    words = [f"{samples:,.0f} samples/s", *([] if tokens is None else [f"{tokens:,.0f} tokens/s"])]
    unit = "" if result.microbatch_unit == "rows" else f" {result.microbatch_unit}"
    cut = f"{result.num_microbatches} × {result.microbatch_size}{unit}"
    told: list[Told] = [
        ("train/loss", state.loss, f"loss {describe_number(state.loss or 0.0)}"),
        (
            "train/num_microbatches",
            result.num_microbatches,
            f"microbatches {cut}{' (measuring)' * result.is_measuring}",
        ),
        ("train/microbatch_size", result.microbatch_size, None),
        ("train/samples_per_second", samples, " · ".join(words)),
        ("train/tokens_per_second", tokens, None),
        ("train/peak_memory_bytes", peak, f"peak memory {format_bytes(peak)}" if peak else None),
    ]
    if len(set(rates)) == 1:
        told.append(("train/lr", rates[0], f"lr {rates[0]:.3g}"))
    else:
        told += [(f"train/lr/{index}", rate, None) for index, rate in enumerate(rates)]
    told += [
        ("train/global_batch", result.num_global_samples, f"global batch {state.most_rows:,}"),
        ("train/grad_norm", trained.grad_norm, None),
        ("train/is_measuring", result.is_measuring, None),
        ("train/attempts", result.attempts, None),
        ("train/ooms", state.train.ooms, None),
        ("train/nested_ooms", state.train.nested_ooms if result.nested_sizes else None, None),
    ]
    told += [(f"train/loss/{name}", part, None) for name, part in trained.losses.items()]
    if news is not None and news.is_news:
        for name in ("microbatch_size", "speedup", "confidence"):
            told.append((f"train/explore/{name}", getattr(news, name), None))
    return told
