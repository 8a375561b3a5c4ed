"""Losses of the search that take outputs, each with its true divisor."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.averages import (
    Loss,
    Rows,
    normalised,
    per_batch,
    per_class_kept,
    per_class_weight,
    per_mask,
    per_row,
    per_target,
    per_weight,
)
from tests.oracle.contents import CLASS_WEIGHT, CLASSES, IGNORED, IGNORED_CLASS
from tests.oracle.programs import PROGRAMS


def cross_entropies(out: Tensor, y: Tensor) -> Any:
    """Return the loss of every target, zero if it is ignored."""
    return F.cross_entropy(out.movedim(-1, 1), y, reduction="none", ignore_index=IGNORED)


class Flat(nn.Module):
    """Flattens tokens and their targets into rows; vectors are unchanged."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, out: Tensor, y: Tensor) -> Any:
        return self.inside(out.flatten(0, -2), y.flatten())


def _row_means(values: Tensor) -> Any:
    return values.reshape(len(values), -1).mean(1)


def _weights(like: Tensor) -> Any:
    return torch.tensor(CLASS_WEIGHT, dtype=like.dtype)


def _module(make: Callable[[], nn.Module], **more: Any) -> Loss:
    return Loss(make=make, **more)


def _function(function: Callable[..., Any], **more: Any) -> Loss:
    return Loss(make=lambda: function, **more)


def _vectors(function: Callable[..., Any], **more: Any) -> Loss:
    return Loss(make=lambda: function, shape="vectors", **more)


# Functions of outputs


def _squares(out: Tensor, d: Rows) -> Any:
    return _row_means((out - d["t"]) ** 2)


def _masked_squares(out: Tensor, d: Rows) -> Any:
    gaps = (out - d["t"]) ** 2
    return gaps * (d["m"] if gaps.dim() == 2 else d["m"][..., None])


def _masked_mean(out: Tensor, d: Rows) -> Any:
    each = _masked_squares(out, d)
    return each.sum() / d["m"].sum()


def _mean_of_row_means(out: Tensor, d: Rows) -> Any:
    each = _masked_squares(out, d).flatten(1).sum(1)
    return (each / d["m"].sum(1)).mean()


def _info_nce(out: Tensor, d: Rows) -> Any:
    rows = normalised(out)
    other = normalised(d["t"])
    return F.cross_entropy(rows @ other.T / 0.5, torch.arange(len(rows)))


def _hard_triplet(out: Tensor, y: Tensor) -> Any:
    apart = torch.cdist(out, out)
    same = y[:, None] == y[None]
    far = apart.masked_fill(~same, 0).max(1).values
    near = apart.masked_fill(same, 1e3).min(1).values
    return F.relu(far - near + 0.5).mean()


def _variance(out: Tensor, d: Rows) -> Any:
    rows = out.reshape(len(out), -1)
    return _squares(out, d).mean() + F.relu(1 - rows.var(0, unbiased=False)).mean()


def _of_mean(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda out, d: function(_squares(out, d).mean())


def _hardest(out: Tensor, d: Rows) -> Any:
    each = _squares(out, d)
    return each.topk(max(1, len(each) // 2)).values.mean()


def _dice(out: Tensor, d: Rows) -> Any:
    odds, truth = out.sigmoid(), (d["t"] > 0).to(out.dtype)
    return 1 - 2 * (odds * truth).sum() / (odds.sum() + truth.sum() + 1e-3)


def _dice_per_row(out: Tensor, d: Rows) -> Any:
    odds, truth = out.sigmoid().flatten(1), (d["t"] > 0).to(out.dtype).flatten(1)
    return (1 - 2 * (odds * truth).sum(1) / (odds.sum(1) + truth.sum(1) + 1e-3)).mean()


def _entropy_of_mean(out: Tensor, d: Rows) -> Any:
    mean = out.softmax(-1).reshape(len(out), -1).mean(0)
    return _squares(out, d).mean() + (mean * mean.clamp(min=1e-9).log()).sum()


def _over_its_value(out: Tensor, d: Rows) -> Any:
    squares, gaps = _squares(out, d).mean(), (out - d["t"]).abs().mean()
    return squares / squares.detach() + gaps / gaps.detach()


def _focal_per_positive(out: Tensor, d: Rows) -> Any:
    truth = (d["t"] > 0).to(out.dtype)
    each = F.binary_cross_entropy_with_logits(out, truth, reduction="none")
    return (each * (1 - out.sigmoid()) ** 2).sum() / truth.sum().clamp(min=1)


def _hinge(out: Tensor, d: Rows) -> Any:
    return F.relu((out - d["t"]).abs() - 2.5).sum(-1).mean()


def _positives_only(out: Tensor, y: Tensor) -> Any:
    chosen = y == 1
    if not chosen.any():
        return out.sum() * 0
    return cross_entropies(out, y)[chosen].mean()


def _positives_or_zero(out: Tensor, y: Tensor) -> Any:
    chosen = y == 1
    if not chosen.any():
        return torch.zeros((), dtype=out.dtype)
    return cross_entropies(out, y)[chosen].mean()


def _balanced_by_counts(out: Tensor, y: Tensor) -> Any:
    counts = torch.bincount(y[y >= 0].flatten(), minlength=CLASSES).to(out.dtype)
    weight = counts.sum() / (CLASSES * counts.clamp(min=1))
    kept = y >= 0
    return (cross_entropies(out, y)[kept] * weight[y[kept]]).mean()


def _rare_class_weight(out: Tensor, y: Tensor) -> Any:
    kept = y != IGNORED
    each, weight = cross_entropies(out, y), _weights(out)[y.clamp(min=0)] * kept
    return (each * weight).sum() / weight.sum()


def _center(out: Tensor, y: Tensor) -> Any:
    total = out.sum() * 0
    for name in range(CLASSES):
        rows = out[y == name]
        if len(rows):
            total = total + ((rows - rows.mean(0)) ** 2).sum()
    return F.cross_entropy(out, y) + total / out.numel()


def _named(out: Tensor, d: Rows) -> Any:
    return {"squares": _squares(out, d).mean(), "size": 0.1 * (out**2).mean()}


def _named_sum(out: Tensor, d: Rows) -> Any:
    return {"squares": _squares(out, d).mean(), "size": 0.1 * (out**2).sum()}


def _named_metric(out: Tensor, d: Rows) -> Any:
    squares = _squares(out, d).mean()
    return {"loss": squares, "error": (out.detach() - d["t"]).abs().mean()}


def _metric_added(out: Tensor, d: Rows) -> Any:
    return {"squares": _squares(out, d).mean(), "error": (out.detach() - d["t"]).abs().mean()}


class CountingCalls:
    """Loss whose weight decreases with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, d: Rows) -> Any:
        self.calls += 1
        return _squares(out, d).mean() / (1 + 0.2 * self.calls)


def counting_closure() -> Callable[..., Any]:
    calls = 0

    def loss(out: Tensor, d: Rows) -> Any:
        nonlocal calls
        calls += 1
        return _squares(out, d).mean() * (0.5 + 0.1 * calls)

    return loss


class RunningBaseline:
    """REINFORCE with a moving baseline."""

    def __init__(self) -> None:
        self.baseline = 0.0

    def __call__(self, out: Tensor, y: Tensor) -> Any:
        reward = (y % 2).to(out.dtype)
        advantage = reward - self.baseline
        self.baseline = 0.8 * self.baseline + 0.2 * float(reward.mean())
        kept = y != IGNORED
        return (cross_entropies(out, y) * advantage * kept).mean()


class BufferBaseline(nn.Module):
    """Loss module with its own buffer."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, out: Tensor, d: Rows) -> Any:
        loss = _squares(out, d).mean()
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.1 * loss)
        return loss / self.level.clone()


class Uncertain(nn.Module):
    """Learned weights of two losses, which are parameters of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, out: Tensor, d: Rows) -> Any:
        squares, gaps = _squares(out, d).mean(), (out - d["t"]).abs().mean()
        losses = torch.stack([squares, gaps])
        return (losses * torch.exp(-self.logs)).sum() + self.logs.sum()


class ClassWeighted(nn.CrossEntropyLoss):
    """Subclass whose divisor cannot be read from its type."""

    def forward(self, out: Tensor, y: Tensor) -> Any:
        return super().forward(out, y)


def numpy_noise_in_loss() -> Callable[..., Any]:
    draws = np.random.default_rng(3)

    def loss(out: Tensor, d: Rows) -> Any:
        noise = torch.as_tensor(draws.standard_normal(tuple(out.shape)), dtype=out.dtype)
        return ((out + 0.1 * noise - d["t"]) ** 2).mean()

    return loss


def _python_noise(out: Tensor, d: Rows) -> Any:
    return _squares(out, d).mean() * (0.5 + random.random())


def _sampled_targets(out: Tensor, d: Rows) -> Any:
    return F.mse_loss(out + torch.randn_like(out), d["t"], reduction="sum")


def _random_mask(out: Tensor, d: Rows) -> Any:
    keep = (torch.rand(len(out)) < 0.6).to(out.dtype)
    return (_squares(out, d) * keep).mean()


def _ctc(reduction: str) -> Callable[..., Any]:
    def loss(out: Tensor, d: Rows) -> Any:
        count, steps = out.shape[:2]
        lengths = torch.full((count,), steps)
        targets = d["y"][:, :2].clamp(min=1)
        odds = out.log_softmax(-1).transpose(0, 1)
        given = 1 + (d["m"].sum(1) > 2).long()
        return F.ctc_loss(odds, targets, lengths, given, reduction=reduction, zero_infinity=True)

    return loss


LOSSES = {
    # torch's modules
    "CrossEntropyLoss": _module(
        lambda: nn.CrossEntropyLoss(), shape="vectors", true=per_target, read=per_target
    ),
    "CrossEntropyLoss sum": _module(
        lambda: nn.CrossEntropyLoss(reduction="sum"),
        shape="vectors",
        true=per_batch,
        read=per_batch,
    ),
    "CrossEntropyLoss smooth": _module(
        lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
        shape="vectors",
        true=per_target,
        read=per_target,
    ),
    "CrossEntropyLoss weight": _module(
        lambda: nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT)),
        shape="vectors",
        true=per_class_weight,
        read=per_class_weight,
    ),
    "CrossEntropyLoss weight and smooth": _module(
        lambda: nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT), label_smoothing=0.1),
        shape="vectors",
        true=per_class_weight,
        read=per_class_weight,
    ),
    "CrossEntropyLoss ignore_index": _module(
        lambda: nn.CrossEntropyLoss(ignore_index=IGNORED_CLASS),
        shape="vectors",
        true=per_class_kept,
        read=per_class_kept,
    ),
    "CrossEntropyLoss of probabilities": _module(
        lambda: nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT)),
        shape="vectors",
        target="t",
        read=per_row,
    ),
    "NLLLoss weight": _module(
        lambda: nn.NLLLoss(torch.tensor(CLASS_WEIGHT)),
        shape="vectors",
        true=per_class_weight,
        read=per_class_weight,
    ),
    "KLDivLoss batchmean": _module(
        lambda: nn.KLDivLoss(reduction="batchmean", log_target=True), target="t", read=per_row
    ),
    "BCEWithLogitsLoss pos_weight": _module(
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(CLASS_WEIGHT)),
        target="t",
        read=per_row,
    ),
    "torch's cross_entropy": _function(
        F.cross_entropy, shape="vectors", true=per_target, read=per_target
    ),
    "a partial with ignore_index": _function(
        functools.partial(F.cross_entropy, ignore_index=IGNORED_CLASS),
        shape="vectors",
        true=per_class_kept,
        read=per_class_kept,
    ),
    "a partial sum": _function(
        functools.partial(F.cross_entropy, reduction="sum"),
        shape="vectors",
        true=per_batch,
        read=per_batch,
    ),
    "a subclass with weights": _module(
        lambda: ClassWeighted(torch.tensor(CLASS_WEIGHT)), shape="vectors", true=per_class_weight
    ),
    "tokens, flat": _module(lambda: Flat(nn.CrossEntropyLoss()), true=per_target),
    "tokens, flat, sum": _module(
        lambda: Flat(nn.CrossEntropyLoss(reduction="sum")), true=per_batch
    ),
    "tokens, flat, weights": _module(
        lambda: Flat(nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT))), true=per_class_weight
    ),
    "MSELoss": _module(nn.MSELoss, target="t", read=per_row),
    "MSELoss sum": _module(
        lambda: nn.MSELoss(reduction="sum"), target="t", true=per_batch, read=per_batch
    ),
    "L1Loss": _module(nn.L1Loss, target="t", read=per_row),
    "HuberLoss": _module(lambda: nn.HuberLoss(delta=0.5), target="t", read=per_row),
    "SmoothL1Loss sum": _module(
        lambda: nn.SmoothL1Loss(reduction="sum"), target="t", true=per_batch, read=per_batch
    ),
    "SoftMarginLoss": _module(nn.SoftMarginLoss, target="t", read=per_row),
    "PoissonNLLLoss": _module(nn.PoissonNLLLoss, target="t", read=per_row),
    "MultiMarginLoss": _module(nn.MultiMarginLoss, shape="vectors", read=per_row),
    "BCEWithLogitsLoss": Loss(
        make=lambda: lambda out, t: F.binary_cross_entropy_with_logits(out, t.sigmoid()),
        target="t",
    ),
    "BCE with pos_weight": Loss(
        make=lambda: (
            lambda out, t: F.binary_cross_entropy_with_logits(
                out, t.sigmoid(), pos_weight=_weights(out)
            )
        ),
        target="t",
    ),
    "KL, batchmean": _function(
        lambda out, t: F.kl_div(out.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
        target="t",
    ),
    "CTC, mean": _function(_ctc("mean"), target="all", shape="tokens", only_float64=True),
    "CTC, sum": _function(
        _ctc("sum"), target="all", shape="tokens", true=per_batch, only_float64=True
    ),
    # means and sums of rows
    "a mean": _function(lambda out, d: _squares(out, d).mean(), target="all"),
    "a sum": _function(lambda out, d: _squares(out, d).sum(), target="all", true=per_batch),
    "a sum of reductions": _function(
        lambda out, t: F.mse_loss(out, t, reduction="sum"), target="t", true=per_batch
    ),
    "a masked mean": _function(_masked_mean, target="all", true=per_mask),
    "a small masked mean": _function(
        lambda out, d: 1e-6 * _masked_mean(out, d), target="all", true=per_mask
    ),
    "a large masked mean": _function(
        lambda out, d: 1e6 * _masked_mean(out, d), target="all", true=per_mask
    ),
    "a small mean": _function(lambda out, d: 1e-6 * _squares(out, d).mean(), target="all"),
    "a large mean": _function(lambda out, d: 1e6 * _squares(out, d).mean(), target="all"),
    "a mean of row means": _function(_mean_of_row_means, target="all"),
    "weights over their sum": _function(
        lambda out, d: (_squares(out, d) * d["w"]).sum() / d["w"].sum(),
        target="all",
        true=per_weight,
    ),
    "a weighted mean": _function(lambda out, d: (_squares(out, d) * d["w"]).mean(), target="all"),
    "rare class over weights": _function(_rare_class_weight, true=per_class_weight),
    "positives only": _function(_positives_only, true=lambda d: float((d["y"] == 1).sum())),
    "positives or a constant": _function(
        _positives_or_zero, true=lambda d: float((d["y"] == 1).sum())
    ),
    "focal per positive": _function(
        _focal_per_positive, target="all", true=lambda d: float((d["t"] > 0).sum().clamp(min=1))
    ),
    "a hinge, mostly zero": _function(_hinge, target="all"),
    "dice per row": _function(_dice_per_row, target="all"),
    "several named": _function(_named, target="all"),
    "several named, one a sum": _function(_named_sum, target="all", true=None),
    "a metric beside the loss": _function(_named_metric, target="all"),
    "a metric among the losses": _function(_metric_added, target="all"),
    "learned weights": _module(Uncertain, target="all"),
    # across rows
    "InfoNCE": _function(_info_nce, target="all", true=None),
    "hard triplets": _vectors(_hard_triplet, true=None),
    "a variance": _function(_variance, target="all", true=None),
    "the square of a mean": _function(_of_mean(torch.square), target="all", true=None),
    "the root of a mean": _function(_of_mean(torch.sqrt), target="all", true=None),
    "the log of a mean": _function(_of_mean(torch.log), target="all", true=None),
    "the tanh of a mean": _function(_of_mean(torch.tanh), target="all", true=None),
    "the hardest half": _function(_hardest, target="all", true=None),
    "the worst row": _function(lambda out, d: _squares(out, d).max(), target="all", true=None),
    "the median row": _function(lambda out, d: _squares(out, d).median(), target="all", true=None),
    "log-sum-exp of rows": _function(
        lambda out, d: _squares(out, d).logsumexp(0), target="all", true=None
    ),
    "dice of the batch": _function(_dice, target="all", true=None),
    "entropy of the mean": _function(_entropy_of_mean, target="all", true=None),
    "loss over its value": _function(_over_its_value, target="all", true=None),
    "weights by counts": _vectors(_balanced_by_counts, true=None),
    "class centres": _vectors(_center, true=None),
    # with state or draws
    "counts its calls": Loss(make=CountingCalls, target="all", true=None),
    "a counting closure": Loss(make=counting_closure, target="all", true=None),
    "a running baseline": Loss(make=RunningBaseline, true=None),
    "a baseline in a buffer": _module(BufferBaseline, target="all", true=None),
    "NumPy noise in a closure": Loss(make=numpy_noise_in_loss, target="all", draws=True),
    "Python's noise": _function(_python_noise, target="all", draws=True),
    "sampled, summed": _function(_sampled_targets, target="all", true=per_batch, draws=True),
    "a random mask": _function(_random_mask, target="all", draws=True),
    **PROGRAMS,
}
