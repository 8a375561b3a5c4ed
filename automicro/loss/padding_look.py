"""Whether a row computes the same with and without its padding: looked at before any is cut."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.padding import Group, cut_padding
from automicro.batch.tensors import tensor_leaves
from automicro.errors import AutomicroError
from automicro.loss.passes import Computation, ExtraPasses, Mode
from automicro.loss.silence import CollectiveError, needs_other_ranks
from automicro.memory.oom import Failure, classify, first_line, release


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
# Relative differences of a loss that are rounding, by the lowest precision that was computed in.
_LOSS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# The same of single outputs, relative to the largest.
_OUTPUT = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
_ACCELERATED = 10  # TF32


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
    seen = _look_once(computation, batch, groups, mode)
    if isinstance(seen, PaddingSeen):
        return seen
    # What fails but once, such as where memory is short, decides nothing.
    seen = _look_once(computation, batch, groups, mode)
    if isinstance(seen, PaddingSeen):
        return seen
    kind, message = seen
    if kind is Failure.RETRYABLE:
        return PaddingSeen(
            verdict=Verdict.UNKNOWN, why="there was no memory to look at a padded row"
        )
    return PaddingSeen(verdict=Verdict.OTHER, why=f"a row without padding fails: {message}")


def _look_once(
    computation: Computation, batch: Any, groups: Sequence[Group], mode: Mode
) -> PaddingSeen | tuple[Failure, str]:
    """What was seen; or what failed, whose memory is free again."""
    failure: Exception | None = None
    try:
        looks: list[PaddingSeen] = []
        for row in padded_rows(groups):
            looks.append(_look(computation, batch, groups, row, mode))
            if looks[-1].verdict is Verdict.OTHER:
                break
        # A difference counts for more than none, and that for more than nothing seen.
        return max(looks, key=lambda seen: seen.verdict, default=_NOTHING_PADDED)
    except CollectiveError as error:
        return PaddingSeen(verdict=Verdict.UNKNOWN, why=needs_other_ranks(str(error)))
    except AutomicroError:
        return PaddingSeen(verdict=Verdict.UNKNOWN)  # the step itself says what is wrong
    except Exception as error:
        failure = error
    try:
        kind = classify(failure)
        if kind not in (Failure.RETRYABLE, Failure.UNRELATED):
            raise failure
        release(failure, computation.device)
        return kind, first_line(failure)
    finally:
        del failure  # it holds this frame: a cycle


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
    with ExtraPasses(computation) as passes, torch.no_grad():
        one = passes.losses(padded, mode=mode)
        passes.losses(padded, mode=mode)  # what the first call makes is no difference
        other = passes.losses(cut, mode=mode)
        used = passes.silence.dtypes | {
            parameter.dtype for module in computation.modules for parameter in module.parameters()
        }
    floating = [dtype for dtype in used if dtype in _LOSS] or [torch.float32]
    precision = min(floating, key=lambda dtype: -_LOSS[dtype])
    slack = 1 if computation.device.type == "cpu" else _ACCELERATED
    windows = {group.name: (*group.window([row]), group.padded) for group in groups}
    compared = False
    if one.loss is not None and other.loss is not None:
        before, after = float(one.loss.detach()), float(other.loss.detach())
        are_finite = math.isfinite(before), math.isfinite(after)
        if any(are_finite):
            compared = True
            most = slack * _LOSS[precision] * max(abs(before), abs(after))
            if not all(are_finite) or abs(before - after) > most:
                why = f"the loss of a row is {before:.6g} with its padding and {after:.6g} without"
                return PaddingSeen(verdict=Verdict.OTHER, why=why)
    dims: dict[str, dict[int, str]] = {}
    without = dict(tensor_leaves(other.outputs))
    for path, whole in tensor_leaves(one.outputs):
        part = without.get(path)
        if part is None or part.dim() != whole.dim() or not whole.is_floating_point():
            continue
        own = _matching(whole, part, windows)
        if own is None:
            continue
        dims[path] = own
        for dim, name in own.items():
            start, stop, _ = windows[name]
            whole = whole.narrow(dim, start, stop - start)
        if whole.dim() == 0 or not whole.numel():
            continue
        scale, gap = float(whole.abs().max()), float((whole - part).abs().max())
        if not math.isfinite(scale):
            continue
        compared = True
        if not gap <= slack * _OUTPUT[precision] * scale:
            share = gap / (scale or 1)
            why = f"the output {path!r} of a row differs by {share:.2g} without its padding"
            return PaddingSeen(verdict=Verdict.OTHER, why=why)
    if not compared:
        return PaddingSeen(
            verdict=Verdict.UNKNOWN, why="the forward gives no finite loss and no outputs of a row"
        )
    return PaddingSeen(verdict=Verdict.SAME, output_dims=dims)


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
