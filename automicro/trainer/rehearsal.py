"""Rehearsal: run the costliest batches before the first step and roll them back.

They are found in a pass over the loader that leaves its state unchanged.
"""

import contextlib
import copy
import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from automicro.batch.device import on_host
from automicro.batch.layout import describe_cut
from automicro.batch.tensors import Contents
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.errors import BatchError
from automicro.memory.device import reset_peak
from automicro.microbatcher import Microbatcher
from automicro.options import check_choice
from automicro.reach import generators_in, kinds_of_loading
from automicro.state.capture import capture
from automicro.step.results import EvalResult, StepResult
from automicro.torch_private import forget_workers
from automicro.trainer.context import RunContext
from automicro.trainer.data.loading import (
    announce_epoch,
    batch_order,
    begin,
    num_batches,
    rest,
    samplers_of,
)
from automicro.trainer.data.sharing import SharedSampler
from automicro.trainer.evaluation import Evaluation
from automicro.trainer.metrics import MetricSet
from automicro.trainer.progress import count_of
from automicro.units import Unit, format_bytes
from automicro.values import walk

MODES = ("worst",)
COSTLIEST = 3
"""Batches that are taken for the costliest; the one of the longest rows comes beside them."""
CLASSES = 4
"""Of so many doublings of the longest rows the costliest batch comes beside these."""
SCANNED_BATCHES = 512
SCANNED_SECONDS = 30.0
# A batch is repeated until its size settles, so that larger sizes are tried here, not in the run.
MOST_TRIES = 8
SHOWN_ROWS = 8

_Run: TypeAlias = Callable[[Any], StepResult | EvalResult]


def read_rehearsal(rehearse: str | None) -> str | None:
    """Check the ``rehearse`` argument of the `Trainer`.

    >>> read_rehearsal("worst"), read_rehearsal(None)
    ('worst', None)
    """
    return None if rehearse is None else check_choice("rehearse", rehearse, MODES)


@runtime_checkable
class _KnowsCosts(Protocol):
    """A batch sampler that knows the costs of its batches without loading rows."""

    def batch_costs(self) -> Sequence[float] | None:
        """Return the cost of each batch of this rank in the next pass, in order; None if unknown.

        Costs only compare batches, such as rows × the length of the longest row.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class _CostlyBatch:
    """One of the costliest batches of a pass, created by ``make``."""

    index: int
    cost: float
    row_cost: float
    rows: tuple[Any, ...]
    make: Callable[[], Any]


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
    most_seconds: float = SCANNED_SECONDS,
) -> _Scan:
    """Find the costliest batches of the next pass over a loader; call this inside `undisturbed`.

    >>> batches = [torch.zeros(2, 3), torch.zeros(2, 9), torch.zeros(2, 5)]
    >>> scan = find_costliest(batches, "train_dataloader")
    >>> [(each.index, each.cost) for each in scan.batches][0], str(scan)
    ((1, 18.0), 'all 3 batches')
    """
    # A sampler with `batch_costs` gives the costs. Otherwise batches are made in this process, from
    # the indices of the sampler if possible, up to a limit of batches and time.
    total = num_batches(loader)
    if most_batches is not None:
        total = most_batches if total is None else min(total, most_batches)
    announce_epoch(loader, epoch)
    most_made = SCANNED_BATCHES if total is None else min(SCANNED_BATCHES, total)
    start, seen, found = time.monotonic(), 0, list[_CostlyBatch]()
    for rows, make, known_cost in _pass_of(loader, name, total):
        listed, cost = tuple(rows) if isinstance(rows, list | tuple) else (rows,), known_cost
        num_rows = len(listed)
        if cost is None:
            batch = make()
            cost, num_rows = float(Contents(batch).num_elements), 1
            with contextlib.suppress(BatchError):  # it might have rows only after a callback
                num_rows = 1 if rows_of is None else rows_of(batch)
            del batch
        row_cost = cost / max(1, num_rows)
        this = _CostlyBatch(index=seen, cost=cost, row_cost=row_cost, rows=listed, make=make)
        found, seen = _costliest([*found, this]), seen + 1
        is_late = time.monotonic() - start >= most_seconds
        if known_cost is None and (seen >= most_made or is_late):
            break
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
"""The rows of a batch, what makes it, and its cost; None where they are not known before."""


def _known_order(loader: Any) -> Iterable[Any] | None:
    """Return the sampler that yields the indices of each batch, if any."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return batch_order(loader)


def _pass_of(loader: Any, name: str, total: int | None) -> Iterator[_Made]:
    """Yield the batches of a pass in this process, from their indices or by iteration."""
    order = _known_order(loader)
    if order is not None:
        # As at the start of a pass, where the loader draws a seed before the sampler draws.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        known = _known_costs(order)
        costs = itertools.repeat(None) if known is None else map(float, list(known)[:total])
        for cost, rows in zip(costs, order, strict=False):
            yield rows, partial(_make, loader, rows), cost
        return
    if not _begins_again(loader):
        owner = loader.dataset if isinstance(loader, DataLoader) else loader
        raise ValueError(
            f"rehearse='worst' looks for the costliest batches before the first step, and {name} "
            f"({type(owner).__name__}) can be passed over only once, so they would be missing in "
            "the run; pass what begins again with each pass, such as a DataLoader over a data set "
            "with a length, or leave rehearse out"
        )
    if isinstance(loader, DataLoader):  # without workers, which would be started only for this
        loader = copy.copy(loader)
        forget_workers(loader)
        alone = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}
        vars(loader).update(alone, persistent_workers=False)
    for batch in rest(begin(loader)):
        yield (), partial(operator.itemgetter(0), [batch]), None
        del batch


def _known_costs(order: Any) -> Sequence[float] | None:
    if isinstance(order, SharedSampler):
        costs = _known_costs(order.sampler)
        return None if costs is None else list(costs)[order.rank :: order.world_size]
    return order.batch_costs() if isinstance(order, _KnowsCosts) else None


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
    # Covers the generators of the process, the loader, its data set and its samplers, and their
    # attributes. For samplers, this includes the contents of lists, arrays and dicts.
    state = rng_state()
    dataset = getattr(loader, "dataset", None)
    sampler, batch_sampler, _ = samplers_of(loader)
    owners = {"sampler": sampler, "batch_sampler": batch_sampler}
    order = walk(owners, kinds_of_loading)
    owners |= {name: each for name, each in order if isinstance(each, Sampler)}
    named = {f"others[{index}]": each for index, each in enumerate(others)}
    owners |= named
    attributes = {
        f"{name}.{key}": value
        for name, owner in owners.items()
        for key, value in getattr(owner, "__dict__", {}).items()
    }
    arrays = {name: each for name, each in attributes.items() if isinstance(each, _ARRAYS)}
    generators = generators_in({"loader": loader, **named}, kinds_of_loading)
    kept = [
        capture(arrays),
        capture(owners | attributes, skip=(*_ARRAYS, nn.Module, Dataset, dataset)),
        capture({"loader": loader, "dataset": dataset, **generators}, skip=_DATA),
    ]
    try:
        yield
    finally:
        for each in kept:
            each.put_back()
        restore_rng_state(state)


# Data sets are not copied, and neither are models that a callback holds.
_ARRAYS = (Tensor, np.ndarray)
_DATA = (*_ARRAYS, nn.Module, list, tuple, dict, set, frozenset, deque)


@dataclass(frozen=True, kw_only=True)
class _RehearsedBatch:
    """A batch of this rank that was run before the first step."""

    loader: str
    index: int | None
    dataset_rows: tuple[Any, ...]
    rows: int
    cost: float
    microbatch_size: int
    microbatch_unit: str
    num_microbatches: int
    ooms: int
    peak_bytes: int | None

    def __str__(self) -> str:
        unit, size = self.microbatch_unit, self.microbatch_size
        cut = describe_cut(self.rows, size, self.num_microbatches, unit=unit)
        if unit == "rows":
            cut += " row" if self.rows == 1 else " rows"
        text = f"{_name(self.loader, self.index, self.dataset_rows)}: {cut}"
        if self.peak_bytes is not None:
            text += f", peak {format_bytes(self.peak_bytes)}"
        if self.ooms:
            text += f", after {count_of(self.ooms, 'OOM')}"
        return text


@dataclass(frozen=True, kw_only=True)
class RehearsalReport:
    """The result of a rehearsal.

    Attributes:
        batches: the rehearsed batches, the costliest of each loader first.
        looked_at: description of the scanned batches by loader.
        unknown: descriptions of everything that was not rehearsed or scanned, with the reason.
    """

    batches: Sequence[_RehearsedBatch]
    looked_at: dict[str, str]
    unknown: Sequence[str]

    @property
    def ooms(self) -> int:
        """Number of attempts that ran out of memory, as they would have in the run."""
        return sum(each.ooms for each in self.batches)

    def brief(self) -> str:
        """Summarize the report in one line.

        >>> RehearsalReport(batches=(), looked_at={}, unknown=()).brief()
        'nothing'
        """
        parts = []
        for loader, looked_at in self.looked_at.items():
            own = [each for each in self.batches if each.loader == loader]
            if own:
                smallest = min(own, key=lambda each: each.microbatch_size)
                size = count_of(
                    smallest.microbatch_size, smallest.microbatch_unit.removesuffix("s")
                )
                ooms = count_of(sum(each.ooms for each in own), "OOM")
                parts.append(
                    f"the costliest {len(own)} of {looked_at} of {loader} fit, with {size} or "
                    f"more, after {ooms}"
                )
        return "; ".join([*parts, *self.unknown]) or "nothing"


@dataclass(kw_only=True, eq=False)
class Rehearsal:
    """Runs the costliest batches before the first step of a run and rolls them back."""

    loader: Any
    microbatcher: Microbatcher
    metrics: MetricSet
    evaluations: Sequence[Evaluation]
    context: RunContext
    count_rows: Callable[[Any], int]
    accumulate_batches: int
    repeatable: bool
    report: RehearsalReport | None = None
    at: str | None = None
    _batches: list[_RehearsedBatch] = field(default_factory=list)
    _looked_at: dict[str, str] = field(default_factory=dict)
    _unknown: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Rehearse and report the result; all ranks must call this."""
        context = self.context
        self.at = "in the rehearsal before the first step"
        try:
            self._train()
            why = self.microbatcher.why_not_reserved
            if why is not None:
                self._unknown.append(f"what the optimizer's first step takes is not known ({why})")
            for evaluation in self.evaluations:
                if evaluation.happens_at_end:
                    self._evaluate(evaluation)
        finally:
            reset_peak(context.device)  # so that the run has its own peak
        self.at = None
        self.report = RehearsalReport(
            batches=tuple(self._batches), looked_at=self._looked_at, unknown=tuple(self._unknown)
        )
        for each in self._unknown:
            context.progress.line(f"rehearsal: {each}")
        context.tell("rehearsal_end", self.report)

    def _train(self) -> None:
        duration, most_batches = self.context.run.max_duration, None
        if duration.unit is Unit.BATCHES:
            most_batches = duration.value * self.accumulate_batches
        # From the second batch on, the gradients of earlier ones take memory next to it.
        copies = min(2, self.accumulate_batches)

        def run(batch: Any) -> StepResult:
            batches = [] if batch is None else [batch] * copies
            return self.microbatcher.accumulate(batches, self.metrics.metrics)

        with undisturbed(self.loader, *self.context.callbacks.transforming):
            epoch = self.context.state.epoch
            scan = self._look(self.loader, "train_dataloader", epoch, most_batches)
            self._twice(scan, run, self.microbatcher, phase="train")

    def _evaluate(self, evaluation: Evaluation) -> None:
        name, microbatcher = evaluation.loader_name, evaluation.microbatcher
        loader = evaluation.dataloader
        if not _begins_again(loader):
            self._unknown.append(f"{name} was not looked at: it can be passed over only once")
            return

        def run(batch: Any) -> EvalResult:
            return microbatcher.evaluate(batch, evaluation.metrics.metrics)

        with undisturbed(loader):
            scan = self._look(loader, name, 0, evaluation.max_batches)
            # In the run, the optimizer's state is on the device during evaluations.
            self.microbatcher.hold_reservation()
            try:
                with microbatcher.evaluating():
                    self._twice(scan, run, microbatcher, phase="eval")
            finally:
                self.microbatcher.release_reservation()

    def _look(self, loader: Any, name: str, epoch: int, most_batches: int | None) -> _Scan:
        progress = self.context.progress
        progress.doing(f"rehearsal: looking for the costliest batches of {name}")
        scan = find_costliest(
            loader,
            name,
            epoch=epoch,
            rows_of=self.count_rows,
            most_batches=most_batches,
            most_seconds=math.inf if self.repeatable else SCANNED_SECONDS,
        )
        self._looked_at[name] = str(scan)
        # Printed before any of the batches can fail.
        progress.line(f"rehearsal: the costliest of {scan} of {name}")
        if not scan.is_complete:
            self._unknown.append(
                f"batches of {name} that were not looked at may be costlier ({scan} were looked "
                "at); a batch sampler with batch_costs() knows them all"
            )
        return scan

    def _twice(self, scan: _Scan, run: _Run, microbatcher: Microbatcher, *, phase: str) -> None:
        """Find the size of each batch, then run all again with the sizes learned from all."""
        with microbatcher.rehearsing():
            first = list(self._each(scan, partial(_settled, run), phase=phase))
        with microbatcher.rehearsing():  # larger sizes are no longer tried, as in the run
            second = self._each(scan, run, phase=phase)
            for before, after in zip(first, second, strict=True):
                self._batches.append(replace(after, ooms=before.ooms + after.ooms))
                self.context.progress.line(f"  {self._batches[-1]}")

    def _each(self, scan: _Scan, run: _Run, *, phase: str) -> Iterator[_RehearsedBatch]:
        context, chosen = self.context, list[_CostlyBatch | None](scan.batches)
        if context.has_peers:  # a rank with fewer batches takes part without rows
            chosen += [None] * (int(context.ranks.most(float(len(chosen)))) - len(chosen))
        for number, this in enumerate(chosen, start=1):
            context.progress.doing(
                f"rehearsal: batch {number} of the costliest {len(chosen)} of {scan.name}"
            )
            batch = None if this is None else this.make()
            if batch is not None and phase == "train":
                batch = context.callbacks.transform(context.run, batch)
            index, rows = (None, ()) if this is None else (this.index, this.rows)
            at = _name(scan.name, index, rows)
            self.at = f"in the rehearsal before the first step, {at}, of the costliest of {scan}"
            given = [] if batch is None else [batch]
            with context.failures.kept(given, phase=phase, where=self.at):
                result = run(batch)
            del given, batch
            copies = min(2, self.accumulate_batches) if phase == "train" else 1
            yield _RehearsedBatch(
                loader=scan.name,
                index=index,
                dataset_rows=rows,
                rows=result.num_samples // copies,
                cost=0.0 if this is None else this.cost,
                microbatch_size=result.microbatch_size,
                microbatch_unit=result.microbatch_unit,
                num_microbatches=result.num_microbatches // copies,
                ooms=result.ooms,
                peak_bytes=result.peak_bytes,
            )


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
    return replace(result, failed_sizes=tuple(failed))


def _name(loader: str, index: int | None, rows: tuple[Any, ...]) -> str:
    """Describe a batch with its rows.

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
