"""One look: the gradient of a few rows, together and apart.

Four passes over at most 16 rows, in training mode: together, together in the opposite order, one
part, the other part. The order shows what chance, state and rounding do; the parts, weighted as
microbatches would be, must add up to the whole. Where they do not, in float32, further passes show
what rounding may do on an edge, as of a ReLU: kernels round otherwise for other numbers of rows.
"""

import array
import dataclasses
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from automicro.batch.device import on_device, on_host
from automicro.errors import LossError
from automicro.loss.informative_rows import Choice
from automicro.loss.passes import Computation, ExtraPasses, Place, keeping_nothing
from automicro.loss.weights import BatchWeights, CutBatch
from automicro.values import children, is_plain

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Differences up to which gradients of a precision count as equal.

    Attributes:
        own: of the parameter's own gradient.
        all: of the gradient of all parameters, for each of them.
        total: of the gradient of all parameters, all differences together.
    """

    own: float
    all: float
    total: float


# Measured: rounding of 95 exact jobs in each precision stays below, by a factor of three or more.
LIMITS = {
    torch.float64: Limits(own=1e-7, all=1e-9, total=1e-8),
    torch.float32: Limits(own=1e-4, all=1e-6, total=1e-5),
    torch.float16: Limits(own=2e-2, all=1e-3, total=1e-2),
    torch.bfloat16: Limits(own=1e-1, all=1e-3, total=3e-2),
}
_ACCELERATED = 10  # TF32, and sums in another order for every shape
_SHAKEN_BITS = range(8, 16)  # of a float32: about 1e-6 of it, in one way after the other
_SLIGHT = 1e-2  # of the gradient of a parameter
CLEARLY = 10  # a difference so many times what chance makes is none of chance's


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look saw.

    Attributes:
        wrong: the parameter whose gradient adds up least, and by how much of itself it is off;
            None where all add up.
        is_slight: whether that may be rounding: where a few ReLUs stand on an edge, and not with
            other rows again.
        ordered: the parameter whose gradient depends on the order of the rows, or on what the
            passes before left behind; None where none does.
        noise: names of what draws and cannot be silenced.
        repeats: whether the forward sets the seed of its draws by itself, so that each microbatch
            draws what the first rows did.
        blind: parameters that a gradient of zero reached.
        num_reached: how many parameters a gradient reached.
        changing: state of Python's that each call changes.
        initialised: names of parameters that the first forward of a look set.
        tells: whether the rows' gradients differ, so that a wrong weight would show.
        why: why nothing was seen; empty where something was.
        tolerance: relative, of the gradient of one parameter.
        values: the losses: together, of both parts added up.
    """

    wrong: tuple[str, float] | None = None
    is_slight: bool = False
    ordered: str | None = None
    noise: tuple[str, ...] = ()
    repeats: bool = False
    blind: frozenset[str] = frozenset()
    num_reached: int = 0
    changing: tuple[Place, ...] = ()
    initialised: tuple[str, ...] = ()
    tells: bool = False
    why: str = ""
    tolerance: float = 0.0
    values: tuple[float, float] = field(default=(math.nan, math.nan))


def look(computation: Computation, batch: Any, choice: Choice) -> Seen:
    """Compare the gradient of some rows with that of two parts of them.

    Two sets of gradients are held.

    Raises:
        LossError: the forward gives no usable loss.
        RollbackError: each forward changes parameters.
        CollectiveError: the forward was about to communicate with other ranks.
        BaseException: whatever the forward raises on these rows.
    """
    cut = CutRows(computation, batch, choice)
    with ExtraPasses(computation) as passes:
        value = passes.run(cut.together, cut.whole_weights)
        passes.watch()
        whole = _wide(passes.take_gradients())
        totals = _norms(whole)
        passes.run(cut.reversed, cut.reversed_weights)
        noises = _norms(_differences(passes.take_gradients(), whole))
        parts = passes.run(cut.small, cut.weights, 0)
        gradients = passes.take_gradients()
        firsts = _norms(gradients)
        along = _dots(gradients, whole)
        whole = _less(whole, gradients)
        del gradients
        parts += passes.run(cut.large, cut.weights, 1)
        whole = _less(whole, passes.take_gradients())
        gaps = _norms(whole)
        del whole
        names = computation.names()
        labels = [
            names.get(id(leaf), f"a leaf outside of the modules, of shape {tuple(leaf.shape)}")
            for leaf in passes.leaves
        ]
        lasting, reached, changing = passes.lasting, passes.reached, tuple(passes.changed())
        initialised = tuple(passes.initialised())
        repeats = passes.silence.seeds.repeat
        labels = _of_lasting(labels, lasting, "")
        used = {leaf.dtype.to_real() for leaf in passes.leaves} | passes.silence.dtypes
        noise = (*sorted(passes.silence.unsilenced), *passes.foreign_draws())
        numbers = _Numbers(
            labels=labels,
            reached=_of_lasting(reached, lasting, False),
            totals=_of_lasting(totals, lasting, 0.0),
            noises=_of_lasting(noises, lasting, 0.0),
            firsts=_of_lasting(firsts, lasting, 0.0),
            gaps=_of_lasting(gaps, lasting, 0.0),
            along=math.fsum(along),
        )
        limits = limits_of(used, computation.device)
        judge = functools.partial(_judge, limits=limits, noise=noise, values=(value, parts))
        seen = judge(numbers)
        is_single = torch.float32 in used and not used & {torch.float16, torch.bfloat16}
        if is_single:
            for bits in _SHAKEN_BITS:
                if seen.wrong is None:
                    break
                moved = _moved_by_rounding(passes, cut, bits)
                # Leaves that these passes alone have made come last.
                chances = _of_lasting(moved[: len(lasting)], lasting, 0.0)
                beyond = [
                    gap if gap > CLEARLY * chance else 0.0
                    for gap, chance in zip(numbers.gaps, chances, strict=True)
                ]
                numbers = dataclasses.replace(numbers, gaps=beyond)
                seen = judge(numbers)
    is_slight = is_single and seen.wrong is not None and seen.wrong[1] < _SLIGHT
    return dataclasses.replace(
        seen,
        changing=changing,
        initialised=initialised,
        is_slight=is_slight,
        repeats=repeats,
    )


def lasting_state(computation: Computation, batch: Any) -> list[Place]:
    """State of Python's that goes on from forward to forward of these rows, and may matter.

    Numbers may always; all else only where the next loss goes by it. What a clock says, and what
    only the last call decides, does not go on. Nothing is kept for a backward.

    Raises:
        BaseException: whatever the forward raises on these rows.
    """
    with ExtraPasses(computation) as passes, keeping_nothing():
        passes.losses(batch)
        passes.watch()
        for _ in range(2):
            passes.losses(batch)
        places = passes.changed()
    if not places:
        return []

    def after(calls: int) -> tuple[list[_Snapshot], _Snapshot]:
        with ExtraPasses(computation) as passes, keeping_nothing():
            losses = [passes.losses(batch).loss for _ in range(calls)]
            return [_Snapshot(place.read()) for place in places], _Snapshot(losses[-1])

    (one, loss), (two, next_loss), (one_again, _), (two_again, _) = map(after, (1, 2, 1, 2))
    is_used = not next_loss.is_like(loss)
    return [
        place
        for place, first, second, *again in zip(places, one, two, one_again, two_again, strict=True)
        if (is_used or isinstance(place.read(), int | float))
        and not second.is_like(first)
        and all(map(_Snapshot.repeats, (first, second), again))
    ]


def counting(
    computation: Computation, batch: Any, choice: Choice, places: Sequence[Place]
) -> list[str]:
    """Names of the state that depends on how many calls there are for the same rows.

    Not of what adds up by rows, and not of what only the last call decides.

    Args:
        computation: model and loss.
        batch: some rows of which are called.
        choice: of rows.
        places: of state that each call changes.

    Raises:
        BaseException: whatever the forward raises on these rows.
    """
    cut = CutRows(computation, batch, choice)

    def after(*calls: Any) -> list[_Snapshot]:
        with ExtraPasses(computation) as passes:
            for rows in calls:
                passes.losses(rows)
            return [_Snapshot(place.read()) for place in places]

    calls = (cut.together,), (cut.small, cut.large), (cut.large,)
    whole, parts, last = (after(*each) for each in calls)
    again = (after(*each) for each in calls[1:])
    return [
        place.name
        for place, together, apart, alone, *repeated in zip(
            places, whole, parts, last, *again, strict=True
        )
        if not apart.is_like(together)
        and not apart.is_like(alone)
        # What a clock says is another each time.
        and all(map(_Snapshot.repeats, (apart, alone), repeated))
    ]


_MOST_VALUES, _MOST_BYTES, _DEPTH = 10_000, 2**24, 12
_ROUNDING = 1e-5  # of the state of a forward in float32, added up in another order


class _Snapshot:
    """What a value is at one moment, to be compared with what it is at another.

    Tensors and arrays are copied. What is too deep or too much, and what says nothing of itself,
    counts as the same.

    Args:
        value: any.

    Example:
        >>> before = _Snapshot({"step": 1, "mean": torch.zeros(2)})
        >>> before.is_like(_Snapshot({"step": 1, "mean": torch.full((2,), 1e-9)}))
        True
        >>> before.is_like(_Snapshot({"step": 2, "mean": torch.zeros(2)}))
        False
    """

    def __init__(self, value: Any) -> None:
        self._left = _MOST_VALUES
        self._frozen = self._freeze(value, _DEPTH)

    def is_like(self, other: "_Snapshot") -> bool:
        """Whether both are the same but for rounding."""
        return _are_alike(self._frozen, other._frozen, near_zero=True)

    def repeats(self, other: "_Snapshot") -> bool:
        """Whether both are the same to the digits that count, however small they are.

        As the same computation leaves them: two durations do not, though both are near zero.
        """
        return _are_alike(self._frozen, other._frozen, near_zero=False)

    def _freeze(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
            return value
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _numbers(value)
        if isinstance(value, bytearray | array.array):
            return bytes(value)
        is_apart = isinstance(value, nn.Module | types.FunctionType | type) or is_plain(value)
        if is_apart or depth == 0 or self._left <= 0:
            return type(value)
        held = [(name, self._freeze(each, depth - 1)) for name, each in children(value)]
        # The order of a set is none.
        return sorted(held, key=repr) if isinstance(value, set | frozenset) else dict(held)


def _numbers(value: Any) -> Any:
    """A copy of a tensor or an array in double precision; the shape of what has no such numbers."""
    is_tensor = isinstance(value, Tensor)
    is_read = value.layout is torch.strided if is_tensor else value.dtype.kind in "biufc"
    if not is_read or value.nbytes > _MOST_BYTES:
        return tuple(value.shape)
    copy = value.detach() if is_tensor else torch.from_numpy(np.array(value))
    return copy.cpu().to(torch.complex128 if copy.is_complex() else torch.float64, copy=True)


def _are_alike(one: Any, other: Any, *, near_zero: bool) -> bool:
    """Whether they are, to ``_ROUNDING`` of them, or, near zero, of one."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not one.numel():
            return one.shape == other.shape
        scale = 1.0 if near_zero else float(one.nan_to_num().abs().max())
        rounding = _ROUNDING * scale
        return torch.allclose(one, other, rtol=_ROUNDING, atol=rounding, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        rounding = _ROUNDING if near_zero else 0.0
        return one == other or math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=rounding)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _are_alike(one[key], other[key], near_zero=near_zero) for key in one
        )
    return type(one) is type(other) and bool(one == other)


def _moved_by_rounding(passes: ExtraPasses, cut: "CutRows", bits: int) -> list[float]:
    """How far the gradient of each leaf moves where parameters are off by their last bits."""
    passes.run(cut.together, cut.whole_weights)
    whole = passes.take_gradients()
    with passes.shaken(bits):
        passes.run(cut.together, cut.whole_weights)
    return _norms(_differences(passes.take_gradients(), whole))


class CutRows:
    """The chosen rows of a batch: together, turned around, and in two parts, with weights."""

    def __init__(self, computation: Computation, batch: Any, choice: Choice) -> None:
        small, large, rows = choice.small, choice.large, choice.rows
        with on_host():
            self.small, self.large, self.together, self.reversed = (
                computation.layout.take_rows(batch, each)
                for each in (small, large, rows, rows[::-1])
            )
            self.weights = weights_of(computation, self.together, [self.small, self.large], choice)
            self.whole_weights = weights_of(computation, self.together, [self.together], choice)
            self.reversed_weights = weights_of(computation, self.reversed, [self.reversed], choice)


def weights_of(
    computation: Computation, together: Any, parts: Sequence[Any], choice: Choice
) -> BatchWeights:
    """What the parts of a few rows weigh, as microbatches would."""
    sizes = [len(choice.rows)] if len(parts) == 1 else [len(choice.small), len(choice.large)]
    cut = CutBatch(batch=together, microbatches=parts, sizes=sizes)
    return BatchWeights(computation.averages, [cut])


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """By parameter: its label, whether it was reached, and norms.

    Norms of the whole gradient, of the noise, of the first part's gradient, and of the gap.
    """

    labels: Sequence[str]
    reached: Sequence[bool]
    totals: Sequence[float]
    noises: Sequence[float]
    firsts: Sequence[float]
    gaps: Sequence[float]
    along: float


def _judge(
    numbers: _Numbers, *, limits: Limits, noise: tuple[str, ...], values: tuple[float, float]
) -> Seen:
    total, first = math.hypot(*numbers.totals), math.hypot(*numbers.firsts)
    scale = max(total, first)
    if not math.isfinite(scale) or not math.isfinite(values[0]):
        return Seen(why="the loss or its gradient is not finite", noise=noise, values=values)
    if scale == 0:
        why = "no gradient reaches any parameter"
        return Seen(why=why, noise=noise, values=values)
    sizes = [max(pair) for pair in zip(numbers.totals, numbers.firsts, strict=True)]
    wrong = _worst(numbers.labels, numbers.gaps, sizes, scale, limits)
    ordered = _worst(numbers.labels, numbers.noises, sizes, scale, limits)
    chance = math.hypot(*numbers.noises)
    if ordered is not None and not math.hypot(*numbers.gaps) > CLEARLY * chance:
        wrong = None
    # How much of the first part's gradient points elsewhere than the whole's.
    aside = first**2 - (numbers.along / total) ** 2 if total else first**2
    return Seen(
        wrong=wrong,
        ordered=None if ordered is None or wrong is not None else ordered[0],
        noise=noise,
        blind=frozenset(
            label
            for label, size, was_reached in zip(numbers.labels, sizes, numbers.reached, strict=True)
            if was_reached and size <= limits.all * scale
        ),
        num_reached=sum(numbers.reached),
        tells=aside > (10 * limits.own * first) ** 2,
        tolerance=limits.own,
        values=values,
    )


def _worst(
    labels: Sequence[str],
    gaps: Sequence[float],
    sizes: Sequence[float],
    scale: float,
    limits: Limits,
) -> tuple[str, float] | None:
    bad = [
        (label, gap / max(size, limits.all * scale))
        for label, gap, size in zip(labels, gaps, sizes, strict=True)
        if not gap <= limits.own * size + limits.all * scale
    ]
    if bad:
        return max(bad, key=lambda each: each[1])
    together = math.hypot(*gaps)
    return (
        ("all parameters together", together / scale) if together > limits.total * scale else None
    )


def limits_of(used: set[torch.dtype], device: torch.device) -> Limits:
    """Those of the lowest precision that was used."""
    known = [LIMITS[dtype] for dtype in used if dtype in LIMITS]
    widest = max(known, key=lambda each: each.own, default=LIMITS[torch.float32])
    if device.type != "cpu" and widest is LIMITS[torch.float32]:
        return Limits(
            own=widest.own * _ACCELERATED,
            all=widest.all * _ACCELERATED,
            total=widest.total * _ACCELERATED,
        )
    return widest


def _wide(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of low precision in float32, so that differences are not rounded away."""
    low = (torch.float16, torch.bfloat16)
    real = [g if g is None else _real(g) for g in gradients]
    return [g.float() if g is not None and g.dtype in low else g for g in real]


def dense(gradient: Tensor) -> Tensor:
    """Numbers of a gradient that is sparse or complex, too: real ones, two for a complex one."""
    values = gradient.detach()
    return _real(values if values.layout is torch.strided else values.to_dense())


def _real(gradient: Tensor) -> Tensor:
    if not gradient.is_complex() or gradient.layout is not torch.strided:
        return gradient
    return torch.view_as_real(gradient.resolve_conj())


def _less(whole: list[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The whole less these, in place where it can be: no third set is made."""
    left: list[Tensor | None] = []
    for index, gradient in enumerate(gradients):
        own = whole[index] if index < len(whole) else None
        if gradient is None:
            left.append(own)
        elif own is None:
            left.append(-dense(gradient))
        elif own.layout is torch.strided:
            left.append(own.sub_(dense(gradient)))
        else:
            left.append(dense(own) - dense(gradient))
    return left


def _differences(
    gradients: Sequence[Tensor | None], whole: Sequence[Tensor | None]
) -> Iterator[Tensor | None]:
    for index, gradient in enumerate(gradients):
        own = whole[index] if index < len(whole) else None
        if gradient is None or own is None:
            yield own if gradient is None else gradient
        else:
            yield dense(gradient) - dense(own)


def _norms(gradients: Iterable[Tensor | None]) -> list[float]:
    """Read at once: each value by itself would wait for the device."""
    norms = [
        torch.zeros((), dtype=torch.float64)
        if each is None
        else torch.linalg.vector_norm(
            each, dtype=torch.float64 if each.dtype is torch.float64 else torch.float32
        )
        for each in (gradient if gradient is None else dense(gradient) for gradient in gradients)
    ]
    return _read(norms)


def _dots(gradients: Sequence[Tensor | None], whole: Sequence[Tensor | None]) -> list[float]:
    return _read(
        [
            (dense(one).reshape(-1).to(other.dtype.to_real()) * dense(other).reshape(-1)).sum()
            for one, other in zip(gradients, whole, strict=False)
            if one is not None and other is not None
        ]
    )


def _read(values: Sequence[Tensor]) -> list[float]:
    if not values:
        return []
    device = next((each.device for each in values if each.device.type != "cpu"), None)
    if device is None:
        found: list[float] = torch.stack([each.double() for each in values]).tolist()
    else:
        found = torch.stack([each.to(device, torch.float32) for each in values]).tolist()
    return found


def _of_lasting(values: Sequence[T], lasting: Sequence[bool], nothing: T) -> list[T]:
    # Leaves that only a later pass reached got nothing in an earlier one.
    padded = [*values, *[nothing] * (len(lasting) - len(values))]
    return [value for value, lasts in zip(padded, lasting, strict=True) if lasts]


@dataclass(frozen=True, kw_only=True)
class Values:
    """Losses of some rows.

    Attributes:
        together: of all.
        apart: added up from parts.
        chance: how far the loss moves when nothing but rounding or state is another.
        tolerance: relative rounding.
        scale: of the numbers that were added up, where these may be larger.
        repeats: as `Seen` has it.
        is_told: whether they are no losses, but numbers that a host was told of.
    """

    together: float
    apart: float
    chance: float
    tolerance: float
    scale: float = 0.0
    repeats: bool = False
    is_told: bool = False

    @property
    def add_up(self) -> bool:
        """Whether they do, as far as can be seen."""
        if math.isfinite(self.together) and not math.isfinite(self.apart):
            return False
        gap = abs(self.together - self.apart)
        scale = max(abs(self.together), abs(self.apart), self.scale)
        return not gap > self.tolerance * scale + CLEARLY * self.chance


def evaluation_values(computation: Computation, batch: Any, choice: Choice) -> Values | None:
    """The loss of some rows in evaluation, together and apart.

    None where evaluation gives no loss. Called in evaluation mode, without gradients.

    Raises:
        As `look`.
    """
    own = dataclasses.replace(computation, averages=computation.eval_averages)
    cut = CutRows(own, batch, choice)
    with ExtraPasses(computation) as passes, torch.no_grad():

        def value(rows: Any, weights: BatchWeights, index: int = 0) -> float | None:
            moved = next(iter(on_device([rows], computation.device, isolate=True)))
            passes.begin_draws()
            with passes.silence:
                output = computation.convention.evaluate(computation.modules[0], moved)
                if output.loss is None:
                    return None
                loss, _ = weights.apply(
                    index, output.loss, output.losses, has_total=output.has_total
                )
            if loss.dim():
                raise LossError("the evaluation loss is not one number")
            return float(loss)

        together = value(cut.together, cut.whole_weights)
        again = value(cut.reversed, cut.reversed_weights)
        one, other = value(cut.small, cut.weights, 0), value(cut.large, cut.weights, 1)
    if together is None or again is None or one is None or other is None:
        return None
    return Values(
        together=together,
        apart=one + other,
        chance=abs(together - again),
        tolerance=limits_of(passes.silence.dtypes, computation.device).own,
        repeats=passes.silence.seeds.repeat,
    )


# Gradients that are zero but for rounding (a bias before a normalisation, keys in attention) are
# measured against this part of the whole gradient.
_FLOOR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What one run gave.

    Attributes:
        loss: of the whole batch.
        losses: its parts by name.
        gradients: by parameter; None where it got none.
    """

    loss: float
    losses: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are numbers."""
        given = [each for each in self.gradients.values() if each is not None]
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in given)

    @property
    def norm(self) -> float:
        """Of all gradients together."""
        return math.hypot(*(_norm(each) for each in self.gradients.values()))


def relative_errors(split: Compared, whole: Compared) -> dict[str, float]:
    """The relative error of each parameter's gradient.

    Example:
        >>> one = Compared(loss=1.0, gradients={"weight": torch.tensor([3.0, 4.0])})
        >>> other = Compared(loss=1.0, gradients={"weight": torch.tensor([3.0, 3.0])})
        >>> relative_errors(other, one)
        {'weight': 0.2}
    """
    floor = max(_FLOOR * whole.norm, torch.finfo(torch.float64).tiny)
    errors = {}
    for name, expected in whole.gradients.items():
        found = split.gradients[name]
        if expected is None and found is None:
            errors[name] = 0.0
            continue
        if expected is None or found is None:
            gap = _norm(found) + _norm(expected)
        else:
            gap = _norm(found - expected)
        error = gap / max(_norm(expected), floor)
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def loss_error(split: float, whole: float) -> float:
    """The relative error of the loss."""
    if math.isnan(split) and math.isnan(whole):
        return 0.0
    # Losses near zero may be differences of numbers near one, with their rounding.
    error = abs(split - whole) / max(0.05, abs(whole))
    return math.inf if math.isnan(error) else error


def _norm(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient))
