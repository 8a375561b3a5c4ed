"""Features take part in a step beside its path: metrics, outputs, observers, or yours."""

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from automicro.errors import Bystander, blame, bystander
from automicro.loss.conventions import Carried, Output
from automicro.state.part import PART
from automicro.step.plan import Cut, Plan
from automicro.step.setup import Setup
from automicro.transaction.transaction import Part


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at a batch. A batch that ran out of memory has several.

    Attributes:
        phase: ``"train"`` or ``"eval"``.
        number: 1 for the first.
        num_rows: of the whole batch.
        microbatch_size: of the largest microbatch: its rows, or in another unit what it costs.
        num_microbatches: into how many the batch is cut.
        is_measuring: whether it is cut smaller than fits, only to measure what its rows need.
        unit: what sizes are counted in, in the plural.
        cuts: rows of each microbatch, of each batch.
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
        index: among those of this rank, from 0.
        num_rows: of it.
        given: its rows as they were cut from the batch, where that lies; with the state beside
            them, where state goes from batch to batch.
        inputs: the same on the device.
        output: of the forward, in `Feature.computed`; None before and after.
        loss: detached, and weighted so that those of all microbatches add up; None before it is
            known, and in evaluation.
    """

    __slots__ = ("given", "index", "inputs", "loss", "num_rows", "output")

    def __init__(self, index: int, num_rows: int, given: Any, inputs: Any) -> None:
        self.index, self.num_rows = index, num_rows
        self.given, self.inputs = given, inputs
        self.output: Output | None = None
        self.loss: Tensor | None = None

    @property
    def rows(self) -> Any:
        """The rows on the device, as the batch holds them."""
        inputs = self.inputs
        return inputs.batch if isinstance(inputs, Carried) else inputs


class Feature:
    """Takes part in every attempt at a batch. A hook that a subclass leaves out costs nothing.

    An attempt may still be undone after any of these: what a hook keeps starts anew in `begin`, or
    belongs into a `Part`, an object beside this one with ``begin``, ``prepare``, ``commit`` and
    ``roll_back``. After a backward, ``.grad`` is the sum over the attempt's microbatches so far. An
    exception in a hook ends the step, with its state as it was before.

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
        """A Microbatcher is made with it, and may be made in another way."""

    def parts(self) -> Sequence[Part]:
        """Its parts that an attempt may change, to be committed or rolled back with all else."""
        return ()

    def begin(self, attempt: Attempt) -> None:
        """An attempt begins."""

    def before(self, run: MicrobatchRun) -> None:
        """A microbatch is on the device; its forward comes next."""

    def forwarded(self, run: MicrobatchRun) -> None:
        """The model has run. A loss function comes next; in evaluation it has run, too."""

    def before_backward(self, run: MicrobatchRun) -> None:
        """The loss is known; its backward comes next. Not in evaluation."""

    def computed(self, run: MicrobatchRun) -> None:
        """Forward and, in training, backward are done; the output is still there."""

    def after(self, run: MicrobatchRun) -> None:
        """The microbatch is over, and its output is let go."""

    def end(self, attempt: Attempt) -> None:
        """All microbatches are done, and may still be rolled back."""

    def failed(self, attempt: Attempt, message: str, peak_bytes: int | None) -> Sequence[str]:
        """The attempt ran out of memory and was undone. Return paths of files you wrote on it."""
        return ()


_HOOKS = [name for name in vars(Feature) if not name.startswith("_") and name != "attach"]


def check_features(features: object) -> list[Feature]:
    """The features of a run.

    Raises:
        TypeError: something else, such as a class.

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
            raise TypeError(f"features holds {kind}, which is no Feature; {remedy}")
        if name := misspelt_hook(type(each), Feature, _HOOKS):
            raise TypeError(
                f"{type(each).__name__}.{name} would never be called: the hooks of a Feature "
                f"are {', '.join(_HOOKS)}. Rename it, or let a name of your own begin with _"
            )
    return found


def misspelt_hook(kind: type, base: type, hooks: Collection[str]) -> str | None:
    """The method of a class that is named nearly as a hook of its base, and would not be called."""
    own = (name for name in dir(kind) if name not in dir(base) and not name.startswith("_"))
    called = (name for name in own if callable(getattr(kind, name)))
    return next((n for n in called if difflib.get_close_matches(n, hooks, 1, 0.85)), None)


def takes_part(feature: Feature) -> bool:
    """Whether a feature has any hook of an attempt."""
    return any(getattr(type(feature), name) is not getattr(Feature, name) for name in _HOOKS)


class Features:
    """The features of one step. Each hook asks those alone that have it.

    Args:
        features: in the order in which they are asked; at the end of an attempt from the last to
            the first.
        given: those of the caller, which an error of theirs names.
        has_metrics: whether metrics are among them.
    """

    def __init__(
        self,
        features: Iterable[Feature],
        *,
        given: Collection[Feature] = (),
        has_metrics: bool = False,
    ) -> None:
        self._all, self._given = list(features), given
        self._attempt: Attempt | None = None
        self.has_metrics = has_metrics
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
        self._attempt = None  # the next one begins
        found: list[Part] = []
        for parts in self._parts:
            found += parts()
        for each in found:
            if missing := [name for name in PART if not hasattr(each, name)]:
                raise TypeError(
                    f"parts() of a feature gave {each!r}, which has no {' and no '.join(missing)}; "
                    f"give objects that have {', '.join(PART)}"
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
        if attempt is None:  # memory ran out before it could begin
            return []
        told = [failed(attempt, message, peak_bytes) for failed in self._failed]
        # A hook of the caller's that ends without a return gives None.
        return [file for files in told for file in files or ()]


# Most steps have none: they share this one, which never holds an attempt.
NO_FEATURES = Features(())


def _named(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook of the caller's; its error says whose it is."""
    try:
        return hook(*args)
    except BaseException as error:
        if bystander(error) is None:  # else it is known better
            feature: Any = hook.__self__  # type: ignore[attr-defined]
            culprit = Bystander(kind="feature", name=type(feature).__name__)
            blame(error, culprit, f"in {hook.__name__} of {culprit}")
        raise
