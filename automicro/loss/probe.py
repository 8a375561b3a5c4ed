"""When to look at a batch, what earlier looks have shown, and what is said of it.

A look is taken at batches 1, 2, 4, 8 … until one could tell. After that, a batch that shows what no
look has seen (padding, ignored targets, a class) is looked at once more. What it costs afterwards
is nothing where the average was declared or read off, and a glance at the host's integers where it
was assumed.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.errors import (
    AutomicroError,
    BufferWarning,
    LossAverageError,
    LossAverageWarning,
    MetricWarning,
    RollbackError,
    describe_error,
    warn,
)
from automicro.loss.averages import Tokens
from automicro.loss.causes import (
    KEEP_WHOLE,
    describe_failure,
    explain,
    sharing,
    taken_for,
    unexplained,
)
from automicro.loss.informative_rows import Choice, choose_rows, other_rows, read_features
from automicro.loss.look import (
    Seen,
    Values,
    counting,
    evaluation_values,
    lasting_state,
    look,
)
from automicro.loss.outputs_look import OutputsSeen, look_at_outputs
from automicro.loss.passes import Computation, ExtraPasses, Mode, Place
from automicro.loss.silence import CollectiveError, needs_other_ranks
from automicro.loss.whole_look import (
    compare_whole,
    describe_numbers,
    describe_told,
    describe_whole,
    fewer_and_fewer,
)
from automicro.memory.oom import Failure, classify, first_line, release
from automicro.torch_private import writes_own_state

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOOKS = 20
LAST_GLANCE = 4096
"""After so many batches without anything new nobody looks any more."""

_OCCASIONS = (1, 2, *(10**power for power in range(1, 7)))
_FEWER_ROWS = (16, 4, 2)
_LOOKS_TO_TELL = 2
_PATIENCE = 4  # looks that learn nothing, after which that is said
_PATIENCE_WITH_FAILURES = 2  # training does not mend these, but one batch may be odd
_REMEDIES = (
    "declare what the loss averages over (loss_average='samples', 'tokens', 'none' or a callable), "
    "or run automicro.verify on a batch"
)


class Occasions:
    """Which of many batches of a kind are compared: the first, second, 10th, 100th … millionth.

    Attributes:
        are_over: whether none will be any more, so that nobody need count.

    Example:
        >>> splits = Occasions()
        >>> [splits.is_next() for _ in range(10)].count(True)
        3
    """

    def __init__(self) -> None:
        self.are_over = False
        self._num = self._num_put_off = 0

    def is_next(self) -> bool:
        """Count one more; whether it is one of them."""
        self._num += 1
        self.are_over |= self._num >= _OCCASIONS[-1]
        return self._num in _OCCASIONS

    def put_off(self) -> None:
        """Take the next one in place of this one, which could not be compared; not for ever."""
        if self._num_put_off < _PATIENCE:
            self._num_put_off += 1
            self._num -= 1


class Prober:
    """Looks at the first batches that could be split, and at later ones that show something new.

    Of a few that are split in the end, it compares the loss of the whole with the microbatches'.
    Where outputs are asked for, it compares those of a few rows with those of two parts of them.

    Args:
        computation: model and loss.
        declared: whether the caller said what the loss averages over.
        off: whether nothing is looked at.
        refuses: whether a loss that is not what it was taken for is an error, not a warning.
        is_alone: whether a forward needs no other rank. Where it does, nothing can be looked at.

    Attributes:
        counting: names of state of Python's that depends on how many forwards there are for a
            batch, as looks have shown.
    """

    def __init__(
        self,
        computation: Computation,
        *,
        declared: bool,
        off: bool = False,
        refuses: bool = False,
        is_alone: bool = True,
    ) -> None:
        self._computation = computation
        self._is_known = all(average.is_known for average in computation.averages.values())
        self._declared = declared
        self._is_claimed = not declared and any(
            isinstance(average, Tokens) and average.is_claimed
            for average in computation.averages.values()
        )
        self._off = off
        self._refuses = refuses
        self._why_not = "" if is_alone else needs_other_ranks()
        self._train = _Evidence(assumed=not self._is_known)
        eval_is_known = all(average.is_known for average in computation.eval_averages.values())
        self._eval = _Evidence(assumed=not eval_is_known)
        self._train.is_done = self._eval.is_done = off
        self._output_splits = Occasions()
        for splits in (*self._train.splits, *self._eval.splits, self._output_splits):
            splits.are_over = bool(off or self._why_not)
        self._has_said_unchecked = off  # who switches it off knows
        self._odd_numbers: set[str] = set()
        self._changing: set[str] = set()
        self.counting: list[str] = []

    @property
    def loss_average_is(self) -> str:
        """How sure it is what the loss averages over.

        ``"declared"``, ``"read"`` (off the loss or the model), ``"checked"``, ``"unchecked"``, or
        ``"wrong"`` where the gradients of a few rows did not add up.
        """
        if self._train.is_wrong:
            return "wrong"
        if self._declared:
            return "declared"
        if self._is_known:
            return "read"
        return "checked" if self._train.has_checked else "unchecked"

    @property
    def is_done(self) -> bool:
        """Whether no further training batch is of use."""
        return self._train.is_done

    def look(self, batch: Any, num_rows: int) -> bool:
        """Look at a training batch that could be split, if that is still of use: whether it was.

        Whatever it changes is put back. Out of memory, it is tried with fewer rows, and then at a
        later batch.

        Raises:
            LossAverageError: the loss is not what it was taken for, and that is refused.

        Warns:
            LossAverageWarning: it is not, or that cannot be checked.
        """
        if self._train.is_done or num_rows < 2:
            return False
        if self._why_not:
            self._train.is_done = True
            message = self._unchecked(self._why_not, may_be_claimed=True)
            if message is not None:
                warn(message, LossAverageWarning)
            return False
        return self._glance(self._train, batch, num_rows, self._look_at)

    def unsaved_state(self, batch: Any, num_rows: int) -> list[str]:
        """Names of what forwards go on changing and no ``state_dict`` of a module holds.

        A few forwards of two rows, which leave no trace; nothing where they fail, or other ranks
        would have to take part.
        """
        if self._off or self._why_not:
            return []

        def look_at_few() -> list[Place]:
            with on_host():
                rows = self._computation.layout.take_rows(batch, range(min(2, num_rows)))
            return lasting_state(self._computation, rows)

        def say(why: str) -> list[Place]:
            logger.info("what state the forward changes is not known: %s", why)
            return []

        places = self._try(look_at_few, otherwise=say)
        if not places:
            return []
        every = [module for root in self._computation.reached for module in root.modules()]
        saved = {id(part) for each in every if writes_own_state(each) for part in each.modules()}
        return [
            place.name
            for place in places
            if not place.is_of_metric and id(place.owner) not in saved
        ]

    def look_at_evaluation(self, batch: Any, num_rows: int) -> bool:
        """The same of a batch that is evaluated: whether its loss adds up.

        Warns:
            LossAverageWarning: it does not.
        """
        if self._eval.is_done or num_rows < 2:
            return False
        if self._why_not or self._train.is_wrong:
            self._eval.is_done = True  # said already
            return False
        return self._glance(self._eval, batch, num_rows, self._compare_values)

    def compares(self, mode: Mode) -> bool:
        """Whether batches that are split are still counted, and some compared."""
        splits = self._of(mode).splits
        return not (self._train.is_wrong or all(each.are_over for each in splits))

    @property
    def compares_outputs(self) -> bool:
        """Whether evaluations that are split, and give outputs, are still counted."""
        return not self._output_splits.are_over

    def compare(
        self, batch: Any, sizes: Sequence[int], mode: Mode, *, gives_outputs: bool = False
    ) -> None:
        """Compare the loss of a batch that is split with its microbatches', where that is due.

        Nothing is kept for a backward, and what it changes is put back. Without memory for the
        whole batch, half, a quarter or two of its microbatches are taken; of the halves of one only
        numbers beside the loss are compared, since looks at a few rows show its loss.

        Args:
            batch: that is split.
            sizes: rows of its microbatches.
            mode: which forward.
            gives_outputs: whether outputs are asked for. These batches are counted apart, since
                numbers among the outputs are not seen in others.

        Raises:
            LossAverageError: they are not the same, and that is refused.

        Warns:
            LossAverageWarning: they are not.
            MetricWarning: numbers beside the loss are not.
        """
        evidence = self._of(mode)
        if not evidence.splits[gives_outputs].is_next() or evidence.is_wrong:
            return
        ran_out = False

        def compare_some(some: Sequence[int]) -> Mapping[str, Values] | None:
            nonlocal ran_out
            try:
                return compare_whole(self._computation, batch, some, mode)
            except Exception as error:
                ran_out = classify(error) is Failure.RETRYABLE
                raise

        for some in fewer_and_fewer(sizes):
            values = self._try(functools.partial(compare_some, some), otherwise=str)
            if not isinstance(values, str):
                break
            logger.info("the loss of %d rows could not be computed at once: %s", sum(some), values)
        if isinstance(values, str) and ran_out:
            evidence.splits[gives_outputs].put_off()
        if not isinstance(values, Mapping):
            return
        is_one = sum(some) == sizes[0]
        if "" in values and not values[""].add_up and not is_one:
            evidence.is_done = evidence.is_wrong = True
            few_rows_add_up, whole = evidence.has_checked, values[""]
            message = describe_whole(self._computation, whole, some, mode, few_rows_add_up)
            self._tell(evidence, message)
            return
        odd = {
            name: each
            for name, each in values.items()
            if name and not each.add_up and name not in self._odd_numbers
            if not is_one or math.isfinite(each.apart)  # of rows that no batch is cut into
        }
        self._odd_numbers.update(odd)
        told = {name: each for name, each in odd.items() if each.is_told}
        beside = {name: each for name, each in odd.items() if not each.is_told}
        if beside:
            warn(describe_numbers(beside, some), MetricWarning)
        if told:
            warn(describe_told(told, some, mode), MetricWarning)

    def compare_outputs(self, batch: Any, num_rows: int, mode: Mode) -> frozenset[str]:
        """Compare outputs of a few rows together and apart, where that is due: what is known now.

        Called in evaluation mode. What it changes is put back; where it fails, nothing is known.

        Args:
            batch: that is split.
            num_rows: of it.
            mode: which forward.

        Returns:
            Paths of outputs of which it is known whether they can be joined.

        Warns:
            MetricWarning: one of them cannot.
        """
        if not self._output_splits.is_next():
            return frozenset()
        seen = self._see_outputs(batch, num_rows, mode)
        if seen is None or not seen.wrong:
            return frozenset() if seen is None else seen.right
        # Rounding on an edge, as of a choice of experts, is not there with other rows again.
        again = self._see_outputs(batch, num_rows, mode, again=True)
        wrong = [] if again is None else [path for path in seen.wrong if path in again.wrong]
        if wrong:
            self._output_splits.are_over = True
            more = f" (and {len(wrong) - 1} more outputs)" if len(wrong) > 1 else ""
            warn(f"{seen.wrong[wrong[0]]}{more}", MetricWarning)
        return seen.right.union(wrong)

    def _see_outputs(
        self, batch: Any, num_rows: int, mode: Mode, *, again: bool = False
    ) -> OutputsSeen | None:
        """What a look at outputs shows; at other rows, or in other parts, where it is once more."""
        computation = self._computation
        layout = computation.layout

        def see(most: int) -> OutputsSeen | None:
            with on_host():
                choice = choose_rows(layout, batch, num_rows, most=most)
                if again:
                    others = other_rows(choice, num_rows)
                    choice = others or choose_rows(layout, batch, num_rows, most=most, seed=1)
            return look_at_outputs(computation, batch, choice, mode)

        for most in _FEWER_ROWS:
            seen = self._try(functools.partial(see, most), otherwise=str)
            if not isinstance(seen, str):
                return seen
            logger.info("the outputs of %d rows could not be compared: %s", most, seen)
        return None

    def _of(self, mode: Mode) -> "_Evidence":
        return self._eval if mode == "eval" else self._train

    def _tell(self, evidence: "_Evidence", message: str) -> None:
        if evidence.is_wrong and self._refuses:
            raise LossAverageError(message)
        warn(message, LossAverageWarning)

    def _glance(
        self,
        evidence: "_Evidence",
        batch: Any,
        num_rows: int,
        compare: Callable[["_Evidence", Any, Choice], str | None],
        *,
        is_retry: bool = False,
    ) -> bool:
        message: str | None = None
        failure: Exception | None = None
        choice: Choice | None = None
        try:
            with on_host():
                if not (is_retry or evidence.wants(self._computation, batch, num_rows)):
                    return False
                choice = choose_rows(
                    self._computation.layout,
                    batch,
                    num_rows,
                    most=evidence.most_rows,
                    met=evidence.classes,
                    seed=evidence.looks,
                )
            message = compare(evidence, batch, choice)
            evidence.took(choice)
        except RollbackError:
            raise  # the step itself may not see it
        except AutomicroError as error:
            evidence.took(choice)
            message = self._failed(evidence, first_line(error))  # the step itself may not say it
        except CollectiveError as error:
            evidence.is_done = True
            message = self._unchecked(needs_other_ranks(str(error)), may_be_claimed=True)
        except Exception as error:
            failure = error
        again = False
        try:
            if failure is not None:
                again = self._takes_fewer_rows(evidence, failure)
                message = None if again else self._recover(evidence, batch, choice, failure)
        finally:
            del failure  # it holds this frame: a cycle
        if again:
            self._glance(evidence, batch, num_rows, compare, is_retry=True)
        if message is not None:
            self._tell(evidence, message)
        return True

    def _takes_fewer_rows(self, evidence: "_Evidence", failure: Exception) -> bool:
        """Whether to look again at once, because memory ran out and fewer rows may fit."""
        if classify(failure) is not Failure.RETRYABLE or not evidence.takes_fewer_rows():
            return False
        release(failure, self._computation.device)
        return True

    def _recover(
        self, evidence: "_Evidence", batch: Any, choice: Choice | None, failure: Exception
    ) -> str | None:
        kind = classify(failure)
        if kind is Failure.RETRYABLE:
            release(failure, self._computation.device)
            logger.log(
                logging.DEBUG if evidence.has_told_of_memory else logging.WARNING,
                "out of memory while a few rows were looked at, together and apart; nothing is "
                "lost, and a later batch is looked at",
            )
            evidence.has_told_of_memory = True
            return self._learned_nothing(evidence, "there was no memory to look")
        if kind is not Failure.UNRELATED:
            raise failure
        text = next(iter(describe_error(failure).splitlines()))
        release(failure, self._computation.device)
        if choice is None:
            return self._failed(evidence, text)
        # Is it the choice of rows, or a mistake in the model?
        mode: Mode = "eval" if evidence is self._eval else "train"
        with on_host():
            parts = [
                self._computation.layout.take_rows(batch, c) for c in (choice.small, choice.large)
            ]
        if not self._has_loss(batch, mode):
            return self._failed(evidence, text)
        evidence.is_done = True
        if all(self._has_loss(part, mode) for part in parts):
            return self._unchecked(f"a look at a few rows failed ({text})")
        evidence.is_wrong = evidence is self._train
        return describe_failure(text, choice.rows, sharing(self._computation, batch, choice))

    def _has_loss(self, batch: Any, mode: Mode) -> bool:
        """Whether a loss can be computed of these rows, from the state as it is."""

        def has_loss() -> bool:
            with ExtraPasses(self._computation) as passes, torch.no_grad():
                return isinstance(passes.losses(batch, mode=mode).loss, Tensor)

        return self._try(has_loss, otherwise=lambda why: False)

    def _try(self, work: Callable[[], T], otherwise: Callable[[str], T]) -> T:
        """Do what is no part of the step; where it fails, something else, given the reason.

        Raises:
            BaseException: the device is lost, or somebody interrupts.
        """
        failure: Exception | None = None
        try:
            return work()
        except Exception as error:
            failure = error
        try:
            if classify(failure) not in (Failure.UNRELATED, Failure.RETRYABLE):
                raise failure
            release(failure, self._computation.device)
            why = first_line(failure)
        finally:
            del failure  # it holds this frame: a cycle
        return otherwise(why)

    def _look_at(self, evidence: "_Evidence", batch: Any, choice: Choice) -> str | None:
        seen = look(self._computation, batch, choice)
        if seen.wrong is not None and seen.is_slight:
            others = other_rows(choice, self._computation.layout.num_rows(batch))
            if others is not None:
                again = look(self._computation, batch, others)
                if again.tells and again.wrong is None:
                    logger.debug("%s is off by %.1g, by rounding", *seen.wrong)
                    seen, choice = again, others
        if seen.initialised and not evidence.looks:
            warn(_initialises(seen.initialised), BufferWarning)
        new = [place for place in seen.changing if place.name not in self._changing]
        self._changing.update(place.name for place in new)
        asked = [place for place in new if not place.is_of_metric]
        if asked:
            self.counting += self._try(
                lambda: counting(self._computation, batch, choice, asked), otherwise=_uncounted
            )
        if seen.wrong is not None:
            evidence.is_done = evidence.is_wrong = True
            return self._explain(batch, choice, seen)
        if seen.repeats:
            evidence.is_done = evidence.is_wrong = True
            return _repeats("the forward")
        if seen.why:
            return self._learned_nothing(evidence, seen.why)
        if seen.ordered is not None:
            evidence.is_done = True
            return self._could_not_tell(seen)
        evidence.saw(seen, choice, is_known=self._is_known)
        return None

    def _explain(self, batch: Any, choice: Choice, seen: Seen) -> str:
        """Why gradients do not add up; where that cannot be found out, that they do not."""
        wrong = seen.wrong
        assert wrong is not None
        return self._try(
            lambda: explain(self._computation, batch, choice, wrong, seen.tolerance),
            otherwise=lambda why: unexplained(self._computation, wrong, why),
        )

    def _compare_values(self, evidence: "_Evidence", batch: Any, choice: Choice) -> str | None:
        values = evaluation_values(self._computation, batch, choice)
        if values is None:
            evidence.is_done = True
            return None
        if not values.add_up:
            evidence.is_done = evidence.is_wrong = True
            return (
                f"the evaluation loss of a few rows is {values.together:.6g} together and "
                f"{values.apart:.6g} added up from two parts, so it depends on how a "
                f"batch is cut. To mend it, {_REMEDIES}; metrics count every row once in any case"
            )
        if values.repeats:
            evidence.is_done = evidence.is_wrong = True
            return _repeats("the forward of an evaluation")
        if math.isfinite(values.together):
            evidence.saw_values(choice)
        return None

    def _could_not_tell(self, seen: Seen) -> str | None:
        if seen.noise:
            return self._unchecked(
                f"the forward draws what cannot be held constant ({', '.join(seen.noise)})"
            )
        state = f" ({', '.join(self.counting[:5])})" if self.counting else ""
        why = (
            f"the gradient of {seen.ordered} is another when the same rows come once more, in "
            f"another order: the forward keeps state from one call to the next{state}, or depends "
            "on the order of the rows"
        )
        if not self._is_known:
            return self._unchecked(why)
        self._has_said_unchecked = True
        return (
            f"could not check that a batch can be split: {why}. Each microbatch is a call of its "
            "own; reset such state before each batch or keep it in what `forward` is given, or "
            f"{KEEP_WHOLE}"
        )

    def _learned_nothing(self, evidence: "_Evidence", why: str) -> str | None:
        evidence.fruitless += 1
        return self._unchecked(why) if evidence.fruitless >= _PATIENCE else None

    def _failed(self, evidence: "_Evidence", why: str) -> str | None:
        """A look that failed: said where a second one does, for the step itself may go through."""
        evidence.failures += 1
        if evidence.failures < _PATIENCE_WITH_FAILURES:
            return None
        return self._unchecked(f"looks at a few rows failed ({why.rstrip('.')})")

    def _unchecked(self, why: str, *, may_be_claimed: bool = False) -> str | None:
        """What to say, once, where nothing could be seen; nothing where nothing was assumed.

        With ``may_be_claimed`` also of what a model's loss type claims, which its forward may not
        keep to: transformers' own have some.
        """
        if self._has_said_unchecked:
            return None
        self._has_said_unchecked = True
        if self._is_known and not (may_be_claimed and self._is_claimed):
            logger.info("splitting was not checked: %s", why)
            return None
        return (
            f"could not check that the loss is {taken_for(self._computation.averages)}, which it "
            f"was taken for: {why}. To be sure, {_REMEDIES}"
        )


def _uncounted(why: str) -> list[str]:
    logger.debug("which state depends on the number of calls is not known: %s", why)
    return []


def _repeats(forward: str) -> str:
    return (
        f"{forward} sets the seed of what it draws for its rows by itself (torch.manual_seed, a "
        "generator made in it), so each microbatch draws once more what the first rows of the "
        "batch get, and its result is another than that of the whole batch. Draw for all rows "
        f"before the batch is cut, and give it along with the rows, or {KEEP_WHOLE}"
    )


def _initialises(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:5])) + f" and {len(names) - 5} more" * (len(names) > 5)
    return (
        f"the first forward sets parameters ({listed}), as layers do that initialise themselves "
        "from data: of a batch that is split they see one microbatch. Call the model on a whole "
        "batch before the first step, under torch.no_grad(), which is also the time for what only "
        "constrains them"
    )


class _Evidence:
    """What looks have shown so far, of training or of evaluation.

    Attributes:
        assumed: whether the average is a guess, which a new kind of row could refute.
        is_done: whether no further batch is of use.
        is_informed: whether a look could tell all but what no batch has shown yet.
        is_wrong: whether one showed that gradients do not add up.
        has_checked: whether one showed that they do.
        fruitless: looks that learned nothing.
        failures: looks that failed, and not for want of memory.
        pending: what rows have yet to differ in.
        classes: those seen, by path.
        most_rows: of a look.
        looks: that were taken.
        splits: which of the batches that are split are compared whole: without outputs, and with.
        has_told_of_memory: whether it was said that there was not enough for one.
    """

    def __init__(self, *, assumed: bool) -> None:
        self.assumed = assumed
        self.is_done = False
        self.is_informed = False
        self.is_wrong = False
        self.has_checked = False
        self.fruitless = 0
        self.failures = 0
        self.pending: frozenset[tuple[str, str]] | None = None
        self.classes: dict[str, frozenset[float]] = {}
        self.most_rows = _FEWER_ROWS[0]
        self._batches = 0
        self._next = 1
        self.looks = 0
        self.splits = (Occasions(), Occasions())
        self.has_told_of_memory = False
        self._blind: frozenset[str] | None = None
        self._same_blind = 0
        self._told = 0

    def wants(self, computation: Computation, batch: Any, num_rows: int) -> bool:
        """Whether this batch is worth a look."""
        self._batches += 1
        is_due = self._batches >= self._next
        if is_due:
            self._next *= 2
        if self._batches > LAST_GLANCE or self.looks >= MAX_LOOKS:
            self.is_done = True
            return False
        if not self.is_informed and (is_due or self.pending is None):
            return is_due
        return self._shows_news(computation, batch, num_rows, everywhere=is_due)

    def took(self, choice: Choice | None) -> None:
        """Count a look, and what was among its rows."""
        self.looks += 1
        if choice is None:
            return
        for path, classes in choice.classes.items():
            self.classes[path] = self.classes.get(path, frozenset()) | classes

    def takes_fewer_rows(self) -> bool:
        """Whether another look may get by with fewer rows, as all later ones then do."""
        fewer = [rows for rows in _FEWER_ROWS if rows < self.most_rows]
        self.looks += 1
        if fewer:
            self.most_rows = fewer[0]
        return bool(fewer)

    def saw(self, seen: Seen, choice: Choice, *, is_known: bool) -> None:
        """Take note of gradients that add up."""
        self.has_checked = self.has_checked or seen.tells
        blind = seen.blind if self._blind is None else self._blind & seen.blind
        self._same_blind = self._same_blind + 1 if blind == self._blind else 0
        self._blind = blind
        # Some gradients are always zero (biases of keys in attention); those behind a head of
        # zeros, or of half of an adapter, are so only at first.
        is_usual = self._same_blind >= 2 and 2 * len(blind) < seen.num_reached
        # Two looks, at other rows cut in another way: one cut may agree by coincidence.
        self._told += seen.tells
        self.is_informed = self._told >= _LOOKS_TO_TELL and (not blind or is_usual)
        if is_known:
            self.is_done = self.is_informed
        else:
            self.narrow(choice)
            self.is_done = self.is_informed and not self.pending and not choice.classes

    def saw_values(self, choice: Choice) -> None:
        """Take note of evaluation losses that add up."""
        self.has_checked = True
        self._told += 1
        self.is_informed = self._told >= _LOOKS_TO_TELL
        self.narrow(choice)
        self.is_done = self.is_informed and not (self.assumed and (self.pending or choice.classes))

    def narrow(self, choice: Choice) -> None:
        """Only what no rows have differed in yet is still of interest."""
        self.pending = choice.pending if self.pending is None else self.pending & choice.pending

    def _shows_news(
        self, computation: Computation, batch: Any, num_rows: int, *, everywhere: bool
    ) -> bool:
        """Whether rows differ in something that they have not differed in before."""
        pending = self.pending or frozenset()
        paths = {path for path, _ in pending} | set(self.classes)
        leaves: Mapping[str, Tensor] = dict(computation.layout.leaves(batch))
        unsettled = {path for path, _ in pending}
        near = {
            path
            for path in paths
            if everywhere or ((leaf := leaves.get(path)) is not None and leaf.device.type == "cpu")
            if path in unsettled or not self._has_met(path, leaves.get(path), num_rows)
        }
        if not near:
            return False
        for feature in read_features(computation.layout, batch, num_rows, only=near):
            if feature.kind == "class":
                if not set(feature.values.tolist()) <= self.classes.get(feature.path, frozenset()):
                    return True
            elif (feature.path, feature.kind) in pending and feature.varies:
                return True
        return False

    def _has_met(self, path: str, leaf: Tensor | None, num_rows: int) -> bool:
        """Whether all classes of a batch's rows have been seen; asked at every batch, so cheaply.

        False where that takes a closer look.
        """
        if leaf is None or leaf.shape != (num_rows,) or leaf.is_floating_point():
            return False
        return self.classes[path].issuperset(leaf.tolist())
