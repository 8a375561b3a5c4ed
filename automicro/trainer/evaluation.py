"""Evaluation: its schedule, one pass over the data, and the prediction of all outputs."""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.durations import Duration, Unit, read_duration
from automicro.errors import CheckpointWarning, describe_error, warn
from automicro.events.run import LoopState, PhaseState, Sizes
from automicro.loss.averages import Weight, read_numbers
from automicro.microbatcher import Microbatcher
from automicro.ranks.interface import Ranks, announcing_failure
from automicro.step.results import EvalResult
from automicro.trainer.context import RunContext
from automicro.trainer.data.loading import (
    Standing,
    check_loader,
    check_passes,
    empty,
    fetch,
    num_batches,
    samplers_of,
)
from automicro.trainer.evaluators import Evaluator, is_inherited
from automicro.trainer.metrics import MetricSet
from automicro.trainer.progress import StatusLine, evaluation_line, position, size_lines
from automicro.trainer.same_on_all_ranks import of_all_ranks, require_same_order
from automicro.trainer.surroundings import noting
from automicro.units import count_of


class Interval:
    """Tracks when an event is due that repeats after a number of epochs, batches or samples.

    >>> interval, state = Interval(Duration.parse("100sp")), LoopState()
    >>> due = []
    >>> for state.samples in (64, 128, 192, 256, 320):
    ...     due.append(interval.is_due(state))
    >>> due
    [False, True, False, True, True]
    """

    # A batch is never cut to reach a number of samples exactly: the event is due after the batch
    # that reaches it.

    def __init__(self, every: Duration | None) -> None:
        self.every = every
        self._passed = 0

    @property
    def is_of_epochs(self) -> bool:
        """Whether the event is due only at the end of an epoch."""
        return self.every is not None and self.every.unit is Unit.EPOCHS

    def catch_up(self, state: LoopState, *, is_pending: bool = False) -> None:
        """Treat all multiples reached so far as handled, such as in a resumed run."""
        self._passed = self._count(state) - is_pending

    def is_pending(self, state: LoopState) -> bool:
        """Whether a multiple has been reached but not handled."""
        return self.every is not None and self._count(state) > self._passed

    def is_due(self, state: LoopState) -> bool:
        """Whether a multiple has been reached since the last call; called after every batch."""
        is_due = self.is_pending(state)
        self.catch_up(state)
        return is_due

    def _count(self, state: LoopState) -> int:
        """Count the multiples reached so far."""
        return 0 if self.every is None else state.done(self.every.unit) // self.every.value


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Evaluates whole batches with its own microbatch size."""

    name: str
    dataloader: Iterable[Any]
    max_batches: int | None
    microbatcher: Microbatcher
    metrics: MetricSet
    interval: Interval
    loader_name: str
    standing: Standing

    @property
    def happens_at_end(self) -> bool:
        """Whether training includes this evaluation."""
        return self.interval.every is not None

    @property
    def prefix(self) -> str:
        """The beginning of the names of its values."""
        return f"{self.name}/" if self.name else ""

    def run(
        self,
        phase: PhaseState,
        context: RunContext,
        *,
        where: str = "",
        is_stopped: Callable[[Ranks], bool] | None = None,
    ) -> dict[str, float] | None:
        """Pass over the data once, record the values in the phase, and return them."""
        # A pass that is interrupted, by an error or by `is_stopped`, leaves the phase unchanged,
        # and callbacks get no `eval_end`.
        with context.mode.evaluating():
            start = time.perf_counter()
            here = PhaseState()
            try:
                context.tell("eval_start")
                with announcing_failure(self.microbatcher.ranks), self.microbatcher.evaluating():
                    found = self._pass(here, context, is_stopped)
            finally:
                self.metrics.reset()  # its counts would take memory from training
            if found is None:
                context.forget()
                return None
            values, samples, size = found
            assert here.cut is not None
            phase.ooms += here.ooms
            phase.nested_ooms += here.nested_ooms
            if phase.cut is None or here.cut.num_rows >= phase.cut.num_rows:
                phase.cut = here.cut
            prefix, before = self.prefix, phase.metrics
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
        self, here: PhaseState, context: RunContext, is_stopped: Callable[[Ranks], bool] | None
    ) -> tuple[dict[str, float], int, int] | None:
        """Return the values, the rows and the last microbatch size; None if interrupted."""
        self.metrics.reset()
        losses, ranks = LossMean(), self.microbatcher.ranks
        samples = batches = 0
        result: EvalResult | None = None
        of = f" of {self.name!r}" if self.name else ""

        def where() -> str:
            return f"in evaluation{of}, batch {batches + 1}"

        with noting(where):
            for batch in self._batches(has_peers=ranks.world_size > 1):
                if is_stopped is not None and is_stopped(ranks):
                    return None
                if batch is not None:
                    context.tell("eval_batch_start", batch)
                given = [] if batch is None else [batch]
                with context.failures.kept(given, phase="eval", where=where()):
                    this = self.microbatcher.evaluate(batch, self.metrics.metrics)
                del given
                if batch is None and this.num_global_samples == 0:
                    break  # all ranks are out of rows
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
                context.progress.status(partial(self._describe, batches, here.cut))
            if result is None:  # on any rank
                raise empty(self.dataloader, self.loader_name)
            require_same_order(ranks, self.dataloader, self.loader_name)
            total, point = LossMean(), f"adding up the losses of {self.loader_name}"
            for each in of_all_ranks(ranks, losses, point):
                total.merge(each)
            values = total.compute() | self.metrics.compute()
        return values, samples, result.microbatch_size

    def _describe(self, batches: int, cut: Sizes | None) -> StatusLine:
        """Describe the progress of the pass."""
        what = f"evaluating {self.name!r}" if self.name else "evaluating"
        known = num_batches(self.dataloader), self.max_batches
        total = min((each for each in known if each is not None), default=None)
        share = None if not total else min(1.0, batches / total)
        text = f"{what}: {count_of(batches, 'batch')}{'' if total is None else f' of {total:,}'}"
        return StatusLine(where=text, words=[f"microbatches {cut}"], share=share)

    def _batches(self, *, has_peers: bool) -> Iterator[Any]:
        batches = fetch(self.dataloader)
        own = itertools.islice(batches, self.max_batches)
        # A rank that is out of rows takes part until all ranks are.
        return itertools.chain(own, itertools.repeat(None)) if has_peers else own


def make_evaluations(
    evaluators: Mapping[str, Evaluator],
    *,
    microbatcher: Microbatcher,
    make_microbatcher: Callable[..., Microbatcher],
    inherited: Mapping[str, Any],  # the options of evaluators that do not have their own
    device: torch.device,
    share: Callable[..., Any],
    loader_name: str = "eval_dataloader",
) -> list[Evaluation]:
    """Create an evaluation for each evaluator; all ranks must call this."""
    made = []
    for name, evaluator in evaluators.items():
        own = {key: each for key, each in vars(evaluator).items() if not is_inherited(each)}
        options, which = {**inherited, **own}, f"{loader_name}[{name!r}]" if name else loader_name
        runs, every = microbatcher, options["interval"]
        if name or "microbatch_size" in own:  # sizes are found separately
            runs = make_microbatcher(eval_microbatch_size=options["microbatch_size"])
        loader = share(evaluator.dataloader, which, is_evaluated=True)
        evaluation = Evaluation(
            name=name,
            dataloader=loader,
            standing=Standing(loader, which),
            max_batches=evaluator.max_batches,
            microbatcher=runs,
            metrics=MetricSet(options["metrics"], device),
            interval=Interval(None if every is None else read_duration("interval", every)),
            loader_name=which,
        )
        made.append(evaluation)
    return made


class EvaluationPlan:
    """Runs evaluations during training without changing the training that follows."""

    # An evaluation that is interrupted, by a signal or an error, stays due: it runs first when
    # training continues, also in a resumed run.

    def __init__(self, evaluations: Sequence[Evaluation], context: RunContext) -> None:
        for evaluation in evaluations:
            every = evaluation.interval.every
            # With a limit of batches, each pass takes the next ones.
            if every is not None and evaluation.max_batches is None:
                name, loader = evaluation.loader_name, evaluation.dataloader
                check_passes(name, loader, context.run.max_duration, every)
        self._evaluations = evaluations
        self._at_end = [each for each in evaluations if each.happens_at_end]
        self._context = context
        self._state = context.state
        self._loaded: Sequence[str] = ()

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self._evaluations)

    @property
    def is_complete_at_end(self) -> bool:
        """Whether all evaluations at the end have evaluated the current model."""
        return all(map(self._is_done, self._at_end))

    def values(self, best: str | None = None) -> dict[str, float]:
        """Collect the values of the current model by the names under which they are logged."""
        # Values of earlier evaluations belong to other weights. While the one with the best metric
        # has not run, there are none, so that the checkpoint store does not warn of its absence.
        prefixes = {f"eval/{each.prefix}": self._is_done(each) for each in self._evaluations}
        if best and not all(done for each, done in prefixes.items() if best.startswith(each)):
            return {}
        return {
            f"eval/{name}": value
            for name, value in self._state.eval.metrics.items()
            if any(done and f"eval/{name}".startswith(each) for each, done in prefixes.items())
        }

    def run_due(self, is_stopped: Callable[[Ranks], bool]) -> None:
        """Run the evaluations whose interval has been reached."""
        # At the end of an epoch, evaluations due after its last batch come before those of the
        # epoch.
        for evaluation in sorted(self._evaluations, key=lambda each: each.interval.is_of_epochs):
            if evaluation.interval.is_pending(self._state):
                self._evaluate(evaluation, is_stopped)

    def run_at_end(self, is_stopped: Callable[[Ranks], bool]) -> None:
        """Run all evaluations of training at its end."""
        for evaluation in self._at_end:
            self._evaluate(evaluation, is_stopped)

    def refuse_empty(self) -> None:
        """Raise an error for an empty loader now, not after an epoch."""
        for each in self._at_end:
            # Other ranks can have batches if this one has none.
            if not self._context.has_peers and num_batches(each.dataloader) == 0:
                raise empty(each.dataloader, each.loader_name)

    def catch_up(self) -> None:
        """Treat all evaluations as done in a resumed run, except the interrupted ones."""
        for evaluation in self._evaluations:
            is_pending = evaluation.name in self._loaded
            evaluation.interval.catch_up(self._state, is_pending=is_pending)

    def state_dict(self) -> dict[str, Any]:
        """Return the interrupted evaluations, which are due, and the state of each loader."""
        pending = (each for each in self._evaluations if each.interval.is_pending(self._state))
        return {
            "pending": [each.name for each in pending],
            "loaders": {each.name: each.standing.read() for each in self._evaluations},
            "begun": list(self._state.evaluated_at),
        }

    def between_epochs(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a state for another number of ranks, which all get that of the first."""
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Mark these evaluations as due at the next `catch_up`, and restore their loaders."""
        self._loaded = state["pending"]
        for each in self._evaluations:
            if (saved := state["loaders"].get(each.name)) is None:
                continue
            if each.name in state["begun"]:
                each.standing.warn_of_lost(saved)
            try:
                each.standing.write(saved)
            except Exception as error:  # of the loader's own code
                warn(
                    f"the state of {each.loader_name} in the checkpoint cannot be loaded "
                    f"({describe_error(error)}), so its batches can differ from those of an "
                    "undisturbed run. Pass the loader of the run that saved it",
                    CheckpointWarning,
                )

    def _is_done(self, evaluation: Evaluation) -> bool:
        return self._state.evaluated_at.get(evaluation.name) == self._state.batch

    def _evaluate(self, evaluation: Evaluation, is_stopped: Callable[[Ranks], bool]) -> None:
        """Run an evaluation unless it has run after this batch."""
        if not self._is_done(evaluation):
            if is_stopped(evaluation.microbatcher.ranks):
                return
            here = rng_state()  # a loader draws random numbers, which must not affect training
            before = evaluation.standing.begin()
            values = evaluation.run(
                self._state.eval,
                self._context,
                where=position(self._state, self._context.run.max_duration),
                is_stopped=is_stopped,
            )
            restore_rng_state(here)
            if values is None:  # it is repeated from where it began
                evaluation.standing.go_back(before)
                return
            self._state.evaluated_at[evaluation.name] = self._state.batch
            self._context.flush()
        evaluation.interval.catch_up(self._state)


_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def predict_all(
    microbatcher: Microbatcher, loader: Iterable[Any], context: RunContext
) -> list[Any]:
    """Predict the outputs of each batch, in order."""
    check_loader("dataloader", loader)
    for sampler in samplers_of(loader):
        if isinstance(sampler, _SHUFFLING):
            raise ValueError(
                f"the loader draws its rows at random ({type(sampler).__name__}), so predictions "
                "would come in an unknown order. Pass a loader with shuffle=False"
            )
    outputs: list[Any] = []
    where = noting(lambda: f"in prediction, batch {len(outputs) + 1}")
    with where, microbatcher.evaluating():
        for batch in fetch(loader):
            outputs.append(microbatcher.predict(batch))
            done = f"predicting: {count_of(len(outputs), 'batch')} done"
            context.progress.status(lambda done=done: done)  # type: ignore[misc]
    if not outputs:
        raise empty(loader, "dataloader")
    return outputs


_MOST_UNREAD = 100


class LossMean:
    """The mean loss of several batches, weighted by their denominators.

    Example:
        >>> import torch
        >>> mean = LossMean()
        >>> mean.add(torch.tensor(1.0), {}, {"": 3})
        >>> mean.add(torch.tensor(5.0), {}, {"": 1})
        >>> mean.compute()
        {'loss': 2.0}
    """

    # A mean of means would depend on the cut of the data into batches; weighted sums do not. Values
    # on a device are read late, a hundred batches at once.
    def __init__(self) -> None:
        self._gathered: list[tuple[str, float, float | None]] = []  # name, loss, denominator
        self._unread: list[tuple[str, Tensor, Weight | None]] = []

    def add(
        self, loss: Tensor, losses: Mapping[str, Tensor], denominators: Mapping[str, Weight | None]
    ) -> None:
        """Add one batch's loss, its parts by name, and their denominators."""
        is_one = "" in denominators
        if is_one:
            self._unread.append(("loss", loss, denominators[""]))
        for name, part in losses.items():
            self._unread.append((f"loss/{name}", part, denominators["" if is_one else name]))
        # Kept on the device until then, because each read waits for it.
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

    def merge(self, other: "LossMean") -> None:
        """Add everything that another one has gathered, such as another rank's.

        >>> import torch
        >>> mine, others = LossMean(), LossMean()
        >>> mine.add(torch.tensor(1.0), {}, {"": 3})
        >>> others.add(torch.tensor(5.0), {}, {"": 1})
        >>> mine.merge(others)
        >>> mine.compute()
        {'loss': 2.0}
        """
        self._read()
        other._read()
        self._gathered += other._gathered

    def __getstate__(self) -> dict[str, Any]:
        # Unread values may be on a device that the receiver of this state does not have.
        self._read()
        return vars(self)

    def compute(self) -> dict[str, float]:
        """Return ``"loss"``, and each part as ``"loss/name"``; empty if there were none."""
        self._read()
        gathered = defaultdict[str, list[tuple[float, float | None]]](list)
        for name, loss, count in self._gathered:
            gathered[name].append((loss, count))
        means = {name: _mean(values) for name, values in gathered.items()}
        if means and "loss" not in means:
            # As in training, a part without any count is left out of the sum.
            counted = [mean for mean in means.values() if mean is not None]
            means = {"loss": math.fsum(counted) if counted else None} | means
        return {name: math.nan if mean is None else mean for name, mean in means.items()}

    def _read(self) -> None:
        """Read all values that are still on a device at once."""
        unread, self._unread = self._unread, []
        values = read_numbers([value for _, *pair in unread for value in pair])
        names = [name for name, *_ in unread]
        self._gathered += zip(names, values[::2], values[1::2], strict=True)


def _mean(values: list[tuple[float, float | None]]) -> float | None:
    """Return the mean, or None if nothing counts, because the losses may then be NaN."""
    # Sums add up and have no denominator.
    if any(count is None for _, count in values):
        return math.fsum(loss for loss, _ in values)
    counted = [(loss, count) for loss, count in values if count]
    # fsum, because an evaluation may add up millions of losses.
    total = math.fsum(count for _, count in counted)
    return math.fsum(loss * count for loss, count in counted) / total if counted else None
