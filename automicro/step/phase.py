"""The phases of a run, training and evaluation, each with its own sizes and measurements."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from automicro.batch.device import InputGuard, InputWatch
from automicro.batch.tensors import Contents
from automicro.memory.device import Meter
from automicro.modules import comparing_rows
from automicro.policy.policy import Policy, make_policy, with_levels
from automicro.ranks.interface import Ranks, Sync
from automicro.state.part import State
from automicro.step.parts import SizedPart
from automicro.step.plan import CutRule, Finished, Step
from automicro.step.setup import Level, Recollection, Setup
from automicro.transaction.rng import RandomState
from automicro.transaction.transaction import Part, Transaction

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

# Choices of a policy besides size and level, by the names that users read.
SYNC, FINER = "sync", "parts finer by"


def choices(nested: Iterable[SizedPart], ranks: Ranks) -> dict[str, Sequence[float | str]]:
    """Return choices that trade memory for time, the least memory first."""
    found: dict[str, Sequence[float | str]] = {}
    # Offered only on request, because whole gradients take much memory.
    if ranks.sync is Sync.LAST:
        found[SYNC] = ("each", "last")
    if any(each.adapts for each in nested):
        found[FINER] = (16.0, 4.0, 1.0)
    return found


def leveled(policy: Policy, levels: Sequence[Level], setup: Setup) -> Policy:
    """Let a policy find the level in addition to the size, if there are several levels."""
    # Slices by cost have rows of different lengths, whose durations are not comparable.
    by_time = setup.levels_by_time and setup.unit.is_rows and not setup.repeatable
    further = choices(setup.parts.all(), setup.ranks)
    if len(levels) > 1 or (further and policy.explores):
        names = [level.name for level in levels]
        return with_levels(policy, names, by_time=by_time, choices=further)
    return policy


def make_phase(name: str, size: Any, setup: Setup, levels: Sequence[Level] = ()) -> "Phase":
    """Make a phase with the policy that a size stands for."""
    unit, argument = setup.unit, "microbatch_size" if name == "train" else "eval_microbatch_size"
    recollection: Recollection | None = None
    # A given number is used as it is: only a size that is searched for is recalled.
    if setup.recollect is not None and isinstance(size, str) and unit.is_rows:
        recollection = setup.recollect(setup, name)
    policy = make_policy(size, name=argument, unit=unit.name, repeatable=setup.repeatable)
    unit.check_policy(policy, argument)
    return Phase(
        name,
        leveled(policy, levels, setup) if levels else policy,
        setup,
        # The last batch of an evaluation has any size, and none of its rows may be dropped.
        rule=unit.rule(strict_divisible=setup.strict_divisible and name == "train"),
        recollection=recollection,
        levels=levels,
    )


_DECLARED = ("state", "metrics")


class Phase:
    """Training, or evaluation: its sizes, and the state that outlives its steps."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        setup: Setup,
        *,
        rule: CutRule,
        recollection: Recollection | None = None,
        levels: Sequence[Level] = (),
    ) -> None:
        self.name, self.policy, self.rule = name, policy, rule
        self._setup, self._levels, self._recollection = setup, levels, recollection
        self.size: int | None = None  # of the largest microbatch of the last batch
        self.device, self.ranks = setup.device, setup.ranks
        self.reach, self.spare = setup.reach, setup.spare
        self.own_parts: Sequence[Part] = setup.own_parts
        self.is_training = name == "train"
        self.is_repeatable = setup.repeatable
        self._meter = Meter(
            setup.devices, repeatable=setup.repeatable, left_free=setup.ranks.communication_share
        )
        # All attempts share it; between them it holds nothing.
        self.random = RandomState(setup.devices)
        self._is_new = True
        self._has_run = False
        self._nested_ooms = 0  # inside parts, before the current step
        self.is_rehearsing = False
        # Shared, because a closure over the phase would be a reference cycle.
        self._updated = updated = dict[str, Any]()
        self._state = State(lambda: {**setup.roots, **updated}, declared=_DECLARED)
        # Separate, because `_state` holds the capture of the attempt while a filler is rolled back.
        self._beside = State(lambda: setup.roots)
        # Shared by all steps: whether a model writes into its input is learned once.
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
        """The meter of attempts; None if its measurements would not be used."""
        is_used = self.policy.adapts or self.is_rehearsing or self.fits_overhead
        return self._meter if is_used else None

    @property
    def fits_overhead(self) -> bool:
        """Whether seconds are measured to learn the fixed cost of a slice."""
        return not self.is_repeatable and self.rule.wants_seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far, as plain values."""
        state = {"policy": self.policy.state_dict(), **self.rule.state_dict()}
        if self.is_training and self.ranks.whole_fits_below:
            state["whole_fits_below"] = sorted(map(list, self.ranks.whole_fits_below.items()))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from sizes that were found earlier."""
        self.rule.load_state_dict(state)
        self.policy.load_state_dict(state["policy"])
        self._is_new = False
        if self.is_training:
            self.ranks.whole_fits_below = dict(map(tuple, state.get("whole_fits_below", [])))

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Roll back every step that succeeds, without events, and remember nothing of it."""
        # A rehearsal must not appear as the size of the last batch.
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
        """Roll back the state and random numbers of a forward that is not part of the step."""
        transaction = Transaction([self._beside, self.random_state()])
        transaction.begin()
        yield  # if it fails, the whole attempt is rolled back
        transaction.roll_back()

    def random_state(self) -> RandomState:
        """Return separate generators, for what is rolled back inside an attempt."""
        return RandomState(self._setup.devices)

    def arrange(self, settings: Mapping[str, float | str]) -> None:
        """Apply the settings that a policy chose to the next attempt; see `choices`."""
        if SYNC in settings:
            is_last = settings[SYNC] == "last"
            self.ranks.sync = Sync.LAST if is_last else Sync.REPLICAS_LAST
        if FINER in settings:
            for nested in self._setup.parts.all():
                nested.finer = int(settings[FINER])

    def applying(self, level: int) -> contextlib.AbstractContextManager[None]:
        """Return the context of a level, for the microbatches of an attempt."""
        return self._levels[level].applied() if level else _NOTHING

    def has_smaller_parts(self) -> bool:
        """Whether parts ran out of memory and now have smaller sizes."""
        return self._setup.parts.took_shortage()

    def cuts_whole_parts(self) -> bool:
        """Whether parts that ran in one piece, keeping their activations, are cut from now on."""
        # Not on several ranks, which would have to agree.
        return self.is_training and self.ranks.is_alone and self._setup.parts.cut_what_was_whole()

    def nested_counts(self) -> tuple[dict[str, int], int]:
        """Return the sizes and OOMs of parts with a size of their own, after a step."""
        nested = self._setup.parts.all()
        if not nested:
            return {}, 0
        # The largest slice decides how much memory a part takes.
        sizes = {each.name: max(each.sizes) for each in nested if each.sizes}
        return sizes, sum(each.ooms for each in nested) - self._nested_ooms

    @property
    def compares_rows(self) -> bool:
        """Whether a module declares that batches have to stay whole."""
        return comparing_rows(self._setup.modules) is not None

    def state(self, metrics: Iterable[Any]) -> State:
        """Return everything that a step can reach, including the counts of the metrics."""
        self._updated.clear()
        self._updated |= {f"metrics[{index}]": each for index, each in enumerate(metrics)}
        return self._state

    def begin(self, step: Step) -> int | None:
        """Prepare a step; return the rows that it starts from, if an earlier run recorded them."""
        recalled: int | None = None
        if self._recollection is not None and self.adapts and not self.is_rehearsing:
            first = step.batches[0] if step.batches else None
            recalled = self._recollection.look_up(
                first, self.policy, is_new=self._is_new, ranks=self.ranks
            )
        self._nested_ooms = 0
        for nested in self._setup.parts.all():
            nested.sizes = []  # a part might not be called, such as a tail in evaluation
            self._nested_ooms += nested.ooms
        if not self._has_run:
            self._has_run = True
            if any(each.type != "cpu" for each in self._setup.devices):
                from automicro.memory.libraries import use_libraries

                # They allocate memory on first use, which would fail in the middle of an attempt.
                use_libraries(self._setup.devices, self._setup.modules)
        self._is_new = False
        if not self.is_rehearsing:  # `reach` counts the batches of the run
            self.reach.step()
        return recalled

    def end(self, finished: Finished[Any]) -> None:
        """Learn from a finished step."""
        self.size = finished.plan.size
        if self.is_rehearsing:
            return
        if finished.measured is not None and self.fits_overhead:
            self.rule.learn(finished)
        if self._recollection is not None and self.adapts:
            self._recollection.take_down(finished)
