"""Kinds of losses in the search, and their true divisors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.contents import CLASS_WEIGHT, IGNORED, IGNORED_CLASS

Rows = Mapping[str, Any]
Denominator = Callable[[Rows], float]


def per_row(d: Rows) -> float:
    return float(len(d["w"]))


def per_batch(d: Rows) -> float:
    """Return the divisor of a sum, which is not divided."""
    return 1.0


def per_target(d: Rows) -> float:
    return float((d["y"] != IGNORED).sum())


def per_class_kept(d: Rows) -> float:
    """Count targets, ignoring the class IGNORED_CLASS."""
    return float((d["y"] != IGNORED_CLASS).sum())


def per_mask(d: Rows) -> float:
    return float(d["m"].sum())


def per_weight(d: Rows) -> float:
    return float(d["w"].sum())


def per_class_weight(d: Rows) -> float:
    kept = d["y"][d["y"] != IGNORED]
    return float(torch.tensor(CLASS_WEIGHT, dtype=torch.float64)[kept].sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss ingredient.

    `make` returns a new loss of ``(outputs, target)``, or of ``(model, rows)`` with `is_program`.
    `target` is y, t, or all rows by name. `true` is the divisor; None if no split is exact.
    `read` is the divisor that can be inferred when it is passed as ``loss_fn``.
    """

    make: Callable[[], Callable[..., Any]]
    target: str = "y"
    true: Denominator | None = per_row
    read: Denominator | None = None
    is_program: bool = False
    draws: bool = False
    shape: str | None = None
    only_float64: bool = False


def normalised(out: Tensor) -> Any:
    return F.normalize(out.reshape(len(out), -1), dim=1)
