"""The losses of the search, each with what it truly divides by."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.search.contents import CLASS_WEIGHT, CLASSES, IGNORED

Rows = Mapping[str, Any]
Denominator = Callable[[Rows], float]


def per_row(d: Rows) -> float:
    return float(len(d["w"]))


def per_batch(d: Rows) -> float:
    """A sum: nothing is divided by."""
    return 1.0


def per_target(d: Rows) -> float:
    return float((d["y"] != IGNORED).sum())


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


def cross_entropies(out: Tensor, y: Tensor) -> Tensor:
    """Of every target, zero where it is ignored."""
    return F.cross_entropy(out.movedim(-1, 1), y, reduction="none", ignore_index=IGNORED)


class Flat(nn.Module):
    """Tokens and their targets in one row each; for vectors nothing changes."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, out: Tensor, y: Tensor) -> Any:
        return self.inside(out.flatten(0, -2), y.flatten())


def _row_means(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _weights(like: Tensor) -> Tensor:
    return torch.tensor(CLASS_WEIGHT, dtype=like.dtype)


def _module(make: Callable[[], nn.Module], **more: Any) -> Loss:
    return Loss(make=make, **more)


def _function(function: Callable[..., Any], **more: Any) -> Loss:
    return Loss(make=lambda: function, **more)


def _program(function: Callable[..., Any], **more: Any) -> Loss:
    return Loss(make=lambda: function, is_program=True, target="all", **more)


def _vectors(function: Callable[..., Any], **more: Any) -> Loss:
    return Loss(make=lambda: function, shape="vectors", **more)


# Functions of outputs


def _squares(out: Tensor, d: Rows) -> Tensor:
    return _row_means((out - d["t"]) ** 2)


def _masked_squares(out: Tensor, d: Rows) -> Tensor:
    gaps = (out - d["t"]) ** 2
    return gaps * (d["m"] if gaps.dim() == 2 else d["m"][..., None])


def _masked_mean(out: Tensor, d: Rows) -> Tensor:
    each = _masked_squares(out, d)
    return each.sum() / d["m"].sum()


def _mean_of_row_means(out: Tensor, d: Rows) -> Tensor:
    each = _masked_squares(out, d).flatten(1).sum(1)
    return (each / d["m"].sum(1)).mean()


def _normalised(out: Tensor) -> Tensor:
    return F.normalize(out.reshape(len(out), -1), dim=1)


def _info_nce(out: Tensor, d: Rows) -> Tensor:
    rows = _normalised(out)
    other = _normalised(d["t"])
    return F.cross_entropy(rows @ other.T / 0.5, torch.arange(len(rows)))


def _hard_triplet(out: Tensor, y: Tensor) -> Tensor:
    apart = torch.cdist(out, out)
    same = y[:, None] == y[None]
    far = apart.masked_fill(~same, 0).max(1).values
    near = apart.masked_fill(same, 1e3).min(1).values
    return F.relu(far - near + 0.5).mean()


def _variance(out: Tensor, d: Rows) -> Tensor:
    rows = out.reshape(len(out), -1)
    return _squares(out, d).mean() + F.relu(1 - rows.var(0, unbiased=False)).mean()


def _of_mean(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda out, d: function(_squares(out, d).mean())


def _hardest(out: Tensor, d: Rows) -> Tensor:
    each = _squares(out, d)
    return each.topk(max(1, len(each) // 2)).values.mean()


def _dice(out: Tensor, d: Rows) -> Tensor:
    odds, truth = out.sigmoid(), (d["t"] > 0).to(out.dtype)
    return 1 - 2 * (odds * truth).sum() / (odds.sum() + truth.sum() + 1e-3)


def _dice_per_row(out: Tensor, d: Rows) -> Tensor:
    odds, truth = out.sigmoid().flatten(1), (d["t"] > 0).to(out.dtype).flatten(1)
    return (1 - 2 * (odds * truth).sum(1) / (odds.sum(1) + truth.sum(1) + 1e-3)).mean()


def _entropy_of_mean(out: Tensor, d: Rows) -> Tensor:
    mean = out.softmax(-1).reshape(len(out), -1).mean(0)
    return _squares(out, d).mean() + (mean * mean.clamp(min=1e-9).log()).sum()


def _over_its_value(out: Tensor, d: Rows) -> Tensor:
    squares, gaps = _squares(out, d).mean(), (out - d["t"]).abs().mean()
    return squares / squares.detach() + gaps / gaps.detach()


def _focal_per_positive(out: Tensor, d: Rows) -> Tensor:
    truth = (d["t"] > 0).to(out.dtype)
    each = F.binary_cross_entropy_with_logits(out, truth, reduction="none")
    return (each * (1 - out.sigmoid()) ** 2).sum() / truth.sum().clamp(min=1)


def _hinge(out: Tensor, d: Rows) -> Tensor:
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


def _balanced_by_counts(out: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y[y >= 0].flatten(), minlength=CLASSES).to(out.dtype)
    weight = counts.sum() / (CLASSES * counts.clamp(min=1))
    kept = y >= 0
    return (cross_entropies(out, y)[kept] * weight[y[kept]]).mean()


def _rare_class_weight(out: Tensor, y: Tensor) -> Tensor:
    kept = y != IGNORED
    each, weight = cross_entropies(out, y), _weights(out)[y.clamp(min=0)] * kept
    return (each * weight).sum() / weight.sum()


def _center(out: Tensor, y: Tensor) -> Tensor:
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
    """Weighs its loss less with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, d: Rows) -> Tensor:
        self.calls += 1
        return _squares(out, d).mean() / (1 + 0.2 * self.calls)


def counting_closure() -> Callable[..., Any]:
    calls = 0

    def loss(out: Tensor, d: Rows) -> Tensor:
        nonlocal calls
        calls += 1
        return _squares(out, d).mean() * (0.5 + 0.1 * calls)

    return loss


class RunningBaseline:
    """REINFORCE with a moving baseline."""

    def __init__(self) -> None:
        self.baseline = 0.0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        reward = (y % 2).to(out.dtype)
        advantage = reward - self.baseline
        self.baseline = 0.8 * self.baseline + 0.2 * float(reward.mean())
        kept = y != IGNORED
        return (cross_entropies(out, y) * advantage * kept).mean()


class BufferBaseline(nn.Module):
    """A loss that is a module with a buffer of its own."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, out: Tensor, d: Rows) -> Tensor:
        loss = _squares(out, d).mean()
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.1 * loss)
        return loss / self.level.clone()


class Uncertain(nn.Module):
    """Learned weights of two losses, parameters of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, out: Tensor, d: Rows) -> Tensor:
        squares, gaps = _squares(out, d).mean(), (out - d["t"]).abs().mean()
        losses = torch.stack([squares, gaps])
        return (losses * torch.exp(-self.logs)).sum() + self.logs.sum()


class ClassWeighted(nn.CrossEntropyLoss):
    """A subclass: what it divides by cannot be read off its type."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return super().forward(out, y)


def numpy_noise_in_loss() -> Callable[..., Any]:
    draws = np.random.default_rng(3)

    def loss(out: Tensor, d: Rows) -> Tensor:
        noise = torch.as_tensor(draws.standard_normal(tuple(out.shape)), dtype=out.dtype)
        return ((out + 0.1 * noise - d["t"]) ** 2).mean()

    return loss


def _python_noise(out: Tensor, d: Rows) -> Tensor:
    return _squares(out, d).mean() * (0.5 + random.random())


def _sampled_targets(out: Tensor, d: Rows) -> Tensor:
    return F.mse_loss(out + torch.randn_like(out), d["t"], reduction="sum")


def _random_mask(out: Tensor, d: Rows) -> Tensor:
    keep = (torch.rand(len(out)) < 0.6).to(out.dtype)
    return (_squares(out, d) * keep).mean()


# Programs: the model is called here


def _first(d: Rows) -> Any:
    return d["x"]


def _gradient_penalty(function: Callable[[Tensor, Rows], Tensor]) -> Callable[..., Any]:
    def loss(model: nn.Module, d: Rows) -> Tensor:
        x = d["x"].detach().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, d["t"]) + function(slope, d)

    return loss


def _forces(model: nn.Module, d: Rows) -> Tensor:
    x = d["x"].detach().requires_grad_(True)
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    each = ((force[:, :CLASSES] - d["t"]) ** 2) * d["m"]
    return each.sum() / d["m"].sum()


def _attack(model: nn.Module, d: Rows) -> Tensor:
    x = d["x"].detach().clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(F.mse_loss(model(x), d["t"], reduction="sum"), x)
    return F.mse_loss(model((d["x"] + 0.1 * slope.sign()).detach()), d["t"])


def _attack_with_backward(model: nn.Module, d: Rows) -> Tensor:
    """Fast gradient sign, as tutorials write it: backward, read, clear, train."""
    x = d["x"].detach().clone().requires_grad_(True)
    F.mse_loss(model(x), d["t"], reduction="sum").backward()
    assert x.grad is not None
    moved = (d["x"] + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return F.mse_loss(model(moved), d["t"])


def _inner_backward(model: nn.Module, d: Rows) -> Tensor:
    """Two losses, of which the first goes backward at once."""
    out = model(d["x"])
    (0.1 * (out**2).mean()).backward()
    return F.mse_loss(model(d["x"]), d["t"])


def _inner_backward_of_sum(model: nn.Module, d: Rows) -> Tensor:
    (0.1 * (model(d["x"]) ** 2).sum()).backward()
    return F.mse_loss(model(d["x"]), d["t"])


def _one_inner_step(model: nn.Module, d: Rows) -> Tensor:
    """MAML: a step on the first half of the rows, the loss of the second."""
    half = (len(d["w"]) + 1) // 2
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def loss_of(parameters: Any, start: int, stop: int) -> Tensor:
        out = torch.func.functional_call(model, parameters, (d["x"][start:stop],))
        return ((out - d["t"][start:stop]) ** 2).sum() / CLASSES

    inner = loss_of(names, 0, half)
    slopes = torch.autograd.grad(inner, list(names.values()), create_graph=True, allow_unused=True)
    moved = {
        n: p if s is None else p - 0.1 * s
        for (n, p), s in zip(names.items(), slopes, strict=True)
    }
    return loss_of(moved, 0, len(d["w"])) / len(d["w"])


def _gradient_norm_weights(model: nn.Module, d: Rows) -> Tensor:
    out = model(d["x"])
    one, two = F.mse_loss(out, d["t"]), out.abs().mean()
    weights = [
        torch.autograd.grad(each, out, retain_graph=True)[0].norm().detach() for each in (one, two)
    ]
    return one + two * weights[0] / weights[1]


def _consistency(model: nn.Module, d: Rows) -> Tensor:
    with torch.no_grad():
        target = model(d["v"])
    return F.mse_loss(model(d["x"]), target) + F.mse_loss(model(d["x"]), d["t"])


def _two_views(model: nn.Module, d: Rows) -> Tensor:
    one, two = _normalised(model(d["x"])), _normalised(model(d["v"]))
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)))


def _barlow(model: nn.Module, d: Rows) -> Tensor:
    one, two = model(d["x"]).flatten(1), model(d["v"]).flatten(1)
    cross = one.T @ two / len(one)
    return ((cross - torch.eye(len(cross), dtype=cross.dtype)) ** 2).sum()


def _triplets(model: nn.Module, d: Rows) -> Tensor:
    anchor, near = model(d["x"]).flatten(1), model(d["v"]).flatten(1)
    return F.triplet_margin_loss(anchor, near, d["t"].flatten(1))


def _balanced_router(model: nn.Module, d: Rows) -> Tensor:
    out = model(d["x"])
    return F.mse_loss(out, d["t"]) + getattr(model, "aux", 0.0)


def _reparameterised(model: nn.Module, d: Rows) -> Tensor:
    """A variational loss as the examples have it: sums, and a draw in every mode."""
    out = model(d["x"])
    mean, log = out[..., :2], out[..., 2:]
    z = mean + torch.randn_like(log) * (log / 2).exp()
    kl = -0.5 * (1 + log - mean**2 - log.exp()).sum()
    return ((z - d["t"][..., :2]) ** 2).sum() + kl


def _mixup(model: nn.Module, d: Rows) -> Tensor:
    order, share = torch.randperm(len(d["w"])), 0.7
    mixed = share * d["x"] + (1 - share) * d["x"][order]
    return F.mse_loss(model(mixed), share * d["t"] + (1 - share) * d["t"][order])


def _two_draws(model: nn.Module, d: Rows) -> Tensor:
    one, two = model(d["x"]).log_softmax(-1), model(d["x"]).log_softmax(-1)
    both = F.kl_div(one, two, log_target=True, reduction="none")
    return both.mean() + F.mse_loss(one, d["t"])


def _penalised(model: nn.Module, d: Rows) -> Tensor:
    decay = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
    return F.mse_loss(model(d["x"]), d["t"]) + 0.01 * decay


def _penalised_sum(model: nn.Module, d: Rows) -> Tensor:
    decay = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
    return F.mse_loss(model(d["x"]), d["t"], reduction="sum") + 0.01 * decay


def _row_by_row(model: nn.Module, d: Rows) -> Tensor:
    total: Any = 0.0
    for index in range(len(d["w"])):
        total = total + F.mse_loss(model(d["x"][index : index + 1]), d["t"][index : index + 1])
    return total / len(d["w"])


def _ctc(reduction: str) -> Callable[..., Any]:
    def loss(out: Tensor, d: Rows) -> Tensor:
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
        lambda: nn.CrossEntropyLoss(reduction="sum"), shape="vectors", true=per_batch,
        read=per_batch,
    ),
    "CrossEntropyLoss smooth": _module(
        lambda: nn.CrossEntropyLoss(label_smoothing=0.2), shape="vectors", true=per_target,
        read=per_target,
    ),
    "CrossEntropyLoss weight": _module(
        lambda: nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT)), shape="vectors",
        true=per_class_weight, read=per_class_weight,
    ),
    "CrossEntropyLoss weight and smooth": _module(
        lambda: nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHT), label_smoothing=0.1),
        shape="vectors", true=per_class_weight, read=per_class_weight,
    ),
    "a subclass with weights": _module(
        lambda: ClassWeighted(torch.tensor(CLASS_WEIGHT)), shape="vectors", true=per_class_weight
    ),
    "tokens, flat": _module(lambda: Flat(nn.CrossEntropyLoss()), true=per_target),
    "tokens, flat, sum": _module(lambda: Flat(nn.CrossEntropyLoss(reduction="sum")), true=per_batch),
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
        make=lambda: lambda out, t: F.binary_cross_entropy_with_logits(
            out, t.sigmoid(), pos_weight=_weights(out)
        ),
        target="t",
    ),
    "KL, batchmean": _function(
        lambda out, t: F.kl_div(out.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
        target="t",
    ),
    "CTC, mean": _function(
        _ctc("mean"), target="all", shape="tokens", only_float64=True
    ),
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
        lambda out, d: (_squares(out, d) * d["w"]).sum() / d["w"].sum(), target="all",
        true=per_weight,
    ),
    "a weighted mean": _function(lambda out, d: (_squares(out, d) * d["w"]).mean(), target="all"),
    "rare class over weights": _function(_rare_class_weight, true=per_class_weight),
    "positives only": _function(
        _positives_only, true=lambda d: float((d["y"] == 1).sum())
    ),
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
    # programs
    "gradient penalty": _program(
        _gradient_penalty(lambda slope, d: ((slope.norm(dim=1) - 1) ** 2).mean()), shape="vectors"
    ),
    "gradient penalty of the sum": _program(
        _gradient_penalty(lambda slope, d: slope.norm()), shape="vectors", true=None
    ),
    "forces with a mask": _program(_forces, shape="vectors", true=per_mask),
    "an attack": _program(_attack, shape="vectors"),
    "an attack that clears": _program(_attack_with_backward, shape="vectors"),
    "an inner backward": _program(_inner_backward),
    "an inner backward of a sum": _program(_inner_backward_of_sum, true=None),
    "one inner step": _program(_one_inner_step, shape="vectors", true=None),
    "weights by gradient norms": _program(_gradient_norm_weights, true=None),
    "consistency": _program(_consistency),
    "two views": _program(_two_views, true=None),
    "decorrelation": _program(_barlow, true=None),
    "triplets of columns": _program(_triplets),
    "router's balance": _program(_balanced_router, true=None),
    "variational": _program(_reparameterised, true=per_batch, draws=True),
    "mixed rows": _program(_mixup, shape="vectors", true=None, draws=True),
    "two draws": _program(_two_draws),
    "weight decay in the loss": _program(_penalised),
    "weight decay and a sum": _program(_penalised_sum, true=None),
    "row by row": _program(_row_by_row),
}
