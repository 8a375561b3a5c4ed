"""Gradients of the whole batch against those of a split."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Gradients that are zero but for rounding (a bias before a normalisation, keys in attention) are
# measured against this part of the whole gradient.
_FLOOR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run gave.

    Attributes:
        loss: of the whole batch.
        losses: its parts by name.
        gradients: by parameter; None where it got none.
    """

    loss: float
    losses: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are numbers."""
        given = [each for each in self.gradients.values() if each is not None]
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in given)

    @property
    def norm(self) -> float:
        """Of all gradients together."""
        return math.hypot(*(_norm(each) for each in self.gradients.values()))


def relative_errors(split: Measured, whole: Measured) -> dict[str, float]:
    """The relative error of each parameter's gradient.

    Example:
        >>> one = Measured(loss=1.0, gradients={"weight": torch.tensor([3.0, 4.0])})
        >>> other = Measured(loss=1.0, gradients={"weight": torch.tensor([3.0, 3.0])})
        >>> relative_errors(other, one)
        {'weight': 0.2}
    """
    floor = max(_FLOOR * whole.norm, torch.finfo(torch.float64).tiny)
    errors = {}
    for name, expected in whole.gradients.items():
        found = split.gradients[name]
        if expected is None and found is None:
            errors[name] = 0.0
            continue
        if expected is None or found is None:
            gap = _norm(found) + _norm(expected)
        else:
            gap = _norm(found - expected)
        error = gap / max(_norm(expected), floor)
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def loss_error(split: float, whole: float) -> float:
    """The relative error of the loss."""
    if math.isnan(split) and math.isnan(whole):
        return 0.0
    # Losses near zero may be differences of numbers near one, with their rounding.
    error = abs(split - whole) / max(0.05, abs(whole))
    return math.inf if math.isnan(error) else error


def _norm(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient))
