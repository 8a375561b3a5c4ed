"""Evaluating: when, one pass over the data, and outputs for all of it."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.events.run import ExpectedValues, LoopState, PhaseState, Sizes
from automicro.loss.weights import LossMean
from automicro.microbatcher import Microbatcher
from automicro.ranks.interface import Ranks
from automicro.step.results import EvalResult
from automicro.trainer.context import RunContext
from automicro.trainer.data.loading import check_loader, empty, fetch, num_batches, samplers_of
from automicro.trainer.data.sharing import shared_sampler
from automicro.trainer.evaluators import INHERITED, Evaluator, read_evaluators
from automicro.trainer.metrics import MetricSet
from automicro.trainer.progress import StatusLine, count_of, evaluation_line, position, size_lines
from automicro.trainer.same_on_all_ranks import (
    announcing_once,
    compare_orders,
    of_all_ranks,
    outline_evaluations,
    require_same,
)
from automicro.trainer.surroundings import noting
from automicro.units import Duration, Unit, read_duration


class Interval:
    """Says when something is due that happens every so many epochs, batches, samples or tokens.

    A batch is never cut to hit a number of samples: it is due after the batch that reaches it.

    >>> interval, state = Interval(Duration.parse("100sp")), LoopState()
    >>> due = []
    >>> for state.samples in (64, 128, 192, 256, 320):
    ...     due.append(interval.is_due(state))
    >>> due
    [False, True, False, True, True]
    """

    def __init__(self, every: Duration | None) -> None:
        self.every = every
        self._passed = 0

    @property
    def is_of_epochs(self) -> bool:
        """Whether it comes with the end of an epoch."""
        return self.every is not None and self.every.unit is Unit.EPOCHS

    def catch_up(self, state: LoopState, *, is_pending: bool = False) -> None:
        """Take all that is done for handled, as in a run that is taken up again."""
        self._passed = self._count(state) - is_pending

    def is_pending(self, state: LoopState) -> bool:
        """Whether a multiple was reached that is not handled yet."""
        return self.every is not None and self._count(state) > self._passed

    def is_due(self, state: LoopState) -> bool:
        """Whether a multiple was reached since this was last asked. Asked after every batch."""
        is_due = self.is_pending(state)
        self.catch_up(state)
        return is_due

    def _count(self, state: LoopState) -> int:
        """How many multiples were reached."""
        return 0 if self.every is None else state.done(self.every.unit) // self.every.value


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Evaluates whole batches, at a size of its own."""

    name: str
    dataloader: Iterable[Any]
    max_batches: int | None
    microbatcher: Microbatcher
    metrics: MetricSet
    interval: Interval
    loader_name: str

    @property
    def happens_at_end(self) -> bool:
        """Whether it is a part of training."""
        return self.interval.every is not None

    @property
    def _prefix(self) -> str:
        return f"{self.name}/" if self.name else ""

    def check_passes(self, max_duration: Duration) -> None:
        """Refuse an iterator where training may pass over it several times."""
        loader, every = self.dataloader, self.interval.every
        is_endless = self.max_batches is not None  # each pass takes the next ones
        if every is None or is_endless or not isinstance(loader, Iterator):
            return
        if every.unit is max_duration.unit and every.value >= max_duration.value:
            return
        raise ValueError(
            f"{self.loader_name} is an iterator ({type(loader).__name__}), which can be passed "
            f"over only once, and evaluating every '{every}' of max_duration='{max_duration}' may "
            "need more passes; pass something that starts again, such as a DataLoader or a list, "
            f"or evaluate once, with an interval of '{max_duration}'"
        )

    def gives(self, name: str) -> bool:
        """Whether a value that is logged under this name is one of its own."""
        return name.startswith(f"eval/{self._prefix}")

    def values_in(self, phase: PhaseState) -> dict[str, float]:
        """Its latest values, by the names under which they are logged."""
        return {
            f"eval/{name}": value
            for name, value in phase.metrics.items()
            if name.startswith(self._prefix)
        }

    def run(
        self,
        phase: PhaseState,
        context: RunContext,
        *,
        where: str = "",
        is_stopped: Callable[[Ranks], bool] | None = None,
        max_batches: int | None = None,
    ) -> dict[str, float] | None:
        """Pass over the data once; the values go into the phase, too.

        A pass that is broken off, by an error or by ``is_stopped``, leaves the phase as it was.
        Like after an error, callbacks are not told of an end then.
        """
        with context.mode.evaluating():
            start = time.perf_counter()
            here = PhaseState()
            try:
                context.tell("eval_start")
                with announcing_once(self.microbatcher.ranks), self.microbatcher.evaluating():
                    found = self._pass(here, context, is_stopped, max_batches)
            finally:
                self.metrics.reset()  # what was counted would take memory from training
            if found is None:
                context.forget()
                return None
            values, samples, size = found
            assert here.cut is not None
            phase.ooms += here.ooms
            phase.nested_ooms += here.nested_ooms
            if phase.cut is None or here.cut.num_rows >= phase.cut.num_rows:
                phase.cut = here.cut
            prefix, before = self._prefix, phase.metrics
            own = {f"{prefix}{name}": value for name, value in values.items()}
            others = {name: before[name] for name in before if not name.startswith(prefix)}
            phase.metrics = others | own
            phase.seconds += time.perf_counter() - start
            context.progress.line(
                evaluation_line(values, name=self.name, samples=samples, cut=here.cut, where=where)
            )
            named = {f"eval/{name}": value for name, value in own.items()}
            context.log({**named, f"eval/{prefix}microbatch_size": size, "eval/ooms": phase.ooms})
            context.tell("eval_end", named)
            return values

    def _pass(
        self,
        here: PhaseState,
        context: RunContext,
        is_stopped: Callable[[Ranks], bool] | None,
        max_batches: int | None,
    ) -> tuple[dict[str, float], int, int] | None:
        """Values, rows, the size for the last batch; None if it was broken off."""
        self.metrics.reset()
        losses, ranks = LossMean(), self.microbatcher.ranks
        samples = batches = 0
        result: EvalResult | None = None
        of = f" of {self.name!r}" if self.name else ""
        with noting(lambda: f"in evaluation{of}, batch {batches + 1} of the pass"):
            for batch in self._batches(max_batches, has_peers=ranks.world_size > 1):
                if is_stopped is not None and is_stopped(ranks):
                    return None
                if batch is not None:
                    context.tell("eval_batch_start", batch)
                where = f"in evaluation{of}, batch {batches + 1} of the pass"
                given = [] if batch is None else [batch]
                with context.failures.kept(given, phase="eval", where=where):
                    this = self.microbatcher.evaluate(batch, self.metrics.metrics)
                del given
                if batch is None and this.num_global_samples == 0:
                    break  # no rank has rows left
                result = this
                for line in size_lines("eval", result, here.cut):
                    context.progress.line(line)
                here.count(result)
                if result.loss is not None:
                    losses.add(result.loss, result.losses, result.denominators)
                samples += result.num_global_samples
                batches += 1
                if batch is not None:
                    context.tell("eval_batch_end", result)
                context.progress.status(partial(self._describe, batches, here.cut, max_batches))
            if result is None:  # on any rank
                raise empty(self.dataloader, self.loader_name)
            values = self._losses_of_all(ranks, losses) | self.metrics.compute()
        return values, samples, result.microbatch_size

    def _describe(self, batches: int, cut: Sizes | None, max_batches: int | None) -> StatusLine:
        """How far the pass is."""
        what = f"evaluating {self.name!r}" if self.name else "evaluating"
        known = num_batches(self.dataloader), self.max_batches, max_batches
        total = min((each for each in known if each is not None), default=None)
        share = None if not total else min(1.0, batches / total)
        text = f"{what}: {count_of(batches, 'batch')}{'' if total is None else f' of {total:,}'}"
        return StatusLine(where=text, words=[f"microbatches {cut}"], share=share)

    def _losses_of_all(self, ranks: Ranks, losses: LossMean) -> dict[str, float]:
        sampler = shared_sampler(self.dataloader)
        own = losses, None if sampler is None else sampler.checksum
        told = of_all_ranks(ranks, own, f"adding up the losses of {self.loader_name}")
        compare_orders([checksum for _, checksum in told], self.loader_name)
        total = LossMean()
        for each, _ in told:
            total.merge(each)
        return total.compute()

    def _batches(self, max_batches: int | None, *, has_peers: bool) -> Iterator[Any]:
        loader = self.dataloader
        batches = fetch(loader, self.loader_name, may_be_empty=has_peers)
        limits = [each for each in (max_batches, self.max_batches) if each is not None]
        own = itertools.islice(batches, min(limits, default=None))
        # A rank without rows takes part until all have none.
        return itertools.chain(own, itertools.repeat(None)) if has_peers else own


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationFactory:
    """Makes evaluations: each with metrics and, where it asks for them, a size of its own."""

    microbatcher: Microbatcher
    make_microbatcher: Callable[..., Microbatcher]
    metrics: Any
    microbatch_size: Any
    interval: Duration | None
    device: torch.device
    share: Callable[..., Any]

    def make_given(self, dataloader: Any) -> list[Evaluation]:
        """The evaluations that `Trainer.eval` was asked for. All ranks call it."""
        given = read_evaluators("dataloader", dataloader)
        self.microbatcher.ranks.ready("evaluating on a loader of its own")
        require_same(partial(outline_evaluations, "dataloader", dataloader))
        return self.make_all(given, loader_name="dataloader")

    def make_all(
        self, evaluators: Mapping[str, Evaluator], *, loader_name: str = "eval_dataloader"
    ) -> list[Evaluation]:
        """The evaluations of these evaluators."""
        return [
            self._make(name, evaluator, f"{loader_name}[{name!r}]" if name else loader_name)
            for name, evaluator in evaluators.items()
        ]

    def _make(self, name: str, evaluator: Evaluator, loader_name: str) -> Evaluation:
        microbatcher, has_own_size = self.microbatcher, not _is_inherited(evaluator.microbatch_size)
        if name or has_own_size:
            size = evaluator.microbatch_size if has_own_size else self.microbatch_size
            microbatcher = self.make_microbatcher(eval_microbatch_size=size)
        every = self.interval
        if not _is_inherited(evaluator.interval):
            given = evaluator.interval
            every = None if given is None else read_duration("interval", given)
        metrics = self.metrics if _is_inherited(evaluator.metrics) else evaluator.metrics
        return Evaluation(
            name=name,
            dataloader=self.share(evaluator.dataloader, loader_name, is_evaluated=True),
            max_batches=evaluator.max_batches,
            microbatcher=microbatcher,
            metrics=MetricSet(metrics, self.device),
            interval=Interval(every),
            loader_name=loader_name,
        )


def expected_values(
    training: MetricSet, evaluations: Sequence[Evaluation], *, loss_fn: object
) -> ExpectedValues:
    """Which values a run will log, as far as that is known."""
    return ExpectedValues(
        evaluations={each.name: each.metrics.names for each in evaluations if each.happens_at_end},
        training=training.names,
        has_one_loss=type(loss_fn).__module__ == nn.MSELoss.__module__,
    )


def _is_inherited(value: object) -> bool:
    return isinstance(value, str) and value == INHERITED


class EvaluationPlan:
    """Evaluates in the middle of training, which goes on as if nothing had been.

    An evaluation that is broken off, by a signal or an error, counts for nothing and stays due:
    it comes first when training goes on, in a run that is taken up again, too.
    """

    def __init__(self, evaluations: Sequence[Evaluation], context: RunContext) -> None:
        for evaluation in evaluations:
            evaluation.check_passes(context.run.max_duration)
        self._evaluations = evaluations
        self._at_end = [each for each in evaluations if each.happens_at_end]
        self._context = context
        self._state = context.state
        self._loaded: Sequence[str] = ()

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self._evaluations)

    @property
    def is_complete_at_end(self) -> bool:
        """Whether all that evaluate at the end have seen the model as it is."""
        return all(map(self._is_done, self._at_end))

    def values(self) -> dict[str, float]:
        """The values for the model as it is, by the names under which they are logged.

        Values of an earlier evaluation are those of other weights and are left out.
        """
        found: dict[str, float] = {}
        for evaluation in filter(self._is_done, self._evaluations):
            found |= evaluation.values_in(self._state.eval)
        return found

    def is_awaited(self, name: str) -> bool:
        """Whether a value is of an evaluation that has not seen the model as it is."""
        return any(each.gives(name) and not self._is_done(each) for each in self._evaluations)

    def run_due(self, is_stopped: Callable[[Ranks], bool]) -> None:
        """Evaluate where an interval was reached."""
        # At the end of an epoch, those of its last batch come before those of the epoch.
        for evaluation in sorted(self._evaluations, key=lambda each: each.interval.is_of_epochs):
            if evaluation.interval.is_pending(self._state):
                self._evaluate(evaluation, is_stopped)

    def run_at_end(self, is_stopped: Callable[[Ranks], bool]) -> None:
        """Evaluate at the end of training, with all that do so in the middle of it."""
        for evaluation in self._at_end:
            self._evaluate(evaluation, is_stopped)

    def refuse_empty(self) -> None:
        """Refuse loaders without a batch now, and not after an epoch."""
        for each in self._at_end:
            # Other ranks may have batches where this one has none.
            if not self._context.has_peers and num_batches(each.dataloader) == 0:
                raise empty(each.dataloader, each.loader_name)

    def catch_up(self) -> None:
        """Take what is done for handled, in a run that is taken up again."""
        for evaluation in self._evaluations:
            is_pending = evaluation.name in self._loaded
            evaluation.interval.catch_up(self._state, is_pending=is_pending)

    def state_dict(self) -> dict[str, Any]:
        """The evaluations that are due, which were broken off."""
        pending = (each for each in self._evaluations if each.interval.is_pending(self._state))
        return {"pending": [each.name for each in pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take these for due with the next `catch_up`."""
        self._loaded = state["pending"]

    def _is_done(self, evaluation: Evaluation) -> bool:
        return self._state.evaluated_at.get(evaluation.name) == self._state.batch

    def _evaluate(self, evaluation: Evaluation, is_stopped: Callable[[Ranks], bool]) -> None:
        """Evaluate, unless that was done for this very batch."""
        if not self._is_done(evaluation):
            if is_stopped(evaluation.microbatcher.ranks):
                return
            here = rng_state()  # a loader draws some, and training must not depend on that
            values = evaluation.run(
                self._state.eval,
                self._context,
                where=position(self._state, self._context.run.max_duration),
                is_stopped=is_stopped,
            )
            restore_rng_state(here)
            if values is None:
                return
            self._state.evaluated_at[evaluation.name] = self._state.batch
            self._context.flush()
        evaluation.interval.catch_up(self._state)


_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def predict_all(
    microbatcher: Microbatcher, loader: Iterable[Any], context: RunContext
) -> list[Any]:
    """The outputs of each batch, in order."""
    check_loader("dataloader", loader)
    for sampler in samplers_of(loader):
        if isinstance(sampler, _SHUFFLING):
            raise ValueError(
                f"the loader draws its rows at random ({type(sampler).__name__}), so predictions "
                "would come in an unknown order; pass one with shuffle=False"
            )
    outputs: list[Any] = []
    where = noting(lambda: f"in prediction, batch {len(outputs) + 1} of the pass")
    with where, microbatcher.evaluating():
        for batch in fetch(loader, "dataloader"):
            outputs.append(microbatcher.predict(batch))
            done = f"predicting: {count_of(len(outputs), 'batch')} done"
            context.progress.status(lambda done=done: done)  # type: ignore[misc]
    return outputs
