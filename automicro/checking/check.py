"""Decide when rows are compared together and in parts, and report differences.

A few rows are compared at batches 1, 2, 4, 8, … and when a batch shows something new; whole split
batches are compared at the first, second, 10th, 100th, …
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.checking.bench import Bench, Conditions, Failed, Wanted, cuts, cuts_of, tried
from automicro.checking.draws import CollectiveError, LossCollectiveError, needs_other_ranks
from automicro.checking.reading import LOSS, SEAM, Reading
from automicro.checking.rows import MOST_ROWS, Forms, is_telling, telling_rows
from automicro.checking.state import Place
from automicro.errors import (
    AutomicroError,
    BatchError,
    BufferWarning,
    LossAverageError,
    LossAverageWarning,
    LossError,
    MetricWarning,
    warn,
)
from automicro.loss.averages import Average, CutBatch, Tokens
from automicro.loss.passes import Computation, Mode
from automicro.memory.oom import Failure, empty_cache
from automicro.torch_private import writes_own_state

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SeenOutputs: TypeAlias = tuple[frozenset[str], dict[str, str]]

_OCCASIONS = (1, 2, *(10**power for power in range(1, 7)))
_FEWER_ROWS = (MOST_ROWS, 4, 2)
_PATIENCE = 4  # fruitless checks before a warning says so
_SHOWN = 5
_SLIGHT = 1e-2  # of the gradient of one parameter


class Occasions:
    """Counter that selects the batches to compare: the first, second, 10th, 100th, … millionth.

    >>> splits = Occasions()
    >>> [splits.is_next() for _ in range(10)].count(True)
    3
    """

    def __init__(self) -> None:
        self._num = self._num_put_off = 0

    def is_next(self) -> bool:
        """Count one batch and return whether it is selected."""
        self._num += 1
        return self._num in _OCCASIONS

    def put_off(self) -> None:
        """Select the next batch instead of this one, a limited number of times."""
        # If there is never enough memory to compare, each attempt would cost time.
        if self._num_put_off < _PATIENCE:
            self._num_put_off += 1
            self._num -= 1


@dataclass(kw_only=True)
class _Track:
    """Results so far of the checks of one kind of forward."""

    forms: Forms = field(default_factory=Forms)  # of batches seen so far
    # Split batches to compare: without outputs, and with outputs.
    splits: tuple[Occasions, Occasions] = field(default_factory=lambda: (Occasions(), Occasions()))
    looks: int = 0  # checks of a few rows
    most_rows: int = MOST_ROWS  # limit for the next check
    failures: int = 0  # checks that failed as the model does on the whole batch
    fruitless: int = 0  # checks that learned nothing
    is_over: bool = False  # no later batch needs a check
    has_named: bool = False  # a warning said that parts do not add up
    is_wrong: bool = False  # parts do not add up, and not because of state
    has_checked: bool = False  # a check showed that parts add up


_DECLARED = "Declare what it averages over (loss_average=…)"
# Ranks would exchange the rows of a microbatch, which are not those of the batch.
_WITHOUT_RANKS = (
    "Leave that out of the loss, compare rows with automicro.Contrastive, keep batches whole with "
    "microbatch_size=None"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check."""

    # "wrong", "nothing" (nothing learned so far), or "unchecked".
    kind: Literal["wrong", "nothing", "unchecked"]
    text: str  # the difference, or the reason why nothing was learned
    is_final: bool = False  # whether later batches cannot show more
    is_slight: bool = False  # whether it might be rounding at a discontinuity, as of a ReLU
    is_state: bool = False  # whether it disappears when every part starts from the same state
    remedy: str = _DECLARED  # for an average that is unchecked


class Checks:
    """Compare rows together and in parts at a Microbatcher's batches, and warn."""

    def __init__(
        self,
        computation: Computation,
        *,
        declared: bool,
        off: bool = False,
        written: MutableMapping[int, Tensor] | None = None,
        refuses: bool = False,
        is_alone: bool = True,
    ) -> None:
        self._computation = computation
        averages = computation.averages.values()
        self._is_known = all(average.is_known for average in averages)
        self._declared = declared
        # A model's own claim might not hold for the loss of a subclass.
        self._is_claimed = not declared and any(
            isinstance(average, Tokens) and average.is_claimed for average in averages
        )
        self._off = off or not is_alone
        self._refuses = refuses
        self._why_not = "" if is_alone else needs_other_ranks()
        self._train, self._eval = (_Track(is_over=off and written is None) for _ in range(2))
        self._output_splits = Occasions()
        self._has_named_outputs = False
        self._has_said_unchecked = off  # the user switched checks off
        self._odd_numbers: set[str] = set()
        self._asked: set[tuple[int, str]] = set()
        # Names of attributes and variables that depend on the number of forwards per batch.
        self.counting: list[str] = []
        # Whether state changed alike in the whole and in parts when a check last saw it change.
        self.adds_up: dict[str, bool] = {}
        # Parameters that a forward wrote to, also if it restored them, by id.
        self.written: MutableMapping[int, Tensor] = {} if written is None else written

    @property
    def loss_average_is(self) -> str:
        """How the average is known: declared, read, checked or unchecked; or that it is wrong."""
        if self._train.is_wrong:
            return "wrong"
        if self._declared:
            return "declared"
        if self._is_known:
            return "read"
        return "checked" if self._train.has_checked else "unchecked"

    def is_over(self, mode: Mode) -> bool:
        """Return whether no later batch needs a check."""
        return self._of(mode).is_over

    # A few rows of a batch that could be split

    def few_rows(
        self,
        batch: Any,
        num_rows: int,
        mode: Mode = "train",
        *,
        multiple: int = 1,
        sizes: Sequence[int] = (),
    ) -> bool:
        """Compare a few rows with two parts of them if a check is due; return whether it was."""
        # All changes are rolled back. If memory runs out, fewer rows are tried, then a later batch.
        track = self._of(mode)
        if track.is_over or num_rows < 2:
            return False
        # A second warning about the same cause would add nothing.
        if self._why_not or (track is self._eval and self._train.is_wrong):
            track.is_over = True
            if self._why_not and track is self._train:
                self._say_unchecked(Finding(kind="unchecked", text=self._why_not, is_final=True))
            return False
        if self._off:
            track.is_over = True
            note = functools.partial(self._note_writes, batch, num_rows, mode)
            self._fewer(note, _FEWER_ROWS, unless=Failure.UNRELATED)
            return True
        cut = math.gcd(*sizes) or 1
        # With too few rows for two groups, comparing single rows is better than nothing.
        multiple = multiple if num_rows >= 2 * multiple else 1
        # A check that cannot be read for lack of memory is not due.
        is_due = functools.partial(track.forms.is_due, batch)
        if tried(is_due, self._computation.device, allowed=(Failure.RETRYABLE,)) is not True:
            return False
        seed, track.looks = track.looks, track.looks + 1
        look = functools.partial(self._look, track, batch, num_rows, mode, seed=seed)
        found, rows = look(multiple=multiple)
        # A difference must hold for rows cut as a step cuts them, and for rows other than one near
        # a discontinuity. So a second check decides.
        if found is not None and found.kind == "wrong":
            if cut > multiple and num_rows >= 2 * cut:
                # It might come from cutting these rows where no batch is cut.
                found, _ = look(multiple=cut)
            elif found.is_slight and num_rows >= 2 * len(rows):
                found, _ = look(multiple=multiple, without=rows)
        self._say(track, found)
        return True

    def _look(
        self,
        track: _Track,
        batch: Any,
        num_rows: int,
        mode: Mode,
        *,
        seed: int,
        multiple: int,
        without: Collection[int] = (),
    ) -> tuple[Finding | None, list[int]]:
        """Compare fewer and fewer rows while memory runs out; return the finding and the rows."""
        layout = self._computation.layout
        parts: list[list[int]] = []

        def compare(most: int) -> Finding | None:
            track.most_rows = most
            parts[:] = telling_rows(
                layout, batch, num_rows, most=most, seed=seed, multiple=multiple, without=without
            )
            return self._compare_few(batch, parts, mode)

        fewer = [each for each in _FEWER_ROWS if each <= track.most_rows]
        # After another error, fewer rows would fail in the same way.
        found = self._fewer(compare, fewer, unless=Failure.UNRELATED)
        if not isinstance(found, Failed):
            return found, [*parts[0], *parts[1]]
        if found.kind is Failure.RETRYABLE:
            return Finding(kind="nothing", text="there was not enough memory to check"), []
        if issubclass(found.error, CollectiveError):
            is_of_loss = issubclass(found.error, LossCollectiveError)
            remedy = _WITHOUT_RANKS if is_of_loss else _DECLARED
            text = needs_other_ranks(found.why.partition(": ")[2])
            return Finding(kind="unchecked", text=text, is_final=True, remedy=remedy), []
        why = found.why.rstrip(".")
        text = f"a check of a few rows failed ({why})"
        says_so = issubclass(found.error, LossError) or not self._can_cut(batch, num_rows)
        if says_so or not self._has_loss(batch, mode):  # the step itself reports the reason
            track.failures += 1
            return Finding(kind="unchecked", text=text) if track.failures > 1 else None, []
        if not issubclass(found.error, AutomicroError):
            with on_host():
                pieces = [layout.take_rows(batch, each) for each in parts]
            # If the whole has a loss and parts have none, every split of this batch is wrong.
            if not all(self._has_loss(each, mode) for each in pieces):
                listed = " and ".join(map(str, sorted([*parts[0], *parts[1]])[:2]))
                text = (
                    f"the whole batch has a loss, and rows such as {listed} have none on their "
                    f"own ({why})"
                )
                return Finding(kind="wrong", text=text), []
        return Finding(kind="unchecked", text=text, is_final=True), []

    def _fewer(
        self, work: Callable[[Any], T], amounts: Iterable[Any], *, unless: Failure | None = None
    ) -> T | Failed:
        """Do work on less and less until it succeeds, or fails in this way."""
        for most in amounts:
            found = tried(functools.partial(work, most), self._computation.device)
            if not isinstance(found, Failed) or found.kind is unless:
                break
            logger.info("a check failed, and nothing is lost: %s", found.why)
        return found

    def _can_cut(self, batch: Any, num_rows: int) -> bool:
        try:
            self._computation.layout.split(batch, [1, num_rows - 1])
        except BatchError:
            return False
        return True

    def _has_loss(self, batch: Any, mode: Mode) -> bool:
        """Return whether these rows have a loss in the current state."""

        def has_loss() -> bool:
            cut = CutBatch.whole(batch, self._computation.layout.num_rows(batch))
            with Bench(self._computation, Conditions(mode=mode, wants="numbers")) as bench:
                return LOSS in bench.read(cut).numbers

        return tried(has_loss, self._computation.device) is True

    def _compare_few(
        self, batch: Any, parts: Sequence[Sequence[int]], mode: Mode
    ) -> Finding | None:
        track, is_training = self._of(mode), mode == "train"
        together, apart = cuts_of(self._computation.layout, batch, parts)
        wants: Wanted = "parameters" if is_training else "numbers"
        conditions = Conditions(mode=mode, wants=wants, notes_state=is_training)
        with Bench(self._computation, conditions) as bench:
            whole = bench.read(together)
            if not is_training and LOSS not in whole.numbers:
                track.is_over = True  # there is no loss
                return None
            pieces = bench.read(apart)
            found, blind = bench.compare(together, whole, pieces)
            initialised = bench.check_writes()
            self.written.update(bench.draws.written)
            if initialised and track.looks < 2:
                warn(_initialises(initialised), BufferWarning)
                return None  # later batches start from these values
            if is_training:
                self.counting += bench.counting(whole, pieces, apart, known=self._asked)
                for key, (place, left) in pieces.state.items():
                    is_alike = key in whole.state and left.repeats(whole.state[key][1])
                    self.adds_up[place.name] = is_alike
            # An overflow in the first steps is common under fp16 and says nothing about the split.
            if not math.isfinite(whole.numbers[LOSS]) or not math.isfinite(whole.size):
                return Finding(kind="nothing", text="the loss or its gradient is not finite")
            if is_training and not whole.size:
                return Finding(kind="nothing", text="no gradient reaches any parameter")
            if bench.draws.repeats:
                return Finding(kind="wrong", text=_REPEATS)
            losses = {LOSS, *self._computation.averages}
            found = {n: e for n, e in found.items() if n in losses or n not in whole.numbers}
            if found:
                is_low = bench.draws.lowest is not torch.float64
                is_slight = is_low and max(found.values()) < _SLIGHT
                # Compare again with state held still: state needs a different remedy.
                bench.conditions = dataclasses.replace(conditions, carries=False)
                is_state = not bench.compare(together, whole, bench.read(apart))[0]
                text = _said(found, whole, pieces, apart) + _BY_STATE * is_state
                return Finding(kind="wrong", text=text, is_slight=is_slight, is_state=is_state)
            unheld = ", ".join(sorted(bench.draws.unheld))
            if unheld and blind:  # these draws change the result
                text = f"the forward draws random numbers that cannot be held constant ({unheld})"
                return Finding(kind="unchecked", text=text)
            if any(blind):
                return Finding(
                    kind="unchecked", text="the same rows give a different gradient each time"
                )
        if is_telling(pieces.each):
            track.has_checked = True
        return None

    def _note_writes(self, batch: Any, num_rows: int, mode: Mode, most: int) -> None:
        """Record the parameters that a forward of a few rows writes to."""
        # Only the first rank compares, but each rank has to restore what its forwards write to.
        layout = self._computation.layout
        together, _ = cuts_of(layout, batch, telling_rows(layout, batch, num_rows, most=most))
        with Bench(self._computation, Conditions(mode=mode, wants="numbers")) as bench:
            bench.read(together)
            self.written.update(bench.draws.written)

    # Whole batches that are split

    @property
    def compares(self) -> bool:
        """Whether split batches are counted, and some of them compared."""
        return not (self._off or self._train.has_named)

    def whole(
        self, batch: Any, sizes: Sequence[int], mode: Mode, *, gives_outputs: bool = False
    ) -> None:
        """Compare a split batch as a whole with its microbatches, if a check is due."""
        # No activations are kept inside modules, and all changes are rolled back. If the whole does
        # not fit, half, a quarter or two of its microbatches are compared. Halves of a single
        # microbatch show only numbers other than the loss.
        track = self._of(mode)
        if not track.splits[gives_outputs].is_next() or track.has_named or len(sizes) < 2:
            return
        wanted = ("seams", "numbers") if mode == "train" else ("numbers",)
        counts = dict.fromkeys(max(2, len(sizes) // fraction) for fraction in (1, 2, 4, len(sizes)))
        fewer = [sizes[:count] for count in counts]
        if sizes[0] > 1:
            fewer.append([sizes[0] - sizes[0] // 2, sizes[0] // 2])

        def compare(given: tuple[Sequence[int], Any]) -> tuple[int, bool, str, dict[str, str]]:
            is_one = sum(given[0]) == sizes[0]
            return len(given[0]), is_one, *self._compare_whole(batch, *given, mode, is_one=is_one)

        found = self._fewer(compare, itertools.product(fewer, wanted))
        if isinstance(found, Failed):
            if found.kind is Failure.RETRYABLE:
                track.splits[gives_outputs].put_off()
            return
        count, is_one, wrong, odd = found
        if wrong and not is_one:
            self._say(track, Finding(kind="wrong", text=wrong))
            return
        new = {name: text for name, text in odd.items() if name not in self._odd_numbers}
        self._odd_numbers |= new.keys()
        if new:
            warn(_odd(new, mode, count), MetricWarning)

    def _compare_whole(
        self, batch: Any, sizes: Sequence[int], wants: Any, mode: Mode, *, is_one: bool
    ) -> tuple[str, dict[str, str]]:
        """Return the error of the loss over some microbatches, and errors of other numbers."""
        device = self._computation.device
        together, apart = cuts(self._computation.layout, batch, sizes)
        with Bench(self._computation, Conditions(mode=mode, wants=wants)) as bench:
            whole, parts = bench.read(together), bench.read(apart)
            found, _ = bench.compare(together, whole, parts)
            self.written.update(bench.draws.written)
            if bench.draws.changed(once=True) and self._train.looks < 2:
                return "", {}  # later batches start from these values
            finite = {name for name, value in whole.numbers.items() if math.isfinite(value)}
            if LOSS in whole.numbers and LOSS not in finite:
                return "", {}
        if device.type != "cpu":
            empty_cache(device)  # cached blocks of a whole batch do not suit microbatches
        odd = found.keys() & finite & parts.numbers.keys() - {LOSS}
        named = odd & self._computation.averages.keys()
        wrong = {name: found[name] for name in found.keys() - odd - whole.numbers.keys() | named}
        wrong |= {LOSS: found[LOSS]} if LOSS in found else {}
        numbers = {
            name: _number(name, whole, parts)
            for name in sorted(odd - named)
            # Halves of a microbatch might lack the rows that a number needs.
            if math.isfinite(parts.numbers[name]) or not is_one
        }
        return _said(wrong, whole, parts, apart) if wrong else "", numbers

    # Outputs

    @property
    def compares_outputs(self) -> bool:
        """Whether split evaluations with outputs are still counted."""
        return not (self._off or self._has_named_outputs)

    def outputs(self, batch: Any, num_rows: int, mode: Mode) -> frozenset[str]:
        """Compare outputs of a few rows together and in parts if due; return the paths compared."""
        # Called in evaluation mode. All changes are rolled back; a failure returns no paths.
        if not self._output_splits.is_next():
            return frozenset()
        known, wrong = self._see_outputs(batch, num_rows, mode, seed=0)
        # Rounding at a discontinuity, as in a choice of experts, does not recur in other rows.
        if wrong:
            _, again = self._see_outputs(batch, num_rows, mode, seed=1)
            wrong = {path: text for path, text in wrong.items() if path in again}
        if wrong:
            self._has_named_outputs = True
            text = next(iter(wrong.values()))
            more = f" (and {len(wrong) - 1} more outputs)" if len(wrong) > 1 else ""
            warn(f"{text}{more}. {_OUTPUTS_REMEDY}", MetricWarning)
        return known | wrong.keys()

    def _see_outputs(self, batch: Any, num_rows: int, mode: Mode, *, seed: int) -> _SeenOutputs:
        """Return paths of outputs that do not depend on the split, and errors of the others."""

        def see(most: int) -> _SeenOutputs:
            layout = self._computation.layout
            parts = telling_rows(layout, batch, num_rows, most=most, seed=seed)
            together, apart = cuts_of(layout, batch, parts)
            with Bench(self._computation, Conditions(mode=mode, wants="outputs")) as bench:
                whole, pieces = bench.read(together), bench.read(apart)
                found, _ = bench.compare(together, whole, pieces)
                if bench.draws.unheld:
                    return frozenset(), {}
            paths = whole.outputs.keys() | pieces.outputs.keys()
            wrong = {
                path: _output(path, whole, pieces, found, apart) for path in found if path in paths
            }
            return frozenset(paths - wrong.keys()), wrong

        found = self._fewer(see, _FEWER_ROWS)
        return (frozenset(), {}) if isinstance(found, Failed) else found

    # State

    def unsaved_state(self, batch: Any, num_rows: int) -> list[str]:
        """Return names of changing state of forwards that no module's ``state_dict`` holds."""
        # A few forwards of two rows, which leave no trace; nothing if they fail or need other
        # ranks.
        if self._off:
            return []

        def lasting() -> list[Place]:
            with on_host():
                rows = self._computation.layout.take_rows(batch, range(min(2, num_rows)))
            return self._lasting_state(rows, min(2, num_rows))

        places = tried(lasting, self._computation.device)
        if isinstance(places, Failed):
            logger.info("could not determine which state the forward changes: %s", places.why)
            return []
        every = [module for root in self._computation.reached for module in root.modules()]
        saved = {id(part) for each in every if writes_own_state(each) for part in each.modules()}
        return [
            place.name
            for place in places
            if not place.is_of_metric and id(place.owner) not in saved
        ]

    def _lasting_state(self, rows: Any, num_rows: int) -> list[Place]:
        """Return state that persists between forwards of the same rows and might matter."""
        # Numbers always might; other values only if the next loss depends on them. Clock readings
        # and values that only the last call sets do not count.
        conditions = Conditions(wants="numbers", notes_state=True)
        with Bench(self._computation, conditions) as bench:

            def after(calls: int) -> Reading:
                return bench.read(CutBatch.whole(rows, num_rows, times=calls))

            two = after(2)
            if all(place.is_buffer for place, _ in two.state.values()):
                return []
            one, one_again, again = after(1).state, after(1).state, after(2).state
        is_used = not math.isclose(two.each[0], two.each[-1], rel_tol=1e-5, abs_tol=1e-5)
        return [
            place
            for key, (place, value) in two.state.items()
            if not place.is_buffer and key in one and not value.is_like(one[key][1])
            if key in again and value.repeats(again[key][1])
            if key in one_again and one[key][1].repeats(one_again[key][1])
            if is_used or isinstance(place.read(), int | float)
        ]

    # Reports

    def _of(self, mode: Mode) -> _Track:
        return self._train if mode == "train" else self._eval

    def _say(self, track: _Track, found: Finding | None) -> None:
        if found is None:
            return
        if found.kind == "wrong":
            track.is_over = track.has_named = True
            track.is_wrong = not found.is_state
            name = "eval_microbatch_size" if track is self._eval else "microbatch_size"
            message = f"splitting changes this batch: {found.text}. {_REMEDY.format(name)}"
            if self._refuses and not found.is_state:
                raise LossAverageError(message)
            warn(message, LossAverageWarning)
            return
        track.fruitless += 1
        track.is_over |= found.is_final
        if found.kind == "unchecked" or track.fruitless >= _PATIENCE:
            self._say_unchecked(found)

    def _say_unchecked(self, found: Finding) -> None:
        """Warn once that nothing could be checked, if an assumption was made."""
        if self._has_said_unchecked:
            return
        self._has_said_unchecked = True
        # A model's loss type is a claim that its forward might break, as some of transformers do.
        is_claimed = found.is_final and self._is_claimed
        if self._is_known and found.remedy is _DECLARED and not is_claimed:
            logger.info("splitting was not checked: %s", found.text)
            return
        warn(
            "could not check the assumption that the loss is "
            f"{_taken_for(self._computation.averages)}: {found.text}. {found.remedy}, or run "
            "automicro.verify(model, batch, …)",
            LossAverageWarning,
        )


def _taken_for(averages: Mapping[str, Average]) -> str:
    """Return a description of the assumed averages."""
    return " and ".join(dict.fromkeys(each.describe() for each in averages.values()))


_REMEDY = (
    "Run automicro.verify(model, batch, …) for the cause and a remedy, or keep batches whole with "
    "{}=None (docs/checks.md)"
)
_BY_STATE = ", because of state that one forward leaves for the next"
_REPEATS = (
    "its forward sets the seed of its random draws, so each microbatch repeats the draws of the "
    "first rows"
)
_OUTPUTS_REMEDY = (
    "Compute results that need all rows before the batch is cut, leave out outputs without one "
    "entry per row, or keep batches whole with eval_microbatch_size=None"
)


def _said(found: Mapping[str, float], whole: Reading, parts: Reading, apart: CutBatch) -> str:
    """Return the largest difference, with its size."""
    rows = f"{sum(apart.sizes)} rows in {len(apart.sizes)} parts"

    def rank(name: str) -> tuple[bool, bool, float]:
        is_number = name in whole.numbers
        return is_number and math.isinf(found[name]), not is_number, found[name]

    name = max(found, key=rank)
    if name in whole.numbers:
        return f"{_number(name, whole, parts)}, for {rows}"
    what = name if name == SEAM else f"the gradient of {name}"
    return f"{what} is off by {found[name]:.2g} of itself, for {rows}"


def _number(name: str, whole: Reading, parts: Reading) -> str:
    shown = name if name == LOSS or name in whole.told else repr(name)
    apart = parts.numbers.get(name, math.nan)
    return f"{shown} is {whole.numbers[name]:.6g} as a whole and {apart:.6g} combined"


def _odd(numbers: Mapping[str, str], mode: Mode, num_microbatches: int) -> str:
    listed = ", ".join(list(numbers.values())[:_SHOWN]) + f" from {num_microbatches} microbatches"
    more = f" (and {len(numbers) - _SHOWN} more)" if len(numbers) > _SHOWN else ""
    size = "microbatch_size" if mode == "train" else "eval_microbatch_size"
    return (
        "numbers that a step returns next to its loss are averaged, but some are not means over "
        f"rows: {listed}{more}. Return means over rows, let a metric count it (metrics=…), "
        f"or keep batches whole with {size}=None"
    )


def _output(
    path: str, whole: Reading, parts: Reading, found: Mapping[str, float], apart: CutBatch
) -> str:
    name = f"the output {path!r}" if path else "the output"
    one, other = whole.outputs.get(path), parts.outputs.get(path)
    rows = f"{sum(apart.sizes)} rows"
    if one is None or other is None or one.shape != other.shape:
        shapes = [None if each is None else tuple(each.shape) for each in (one, other)]
        return (
            f"{name} has the shape {shapes[0]} for {rows}, and {shapes[1]} joined from two parts "
            "of them, so its first dimension is not the rows"
        )
    return (
        f"{name} of a row depends on the other rows: for {rows} it is off by "
        f"{found[path]:.2g} of itself when they are computed in two parts"
    )


def _initialises(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:5])) + f" and {len(names) - 5} more" * (len(names) > 5)
    return (
        f"the first forward sets parameters ({listed}), as data-dependent initialization does, "
        "and would see one microbatch only. Call the model on a whole batch under torch.no_grad() "
        "before the first step"
    )
