"""Results of a computation by name, and their differences beyond chance."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from automicro.checking.state import Place, Snapshot

CLEARLY = 10.0  # times the difference that chance caused
LOSS = "the loss"
SEAM = "the gradient with respect to the model output"


@dataclass(kw_only=True)
class Reading:
    """Results of a computation on some rows, in one part or several, by name."""

    # The loss, its terms, and other numbers, weighted and summed.
    numbers: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of parameters, summed
    outputs: dict[str, Tensor] = field(default_factory=dict)  # joined rows of all parts, by path
    # For each part, outputs of modules or gradients of its loss by these outputs.
    seams: list[list[tuple[str, Tensor | None]]] = field(default_factory=list)
    # The largest magnitude of each result while parts were added.
    scales: dict[str, float] = field(default_factory=dict)
    # The rounding error expected for each result.
    floors: dict[str, float] = field(default_factory=dict)
    each: list[float] = field(default_factory=list)  # the unweighted loss of each part
    told: set[str] = field(default_factory=set)  # names of numbers that were reported to a host
    as_loss: frozenset[str] = frozenset()  # names of reported numbers that were the loss itself
    has_total: bool = False  # whether the forward returned a total loss in addition to its terms
    # Paths of the batch's tensors that a forward wrote to.
    written: set[str] = field(default_factory=set)
    # Attributes and variables that the passes changed, with their new values.
    state: dict[tuple[int, str], tuple[Place, Snapshot]] = field(default_factory=dict)

    def raise_scale(self, name: str, *values: float) -> None:
        """Raise the recorded magnitude of a result if one of these values is larger."""
        self.scales[name] = max(self.scales.get(name, 0.0), *map(abs, values))

    @property
    def size(self) -> float:
        """The magnitude of all gradients, or of all numbers if there are no gradients."""
        return math.hypot(*(self.scales[name] for name in self.gradients or self.numbers))

    @property
    def norm(self) -> float:
        """The norm of all gradients."""
        return math.hypot(*map(norm_of, self.gradients.values()))

    def distances(self, other: "Reading") -> dict[str, float]:
        """Return distances to another reading by name; infinite if shapes differ."""
        names = [each for each in self.numbers if each in other.told or each not in self.told]
        found = {name: abs(self.numbers[name] - other.numbers.get(name, 0.0)) for name in names}
        for mine, theirs in ((self.gradients, other.gradients), (self.outputs, other.outputs)):
            for name in {**mine, **theirs}:
                a, b = mine.get(name), theirs.get(name)
                if a is not None and b is not None:
                    found[name] = _apart(a, b)
                elif mine is self.gradients:  # the parameter was not reached
                    found[name] = norm_of(a) + norm_of(b)
                else:
                    found[name] = math.inf
        for name, one, two in self._pairs(other):
            found[name] = math.hypot(found.get(name, 0.0), _apart(one, two))
        return {name: math.inf if math.isnan(gap) else gap for name, gap in found.items()}

    def _pairs(self, parts: "Reading") -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield pairs of a module's values: for all rows, and for parts joined."""
        mine, theirs = [each for part in self.seams for each in part], list(parts.seams)
        flat = [(each,) for part in theirs for each in part]
        # Otherwise the module ran, for example, once per row in either case.
        if len(flat) != len(mine):
            flat = list(zip(*theirs, strict=True)) if {len(mine)} == {*map(len, theirs)} else []
        for (name, one), pieces in zip(mine, flat, strict=bool(flat)):
            values = [value for _, value in pieces if value is not None]
            if one is None or len(values) < len(pieces):
                continue
            if one.dim() and sum(map(Tensor.numel, values)) == one.numel():
                width = one.shape[-1] if {v.shape[-1:] for v in values} == {one.shape[-1:]} else 1
                yield name, profile([one], width), profile(values, width)


def profile(pieces: Sequence[Tensor], width: int = 1) -> Tensor:
    """Return sums, absolute sums and norms by column, which do not depend on the order of rows."""
    # Packed and ragged rows have a different order in each cut.
    wide = [_dense(each.detach()) for each in pieces]
    lines = [each.reshape(-1, width if each.dim() > 1 else 1) for each in wide if each.numel()]
    if not lines or not has_fractions(lines[0]):
        return torch.zeros(0)
    kind = torch.float64 if lines[0].dtype is torch.float64 else torch.float32
    sums = [sum(each.sum(0, dtype=kind) for each in lines)]
    sums += [sum(each.abs().sum(0, dtype=kind) for each in lines)]
    sums += [sum(each.to(kind).square().sum(0) for each in lines)]
    sums[-1] = torch.as_tensor(sums[-1]).sqrt()
    return torch.cat([torch.as_tensor(each) for each in sums])


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the distance of two tensors; entries infinite or NaN in both count as equal."""
    if one.shape != other.shape or one.is_nested or other.is_nested:
        return 0.0 if one.is_nested and other.is_nested else math.inf
    one, other = _dense(one), _dense(other)
    if not has_fractions(one):  # the share of entries that differ
        return float((one != other).float().mean()) if one.numel() else 0.0
    gap = one - other
    if one.numel() and not bool(gap.isfinite().all()):
        is_same = (one == other) | (one.isnan() & other.isnan())
        gap = gap.masked_fill(is_same, 0.0)
    return norm_of(gap)


def has_fractions(value: Tensor) -> bool:
    """Return whether a tensor holds floating point or complex numbers."""
    return value.is_floating_point() or value.is_complex()


def _dense(value: Tensor) -> Tensor:
    value = value if value.layout is torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def norm_of(value: Tensor | None) -> float:
    """Return the norm of a floating point tensor; zero for other tensors and None."""
    if value is None or value.is_nested or not has_fractions(value) or not value.numel():
        return 0.0
    wide = torch.float64 if value.dtype.to_real() is torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(_dense(value.detach()), dtype=wide))


def gaps(whole: Reading, parts: Reading, controls: Iterable[Reading]) -> dict[str, float]:
    """Return differences between two readings beyond chance, relative to their size."""
    beyond = {
        name: gap
        for name, gap in whole.distances(parts).items()
        if not gap <= max(whole.floors.get(name, 0.0), parts.floors.get(name, 0.0))
    }
    parts.gradients.clear()
    parts.seams.clear()
    for control in controls if beyond else ():
        chance = whole.distances(control)
        beyond = {n: gap for n, gap in beyond.items() if not gap <= CLEARLY * chance.get(n, 0.0)}
        del control  # free it before the next one
        if not beyond:
            break
    return {
        name: gap / (max(whole.scales.get(name, 0.0), parts.scales.get(name, 0.0)) or 1.0)
        for name, gap in beyond.items()
    }


def is_blind(whole: Reading, control: Reading) -> bool:
    """Return whether chance would hide a gradient twice as large."""
    names = whole.gradients or whole.numbers
    chance = whole.distances(control)
    # Since the whole was read, a check might have found that a number is not a mean.
    return CLEARLY * math.hypot(*(chance.get(name, 0.0) for name in names)) > whole.size > 0


# Gradients that are zero except for rounding (a bias before a normalization, keys in attention) are
# measured against this fraction of the whole gradient.
_FLOOR = 1e-2


def relative_errors(parts: Reading, whole: Reading) -> dict[str, float]:
    """Return the relative error of each parameter's gradient.

    >>> whole = Reading(gradients={"weight": torch.tensor([3.0, 4.0])})
    >>> relative_errors(Reading(gradients={"weight": torch.tensor([3.0, 3.0])}), whole)
    {'weight': 0.2}
    """
    names, apart = {**whole.gradients, **parts.gradients}, whole.distances(parts)
    least = _FLOOR * whole.norm or 1.0
    return {n: apart[n] / max(norm_of(whole.gradients.get(n)), least) for n in names}
