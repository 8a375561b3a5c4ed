"""Report of a plan: as data and as text."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.events.run import describe_cut
from automicro.memory.timeline import ACTIVATIONS, Owner, Trace, added_up
from automicro.policy.auto import Halving
from automicro.savers.levels import PLAIN
from automicro.tools import Remedy, table
from automicro.tools.plan.kernels import KINDS
from automicro.units import describe_count, format_bytes

_PLACES = {"cpu": "on the CPU", "cuda": "as on a GPU"}
_MOST_MODULES = 6
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """The largest microbatch of one level of ``when_too_large``.

    Attributes:
        name: name of the level, as in `StepResult.level`.
        microbatch_size: rows of the largest microbatch; 1 if not even one row fits.
        num_microbatches: number of microbatches in the batch.
        fits: whether that microbatch fits, including the margin.
        peak_bytes: peak memory of the step.
        margin_bytes: bytes to leave free above the peak.
        nested_sizes: rows of the largest slice of each part with its own size, by name.
    """

    name: str
    microbatch_size: int
    num_microbatches: int
    fits: bool
    peak_bytes: int
    margin_bytes: int
    nested_sizes: Mapping[str, int]

    @property
    def needed_bytes(self) -> int:
        """The peak plus the margin."""
        return self.peak_bytes + self.margin_bytes

    def cut(self, num_rows: int, rows: str = "rows") -> str:
        """Return a description of the microbatches of a batch and their memory."""
        need = format_bytes(self.needed_bytes)
        if not self.fits and self.microbatch_size == 1:
            return f"not even one row fits: it needs {need}"
        cut = describe_cut(num_rows, self.microbatch_size, self.num_microbatches)
        return f"{cut} {rows} need {need}"


@dataclass(frozen=True, kw_only=True)
class PlanReport(LevelPlan):
    """The result of `plan`. ``print(report)`` shows it, and `to_dict` returns JSON values.

    It describes the first level of ``when_too_large`` at which a microbatch fits, or the plain
    level if none fits.

    Attributes:
        model: class name of the model.
        device: the device, as given.
        limit_bytes: memory available to tensors, or None if not given.
        num_rows: rows of the optimization batch on each rank.
        points: sizes that were checked, with their peaks.
        num_parameters: number of parameters of the model.
        ranks: number of ranks that share the model as shards.
        precision: precision of autocast.
        train: whether it is a training step.
        levels: plans of all levels, the plain one first.
        assumptions: assumptions about the device's kernels, as sentences.
        state_unknown: why the optimizer's state could not be predicted and is not counted.
        trace: allocations and releases in the step.
        find_remedies: runs the step with changes that might help.
    """

    model: str
    device: str
    limit_bytes: int | None
    num_rows: int
    points: Sequence[tuple[int, int]]
    num_parameters: int
    ranks: int
    precision: str
    train: bool
    levels: Sequence[LevelPlan]
    assumptions: Sequence[str]
    state_unknown: str
    trace: Trace = dataclasses.field(repr=False)
    find_remedies: Callable[[], Sequence[Remedy]] = dataclasses.field(repr=False)

    @functools.cached_property
    def remedies(self) -> Sequence[Remedy]:
        """Changes that would help, most helpful first; they are planned when first read."""
        return self.find_remedies()

    def __getstate__(self) -> dict[str, Any]:
        # The steps of the planner cannot be pickled, so the remedies are planned before.
        return vars(self) | {"find_remedies": functools.partial(tuple, self.remedies)}

    @property
    def level(self) -> str:
        """Name of the level that this report describes."""
        return self.name

    @property
    def exit_code(self) -> int:
        """0 if the plan fits; 1 if not even one row, or not the requested size, fits."""
        return 0 if self.fits else 1

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak, by kind."""
        found = added_up(self.trace.breakdown(), lambda owner: owner.kind)
        return {kind: found[kind] for kind in KINDS if found.get(kind)}

    @property
    def modules(self) -> dict[str, int]:
        """Bytes of activations at the peak by module, largest first; repeated blocks are summed."""
        held = self.trace.breakdown().items()
        made = added_up({each: n for each, n in held if each.kind == ACTIVATIONS}, _name_of)
        return dict(sorted(made.items(), key=lambda item: -item[1]))

    def policy(self) -> Halving:
        """Return the policy ``"auto"``, starting from the planned size instead of the whole batch.

        Pass it as ``microbatch_size=report.policy()`` to a `Microbatcher` or a `Trainer`.
        """
        return Halving(initial=self.microbatch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        levels = [vars(each) | {"needed_bytes": each.needed_bytes} for each in self.levels]
        remedies = list(map(vars, self.remedies))
        found = vars(self) | {"levels": levels, "remedies": remedies, "level": self.level}
        found |= {"needed_bytes": self.needed_bytes, "breakdown": self.breakdown}
        del found["trace"], found["find_remedies"]
        return found | {"modules": self.modules}

    def __str__(self) -> str:
        lines = [self._verdict(), self._conditions(), "  at the peak:"]
        for kind, num_bytes in self.breakdown.items():
            lines += table([(num_bytes, kind)])
            if kind == ACTIVATIONS:
                most = dict(list(self.modules.items())[:_MOST_MODULES])
                most["others"] = num_bytes - sum(most.values())
                lines += [f"    {format_bytes(n):>26}  {name}" for name, n in most.items() if n]
        lines += table([(self.margin_bytes, "margin to leave free")])
        if len(self.levels) > 1:
            lines.append("  at each level of when_too_large:")
        for level in self.levels if len(self.levels) > 1 else ():
            parts = "".join(f", {part} {n} at a time" for part, n in level.nested_sizes.items())
            fits = "" if level.fits else ", and do not fit"
            lines.append(f"    {level.name}: {level.cut(self.num_rows)}{parts}{fits}")
        if self.remedies:
            lines.append("  what would help most, for the same microbatch, by predicted bytes:")
        for each in self.remedies:
            then = ", and it fits" if each.fits and not self.fits else ""
            lines += table([(each.saved_bytes, f"{each.text}{then}")])
        lines += [f"  assumed: {each}" for each in self.assumptions]
        if self.state_unknown:
            lines.append(f"  the optimizer's state is not counted: {self.state_unknown}")
        return "\n".join(lines)

    def _verdict(self) -> str:
        of = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
        fits = "" if self.limit_bytes is None else " fits" if self.fits else " does not fit"
        cut = self.cut(self.num_rows, "rows" if self.ranks == 1 else "rows of each rank")
        return f"{self.model}{fits}: {cut}{of} (planned)"

    def _conditions(self) -> str:
        words = [
            f"  {describe_count(self.num_parameters)} parameters",
            "training" if self.train else "evaluation",
            self.precision,
        ]
        if self.level != PLAIN:
            words.append(f"at the level {self.level}")
        words += [f"{name} {size} at a time" for name, size in self.nested_sizes.items()]
        if self.ranks > 1:
            words.append(f"sharded over {self.ranks} ranks (all figures are per rank)")
        return ", ".join([*words, _PLACES.get(self.device, f"on {self.device}")])


def grouped(module: str) -> str:
    """Return the name of a module with a wildcard for its position in a row of blocks.

    >>> grouped("transformer.h.11.mlp.act"), grouped("layers.0.2"), grouped("0"), grouped("")
    ('transformer.h.*.mlp.act', 'layers.*.2', '0', 'the model itself')
    """
    # Only the first number, so that blocks are combined but layers within one stay distinct.
    return _NUMBER.sub("*", module, count=1) or "the model itself"


def _name_of(owner: Owner) -> str:
    return grouped(owner.module) if owner.kind == ACTIVATIONS else owner.kind
