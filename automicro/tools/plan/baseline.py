"""Two plans of a model beside each other, one as it was written down: what grew, and by what name.

Each part is compared at its own fullest moment, so that one which grows while something else is
larger is seen. A module that was renamed, wrapped, split or joined is found again by its class, its
name and its bytes.
"""

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.memory.timeline import ACTIVATIONS
from automicro.rungs.levels import PLAIN
from automicro.tools.plan.report import PlanReport
from automicro.units import format_bytes
from automicro.version import __version__

LEAST_BYTES = 1 << 20  # that a part may grow by in any case
_ALIKE = 0.95  # bytes of a part under its old and its new name, as a share of the larger
_LIKELY = 1.5  # of three: likeness of names, bytes and classes
_MOST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a model's step holds, as a baseline keeps it.

    Attributes:
        peak_bytes: of the whole step.
        kinds: the most of each kind that is not told by module.
        modules: the most of each kind, by module.
        classes: of the modules, where they are known.
        conditions: for what it was planned, in words.
        is_at_peak: whether all parts are those of the fullest moment, as files once had them.
    """

    peak_bytes: int
    kinds: Mapping[str, int]
    modules: Mapping[str, Mapping[str, int]]
    classes: Mapping[str, str]
    conditions: str
    is_at_peak: bool = False

    @classmethod
    def of(cls, report: PlanReport, *, at_peak: bool = False) -> "Peaks":
        """Those of a plan; with ``at_peak`` as an old file has them."""
        if at_peak:
            kinds = {kind: n for kind, n in report.breakdown.items() if kind != ACTIVATIONS}
            modules = {name: {ACTIVATIONS: n} for name, n in report.modules.items()}
        else:
            kinds = {part.kind: part.peak_bytes for part in report.parts if not part.module}
            modules = {part.module: {} for part in report.parts if part.module}
            for part in report.parts:
                if part.module:
                    modules[part.module][part.kind] = part.peak_bytes
        return cls(
            peak_bytes=report.peak_bytes,
            kinds=kinds,
            modules=modules,
            classes={part.module: part.made_of for part in report.parts if part.module},
            conditions=_conditions(report),
            is_at_peak=at_peak,
        )

    @classmethod
    def read(cls, entry: Any) -> "Peaks":
        """Those of an entry of a file.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        if "parts" in entry:
            modules: dict[str, Mapping[str, int]] = {}
            classes = {}
            for name, found in entry["modules"].items():
                held = dict(found)
                classes[name] = str(held.pop("class"))
                modules[name] = {kind: int(num_bytes) for kind, num_bytes in held.items()}
            return cls(
                peak_bytes=int(entry["peak"]),
                kinds={kind: int(num_bytes) for kind, num_bytes in entry["parts"].items()},
                modules=modules,
                classes=classes,
                conditions=str(entry["planned for"]),
            )
        start = f"{ACTIVATIONS} of "
        old = {name: int(num_bytes) for name, num_bytes in entry.items()}
        return cls(
            peak_bytes=old.pop("peak"),
            kinds={name: n for name, n in old.items() if not name.startswith(start)},
            modules={
                name.removeprefix(start): {ACTIVATIONS: n}
                for name, n in old.items()
                if name.startswith(start)
            },
            classes={},
            conditions="",
            is_at_peak=True,
        )

    def entry(self) -> dict[str, Any]:
        """What `read` reads."""
        return {
            "peak": self.peak_bytes,
            "planned for": self.conditions,
            "parts": dict(self.kinds),
            "modules": {
                name: {"class": self.classes[name], **held} for name, held in self.modules.items()
            },
        }


def _conditions(report: PlanReport) -> str:
    import torch

    rows = f"{report.microbatch_size} of {report.num_rows} rows"
    words = [rows, "training" if report.train else "evaluation", report.precision]
    if report.level != PLAIN:
        words.append(report.level)
    elif report.recompute:
        words.append("blocks computed again")
    words += [f"{name} {size} at a time" for name, size in report.nested_sizes.items()]
    words += [f"{report.ranks} ranks"] if report.ranks > 1 else []
    words += ["measured"] if report.is_measured else []
    versions = f"torch {torch.__version__.partition('+')[0]}", f"automicro {__version__}"
    return ", ".join([*words, report.device, *versions])


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part, before and now.

    Attributes:
        part: in words.
        before: bytes.
        now: bytes.
    """

    part: str
    before: int
    now: int

    def __str__(self) -> str:
        return f"{self.part}: {format_bytes(self.before)} -> {format_bytes(self.now)}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What became of the parts of a model.

    Attributes:
        peak: of the whole step.
        grown: parts that hold more than they may, most first; the peak may be one of them.
        shrunk: parts that hold as much less, most first.
        renamed: modules with another name, as ``"old -> new"``.
        before: for what the old peaks were planned.
        now: the same of the new ones.
    """

    peak: Change
    grown: tuple[Change, ...]
    shrunk: tuple[Change, ...]
    renamed: tuple[str, ...]
    before: str
    now: str

    @property
    def shown_renames(self) -> str:
        """Some of the new names, in one line."""
        return "; ".join(_first(self.renamed, 4))

    def __str__(self) -> str:
        same = format_bytes(self.peak.before) == format_bytes(self.peak.now)
        peak = f"peak: {format_bytes(self.peak.now)}, as before" if same else str(self.peak)
        lines = [peak, *_first(str(each) for each in self.grown if each is not self.peak)]
        lines = [f"  {line}" for line in lines]
        if self.shrunk:
            lines += ["what shrank:"]
            lines += [f"  {line}" for line in _first(map(str, self.shrunk))]
        if self.renamed:
            lines += ["renamed?", *(f"  {line}" for line in _first(self.renamed))]
        if self.before and self.before != self.now:
            lines += [f"planned for {self.now}; the file for {self.before}"]
        return "\n".join(lines)


def _first(lines: Iterable[str], most: int = _MOST_LINES) -> list[str]:
    lines = list(lines)
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"and {more} more"]


def compare(before: Peaks, now: Peaks, share: float) -> Comparison:
    """What holds more than before, by more than a share and by more than a MiB.

    Args:
        before: as it was written down.
        now: of the same kind, whole peaks or those at the fullest moment.
        share: that each part may have grown by; with 0 not even by a byte.

    Example:
        >>> def peaks(**modules):
        ...     return Peaks(
        ...         peak_bytes=64 << 20, kinds={}, conditions="",
        ...         modules={name: {"activations": held << 20} for name, held in modules.items()},
        ...         classes=dict.fromkeys(modules, "Linear"),
        ...     )
        >>> found = compare(peaks(up=64, down=8), peaks(wide=64, down=16), 0.05)
        >>> print(found)
          peak: 64.00 MiB, as before
          activations of down: 8.00 MiB -> 16.00 MiB
        renamed?
          up -> wide
    """
    peak = Change(part="peak", before=before.peak_bytes, now=now.peak_bytes)
    changes = [peak]
    for kind in {**before.kinds, **now.kinds}:
        held = before.kinds.get(kind, 0), now.kinds.get(kind, 0)
        changes.append(Change(part=kind, before=held[0], now=held[1]))
    matched = _matched(before, now)
    for olds, news in matched:
        for kind in dict.fromkeys(
            itertools.chain(
                *(before.modules[name] for name in olds), *(now.modules[name] for name in news)
            )
        ):
            changes.append(
                Change(
                    part=f"{kind} of {_shown(olds, news)}",
                    before=sum(before.modules[name].get(kind, 0) for name in olds),
                    now=sum(now.modules[name].get(kind, 0) for name in news),
                )
            )

    def is_more(much: int, little: int) -> bool:
        return much > little * (1 + share) + (LEAST_BYTES if share else 0)

    return Comparison(
        peak=peak,
        grown=_sorted(each for each in changes if is_more(each.now, each.before)),
        shrunk=_sorted(each for each in changes[1:] if is_more(each.before, each.now)),
        renamed=tuple(
            f"{', '.join(olds)} -> {', '.join(news)}"
            for olds, news in matched
            if olds and news and olds != news
        ),
        before=before.conditions,
        now=now.conditions,
    )


def _sorted(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda each: -abs(each.now - each.before)))


_Names = tuple[tuple[str, ...], tuple[str, ...]]  # of one part: before, and now


def _shown(olds: tuple[str, ...], news: tuple[str, ...]) -> str:
    if not olds:
        return f"{news[0]} (new)"
    if not news:
        return f"{olds[0]} (gone)"
    if olds == news:
        return news[0]
    return f"{', '.join(news)} (renamed? it was {', '.join(olds)})"


def _matched(before: Peaks, now: Peaks) -> list[_Names]:
    """Names of before, each with that of now: itself, unless a module of another class has it.

    Names that vanished and names that appeared are matched one to one, the likeliest first. Then
    those that are left join a pair in which one side has room for their bytes: a part that was
    split, or several that were joined. What has no match is new, or gone.
    """
    sizes = [
        {name: sum(held.values()) for name, held in of.modules.items()} for of in (before, now)
    ]
    both = [name for name in sizes[0] if name in sizes[1]]
    found: list[_Names] = [((name,), (name,)) for name in both if _kinship(before, now, name, name)]
    same = {name for (name,), _ in found}
    gone, come = ({name: each[name] for name in each if name not in same} for each in sizes)
    pairs: dict[str, str] = {}
    rated = ((_likeness(before, now, old, new), old, new) for old in gone for new in come)
    likely = [(likeness, old, new) for likeness, old, new in rated if likeness >= _LIKELY]
    for _, old, new in [*sorted(likely, reverse=True), *((0, name, name) for name in both)]:
        if old in gone and old not in pairs and new not in pairs.values():
            pairs[old] = new
    groups = [([old], [new]) for old, new in pairs.items()]
    left = sorted(gone.keys() - pairs.keys()), sorted(come.keys() - set(pairs.values()))
    _gather(groups, left, sizes)
    alone: list[_Names] = [((old,), ()) for old in left[0]]
    alone += [((), (new,)) for new in left[1]]
    return found + sorted([*((tuple(olds), tuple(news)) for olds, news in groups), *alone])


def _gather(
    groups: list[tuple[list[str], list[str]]],
    left: tuple[list[str], list[str]],
    sizes: Sequence[Mapping[str, int]],
) -> None:
    """Put names that are left beside those that hold as much as several of them."""
    for side in (0, 1):
        whole = 1 - side
        lonely = [([], [name]) if whole else ([name], []) for name in left[whole]]
        for group in [*groups, *lonely]:
            held = [sum(sizes[of][name] for name in group[of]) for of in (0, 1)]
            room = held[whole] - held[side]
            chosen = []
            for name in sorted(left[side], key=lambda each: -sizes[side][each]):
                if 0 < _ALIKE * sizes[side][name] <= room:
                    chosen.append(name)
                    room -= sizes[side][name]
            is_pair = bool(group[side])
            if chosen and (is_pair or abs(room) <= (1 - _ALIKE) * held[whole]):
                group[side].extend(chosen)
                left[side][:] = [name for name in left[side] if name not in chosen]
                if not is_pair:
                    groups.append(group)
                    left[whole].remove(group[whole][0])


def _kinship(before: Peaks, now: Peaks, old: str, new: str) -> float:
    """1 for one class, 0 for two, and a half where it is not known."""
    if old not in before.classes:
        return 0.5
    return float(before.classes[old] == now.classes[new])


def _likeness(before: Peaks, now: Peaks, old: str, new: str) -> float:
    """How likely two names are one module's, of three: by name, bytes and class."""
    sizes = sum(before.modules[old].values()), sum(now.modules[new].values())
    bytes_alike = min(sizes) / max(*sizes, 1)
    names_alike = difflib.SequenceMatcher(None, old.split("."), new.split(".")).ratio()
    likeness = names_alike + bytes_alike + _kinship(before, now, old, new)
    return max(likeness, _LIKELY) if bytes_alike >= _ALIKE else likeness
