"""What a loss of the search is, and what it may truly divide by."""

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
    """A sum: nothing is divided by."""
    return 1.0


def per_target(d: Rows) -> float:
    return float((d["y"] != IGNORED).sum())


def per_class_kept(d: Rows) -> float:
    """Targets of the class IGNORED_CLASS are ignored."""
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
    """An ingredient.

    `make` gives a fresh loss of ``(outputs, target)``, or with `is_program` of ``(model, rows)``.
    `target` is y, t, or all rows by name. `true` says what it divides by; None where no split of
    it is exact. `read` is what can be read off it where it is handed over as ``loss_fn``.
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
