"""The report of a plan: for a program, for a person, and as a picture."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automicro.batch.layout import describe_cut
from automicro.memory.timeline import ACTIVATIONS, Owner, Trace, added_up
from automicro.policy.auto import Halving
from automicro.savers.levels import PLAIN
from automicro.tools.pictures import new_figure, speed_and_memory, timeline
from automicro.tools.plan.devices import find_device
from automicro.tools.plan.kernels import KINDS
from automicro.units import describe_count, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLACES = {"cpu": "on the CPU", "cuda": "as on a GPU"}
_MOST_MODULES = 6
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that would make a step smaller.

    Attributes:
        name: in a word.
        how: to do it.
        peak_bytes: of the same microbatch then.
        saved_bytes: less than now, margins included.
        fits: whether the same microbatch would fit then.
    """

    name: str
    how: str
    peak_bytes: int
    saved_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """The largest microbatch of one level of ``when_too_large``.

    Attributes:
        name: as `StepResult.level` has it.
        how: microbatches are computed, in half a sentence.
        largest_size: the most rows that fit, 0 where one does not. Microbatches are balanced, so
            that `microbatch_size` may be smaller.
        microbatch_size: rows of the largest microbatch; 1 where not even one row fits.
        num_microbatches: into which the batch is cut.
        fits: whether that microbatch fits, with the margin.
        peak_bytes: the most that its step holds.
        margin_bytes: what is left free above the peak.
        nested_sizes: of the largest slice of each part with a size of its own, by its name.
        deferred_bytes: what it needs, with the margin, where shards are reduced with the last
            microbatch alone; None where nothing is deferred.
    """

    name: str
    how: str
    largest_size: int
    microbatch_size: int
    num_microbatches: int
    fits: bool
    peak_bytes: int
    margin_bytes: int
    nested_sizes: Mapping[str, int]
    deferred_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """The peak with the margin."""
        return self.peak_bytes + self.margin_bytes


@dataclass(frozen=True, kw_only=True)
class PlanReport(LevelPlan):
    """The result of `plan`. ``print(report)`` shows it, `to_dict` is for JSON.

    It is the plan of the first level of ``when_too_large`` at which a microbatch fits, or of the
    plain one.

    Attributes:
        model: its class.
        device: as given.
        limit_bytes: what tensors may take; None if not given.
        num_rows: of the optimization batch, on each rank.
        breakdown: bytes at the peak, by what they are.
        modules: bytes of activations at the peak, by the module that made them; those of repeated
            blocks are added up.
        points: sizes that were looked at, and their peaks.
        remedies: what would help, the most helpful first.
        num_parameters: of the model.
        ranks: on which it is sharded.
        precision: of autocast.
        train: whether it is a training step.
        recompute: whether repeated blocks are computed again in the backward.
        levels: all of them, the plain one first.
        is_measured: whether a few rows ran on the CPU, because the model needs data.
        why_measured: in that case, with the model's own line.
        assumptions: about the device's kernels, in sentences.
        state_unknown: why the optimizer's state could not be predicted and is not counted.
        samples: bytes by owner, at points in the order of the step from 0 to 1.
    """

    model: str
    device: str
    limit_bytes: int | None
    num_rows: int
    breakdown: Mapping[str, int]
    modules: Mapping[str, int]
    points: Sequence[tuple[int, int]]
    remedies: Sequence[Remedy]
    num_parameters: int
    ranks: int
    precision: str
    train: bool
    recompute: bool
    levels: Sequence[LevelPlan]
    is_measured: bool
    why_measured: str
    assumptions: Sequence[str]
    state_unknown: str
    samples: Sequence[tuple[float, Mapping[str, int]]] = dataclasses.field(repr=False)

    @property
    def level(self) -> str:
        """The name of the level that all of this is told of."""
        return self.name

    @property
    def exit_code(self) -> int:
        """0 where it fits, 1 where not even one row does, or not the size that was asked for."""
        return 0 if self.fits else 1

    def policy(self) -> Halving:
        """The policy ``"auto"``, starting from the planned size in place of the whole batch.

        ``microbatch_size=report.policy()`` for a `Microbatcher` or a `Trainer`.
        """
        return Halving(initial=self.microbatch_size)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        found = dataclasses.asdict(self)
        found |= {"needed_bytes": self.needed_bytes, "level": self.level}
        for planned, level in zip(found["levels"], self.levels, strict=True):
            planned["needed_bytes"] = level.needed_bytes
        found["points"] = [list(point) for point in self.points]
        found["samples"] = [[step, dict(held)] for step, held in self.samples]
        return found

    def picture(self) -> "Figure":
        """Draw what a step holds from its beginning to its end, and the peak against the size.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = new_figure(height=9.0)
        above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
        title = f"What a step of {self.model} holds"
        timeline(
            self.samples, limit_bytes=self.limit_bytes, title=title, unit="part of it", into=above
        )
        points = [(size, None, None, peak) for size, peak in self.points]
        chosen = self.microbatch_size if self.fits else None
        speed_and_memory(
            points, limit_bytes=self.limit_bytes, chosen=chosen, title="Its peak", into=below
        )
        return figure

    def __str__(self) -> str:
        lines = [self._verdict(), self._conditions(), "  at the peak:"]
        for kind, num_bytes in self.breakdown.items():
            lines.append(f"    {format_bytes(num_bytes):>12}  {kind}")
            if kind == ACTIVATIONS:
                most = dict(list(self.modules.items())[:_MOST_MODULES])
                most["others"] = num_bytes - sum(most.values())
                lines += [f"    {format_bytes(n):>26}  {name}" for name, n in most.items() if n]
        if self.margin_bytes:
            lines.append(f"    {format_bytes(self.margin_bytes):>12}  margin, to be left free")
        if len(self.levels) > 1:
            lines.append("  at each level of when_too_large:")
            width = max(len(level.name) for level in self.levels)
            lines += [f"    {each.name:<{width}}  {self._at(each)}" for each in self.levels]
        deferred = self._deferred()
        if deferred:
            lines.append(deferred)
        if self.remedies:
            lines.append("  what would help most, for the same microbatch:")
        for remedy in self.remedies:
            then = "" if self.fits or not remedy.fits else ", and it fits"
            lines.append(
                f"    {'-' + format_bytes(remedy.saved_bytes):>12}  {remedy.name}: {remedy.how}"
                f"{then}"
            )
        if self.remedies and not (self.fits or any(each.fits for each in self.remedies)):
            lines.append("    none of these alone is enough")
        lines += [f"  assumed: {each}" for each in self.assumptions]
        if self.is_measured:
            lines.append(f"  measured in a few rows on the CPU, because {self.why_measured}")
        if self.state_unknown:
            lines.append(f"  the optimizer's state is not counted: {self.state_unknown}")
        return "\n".join(lines)

    def _verdict(self) -> str:
        how = "measured" if self.is_measured else "planned"
        limit = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
        need = f"{format_bytes(self.needed_bytes)}{limit}"
        cut = describe_cut(self.num_rows, self.microbatch_size, self.num_microbatches)
        cut += " rows" if self.ranks == 1 else " rows of each rank"
        if self.limit_bytes is None:
            return f"{self.model}: {cut} need {need} ({how})"
        if self.fits:
            return f"{self.model} fits: {cut} need {need} ({how})"
        what = "not even one row fits" if self.largest_size == 0 else f"{cut} do not fit"
        return f"{self.model} does not fit: {what}, it needs {need} ({how})"

    def _deferred(self) -> str:
        """Lines about gradients that wait; empty where none do."""
        if self.deferred_bytes is None:
            return ""
        fits = self.limit_bytes is None or self.deferred_bytes <= self.limit_bytes
        does = "" if self.limit_bytes is None else ", and fits" if fits else ", and does not fit"
        return (
            "  reducing gradients with the last microbatch alone (sync='auto') needs "
            f"{format_bytes(self.deferred_bytes)}{does}"
        )

    def _at(self, level: LevelPlan) -> str:
        """The line of one level."""
        need = format_bytes(level.needed_bytes)
        if level.largest_size == 0:
            return f"not even one row fits, it needs {need}"
        cut = describe_cut(self.num_rows, level.microbatch_size, level.num_microbatches)
        fits = "" if level.fits else ", and do not fit"
        parts = [f", {name} {size} at a time" for name, size in level.nested_sizes.items()]
        return f"{cut} rows need {need}{fits}{''.join(parts)}"

    def _conditions(self) -> str:
        words = [
            f"  {describe_count(self.num_parameters)} parameters",
            "training" if self.train else "evaluation",
            self.precision,
        ]
        if self.level != PLAIN:
            words.append(f"at the level {self.level}")
        elif self.recompute:
            words.append("blocks computed again")
        words += [f"{name} {size} at a time" for name, size in self.nested_sizes.items()]
        if self.ranks > 1:
            words.append(f"sharded over {self.ranks} ranks (all figures are of one)")
        return ", ".join([*words, self._place()])

    def _place(self) -> str:
        if self.device in _PLACES:
            return _PLACES[self.device]
        usable_bytes = find_device(self.device).usable_bytes
        if self.limit_bytes in (None, usable_bytes):
            return f"on {self.device}"
        return (
            f"on {self.device} with the given {format_bytes(self.limit_bytes)} in place of its "
            f"{format_bytes(usable_bytes)}"
        )


def grouped(module: str) -> str:
    """The name of a module, the same for all that stand in a row.

    >>> grouped("transformer.h.11.mlp.act"), grouped("layers.0.2"), grouped("0"), grouped("")
    ('transformer.h.*.mlp.act', 'layers.*.2', '0', 'the model itself')
    """
    # The first number alone: blocks are put together, and the layers in one are told apart.
    return _NUMBER.sub("*", module, count=1) or "the model itself"


def breakdown_of(trace: Trace) -> dict[str, int]:
    """Bytes at the peak by what they are, in the order of `KINDS`."""
    found = added_up(trace.breakdown(), lambda owner: owner.kind)
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def modules_of(trace: Trace) -> dict[str, int]:
    """Bytes of activations at the peak by module, most first."""
    made = {owner: held for owner, held in trace.breakdown().items() if owner.kind == ACTIVATIONS}
    return dict(sorted(added_up(made, _name_of).items(), key=lambda item: -item[1]))


def samples_of(trace: Trace) -> list[tuple[float, Mapping[str, int]]]:
    """Bytes by owner along a step, from 0 to 1."""
    last = max(len(trace.deltas) - 1, 1)
    return [(event / last, held) for event, held in trace.samples(_name_of)]


def _name_of(owner: Owner) -> str:
    return grouped(owner.module) if owner.kind == ACTIVATIONS else owner.kind
