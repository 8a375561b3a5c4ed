"""Additions to a step that are not on its path: metrics, outputs, observers, or your own."""

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from automicro.errors import Bystander, blame, facts_of
from automicro.loss.conventions import Carried, Output
from automicro.state.part import PART
from automicro.step.plan import Cut, Plan
from automicro.step.setup import Setup
from automicro.transaction.transaction import Part


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a batch. A batch that ran out of memory has several.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        number: 1 for the first.
        num_rows: rows of the whole batch.
        microbatch_size: size of the largest microbatch: its rows, or in another unit its cost.
        num_microbatches: number of microbatches that the batch is cut into.
        is_measuring: whether it is cut smaller than necessary, only to measure memory.
        unit: the unit of sizes, in the plural.
        cuts: rows of each microbatch, for each batch.
    """

    phase: str
    number: int
    num_rows: int
    microbatch_size: int
    num_microbatches: int
    is_measuring: bool = False
    unit: str = "rows"
    cuts: Sequence[Cut] = field(default=(), repr=False, compare=False)


class MicrobatchRun:
    """One microbatch while it is computed.

    Attributes:
        index: position among the microbatches of this rank, from 0.
        num_rows: number of its rows.
        given: its rows as they were cut from the batch, on the device of the batch; with their
            state, if state is carried from batch to batch.
        inputs: the same on the device that computes.
        output: of the forward, in `Feature.computed`; None before and after.
        loss: detached, and weighted so that the losses of all microbatches add up; None before it
            is known, and in evaluation.
    """

    __slots__ = ("given", "index", "inputs", "loss", "num_rows", "output")

    def __init__(self, index: int, num_rows: int, given: Any, inputs: Any) -> None:
        self.index, self.num_rows = index, num_rows
        self.given, self.inputs = given, inputs
        self.output: Output | None = None
        self.loss: Tensor | None = None

    @property
    def rows(self) -> Any:
        """Its rows on the device that computes, in the structure of the batch."""
        inputs = self.inputs
        return inputs.batch if isinstance(inputs, Carried) else inputs


class Feature:
    """An addition to every attempt at a batch. Hooks that a subclass leaves out cost nothing.

    An attempt might still be rolled back after any of these hooks. So reset what a hook keeps in
    `begin`, or put it into a `Part`, a separate object with ``begin``, ``prepare``, ``commit`` and
    ``roll_back``. After a backward, ``.grad`` is the sum over the microbatches of the attempt so
    far. An exception in a hook ends the step, with its state as it was before.

    Example:
        >>> import torch
        >>> from automicro import Microbatcher
        >>> class LargestLoss(Feature):
        ...     def begin(self, attempt):
        ...         self.found = 0.0
        ...     def computed(self, run):
        ...         if run.loss is not None:
        ...             self.found = max(self.found, float(run.loss))
        >>> largest = LargestLoss()
        >>> microbatcher = Microbatcher(
        ...     torch.nn.Linear(8, 2), loss_fn=torch.nn.MSELoss(), features=[largest],
        ...     microbatch_size=4,
        ... )
        >>> result = microbatcher.backward((torch.randn(10, 8), torch.randn(10, 2)))
        >>> 0 < largest.found < float(result.loss)
        True
    """

    def attach(self, setup: Setup) -> None:
        """Change the setup of the Microbatcher that is being constructed with this feature."""

    def parts(self) -> Sequence[Part]:
        """Return the state that an attempt might change, to be committed or rolled back."""
        return ()

    def begin(self, attempt: Attempt) -> None:
        """Handle the start of an attempt."""

    def before(self, run: MicrobatchRun) -> None:
        """Handle a microbatch that is on the device, before its forward."""

    def forwarded(self, run: MicrobatchRun) -> None:
        """Handle the end of the model's forward; in evaluation the loss is known, too."""

    def before_backward(self, run: MicrobatchRun) -> None:
        """Handle a known loss, before its backward. Not called in evaluation."""

    def computed(self, run: MicrobatchRun) -> None:
        """Handle the end of forward and, in training, backward, while the output still exists."""

    def after(self, run: MicrobatchRun) -> None:
        """Handle the end of a microbatch, after its output was released."""

    def end(self, attempt: Attempt) -> None:
        """Handle the end of all microbatches, which might still be rolled back."""

    def failed(self, attempt: Attempt, message: str, peak_bytes: int | None) -> Sequence[str]:
        """Handle an attempt that ran out of memory and was rolled back.

        Returns:
            Paths of report files that the hook wrote.
        """
        return ()


_HOOKS = [name for name in vars(Feature) if not name.startswith("_") and name != "attach"]


def check_features(features: object) -> list[Feature]:
    """Return the features as a list.

    Raises:
        TypeError: it is not a list of features, or a method looks like a misspelled hook.

    >>> check_features([Feature()])[0].parts()
    ()
    """
    remedy = "give them in a list, such as features=[automicro.features.RememberSizes()]"
    if isinstance(features, str) or not isinstance(features, Iterable):
        raise TypeError(f"features is a {type(features).__name__} and not a list; {remedy}")
    found = list(features)
    for each in found:
        if not isinstance(each, Feature):
            kind = f"the class {each.__name__}" if isinstance(each, type) else f"{each!r}"
            raise TypeError(f"features holds {kind}, which is not a Feature; {remedy}")
        if name := misspelt_hook(type(each), Feature, _HOOKS):
            raise TypeError(
                f"{type(each).__name__}.{name} would never be called: the hooks of a Feature "
                f"are {', '.join(_HOOKS)}. Rename it, or start the name of your own method with _"
            )
    return found


def misspelt_hook(kind: type, base: type, hooks: Collection[str]) -> str | None:
    """Return a method of a class with nearly the name of a hook, which would never be called."""
    own = (name for name in dir(kind) if name not in dir(base) and not name.startswith("_"))
    called = (name for name in own if callable(getattr(kind, name)))
    return next((n for n in called if difflib.get_close_matches(n, hooks, 1, 0.85)), None)


def takes_part(feature: Feature) -> bool:
    """Whether a feature overrides any hook of an attempt."""
    return any(getattr(type(feature), name) is not getattr(Feature, name) for name in _HOOKS)


class Features:
    """The features of one step. Each hook calls only the features that override it."""

    def __init__(self, features: Iterable[Feature], *, given: Collection[Feature] = ()) -> None:
        self._all, self._given = list(features), given
        self._attempt: Attempt | None = None
        self._parts, self._begin = self._having("parts"), self._having("begin")
        self._end, self._failed = self._having("end"), self._having("failed")
        self.before = self._having("before")
        self.forwarded = self._having("forwarded")
        self.before_backward = self._having("before_backward")
        self.computed = self._having("computed")
        self.after = self._having("after")

    def _having(self, name: str) -> list[Callable[..., Any]]:
        known = getattr(Feature, name)
        having = [each for each in self._all if getattr(type(each), name) is not known]
        hooks = [(each, getattr(each, name)) for each in having]
        return [functools.partial(_named, h) if f in self._given else h for f, h in hooks]

    def parts(self) -> list[Part]:
        self._attempt = None  # a new attempt begins
        found: list[Part] = []
        for parts in self._parts:
            found += parts()
        for each in found:
            if missing := [name for name in PART if not hasattr(each, name)]:
                raise TypeError(
                    f"parts() of a feature returned {each!r}, which lacks "
                    f"{' and no '.join(missing)}. Return objects that have {', '.join(PART)}"
                )
        return found

    def begin(self, phase: str, number: int, plan: Plan) -> None:
        if not self._all:
            return
        self._attempt = attempt = Attempt(
            phase=phase,
            number=number,
            num_rows=sum(cut.num_rows for cut in plan.cuts),
            microbatch_size=max((cut.largest for cut in plan.cuts), default=0),
            num_microbatches=sum(len(cut.sizes) for cut in plan.cuts),
            is_measuring=plan.is_measuring,
            unit=plan.unit,
            cuts=plan.cuts,
        )
        for begin in self._begin:
            begin(attempt)

    def end(self) -> None:
        if self._attempt is not None:
            for end in reversed(self._end):
                end(self._attempt)

    def failed(self, message: str, peak_bytes: int | None) -> list[str]:
        attempt = self._attempt
        if attempt is None:  # memory ran out before the features had begun
            return []
        told = [failed(attempt, message, peak_bytes) for failed in self._failed]
        # A hook of the caller that lacks a return statement gives None.
        return [file for files in told for file in files or ()]


# Most steps have no features and share this object, which never holds an attempt.
NO_FEATURES = Features(())


def _named(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook of the caller and name its feature in any error."""
    try:
        return hook(*args)
    except BaseException as error:
        if facts_of(error).bystander is None:  # otherwise an inner call has already named it
            feature: Any = hook.__self__  # type: ignore[attr-defined]
            culprit = Bystander(kind="feature", name=type(feature).__name__)
            blame(error, culprit, f"in {hook.__name__} of {culprit}")
        raise
