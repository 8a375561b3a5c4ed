"""Gradient comparisons and losses that tests share."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import IGNORED


def gradients(*modules: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{index}.{name}": None if p.grad is None else p.grad.detach().clone()
        for index, module in enumerate(modules)
        for name, p in module.named_parameters()
    }


def difference(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> float:
    """Return the largest absolute difference; infinite for NaN or if only one has a gradient."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, first in one.items():
        second = other[name]
        if (first is None) is not (second is None):
            return float("inf")
        if first is not None and second is not None:
            gap = float((first.to_dense() - second.to_dense()).abs().max())
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


# Losses


def mean_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def masked_mean(logits: Tensor, targets: Tensor) -> Any:
    """A typical mean in user code: zero divided by zero if every target is ignored."""
    mask = targets != IGNORED
    each = F.cross_entropy(logits.movedim(-1, 1), targets.where(mask, 0), reduction="none")
    return (each * mask).sum() / mask.sum()


def contrastive(embeddings: Tensor, _: Any) -> Any:
    """A loss within the batch: every row is compared with all others."""
    return F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)))


def count_targets(batch: Any) -> Any:
    return (batch[1] != IGNORED).sum()
