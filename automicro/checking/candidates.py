"""Values of ``loss_average`` that `verify` tries on a batch."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.batch.types import Kind, kind_of
from automicro.loss.conventions import IGNORED, TARGET_KEYS, Carried, Convention
from automicro.memory.oom import ignoring_errors
from automicro.values import attributes_of

_OTHER_IGNORED = (-1, 0, 255)
_ADDED = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)  # added to the divisor of a loss


@dataclass(frozen=True)
class Candidate:
    """One value of ``loss_average``."""

    code: str  # the value as a user would write it
    kind: str  # description of such a loss

    @functools.cached_property
    def value(self) -> Any:
        """The value, evaluated from the code so that the code shown is the code tried."""
        return eval(self.code, {"torch": torch})


def candidates(batch: Any, convention: Convention) -> Iterator[Candidate]:
    """Yield candidates for this batch, the most likely first."""
    yield Candidate("'samples'", "a mean over samples")
    yield Candidate("'none'", "a sum")
    yield Candidate("'tokens'", "a mean over the targets that are not ignored")
    targets: Any = None
    with ignoring_errors():  # the caller's code might run here
        targets = convention.targets(batch)
    # The caller's functions get the inner batch only.
    places = _places(batch.batch if isinstance(batch, Carried) else batch, "batch")
    leaves = [(code, each) for code, each in places if isinstance(each, Tensor) and each.dim()]
    leaves.sort(key=lambda leaf: leaf[1] is not targets)
    counts = [count for leaf in leaves for count in _counts(*leaf, is_target=leaf[1] is targets)]
    yield from (Candidate(f"lambda batch: {code}", kind) for code, kind in counts)
    # Last because there are many: losses guard against division by 0 with a small constant.
    for (code, kind), added in itertools.product(counts, _ADDED):
        yield Candidate(f"lambda batch: {code} + {added}", f"{kind}, {added} added to the divisor")


def named(choice: Mapping[str, Candidate]) -> Candidate:
    """Merge one candidate for each loss name into a single candidate."""
    code = ", ".join(f"{name!r}: {each.code}" for name, each in choice.items())
    kind = ", ".join(f"{name!r} {each.kind}" for name, each in choice.items())
    return Candidate(f"{{{code}}}", kind)


def _counts(where: str, leaf: Tensor, *, is_target: bool) -> Iterator[tuple[str, str]]:
    """Yield code that counts entries of a leaf, with the kind of loss."""
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_complex():
        return
    # Regression targets are not counted, because all of them count.
    if is_target and not leaf.is_floating_point():
        yield f"({where} != {IGNORED}).sum()", "a mean over the targets that are not ignored"
        if leaf.dim() > 1:
            shifted = "a mean over the targets that are not ignored, the labels shifted by one"
            yield f"({where}[..., 1:] != {IGNORED}).sum()", shifted
        # Only if one is in the batch: otherwise all candidates count the same.
        for ignored in _OTHER_IGNORED:
            if bool((leaf == ignored).any()):
                yield (
                    f"({where} != {ignored}).sum()",
                    f"a mean over the targets other than {ignored}",
                )
    # A divisor must be positive: masks, lengths and row weights are never negative.
    if not bool((leaf < 0).any()):
        yield f"{where}.sum()", f"a mean weighted by {where}"
    if not leaf.is_floating_point():
        yield f"({where} != 0).sum()", f"a mean over the nonzero entries of {where}"


def _places(value: Any, code: str) -> Iterator[tuple[str, Any]]:
    """Yield each part of a batch, with code that reads it."""
    yield code, value
    kind = kind_of(type(value))
    steps: dict[str, Any] = {}
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: key not in TARGET_KEYS)
        # The repr of other keys is not always valid code.
        steps = {f"[{key!r}]": value[key] for key in keys if type(key) in (str, int)}
    elif kind in (Kind.SEQUENCE, Kind.NAMED_TUPLE):
        steps = {f"[{index}]": part for index, part in enumerate(value)}
    elif kind in (Kind.RECORD, Kind.ROWS) and not isinstance(value, Tensor):
        # Generated code must not name hidden attributes.
        parts = attributes_of(value).items()
        steps = {f".{name}": part for name, part in parts if not name.startswith("_")}
    for step, part in steps.items():
        yield from _places(part, code + step)
