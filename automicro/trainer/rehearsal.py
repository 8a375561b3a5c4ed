"""The worst batch first: the costliest batches before the first step, without a trace."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from automicro.batch.layout import describe_cut
from automicro.events.run import LoopState
from automicro.memory.device import capacity_bytes, reset_peak
from automicro.microbatcher import Microbatcher
from automicro.options import check_choice
from automicro.step.results import EvalResult, StepResult
from automicro.torch_private import is_uninitialized
from automicro.trainer.context import RunContext
from automicro.trainer.data.worst import (
    SCANNED_SECONDS,
    Scan,
    begins_again,
    find_costliest,
    undisturbed,
)
from automicro.trainer.evaluation import Evaluation
from automicro.trainer.metrics import MetricSet
from automicro.trainer.progress import Progress, count_of
from automicro.units import Unit, format_bytes

MODES = ("worst",)
# A batch is tried until its size stays, so that trials of larger ones need not come in the run.
MOST_TRIES = 8
SHOWN_ROWS = 8


def read_rehearsal(rehearse: str | None) -> str | None:
    """What to rehearse, as it was given.

    Raises:
        TypeError, ValueError: nothing that can be rehearsed.

    >>> read_rehearsal("worst"), read_rehearsal(None)
    ('worst', None)
    """
    return None if rehearse is None else check_choice("rehearse", rehearse, MODES)


@dataclass(frozen=True, kw_only=True)
class RehearsedBatch:
    """A batch that went through before the first step. Of several ranks, this one's.

    Attributes:
        loader: the argument that it came in.
        index: among the batches of its first pass, from 0; None where this rank had no more.
        dataset_rows: its rows by their indices in the data set; None where nobody knows.
        rows: how many it has.
        cost: of all of it, padding included: elements, or what the sampler counts.
        microbatch_size: that was found.
        microbatch_unit: what it is counted in: ``"rows"``, ``"tokens"``, …
        num_microbatches: of that size.
        ooms: attempts that ran out of memory first.
        peak_bytes: at that size; None where nobody counts.
        capacity_bytes: of the device; None where nobody counts.
    """

    loader: str
    index: int | None
    dataset_rows: tuple[Any, ...] | None
    rows: int
    cost: float
    microbatch_size: int
    microbatch_unit: str
    num_microbatches: int
    ooms: int
    peak_bytes: int | None
    capacity_bytes: int | None

    def __str__(self) -> str:
        unit, size = self.microbatch_unit, self.microbatch_size
        cut = describe_cut(self.rows, size, self.num_microbatches, unit=unit)
        if unit == "rows":
            cut += " row" if self.rows == 1 else " rows"
        text = f"{_name(self.loader, self.index, self.dataset_rows)}: {cut}"
        if self.peak_bytes is not None:
            of = "" if self.capacity_bytes is None else f" of {format_bytes(self.capacity_bytes)}"
            text += f", peak {format_bytes(self.peak_bytes)}{of}"
        if self.ooms:
            text += f", after {count_of(self.ooms, 'OOM')}"
        return text


@dataclass(frozen=True, kw_only=True)
class RehearsalReport:
    """What was rehearsed. ``str()`` of it has a line for each loader and each batch.

    Attributes:
        batches: that went through, the costliest of each loader first.
        looked_at: by loader, among how many batches these were found, in words.
        unknown: what was left out, or not looked at, and why; empty where nothing was.
        seconds: that it took.
    """

    batches: Sequence[RehearsedBatch]
    looked_at: dict[str, str]
    unknown: Sequence[str]
    seconds: float

    @property
    def ooms(self) -> int:
        """Attempts that ran out of memory, and would have done so in the run."""
        return sum(each.ooms for each in self.batches)

    def brief(self) -> str:
        """All of it in one line, for a summary.

        >>> RehearsalReport(batches=(), looked_at={}, unknown=(), seconds=0.0).brief()
        'nothing'
        """
        parts = []
        for loader, looked_at in self.looked_at.items():
            own = [each for each in self.batches if each.loader == loader]
            if own:
                smallest = min(own, key=lambda each: each.microbatch_size)
                parts.append(
                    f"the costliest {len(own)} of {looked_at} of {loader} fit, with "
                    f"{_counted(smallest)} or more, after "
                    f"{count_of(sum(each.ooms for each in own), 'OOM')}"
                )
        return "; ".join([*parts, *self.unknown]) or "nothing"

    def __str__(self) -> str:
        lines = []
        for loader, looked_at in self.looked_at.items():
            lines.append(_heading(loader, looked_at))
            lines += [f"  {each}" for each in self.batches if each.loader == loader]
        return "\n".join([*lines, *(f"rehearsal: {each}" for each in self.unknown)])


class Rehearsal:
    """Runs the costliest batches before the first step of a run, and rolls all of it back.

    Args:
        loader: of the data to train on.
        microbatcher: of training, whose sizes stay.
        metrics: of training, updated and put back.
        evaluations: those that happen in the run.
        context: of the run.
        count_rows: of a batch.
        accumulate_batches: how many batches of the loader make up an optimization batch.
        repeatable: whether no clock may decide what is found.
    """

    def __init__(
        self,
        loader: Any,
        microbatcher: Microbatcher,
        metrics: MetricSet,
        evaluations: Sequence[Evaluation],
        context: RunContext,
        *,
        count_rows: Callable[[Any], int],
        accumulate_batches: int = 1,
        repeatable: bool = False,
    ) -> None:
        self.report: RehearsalReport | None = None
        self._loader = loader
        self._microbatcher = microbatcher
        self._metrics = metrics
        self._evaluations = [each for each in evaluations if each.happens_at_end]
        self._context = context
        self._count_rows = count_rows
        self._accumulate_batches = accumulate_batches
        # From the second one on, the gradients of those before lie beside a batch.
        self._copies = min(2, accumulate_batches)
        self._repeatable = repeatable
        self._at: str | None = None  # while it runs

    def where(self) -> str | None:
        """Where it stands, for errors; None where it does not run."""
        return self._at

    def run(self, state: LoopState, progress: Progress) -> None:
        """Rehearse, and say what was found. All ranks call it.

        Args:
            state: where training stands.
            progress: where to say it.

        Raises:
            SampleTooLargeError: a batch does not fit.
            ValueError: a loader that can be passed over only once, or layers without shapes.
        """
        self._refuse_lazy()
        start = time.perf_counter()
        self._at = "in the rehearsal before the first step"
        batches: list[RehearsedBatch] = []
        looked_at: dict[str, str] = {}
        unknown: list[str] = []
        try:
            batches += self._train(state, progress, looked_at, unknown)
            why = self._microbatcher.why_not_reserved
            if why is not None:
                unknown.append(f"what the optimizer's first step takes is not known ({why})")
            for evaluation in self._evaluations:
                batches += self._evaluate(evaluation, progress, looked_at, unknown)
        finally:
            reset_peak(self._context.device)  # that of the run is to come
        self._at = None
        self.report = RehearsalReport(
            batches=tuple(batches),
            looked_at=looked_at,
            unknown=tuple(unknown),
            seconds=time.perf_counter() - start,
        )
        for each in unknown:
            progress.line(f"rehearsal: {each}")
        self._context.tell("rehearsal_end", self.report)

    def _train(
        self, state: LoopState, progress: Progress, looked_at: dict[str, str], unknown: list[str]
    ) -> list[RehearsedBatch]:
        name, microbatcher, context = "train_dataloader", self._microbatcher, self._context

        def run(batch: Any) -> StepResult:
            batches = [] if batch is None else [batch] * self._copies
            return microbatcher.accumulate(batches, self._metrics.metrics)

        with undisturbed(self._loader, *context.callbacks.transforming):
            scan = self._look(self._loader, name, state.epoch, self._most_batches, progress)
            _note(scan, name, looked_at, unknown, progress)
            return self._twice(scan, name, run, microbatcher, progress, phase="train")

    @property
    def _most_batches(self) -> int | None:
        """Of the loader, where the run may end before a pass does."""
        duration = self._context.run.max_duration
        if duration.unit is not Unit.BATCHES:
            return None
        return duration.value * self._accumulate_batches

    def _evaluate(
        self,
        evaluation: Evaluation,
        progress: Progress,
        looked_at: dict[str, str],
        unknown: list[str],
    ) -> list[RehearsedBatch]:
        name, microbatcher = evaluation.loader_name, evaluation.microbatcher
        loader = evaluation.dataloader
        if not begins_again(loader):
            unknown.append(f"{name} was not looked at: it can be passed over only once")
            return []

        def run(batch: Any) -> EvalResult:
            return microbatcher.evaluate(batch, evaluation.metrics.metrics)

        with undisturbed(loader):
            scan = self._look(loader, name, 0, evaluation.max_batches, progress)
            _note(scan, name, looked_at, unknown, progress)
            # In the run, the optimizer's state lies on the device by then.
            self._microbatcher.hold_reservation()
            try:
                with microbatcher.evaluating():
                    return self._twice(scan, name, run, microbatcher, progress, phase="eval")
            finally:
                self._microbatcher.release_reservation()

    def _look(
        self, loader: Any, name: str, epoch: int, most_batches: int | None, progress: Progress
    ) -> Scan:
        progress.doing(f"rehearsal: looking for the costliest batches of {name}")
        return find_costliest(
            loader,
            name,
            epoch=epoch,
            rows_of=self._count_rows,
            most_batches=most_batches,
            most_seconds=math.inf if self._repeatable else SCANNED_SECONDS,
        )

    def _twice(
        self,
        scan: Scan,
        name: str,
        run: Callable[[Any], StepResult | EvalResult],
        microbatcher: Microbatcher,
        progress: Progress,
        *,
        phase: str,
    ) -> list[RehearsedBatch]:
        """Find the size of each batch; then run all with what was learned from the others."""
        with microbatcher.rehearsing():
            first = list(self._each(scan, name, _until_it_stays(run), progress, phase=phase))
        with microbatcher.rehearsing():  # from here on no larger size is tried, as in the run
            second = self._each(scan, name, run, progress, phase=phase)
            found = []
            for before, after in zip(first, second, strict=True):
                found.append(replace(after, ooms=before.ooms + after.ooms))
                progress.line(f"  {found[-1]}")
            return found

    def _each(
        self,
        scan: Scan,
        name: str,
        run: Callable[[Any], StepResult | EvalResult],
        progress: Progress,
        *,
        phase: str,
    ) -> Iterator[RehearsedBatch]:
        context, count = self._context, len(scan.batches)
        if context.has_peers:
            count = int(context.ranks.most(float(count)))
        for number in range(count):
            progress.doing(f"rehearsal: batch {number + 1} of the costliest {count} of {name}")
            chosen = scan.batches[number] if number < len(scan.batches) else None
            batch = None if chosen is None else chosen.make()
            if batch is not None and phase == "train":
                batch = context.callbacks.transform(context.run, batch)
            index, rows = (None, None) if chosen is None else (chosen.index, chosen.rows)
            at = _name(name, index, rows)
            self._at = f"in the rehearsal before the first step, {at}, of the costliest of {scan}"
            given = [] if batch is None else [batch]
            with context.failures.kept(given, phase=phase, where=self._at):
                result = run(batch)
            num_rows = 0 if batch is None else self._count_rows(batch)
            copies = result.num_samples // num_rows if num_rows else 1
            del given, batch
            yield RehearsedBatch(
                loader=name,
                index=index,
                dataset_rows=rows,
                rows=num_rows,
                cost=0.0 if chosen is None else chosen.cost,
                microbatch_size=result.microbatch_size,
                microbatch_unit=result.microbatch_unit,
                num_microbatches=result.num_microbatches // copies,
                ooms=result.ooms,
                peak_bytes=result.peak_bytes,
                capacity_bytes=capacity_bytes(context.device),
            )

    def _refuse_lazy(self) -> None:
        for module in self._context.run.modules:
            for name, parameter in module.named_parameters():
                if is_uninitialized(parameter):
                    raise ValueError(
                        f"rehearse='worst', but {name!r} of {type(module).__name__} gets its shape "
                        "and its random weights from the first batch of the run, and would get "
                        "others in a rehearsal; run the model on one row before, give the layer "
                        "its shape, or leave rehearse out"
                    )


def _until_it_stays(
    run: Callable[[Any], StepResult | EvalResult],
) -> Callable[[Any], StepResult | EvalResult]:
    """Run a batch until nothing larger is tried any more; the last result, with all failures."""

    def again(batch: Any) -> StepResult | EvalResult:
        failed: tuple[int, ...] = ()
        sizes = set[int]()
        for _ in range(MOST_TRIES):
            result = run(batch)
            failed += result.failed_sizes
            is_new = result.microbatch_size not in sizes
            sizes.add(result.microbatch_size)
            if not (is_new or result.ooms or result.is_measuring):
                break
        return replace(result, failed_sizes=failed)

    return again


def _heading(loader: str, looked_at: str) -> str:
    return f"rehearsal: the costliest of {looked_at} of {loader}"


def _note(
    scan: Scan, name: str, looked_at: dict[str, str], unknown: list[str], progress: Progress
) -> None:
    looked_at[name] = str(scan)
    progress.line(_heading(name, str(scan)))  # before any of them can fail
    if not scan.is_complete:
        unknown.append(
            f"batches of {name} that nobody has looked at may be costlier ({scan} were looked at); "
            "a batch sampler with batch_costs() knows them all"
        )


def _counted(batch: RehearsedBatch) -> str:
    unit, size = batch.microbatch_unit, batch.microbatch_size
    return f"{size:,} {unit.removesuffix('s') if size == 1 else unit}"


def _name(loader: str, index: int | None, rows: tuple[Any, ...] | None) -> str:
    """A batch, with its rows.

    >>> _name("train_dataloader", 7, (3, 1))
    'batch 8 of train_dataloader (rows 3, 1 of the data set)'
    """
    if index is None:
        return f"no batch of {loader}"
    text = f"batch {index + 1:,} of {loader}"
    if not rows:
        return text
    listed = ", ".join(map(str, rows[:SHOWN_ROWS]))
    return f"{text} (rows {listed}{', …' * (len(rows) > SHOWN_ROWS)} of the data set)"
