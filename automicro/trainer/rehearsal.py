"""Rehearsal: run the costliest batches before the first step and roll them back.

They are found in a pass over the loader that leaves its state unchanged.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from automicro.batch.device import on_host
from automicro.batch.tensors import Contents
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.durations import Unit
from automicro.errors import BatchError
from automicro.events.run import Sizes
from automicro.memory.device import reset_peak
from automicro.microbatcher import Microbatcher
from automicro.reach import generators_in
from automicro.state.capture import capture
from automicro.step.results import EvalResult, StepResult
from automicro.torch_private_execution import forget_workers
from automicro.trainer.data import loading
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.loading import kinds_of_loading
from automicro.trainer.data.sharing import SharedSampler
from automicro.trainer.evaluation import Evaluation, EvaluationPlan
from automicro.trainer.step import TrainingStep
from automicro.units import count_of, format_bytes
from automicro.values import walk

COSTLIEST = 3
"""Number of costliest batches to run; the one with the longest rows is run in addition."""
CLASSES = 4
"""Number of doublings of the row length whose costliest batches are run in addition."""
SCANNED_BATCHES = 512
# A batch is repeated until its size settles, so that larger sizes are tried here, not in the run.
MOST_TRIES = 8
SHOWN_ROWS = 8

_Run: TypeAlias = Callable[[Any], StepResult | EvalResult]


@dataclass(frozen=True, kw_only=True, eq=False)
class _CostlyBatch:
    """One of the costliest batches of a pass, created by ``make``."""

    loader: str
    index: int
    cost: float
    row_cost: float
    rows: tuple[Any, ...]  # their indices, if known
    make: Callable[[], Any]

    def __str__(self) -> str:
        text = f"batch {self.index + 1:,} of {self.loader}"
        if not self.rows:
            return text
        listed = ", ".join(map(str, self.rows[:SHOWN_ROWS]))
        return f"{text} (rows {listed}{', …' * (len(self.rows) > SHOWN_ROWS)} of the data set)"


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """The costliest of the scanned batches."""

    name: str
    batches: Sequence[_CostlyBatch]
    seen: int
    total: int | None

    @property
    def is_complete(self) -> bool:
        """Whether all batches of the pass were scanned."""
        return self.total is not None and self.seen >= self.total

    def __str__(self) -> str:
        of = "an unknown number of" if self.total is None else f"{self.total:,}"
        return f"{'all' if self.is_complete else f'the first {self.seen:,} of'} {of} batches"


def find_costliest(
    loader: Any,
    name: str,
    *,
    epoch: int = 0,
    rows_of: Callable[[Any], int] | None = None,
    most_batches: int | None = None,
) -> _Scan:
    """Find the costliest batches of the next pass over a loader; call this inside `undisturbed`.

    >>> batches = [torch.zeros(2, 3), torch.zeros(2, 9), torch.zeros(2, 5)]
    >>> scan = find_costliest(batches, "train_dataloader")
    >>> [(each.index, each.cost) for each in scan.batches][0], str(scan)
    ((1, 18.0), 'all 3 batches')
    """
    # A sampler with `batch_costs` gives the costs. Otherwise batches are made in this process, from
    # the indices of the sampler if possible. No clock limits them, so that runs can be repeated.
    known = [each for each in (loading.num_batches(loader), most_batches) if each is not None]
    total, seen, found = min(known, default=None), 0, list[_CostlyBatch]()
    loading.announce_epoch(loader, epoch)
    for rows, make, cost in itertools.islice(_pass_of(loader, name), total):
        if cost is None and seen == SCANNED_BATCHES:
            break
        listed = tuple(rows) if isinstance(rows, list | tuple) else (rows,)
        num_rows = len(listed)
        if cost is None:
            batch = make()
            cost, num_rows = float(Contents(batch).num_elements), 1
            with contextlib.suppress(BatchError):  # it might have rows only after a callback
                num_rows = 1 if rows_of is None else rows_of(batch)
            del batch
        row_cost = cost / max(1, num_rows)
        this = _CostlyBatch(
            loader=name, index=seen, cost=cost, row_cost=row_cost, rows=listed, make=make
        )
        found, seen = _costliest([*found, this]), seen + 1
    else:
        total = seen
    return _Scan(name=name, batches=found, seen=seen, total=total)


def _costliest(batches: Sequence[_CostlyBatch]) -> list[_CostlyBatch]:
    """Keep the costliest batches, the one with the longest rows, and some with shorter rows."""
    # The memory of a batch of long rows says little about one with many short rows, so the
    # costliest batch is kept for each doubling of the cost per row.
    ranked = sorted(batches, key=lambda each: (-each.cost, each.index))
    of_class: dict[int, _CostlyBatch] = {}
    for each in ranked:
        of_class.setdefault(math.frexp(each.row_cost)[1], each)
    longest = max(batches, key=lambda each: (each.row_cost, -each.index))
    others = [of_class[each] for each in sorted(of_class, reverse=True)[:CLASSES]]
    return list(dict.fromkeys([*ranked[:COSTLIEST], longest, *others]))


_Made = tuple[Any, Callable[[], Any], float | None]
"""The rows of a batch, a function that makes it, and its cost; None if unknown."""


def _known_order(loader: Any) -> Iterable[Any] | None:
    """Return the sampler that yields the indices of each batch, if any."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loading.batch_order(loader)


def _pass_of(loader: Any, name: str) -> Iterator[_Made]:
    """Yield the batches of a pass in this process, from their indices or by iteration."""
    order = _known_order(loader)
    if order is not None:
        # As at the start of a pass, where the loader draws a seed before the sampler draws.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        known = _known_costs(order)
        costs = itertools.repeat(None) if known is None else map(float, known)
        for cost, rows in zip(costs, order, strict=False):
            yield rows, partial(_make, loader, rows), cost
        return
    if not _begins_again(loader):
        owner = loader.dataset if isinstance(loader, DataLoader) else loader
        raise ValueError(
            f"rehearse='worst' iterates over {name} before the first step, but {name} "
            f"({type(owner).__name__}) can be iterated only once, so these batches would be "
            "missing in the run. Pass a DataLoader over a data set with a length, or leave "
            "rehearse out"
        )
    if isinstance(loader, DataLoader):  # without workers, which would be started only for this
        loader = copy.copy(loader)
        forget_workers(loader)
        alone = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}
        vars(loader).update(alone, persistent_workers=False)
    for batch in loading.rest(loading.begin(loader)):
        yield (), partial([batch].__getitem__, 0), None
        del batch


def _known_costs(order: Any) -> Sequence[float] | None:
    """Return the costs of the batches in the next pass from the sampler's `batch_costs`, if any."""
    # Costs only compare batches, such as rows × the length of the longest row.
    if isinstance(order, SharedSampler):
        costs = _known_costs(order.sampler)
        return None if costs is None else list(costs)[order.rank :: order.world_size]
    known: Sequence[float] | None = getattr(order, "batch_costs", lambda: None)()
    return known


def _make(loader: DataLoader[Any], rows: Any) -> Any:
    """Make a batch from the indices of its rows like torch's loader."""
    with on_host():
        dataset: Any = loader.dataset
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[rows])
        if callable(getattr(dataset, "__getitems__", None)):
            return loader.collate_fn(dataset.__getitems__(rows))
        return loader.collate_fn([dataset[row] for row in rows])


def _begins_again(loader: Any) -> bool:
    """Whether each pass over a loader starts from the beginning.

    >>> _begins_again([1, 2]), _begins_again(iter([1, 2]))
    (True, False)
    """
    if isinstance(loader, Iterator):
        return False
    if _known_order(loader) is not None:
        return True
    source = loader.dataset if isinstance(loader, DataLoader) else loader
    with undisturbed(source):
        return iter(source) is not iter(source)


@contextlib.contextmanager
def undisturbed(loader: Any, *others: object) -> Iterator[None]:
    """Restore random number generators and the attributes of a loader's parts after the block.

    >>> import random
    >>> order = torch.utils.data.SequentialSampler(range(3))
    >>> order.mood = ["calm"]
    >>> with undisturbed(torch.utils.data.DataLoader(range(3), sampler=order)):
    ...     _ = order.mood.append("excited"), random.random(), setattr(order, "epoch", 1)
    >>> order.mood, hasattr(order, "epoch")
    (['calm'], False)
    """
    state = rng_state()
    dataset = getattr(loader, "dataset", None)
    named: dict[str, Any] = {f"others[{index}]": each for index, each in enumerate(others)}
    samplers = dict(zip(("sampler", "batch_sampler"), loading.samplers_of(loader), strict=False))
    owners = named | samplers
    owners |= {name: e for name, e in walk(samplers, kinds_of_loading) if isinstance(e, Sampler)}
    # As roots, so that orders are captured at any length.
    attributes = {
        f"{name}.{key}": value
        for name, owner in owners.items()
        for key, value in getattr(owner, "__dict__", {}).items()
    }
    generators = generators_in({"loader": loader, **named}, kinds_of_loading)
    # Data sets are not copied, and neither are models that a callback holds.
    kept = [
        capture(owners | attributes, skip=(nn.Module, Dataset, dataset)),
        capture({"loader": loader, "dataset": dataset, **generators}, skip=_DATA),
    ]
    try:
        yield
    finally:
        for each in kept:
            each.put_back()
        restore_rng_state(state)


_DATA = (Tensor, np.ndarray, nn.Module, list, tuple, dict, set, frozenset, deque)


@dataclass(frozen=True, kw_only=True)
class _RehearsedBatch:
    """A batch of this rank that was run before the first step."""

    batch: _CostlyBatch | None  # None on a rank that has fewer of them
    loader: str
    cut: Sizes
    ooms: int
    peak_bytes: int | None

    def __str__(self) -> str:
        text = f"{self.batch or f'no batch of {self.loader}'}: {self.cut}"
        if self.peak_bytes is not None:
            text += f", peak {format_bytes(self.peak_bytes)}"
        return text + (f", after {count_of(self.ooms, 'OOM')}" if self.ooms else "")


@dataclass(frozen=True, kw_only=True)
class RehearsalReport:
    """The result of a rehearsal.

    Attributes:
        batches: the rehearsed batches, the costliest of each loader first.
        looked_at: description of the scanned batches by loader.
        unknown: descriptions of everything that was not rehearsed or scanned, with the reason.
    """

    batches: list[_RehearsedBatch] = field(default_factory=list)
    looked_at: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def ooms(self) -> int:
        """Number of attempts that ran out of memory, as they would have in the run."""
        return sum(each.ooms for each in self.batches)

    def brief(self) -> str:
        """Summarize the report in one line.

        >>> RehearsalReport().brief()
        'nothing'
        """
        parts = []
        for loader, looked_at in self.looked_at.items():
            own = [each for each in self.batches if each.loader == loader]
            if own:
                least = min((each.cut for each in own), key=lambda cut: cut.microbatch_size)
                parts.append(
                    f"the costliest {len(own)} of {looked_at} of {loader} fit, with "
                    f"{count_of(least.microbatch_size, least.unit.removesuffix('s'))} or more, "
                    f"after {count_of(sum(each.ooms for each in own), 'OOM')}"
                )
        return "; ".join([*parts, *self.unknown]) or "nothing"


@dataclass(kw_only=True, eq=False)
class Rehearsal:
    """Runs the costliest batches before the first step of a run and rolls them back."""

    step: TrainingStep
    feed: Feed
    evaluations: EvaluationPlan
    count_rows: Callable[[Any], int]
    report: RehearsalReport | None = None
    at: str | None = None

    def run(self) -> None:
        """Rehearse and report the result; all ranks must call this."""
        context, report = self.step.context, RehearsalReport()
        self.at = "in the rehearsal before the first step"
        try:
            self._train(report)
            why = self.step.microbatcher.why_not_reserved
            if why is not None:
                report.unknown.append(f"the optimizer's first step needs unknown memory ({why})")
            for evaluation in self.evaluations:
                if evaluation.happens_at_end:
                    self._evaluate(evaluation, report)
        finally:
            reset_peak(context.run.device)  # so that the run has its own peak
        self.at, self.report = None, report
        for each in report.unknown:
            context.progress.line(f"rehearsal: {each}")
        context.tell("rehearsal_end", report)

    def _train(self, report: RehearsalReport) -> None:
        context = self.step.context
        most, size, loader = context.run.max_duration, self.feed.group_size, self.feed.loader
        most_batches = most.value * size if most.unit is Unit.BATCHES else None
        # From the second batch on, the gradients of earlier ones take memory next to it.
        copies = min(2, size)

        def run(batch: Any) -> StepResult:
            batches = [] if batch is None else [batch] * copies
            return self.step.microbatcher.accumulate(batches, self.step.metrics.metrics)

        with undisturbed(loader, *context.callbacks.transforming):
            epoch, name = context.state.epoch, "train_dataloader"
            scan = self._scan(loader, name, report, epoch=epoch, most_batches=most_batches)
            report.batches.extend(self._twice(scan, run, self.step.microbatcher))

    def _evaluate(self, evaluation: Evaluation, report: RehearsalReport) -> None:
        name, microbatcher = evaluation.loader_name, evaluation.microbatcher
        loader = evaluation.dataloader
        if not _begins_again(loader):
            report.unknown.append(f"{name} was not checked: it can be iterated only once")
            return

        def run(batch: Any) -> EvalResult:
            return microbatcher.evaluate(batch, evaluation.metrics.metrics)

        with undisturbed(loader):
            scan = self._scan(loader, name, report, most_batches=evaluation.max_batches)
            # In the run, the optimizer's state is on the device during evaluations.
            self.step.microbatcher.hold_reservation()
            try:
                with microbatcher.evaluating():
                    report.batches.extend(self._twice(scan, run, microbatcher, phase="eval"))
            finally:
                self.step.microbatcher.release_reservation()

    def _scan(self, loader: Any, name: str, report: RehearsalReport, **limits: Any) -> _Scan:
        progress = self.step.context.progress
        progress.doing(f"rehearsal: finding the costliest batches of {name}")
        scan = find_costliest(loader, name, rows_of=self.count_rows, **limits)
        report.looked_at[name] = str(scan)
        # Printed before any of the batches can fail.
        progress.line(f"rehearsal: the costliest of {scan} of {name}")
        if not scan.is_complete:
            report.unknown.append(
                f"unchecked batches of {name} may be costlier ({scan} were checked). Use a batch "
                "sampler with batch_costs(), which knows the costs of all batches"
            )
        return scan

    def _twice(
        self, scan: _Scan, run: _Run, microbatcher: Microbatcher, *, phase: str = "train"
    ) -> Iterator[_RehearsedBatch]:
        """Find the size of each batch, then run all again with the sizes learned from all."""
        copies = min(2, self.feed.group_size) if phase == "train" else 1
        # A rank with fewer batches takes part without rows.
        number = int(self.step.context.ranks.most(float(len(scan.batches))))
        chosen = [*scan.batches, *[None] * (number - len(scan.batches))]
        found = list[list[StepResult | EvalResult]]()
        for each in (partial(_settled, run), run):  # the second tries no larger sizes, as the run
            with microbatcher.rehearsing():
                found.append([self._try(this, scan, each, phase=phase) for this in chosen])
        for this, before, result in zip(chosen, *found, strict=True):
            cut = dataclasses.replace(
                Sizes.of(result),
                num_rows=result.num_samples // copies,
                num_microbatches=result.num_microbatches // copies,
            )
            ooms, peak = before.ooms + result.ooms, result.peak_bytes
            rehearsed = _RehearsedBatch(
                batch=this, loader=scan.name, cut=cut, ooms=ooms, peak_bytes=peak
            )
            self.step.context.progress.line(f"  {rehearsed}")
            yield rehearsed

    def _try(
        self, this: _CostlyBatch | None, scan: _Scan, run: _Run, *, phase: str
    ) -> StepResult | EvalResult:
        context = self.step.context
        batch = None if this is None else this.make()
        if batch is not None and phase == "train":
            batch = context.callbacks.transform(context.run, batch)
        which = this or f"no batch of {scan.name}"
        self.at = f"in the rehearsal before the first step, {which}, of the costliest of {scan}"
        context.progress.doing(self.at)
        given = [] if batch is None else [batch]
        with context.failures.kept(given, phase=phase, where=self.at):
            return run(batch)


def _settled(run: _Run, batch: Any) -> StepResult | EvalResult:
    """Run a batch until its size settles; return the last result with all failed sizes."""
    failed, sizes = list[int](), set[int]()
    for _ in range(MOST_TRIES):
        result = run(batch)
        failed += result.failed_sizes
        is_new = result.microbatch_size not in sizes
        sizes.add(result.microbatch_size)
        if not (is_new or result.ooms or result.is_measuring):
            break
    return dataclasses.replace(result, failed_sizes=tuple(failed))
