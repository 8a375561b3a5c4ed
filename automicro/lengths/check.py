"""Whether a row computes the same with and without its padding: looked at before any is cut."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from automicro.batch.device import on_host
from automicro.checking.bench import Bench, Conditions, Failed, tried
from automicro.checking.draws import CollectiveError, needs_other_ranks
from automicro.checking.reading import LOSS, Reading, gaps
from automicro.errors import AutomicroError
from automicro.lengths.padding import Group, cut_padding
from automicro.loss.averages import CutBatch
from automicro.loss.passes import Computation, Mode
from automicro.memory.oom import Failure


class Verdict(enum.IntEnum):
    """What a look at padding has shown. Of several ranks the highest counts."""

    UNKNOWN = 0
    """Nothing was padded, or nothing could be compared."""
    SAME = 1
    OTHER = 2
    """The loss or an output is another without the padding."""


@dataclass(frozen=True, kw_only=True)
class PaddingSeen:
    """What one look has shown.

    Attributes:
        verdict: on the model.
        why: what differs, or why nothing could be compared; empty where all is the same.
        output_dims: by the path of an output, which of its dimensions have the length of which
            group, by its name.
    """

    verdict: Verdict
    why: str = ""
    output_dims: Mapping[str, dict[int, str]] = field(default_factory=dict)


_NOTHING_PADDED = PaddingSeen(verdict=Verdict.UNKNOWN)


def padded_rows(groups: Sequence[Group]) -> list[int]:
    """The rows to look at: that with the most padding, and one that is half padded, say.

    The shortest row may have a single word, which says little; one that has nothing says nothing.

    >>> import numpy as np
    >>> stops = np.array([8, 1, 0, 5])
    >>> padded_rows([Group("mask", 8, np.zeros(4, int), stops, {})])
    [1, 3]
    """
    if not groups:
        return []
    share = np.mean([group.lengths / group.padded for group in groups], axis=0)
    is_empty = np.any([group.stops <= group.starts for group in groups], axis=0)
    candidates = np.flatnonzero((share < 1) & ~is_empty)
    if not candidates.size:
        return []
    shares = share[candidates]
    chosen = [candidates[shares.argmin()], candidates[np.abs(shares - 0.5).argmin()]]
    return list(dict.fromkeys(map(int, chosen)))


def look_at_padding(
    computation: Computation, batch: Any, groups: Sequence[Group], mode: Mode = "train"
) -> PaddingSeen:
    """Compare rows with their padding and without: losses, and outputs where rows have something.

    Nothing of that stays. Dropout and other noise is silenced.

    Args:
        computation: model and loss.
        batch: of the caller.
        groups: what is padded in it.
        mode: of the forward.
    """

    def look() -> PaddingSeen:
        looks: list[PaddingSeen] = []
        for row in padded_rows(groups):
            looks.append(_look(computation, batch, groups, row, mode))
            if looks[-1].verdict is Verdict.OTHER:
                break
        # A difference counts for more than none, and that for more than nothing seen.
        return max(looks, key=lambda seen: seen.verdict, default=_NOTHING_PADDED)

    # What fails but once, such as where memory is short, decides nothing.
    seen: PaddingSeen | Failed = _NOTHING_PADDED
    for _ in range(2):
        seen = tried(look, computation.device)
        if not isinstance(seen, Failed):
            return seen
        if issubclass(seen.error, CollectiveError):
            why = needs_other_ranks(seen.why.partition(": ")[2])
            return PaddingSeen(verdict=Verdict.UNKNOWN, why=why)
        if issubclass(seen.error, AutomicroError):
            return PaddingSeen(verdict=Verdict.UNKNOWN)  # the step itself says what is wrong
    assert isinstance(seen, Failed)
    if seen.kind is Failure.RETRYABLE:
        return PaddingSeen(
            verdict=Verdict.UNKNOWN, why="there was no memory to look at a padded row"
        )
    return PaddingSeen(verdict=Verdict.OTHER, why=f"a row without padding fails: {seen.why}")


def _look(
    computation: Computation,
    batch: Any,
    groups: Sequence[Group],
    row: int,
    mode: Mode,
) -> PaddingSeen:
    with on_host():
        padded = computation.layout.take_rows(batch, [row])
        cut = cut_padding(padded, groups, slice(row, row + 1))
    windows = {group.name: (*group.window([row]), group.padded) for group in groups}
    with Bench(computation, Conditions(mode=mode, wants="outputs")) as bench:
        one, other = bench.read(_alone(padded)), bench.read(_alone(cut))
        dims = {
            path: own
            for path, whole in one.outputs.items()
            if (part := other.outputs.get(path)) is not None
            if part.dim() == whole.dim() and whole.is_floating_point()
            if (own := _matching(whole, part, windows)) is not None
        }
        other.outputs = {path: other.outputs[path] for path in dims}
        one = _narrowed(one, dims, windows)
        shaken = (bench.read(_alone(padded), shake=shake) for shake in range(1, 7))
        finite = [name for name, value in one.numbers.items() if math.isfinite(value)]
        has_values = any(float(leaf.nan_to_num().abs().max()) for leaf in one.outputs.values())
        found = gaps(one, other, (_narrowed(each, dims, windows) for each in shaken))
    if LOSS in found and (finite or math.isfinite(other.numbers[LOSS])):
        before, after = one.numbers[LOSS], other.numbers[LOSS]
        why = f"the loss of a row is {before:.6g} with its padding and {after:.6g} without"
        return PaddingSeen(verdict=Verdict.OTHER, why=why)
    path = next((path for path in found if path in dims), None)
    if path is not None:
        why = f"the output {path!r} of a row differs by {found[path]:.2g} without its padding"
        return PaddingSeen(verdict=Verdict.OTHER, why=why)
    if not (finite or has_values):
        return PaddingSeen(
            verdict=Verdict.UNKNOWN, why="the forward gives no finite loss and no outputs of a row"
        )
    return PaddingSeen(verdict=Verdict.SAME, output_dims=dims)


def _alone(row: Any) -> CutBatch:
    return CutBatch(batch=row, microbatches=[row], sizes=[1])


def _narrowed(
    reading: Reading,
    dims: Mapping[str, Mapping[int, str]],
    windows: Mapping[str, tuple[int, int, int]],
) -> Reading:
    """The same without what lies in the padding of its outputs."""
    outputs = {}
    for path, own in dims.items():
        leaf = reading.outputs[path]
        for dim, name in own.items():
            start, stop, _ = windows[name]
            leaf = leaf.narrow(dim, start, stop - start)
        outputs[path] = leaf
    return dataclasses.replace(reading, outputs=outputs)


def _matching(
    whole: Tensor, part: Tensor, windows: Mapping[str, tuple[int, int, int]]
) -> dict[int, str] | None:
    """The dimensions that a group's padding was cut from; None where that explains no shape."""
    found = {}
    for dim, (size, cut) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if size == cut:
            continue
        names = [
            name
            for name, (start, stop, padded) in windows.items()
            if size == padded and cut == stop - start
        ]
        if not names or dim == 0:
            return None
        found[dim] = names[0]
    return found
