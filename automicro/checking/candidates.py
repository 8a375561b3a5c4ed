"""Values of ``loss_average`` that `verify` tries on a batch."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.batch.tensors import tensor_leaves
from automicro.batch.types import Kind, kind_of, state_of
from automicro.loss.conventions import IGNORED, TARGET_KEYS, Carried, Convention

_OTHER_IGNORED = (-1, 0, 255)
_ADDED = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)  # added to the divisor of a loss
_OVER_COUNTED = "a mean over the targets that are not "


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
    yield Candidate("'tokens'", _OVER_COUNTED + "ignored")
    counts = [*_target_counts(batch, convention), *_leaf_counts(batch)]
    yield from (Candidate(f"lambda batch: {code}", kind) for code, kind in counts)
    # Last because there are many: losses guard against division by 0 with a small constant.
    for (code, kind), added in itertools.product(counts, _ADDED):
        yield Candidate(f"lambda batch: {code} + {added}", f"{kind}, {added} added to the divisor")


def named(choice: Mapping[str, Candidate]) -> Candidate:
    """Merge one candidate for each loss name into a single candidate."""
    code = ", ".join(f"{name!r}: {each.code}" for name, each in choice.items())
    kind = ", ".join(f"{name!r} {each.kind}" for name, each in choice.items())
    return Candidate(f"{{{code}}}", kind)


def _target_counts(batch: Any, convention: Convention) -> Iterator[tuple[str, str]]:
    """Yield code that counts targets, with the kind of loss, for integer targets."""
    try:
        targets = convention.targets(batch)
    except (ValueError, IndexError):
        return
    # Regression targets are not counted, because all of them count.
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_nested:
        return
    where = expression(batch, targets)
    yield f"({where} != {IGNORED}).sum()", _OVER_COUNTED + "ignored"
    if targets.dim() > 1:
        shifted = _OVER_COUNTED + "ignored, the labels shifted by one"
        yield f"({where}[..., 1:] != {IGNORED}).sum()", shifted
    # Only if one is in the batch: otherwise all candidates count the same.
    for ignored in _OTHER_IGNORED:
        if bool((targets == ignored).any()):
            yield f"({where} != {ignored}).sum()", f"{_OVER_COUNTED}{ignored}"


def _leaf_counts(batch: Any) -> Iterator[tuple[str, str]]:
    """Yield counts of masks, lengths and row weights: leaves that are never negative."""
    for path, leaf in tensor_leaves(batch):
        # Generated code must not name hidden keys.
        is_hidden = any(key.startswith("_") for key in path.split("."))
        is_plain = leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_complex()
        if is_hidden or not is_plain or leaf.dim() == 0:
            continue
        where = expression(batch, leaf)
        # A divisor must be positive.
        if not bool((leaf < 0).any()):
            yield f"{where}.sum()", f"a mean weighted by {path!r}"
        if not leaf.is_floating_point():
            yield f"({where} != 0).sum()", f"a mean over the nonzero entries of {path!r}"


def expression(batch: Any, leaf: Tensor) -> str:
    """Return Python code that reads a leaf of a batch, or ``batch`` if the leaf is not in it.

    >>> labels = torch.ones(2)
    >>> expression({"inputs": [torch.zeros(2)], "labels": labels}, labels)
    "batch['labels']"
    """
    if isinstance(batch, Carried):
        batch = batch.batch  # the caller's functions get the inner batch only
    return next((code for code, each in _places(batch, "batch") if each is leaf), "batch")


def _places(value: Any, code: str) -> Iterator[tuple[str, Any]]:
    """Yield each value that `tensor_leaves` would reach, with code that reads it."""
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
        steps = {f".{name}": part for name, part in state_of(value).items()}
    for step, part in steps.items():
        yield from _places(part, code + step)
