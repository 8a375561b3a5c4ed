"""Training, or evaluation: sizes of its own, and what was learned of the model meanwhile."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from automicro.batch.device import InputGuard, InputWatch
from automicro.batch.tensors import Contents
from automicro.errors import SizeCacheWarning, describe_error, warn
from automicro.memory.device import use_libraries
from automicro.memory.meter import Meter
from automicro.modules import ModuleIndex, comparing_rows
from automicro.nested.split import NestedSplit
from automicro.policy.policy import Policy
from automicro.ranks.interface import OneRank, Ranks, Sync, announcing_failure
from automicro.reach import Reach
from automicro.remembered.cache import RememberedSize, RunKey, SizeCache
from automicro.savers.levels import Level
from automicro.state.part import State, taking_shapes
from automicro.step.metrics import Metrics, flatten_metrics
from automicro.step.plan import CutRule, Finished, ReadBatch, Step
from automicro.step.unit import ROWS
from automicro.transaction.rng import RandomState, devices_of
from automicro.transaction.transaction import Part, Transaction

logger = logging.getLogger(__name__)

# Batches of varying length have a size each: what is remembered of them changes by this share.
CHANGE = 0.05


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

# What a policy may choose beside size and level, by the names that people read.
SYNC, FINER = "sync", "parts finer by"


def choices(nested: Iterable[NestedSplit], ranks: Ranks) -> dict[str, Sequence[float | str]]:
    """What there is to choose for the sake of time, the least memory first."""
    found: dict[str, Sequence[float | str]] = {}
    if ranks.sync is Sync.LAST:
        found[SYNC] = ("each", "last")
    if any(each.adapts for each in nested):
        found[FINER] = (16.0, 4.0, 1.0)
    return found


class Recollection:
    """What one phase of a run takes from the cache of sizes, and gives to it.

    Nothing in it can stop a run: whatever goes wrong is one `SizeCacheWarning`, and the run goes
    on without remembering.

    Args:
        describe: ``describe(shapes, rows=…)`` is the key of a run, from its first batch.
        shapes: of a batch; see `describe_shapes`.
    """

    def __init__(
        self, describe: Callable[..., RunKey], shapes: Callable[[Any], Mapping[str, str]]
    ) -> None:
        self._describe = describe
        self._shapes = shapes
        self._has_asked = False
        self._cache: SizeCache | None = None  # None where nothing is remembered
        self._key: RunKey
        self._varies = False  # batches of several shapes were seen
        self._written: tuple[object, ...] | None = None
        self._row_cost: float | None = None
        self._size: int | None = None
        # While lengths vary: the most elements of a microbatch that fitted, of batches that were
        # cut if any was.
        self._elements = 0.0
        self._has_cut = False

    def look_up(
        self, batch: ReadBatch | None, policy: Policy, *, is_new: bool, ranks: Ranks
    ) -> int | None:
        """Let a policy start from what is remembered, at the first batch of a new run.

        Returns the rows that it starts from, None where nothing was recalled.

        Args:
            batch: that comes next; None where this rank has none. While the cost of a row stays,
                shapes are not read, which takes longer.
            policy: of the sizes; told where it can be.
            is_new: whether nothing was found yet, here or in a checkpoint.
            ranks: that all start from what the first of them remembers.
        """
        row_cost = None if batch is None else batch.cost
        if self._has_asked:
            is_same = row_cost is not None and row_cost == self._row_cost
            if self._cache is not None and not (self._varies or is_same or batch is None):
                with self._going_on():
                    self._varies = self._shapes(batch.batch) != self._key.shapes
                if self._varies:
                    self._key, self._written = self._key.with_any_shape(), None
            return None
        self._row_cost = row_cost
        with announcing_failure(ranks):
            size, cost, level = 0.0, 0.0, 0.0
            if ranks.rank == 0 and batch is not None:
                with self._going_on():
                    size, cost, level = self._recall(batch, policy.levels)
        if not ranks.is_alone:
            size, cost, level = ranks.from_first([size, cost, level])
        self._has_asked = True
        if not size or not is_new:
            return None
        at = {"level": int(level)} if level else {}
        if not policy.suggest(int(size), cost or None, **at):
            return None
        logger.info(
            "starting from %d rows per microbatch%s, which an earlier run found; "
            '"automicro cache" lists what is remembered',
            int(size),
            f", {policy.levels[int(level)]}" if level else "",
        )
        return int(size)

    def _recall(self, batch: ReadBatch, levels: Sequence[str]) -> tuple[float, float, float]:
        """Rows, cost of a row and level that are remembered; zeros where nothing is of use."""
        self._key = self._describe(self._shapes(batch.batch), rows=batch.num_rows)
        self._cache = SizeCache()
        recalled = self._cache.find(self._key)
        if recalled is None:
            return 0.0, 0.0, 0.0
        self._written = self._content(recalled)
        is_whole = recalled.level == levels[0] and recalled.microbatch_size >= batch.num_rows
        # The whole batch comes first anyway, and longer rows may fit as well.
        if is_whole or recalled.level not in levels:
            return 0.0, 0.0, 0.0
        level = levels.index(recalled.level)
        return float(recalled.microbatch_size), recalled.cost_per_row or 0.0, float(level)

    def take_down(self, finished: Finished[Any]) -> None:
        """Remember the size of a step, once it is settled.

        While all batches have one shape, two in a row had it. Where lengths vary, it is the
        largest that fitted, in elements, until one of no more than these fails.
        """
        before, self._size = self._size, finished.microbatch_size
        if self._cache is None or not finished.is_committed or not finished.cuts:
            return
        if finished.plan.is_measuring or finished.plan.unit != ROWS:
            return
        widest = max(finished.cuts, key=lambda cut: cut.largest * (cut.row_cost or 1))
        if self._varies:
            cost = widest.row_cost or 1.0
            failed = [each * cost for each in finished.failed_sizes]
            if not self._is_news(widest.largest * cost, failed, is_cut=widest.is_split):
                return
        elif before != self._size:
            return
        # Batches of other rows, such as the last one of an epoch, say nothing of this key.
        if widest.num_rows != self._key.rows:
            return
        with self._going_on():
            measured = finished.measured
            found = RememberedSize(
                key=self._key,
                microbatch_size=widest.largest,
                cost_per_row=widest.row_cost or None,
                peak_bytes=None if measured is None else measured.peak_bytes,
                level=finished.level_name,
            )
            if self._content(found) != self._written:
                self._written = self._content(found)
                self._cache.remember(found)

    def _content(self, size: RememberedSize) -> tuple[object, ...]:
        """What makes two sizes the same: where lengths vary, as many rows may be longer ones."""
        return size.microbatch_size, size.cost_per_row if self._varies else None, size.level

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except SizeCacheWarning:  # one of those that the user wants as errors
            raise
        except Exception as error:
            self._cache = None
            warn(
                f"microbatch sizes are not remembered in this run ({describe_error(error)}); it "
                "finds them by itself, and remember_sizes=False says nothing of it",
                SizeCacheWarning,
            )

    def _is_news(self, elements: float, failed: Sequence[float], *, is_cut: bool) -> bool:
        if is_cut < self._has_cut:
            return False  # a batch that went whole tells less than one that did not
        if is_cut > self._has_cut or min(failed, default=math.inf) <= self._elements:
            self._has_cut, self._elements = is_cut, 0.0
        if elements <= self._elements * (1 + CHANGE):
            return False
        self._elements = elements
        return True


class Spare(Protocol):
    """Rows that a rank runs fillers on."""

    @property
    def is_lacking(self) -> bool:
        """Whether this rank has none."""

    def pass_on(self, donor: int) -> None:
        """Give those of one rank to all that have none. All ranks call it."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What training and evaluation have in common.

    Attributes:
        modules: everything that takes part.
        device: where they compute.
        ranks: that run steps together.
        reach: modules and generators that the caller's functions get at by themselves.
        spare: rows for the fillers of a rank that has none; None where there are no ranks.
        repeatable: whether sizes may not depend on how long attempts took.
        roots: modules, functions and further values, by name, whose state an attempt may change.
        own_parts: further state that the caller puts back.
        nested: parts of the modules that have a size of their own.
    """

    modules: Sequence[nn.Module]
    device: torch.device
    ranks: Ranks = field(default_factory=OneRank)
    reach: Reach = field(default_factory=lambda: Reach({}))
    spare: Spare | None = None
    repeatable: bool = False
    roots: Mapping[str, Any] = field(default_factory=dict)
    own_parts: Sequence[Part] = ()
    nested: Callable[[], Collection[NestedSplit]] = tuple

    @functools.cached_property
    def index(self) -> ModuleIndex:
        """All that the modules hold."""
        return ModuleIndex(self.modules, self.reach.modules)

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All that draw and compute, the main one first."""
        return devices_of([*self.modules, *self.reach.modules().values()], self.device)


_DECLARED = ("state", "metrics")


class Phase:
    """Training, or evaluation: its sizes, and what outlives its steps.

    Args:
        name: ``"train"`` or ``"eval"``.
        policy: proposes sizes.
        shared: with the other phase.
        strict_divisible: whether a batch must be a multiple of the size.
        unit: what sizes are counted in, in the plural.
        recollection: of sizes that earlier runs found; None for none.
        levels: at which microbatches can be computed, as the policy's.

    Attributes:
        name: as given.
        policy: as given.
        size: of the largest microbatch of the last batch, in rows or the unit of sizes; None before
            the first.
        rule: turns sizes into slices.
        device: where the modules compute.
        ranks: that run steps together.
        reach: as shared.
        spare: as shared.
        is_training: whether gradients are computed.
        is_rehearsing: whether steps leave no trace but what is learned of sizes; see `rehearsing`.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        shared: Shared,
        *,
        strict_divisible: bool = False,
        unit: str = ROWS,
        recollection: Recollection | None = None,
        levels: Sequence[Level] = (),
    ) -> None:
        self.policy = policy
        self._levels = levels
        self.size: int | None = None
        self.rule = CutRule(strict_divisible=strict_divisible, unit=unit)
        self.device, self.ranks = shared.device, shared.ranks
        self.reach, self.spare = shared.reach, shared.spare
        self.is_training = name == "train"
        self.is_repeatable = shared.repeatable
        self._meter = Meter(
            shared.devices,
            repeatable=shared.repeatable,
            left_free=shared.ranks.communication_share,
        )
        self.name = name
        self._shared = shared
        self._recollection = recollection
        self._is_new = True
        self._has_run = False
        self._nested_ooms = 0  # inside of parts, before the step that runs
        self.is_rehearsing = False
        self._updated = updated = dict[str, Any]()  # shared, for holding the phase would be a cycle
        self._state = State(lambda: {**shared.roots, **updated}, declared=_DECLARED)
        self._beside = State(lambda: shared.roots)
        self._inputs = InputGuard()

    def __repr__(self) -> str:
        size = "" if self.size is None else f", last {self.size} {self.rule.unit}"
        return f"microbatch_size={self.policy!r}{size}, device={str(self.device)!r}"

    @property
    def adapts(self) -> bool:
        """Whether sizes may change."""
        return self.policy.adapts

    @property
    def meter(self) -> Meter | None:
        """What measures attempts, where anything may follow from that."""
        is_used = self.policy.adapts or self.is_rehearsing or self.fits_overhead
        return self._meter if is_used else None

    @property
    def fits_overhead(self) -> bool:
        """Whether seconds are measured for what a slice costs whatever it holds."""
        if self.rule.unit == ROWS or self.is_repeatable:
            return False
        return self.rule.overhead.wants_seconds

    def state_dict(self) -> dict[str, Any]:
        """What was found, as plain values."""
        state = {"policy": self.policy.state_dict(), "min_rows": self.rule.min_rows}
        if self.rule.unit != ROWS:
            failed = None if math.isinf(self.rule.failed) else self.rule.failed
            overhead = self.rule.overhead.state_dict()
            state |= {"unit": self.rule.unit, "overhead": overhead, "failed": failed}
        if self.is_training and self.ranks.whole_fits_below:
            state["whole_fits_below"] = sorted(map(list, self.ranks.whole_fits_below.items()))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was found earlier.

        Raises:
            ValueError: a state of another policy, or of sizes in another unit.
        """
        unit = state.get("unit", ROWS)
        if unit != self.rule.unit:
            raise ValueError(
                f"the sizes of this state are {unit}, and those of this run {self.rule.unit}; "
                "give the microbatch_unit that it was saved with, or leave the state out"
            )
        if "overhead" in state:
            self.rule.overhead.load_state_dict(state["overhead"])
            failed = state.get("failed")
            self.rule.failed = math.inf if failed is None else failed
        self.policy.load_state_dict(state["policy"])
        self._is_new = False
        self.rule.min_rows = state["min_rows"]
        if self.is_training:
            self.ranks.whole_fits_below = dict(map(tuple, state.get("whole_fits_below", [])))

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Roll back every step that goes through, tell nobody, and remember nothing of it."""
        before, self.size = self.size, None
        self.is_rehearsing = True
        try:
            yield
            if self.size is not None:  # it ran
                self.policy.take_rehearsal()
        finally:
            self.is_rehearsing, self.size = False, before

    def watch(self, batches: Sequence[Contents]) -> InputWatch:
        """Guard the batches of a step against a model that writes into its input."""
        return InputWatch(self._inputs, batches, self.device)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let no state and no random number show what a forward beside the step's own does."""
        transaction = Transaction([self._beside, self.random_state()])
        transaction.begin()
        yield  # where it fails, the whole attempt is rolled back
        transaction.roll_back()

    def initializing(self) -> contextlib.AbstractContextManager[None]:
        """Let modules take their shapes meanwhile, and nothing else change that is there."""
        modules = (module for _, module in self._shared.index.owners)
        return taking_shapes(modules, self.reach.generators())

    def random_state(self) -> RandomState:
        """The generators of the process and of its devices."""
        return RandomState(self._shared.devices)

    def arrange(self, settings: Mapping[str, float | str]) -> None:
        """Let the next attempt run as a policy says beside size and level; see `choices`."""
        if SYNC in settings:
            is_last = settings[SYNC] == "last"
            self.ranks.sync = Sync.LAST if is_last else Sync.REPLICAS_LAST
        if FINER in settings:
            for nested in self._shared.nested():
                nested.finer = int(settings[FINER])

    def applying(self, level: int) -> contextlib.AbstractContextManager[None]:
        """Around what computes the microbatches of an attempt."""
        return self._levels[level].applied() if level else _NOTHING

    def has_smaller_parts(self) -> bool:
        """Whether the memory that has run out was that of parts, which have smaller sizes now."""
        took = [nested.took_shortage() for nested in self._shared.nested()]  # all are asked
        return any(took)

    def cuts_whole_parts(self) -> bool:
        """Whether parts that ran in one piece, and kept what they computed, have slices now.

        On several ranks none has: they would have to agree.
        """
        if not (self.is_training and self.ranks.is_alone):
            return False
        cut = [nested.cut_what_was_whole() for nested in self._shared.nested()]  # all of them
        return any(cut)

    def nested_counts(self) -> tuple[dict[str, int], int]:
        """What there is to tell of the parts with a size of their own, once a step is over.

        Returns:
            The rows of the largest slice of each in its last call, by its name, and how often
            memory ran out inside of them since the step began.
        """
        nested = self._shared.nested()
        if not nested:
            return {}, 0
        sizes = {each.name: max(each.sizes) for each in nested if each.sizes}
        return sizes, sum(each.ooms for each in nested) - self._nested_ooms

    @property
    def compares_rows(self) -> bool:
        """Whether batches have to stay whole, as a module says of itself."""
        return comparing_rows(self._shared.modules) is not None

    def metrics(self, metrics: Any) -> Metrics:
        """What is updated with the rows of one step."""
        with announcing_failure(self.ranks):
            return Metrics(flatten_metrics(metrics))

    def state(self, metrics: Any = None) -> State:
        """Everything that a step can reach, with what the metrics count."""
        found = flatten_metrics(metrics)
        self._updated.clear()
        self._updated |= {f"metrics[{index}]": each for index, each in enumerate(found)}
        return self._state

    def own_parts(self) -> list[Part]:
        """Further state that the caller puts back."""
        return list(self._shared.own_parts)

    def begin(self, step: Step) -> int | None:
        """A step is about to be attempted; the rows that it starts from, if an earlier run says."""
        recalled: int | None = None
        if self._recollection is not None and self.adapts and not self.is_rehearsing:
            first = step.batches[0] if step.batches else None
            recalled = self._recollection.look_up(
                first, self.policy, is_new=self._is_new, ranks=self.ranks
            )
        self._nested_ooms = 0
        for nested in self._shared.nested():
            nested.sizes = []  # a part may not be called at all, as a tail is not in evaluation
            self._nested_ooms += nested.ooms
        if not self._has_run:
            self._has_run = True
            use_libraries(self._shared.devices, self._shared.modules)
        self._is_new = False
        if not self.is_rehearsing:  # it counts the batches of the run
            self.reach.step()
        return recalled

    def end(self, finished: Finished[Any]) -> None:
        """It is done: learn from it."""
        self.size = finished.microbatch_size
        if self.is_rehearsing:
            return
        self._learn_overhead(finished)
        if self._recollection is not None and self.adapts:
            self._recollection.take_down(finished)

    def _learn_overhead(self, finished: Finished[Any]) -> None:
        measured = finished.measured
        if measured is None or not self.fits_overhead or not measured.has_waited:
            return
        if finished.attempts > 1 or not finished.cuts:
            return  # memory that was given back is asked for anew
        packed = [(cut.packing, cut.sizes) for cut in finished.cuts if cut.packing is not None]
        self.rule.overhead.record(
            seconds=measured.seconds,
            slices=finished.plan.num_microbatches,
            padded=sum(packing.padded(sizes) for packing, sizes in packed),
        )
