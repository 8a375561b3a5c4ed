"""Losses of the search that call the model themselves: penalties, attacks, inner steps."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.averages import Loss, Rows, normalised, per_batch, per_mask
from tests.oracle.contents import CLASSES


def _program(function: Callable[..., Any], **more: Any) -> Loss:
    return Loss(make=lambda: function, is_program=True, target="all", **more)


def _gradient_penalty(function: Callable[[Tensor, Rows], Tensor]) -> Callable[..., Any]:
    def loss(model: nn.Module, d: Rows) -> Any:
        x = d["x"].detach().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, d["t"]) + function(slope, d)

    return loss


def _forces(model: nn.Module, d: Rows) -> Any:
    x = d["x"].detach().requires_grad_(True)
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    each = ((force[:, :CLASSES] - d["t"]) ** 2) * d["m"]
    return each.sum() / d["m"].sum()


def _attack(model: nn.Module, d: Rows) -> Any:
    x = d["x"].detach().clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(F.mse_loss(model(x), d["t"], reduction="sum"), x)
    return F.mse_loss(model((d["x"] + 0.1 * slope.sign()).detach()), d["t"])


def _attack_with_backward(model: nn.Module, d: Rows) -> Any:
    """Apply the fast gradient sign method as tutorials do: backward, read, clear, train."""
    x = d["x"].detach().clone().requires_grad_(True)
    F.mse_loss(model(x), d["t"], reduction="sum").backward()
    assert x.grad is not None
    moved = (d["x"] + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return F.mse_loss(model(moved), d["t"])


def _inner_backward(model: nn.Module, d: Rows) -> Any:
    """Compute two losses, the first of which runs backward at once."""
    out = model(d["x"])
    (0.1 * (out**2).mean()).backward()
    return F.mse_loss(model(d["x"]), d["t"])


def _one_inner_step(model: nn.Module, d: Rows) -> Any:
    """Apply MAML: a step on the first half of the rows, the loss of the second."""
    half = (len(d["w"]) + 1) // 2
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def loss_of(parameters: Any, start: int, stop: int) -> Any:
        out = torch.func.functional_call(model, parameters, (d["x"][start:stop],))
        return ((out - d["t"][start:stop]) ** 2).sum() / CLASSES

    inner = loss_of(names, 0, half)
    given = list(names.values())
    slopes: Any = torch.autograd.grad(inner, given, create_graph=True, allow_unused=True)
    moved = {
        n: p if s is None else p - 0.1 * s for (n, p), s in zip(names.items(), slopes, strict=True)
    }
    return loss_of(moved, 0, len(d["w"])) / len(d["w"])


def _gradient_norm_weights(model: nn.Module, d: Rows) -> Any:
    out = model(d["x"])
    one, two = F.mse_loss(out, d["t"]), out.abs().mean()
    weights = [
        torch.autograd.grad(each, out, retain_graph=True)[0].norm().detach() for each in (one, two)
    ]
    return one + two * weights[0] / weights[1]


def _consistency(model: nn.Module, d: Rows) -> Any:
    with torch.no_grad():
        target = model(d["v"])
    return F.mse_loss(model(d["x"]), target) + F.mse_loss(model(d["x"]), d["t"])


def _two_views(model: nn.Module, d: Rows) -> Any:
    one, two = normalised(model(d["x"])), normalised(model(d["v"]))
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)))


def _barlow(model: nn.Module, d: Rows) -> Any:
    one, two = model(d["x"]).flatten(1), model(d["v"]).flatten(1)
    cross = one.T @ two / len(one)
    return ((cross - torch.eye(len(cross), dtype=cross.dtype)) ** 2).sum()


def _triplets(model: nn.Module, d: Rows) -> Any:
    anchor, near = model(d["x"]).flatten(1), model(d["v"]).flatten(1)
    return F.triplet_margin_loss(anchor, near, d["t"].flatten(1))


def _balanced_router(model: nn.Module, d: Rows) -> Any:
    out = model(d["x"])
    return F.mse_loss(out, d["t"]) + getattr(model, "aux", 0.0)


def _reparameterised(model: nn.Module, d: Rows) -> Any:
    """Compute a variational loss as examples do: sums, and a draw in every mode."""
    out = model(d["x"])
    mean, log = out[..., :2], out[..., 2:]
    z = mean + torch.randn_like(log) * (log / 2).exp()
    kl = -0.5 * (1 + log - mean**2 - log.exp()).sum()
    return ((z - d["t"][..., :2]) ** 2).sum() + kl


def _mixup(model: nn.Module, d: Rows) -> Any:
    order, share = torch.randperm(len(d["w"])), 0.7
    mixed = share * d["x"] + (1 - share) * d["x"][order]
    return F.mse_loss(model(mixed), share * d["t"] + (1 - share) * d["t"][order])


def _two_draws(model: nn.Module, d: Rows) -> Any:
    one, two = model(d["x"]).log_softmax(-1), model(d["x"]).log_softmax(-1)
    both = F.kl_div(one, two, log_target=True, reduction="none")
    return both.mean() + F.mse_loss(one, d["t"])


def _penalised(model: nn.Module, d: Rows) -> Any:
    decay = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
    return F.mse_loss(model(d["x"]), d["t"]) + 0.01 * decay


def _penalised_sum(model: nn.Module, d: Rows) -> Any:
    decay = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
    return F.mse_loss(model(d["x"]), d["t"], reduction="sum") + 0.01 * decay


def _row_by_row(model: nn.Module, d: Rows) -> Any:
    total: Any = 0.0
    for index in range(len(d["w"])):
        total = total + F.mse_loss(model(d["x"][index : index + 1]), d["t"][index : index + 1])
    return total / len(d["w"])


PROGRAMS = {
    "gradient penalty": _program(
        _gradient_penalty(lambda slope, d: ((slope.norm(dim=1) - 1) ** 2).mean()), shape="vectors"
    ),
    "gradient penalty of the sum": _program(
        _gradient_penalty(lambda slope, d: slope.norm()), shape="vectors", true=None
    ),
    "forces with a mask": _program(_forces, shape="vectors", true=per_mask),
    "an attack": _program(_attack, shape="vectors"),
    "an attack that clears": _program(_attack_with_backward, shape="vectors", true=None),
    "an inner backward": _program(_inner_backward, true=None),
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
