"""Rows that splitting does not change: none of them may cause a warning."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Halving
from tests.acceptance.rows import (
    WIDE,
    Draws,
    Row,
    Words,
    between,
    classes,
    convolutional,
    entropies,
    images,
    job,
    masked,
    masked_mean,
    net,
    numbers,
    of_rows,
    squares,
    token_mean,
    tokens,
    weighted,
)
from tests.acceptance.wrong import (
    Bayesian,
    Make,
    bayesian,
    beside,
    decay,
    each_of,
    evaluated,
    giving,
    tokens_and_rows,
)

RIGHT: dict[str, Row] = {}


def add(kind: str, rows: dict[str, Make], **more: Any) -> None:
    for name, make in rows.items():
        assert name not in RIGHT, name
        RIGHT[name] = Row(kind=kind, is_wrong=False, make=make, **more)


# Losses of torch


def told(loss_fn: Any, target: Callable[[Draws], Any], *after: nn.Module, **options: Any) -> Make:
    """A torch loss on a small model."""
    return job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), *after),
        batch=lambda d: (d.normal(30, 6), target(d)),
        loss_fn=loss_fn,
        **options,
    )


def of_classes(d: Draws) -> Tensor:
    return d.whole(0, 3, 30)


def of_some(d: Draws) -> Tensor:
    return of_classes(d).where(d.uniform(30) < 0.7, -100)


def of_numbers(d: Draws) -> Tensor:
    return d.normal(30, 3)


def of_bits(d: Draws) -> Tensor:
    return (d.uniform(30, 3) < 0.3).to(d.real)


def of_shares(d: Draws) -> Tensor:
    return d.normal(30, 3).softmax(1)


def weight() -> Tensor:
    return torch.tensor([0.25, 2.5, 1.0])


LOG = nn.LogSoftmax(1)
add("losses of torch", {
    **{type(loss).__name__: told(loss, of_numbers) for loss in (
        nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(beta=0.5), nn.HuberLoss(delta=0.3),
    )},
    "CrossEntropyLoss": told(nn.CrossEntropyLoss(), of_classes),
    "CrossEntropyLoss, weights": told(nn.CrossEntropyLoss(weight()), of_classes),
    "CrossEntropyLoss, some ignored": told(nn.CrossEntropyLoss(), of_some),
    "CrossEntropyLoss, own index": told(nn.CrossEntropyLoss(ignore_index=2), of_classes),
    "cross_entropy, a partial": told(functools.partial(F.cross_entropy, ignore_index=2), of_classes),
    "NLLLoss": told(nn.NLLLoss(), of_classes, LOG),
    "KLDivLoss, a sum": told(nn.KLDivLoss(reduction="sum"), of_shares, LOG),
    "BCEWithLogitsLoss": told(nn.BCEWithLogitsLoss(), of_bits),
    "BCEWithLogitsLoss, a sum": told(nn.BCEWithLogitsLoss(reduction="sum"), of_bits),
})  # fmt: skip
add("losses of torch", {
    "LinearCrossEntropyLoss": job(model=net(6, 8), batch=classes, loss_fn=nn.LinearCrossEntropyLoss(8, 3)),
}, dtypes=WIDE)  # fmt: skip

# Custom losses


def ratios(model: Any, batch: Any) -> Any:
    """A loss whose value is zero except for rounding, but whose gradient is not."""
    logs = -entropies(model, batch)
    return -((logs - logs.detach()).exp() * batch[2]).mean() + batch[2].mean()


def groups_of_four(model: Any, batch: Any) -> Any:
    """A loss over groups of four consecutive rows, which cuts keep together."""
    rewards = batch[2].view(-1, 4)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return (entropies(model, batch) * advantage.view(-1)).mean()


language = functools.partial(job, token_mean, model=Words, batch=tokens)
by_name = functools.partial(job, tokens_and_rows, model=Words, batch=tokens)
OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "a mean": lambda e: e.mean(),
    "a mean of roots": lambda e: (e + 1e-6).sqrt().mean(),
    "a mean times 1e-12": lambda e: e.mean() * 1e-12,
}
add("losses of one's own", {
    **each_of((name, of_rows(function)) for name, function in OF_ROWS.items()),
    **each_of([("a mean times 1e6", of_rows(lambda each: each.mean() * 1e6, lr=1e-9))]),
    "tokens, declared": language(loss_average="tokens"),
    "tokens, counted": language(loss_average=lambda batch: (batch["labels"] != -100).sum()),
    "a mask, declared": job(masked_mean, model=net(6, 8, 5), batch=masked, loss_average=lambda batch: batch["keep"].sum()),
    "a mask and a little, declared": job(
        functools.partial(masked_mean, add=1e-3), model=net(6, 8, 5), batch=masked,
        loss_average=lambda batch: batch["keep"].sum() + 1e-3,
    ),
    "a sum, declared": job(lambda m, b: squares(m, b).sum(), batch=numbers, loss_average="none"),
    "weights over their sum, declared": job(
        lambda m, b: (entropies(m, b) * b[2]).sum() / b[2].sum(), batch=weighted,
        loss_average=lambda batch: batch[2].sum(),
    ),
    "losses by name, declared": by_name(loss_average={"language": "tokens", "size": "samples"}),
    "a divergence of weights beside a mean": job(
        functools.partial(bayesian, reduction="mean"), model=lambda: Bayesian(6, 3)
    ),
    "a divergence of weights, declared": job(
        functools.partial(bayesian, reduction="sum"), model=lambda: Bayesian(6, 3),
        loss_average={"data": "none", "divergence": "samples"},
    ),
    "decay beside a mean": job(lambda m, b: squares(m, b).mean() + 0.01 * decay(m), batch=numbers),
    "advantages": job(lambda m, b: (entropies(m, b) * b[2] * 100).mean(), batch=weighted),
    "ratios whose value is zero": job(ratios, batch=weighted),
    "groups of four rows, cut at eight": job(groups_of_four, batch=weighted),
    "groups of four rows, in multiples of four": job(groups_of_four, batch=weighted, size=Halving(initial=8, multiple_of=4)),
})  # fmt: skip

# Random draws


def drawing(spoil: Callable[[Tensor], Tensor]) -> Make:
    return job(lambda m, b: F.cross_entropy(m(spoil(b[0])), b[1]), loss_average="samples")


def diffusion(model: Any, batch: Any) -> Any:
    at = torch.randint(0, 100, (len(batch[0]), 1)).to(batch[0].dtype) / 100
    noise = torch.randn_like(batch[0])
    return F.mse_loss(model((1 - at) * batch[0] + at * noise), noise)


class Last(nn.Module):
    """The output of a sequence layer at the last position."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        return self.head(out[0] if isinstance(out, tuple) else out)[:, -1]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)


def of_sequences(d: Draws) -> Any:
    return d.normal(16, 7, 6), d.whole(0, 3, 16)


def layers(*between: Any, width: int = 8) -> Make:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, width), *(each() for each in between), nn.Linear(width, 3)
        )

    return job(model=build, loss_fn=nn.CrossEntropyLoss())


def modelled(model: Callable[[], nn.Module], **more: Any) -> Make:
    return job(model=model, loss_fn=nn.CrossEntropyLoss(), **more)


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a distribution": lambda x: x + torch.distributions.Normal(x * 0, 1.0).rsample(),
    "rows dropped": lambda x: x * torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype)),
    "NumPy's noise": lambda x: x + torch.from_numpy(np.random.standard_normal(tuple(x.shape))).to(x.dtype),
}  # fmt: skip
add("draws", {
    **{name: drawing(spoil) for name, spoil in SPOILT.items()},
    "times of a diffusion": job(diffusion, model=net(6, 16, 6), batch=numbers, loss_average="samples"),
    "dropout": layers(nn.Tanh, lambda: nn.Dropout(0.3)),
}, is_measured=False)  # fmt: skip

# Models


class Spectrum(nn.Module):
    """A complex weight between two real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        return super()._apply(lambda t: t if t.is_complex() else function(t), recurse)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.fft.rfft(self.first(x).float()) * self.weight
        return self.last(torch.fft.irfft(hidden, 8).to(x.dtype))


def on_an_edge() -> nn.Module:
    """A model with many ReLUs near zero."""
    model = nn.Sequential(
        nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
    )
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


def hooked_parameter() -> nn.Module:
    model = net(6, 8, 3)()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))  # type: ignore[index]
    return model


def hooked_after() -> nn.Module:
    def clip(parameter: Any) -> None:
        parameter.grad.mul_((0.01 / parameter.grad.norm()).clamp(max=1.0))

    model = net(6, 8, 3)()
    model[2].weight.register_post_accumulate_grad_hook(clip)  # type: ignore[index]
    return model


def taught() -> Callable[[Any, Any], Any]:
    teacher = nn.Linear(6, 3, dtype=torch.float64).requires_grad_(False)

    def forward(model: Any, batch: Any) -> Any:
        out = model(batch[0]).log_softmax(1)
        goal = teacher(batch[0].double()).softmax(1).to(out.dtype)
        return F.kl_div(out, goal, reduction="batchmean")

    return forward


def counts(module: Any, h: Tensor) -> Any:
    module.seen += len(h)
    module.last = h.detach()
    return h


def frozen_batchnorm() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval()
    return model


def vision(*between: Callable[[], nn.Module], width: int = 8, **more: Any) -> Make:
    return modelled(
        lambda: convolutional(*(each() for each in between), width=width),
        batch=images,
        size=5,
        **more,
    )


add("models", {
    "ReLUs on an edge": modelled(on_an_edge),
    "RMSNorm": layers(lambda: nn.RMSNorm(8), nn.SiLU),
    "BatchNorm that is frozen": modelled(frozen_batchnorm),
    "convolutions": vision(nn.ReLU, lambda: nn.Conv2d(8, 8, 3), nn.ReLU),
    "GroupNorm": vision(lambda: nn.GroupNorm(4, 8), nn.ReLU),
    "a recurrent layer": modelled(lambda: Last(nn.GRU(6, 6, batch_first=True)), batch=of_sequences, size=5),
    "an encoder": modelled(lambda: Last(encoder()), batch=of_sequences, size=5),
    "a hook that clamps": modelled(hooked_parameter),
    "a hook that clips": modelled(hooked_after),
    "a teacher in a closure": job(fresh=taught),
    "rows counted, and what came last": modelled(between(counts, seen=lambda: 0, last=lambda: None)),
})  # fmt: skip
add("models", {"complex weights": modelled(Spectrum)}, dtypes=("float32",))

# Evaluation: losses and outputs

add("evaluation", {
    "evaluated: a mean": evaluated(lambda m, b: squares(m, b).mean(), batch=numbers),
    "evaluated: tokens, declared": evaluated(token_mean, model=Words, batch=tokens, loss_average="tokens"),
    "evaluated: noise": evaluated(lambda m, b: squares(m, (b[0] + 0 * torch.randn_like(b[0]), b[1])).mean(), batch=numbers),
}, dtypes=WIDE)  # fmt: skip
add("outputs", {
    "outputs: plain": giving(lambda o: o),
    "outputs: by name": giving(lambda o: {"odds": o.softmax(1), "top": o.argmax(1)}),
    "outputs: a list of tensors": giving(lambda o: [one[one > 0] for one in o]),
    "outputs: words": giving(lambda o: [f"{float(one[0]):.3f}" for one in o]),
    "outputs: some of the rows": giving(lambda o: o[o[:, 0] > 0]),
    "outputs: several of each row": giving(lambda o: o.repeat_interleave(3, 0)),
    "outputs: as wide as a microbatch": giving(lambda o: o[:, :1].repeat(1, 8)),
    "outputs: infinite": giving(lambda o: o.masked_fill(o > 0, -torch.inf)),
    "outputs: truths": giving(lambda o: o > 0),
}, dtypes=WIDE)  # fmt: skip
add("numbers", {
    "a number: a mean": beside(lambda o: o.mean()),
    "a number: a confidence": beside(lambda o: o.softmax(1).amax(1).mean()),
    "a number: a constant": beside(lambda o: torch.tensor(0.07)),
    "a number: zero": beside(lambda o: o.sum() * 0),
}, dtypes=WIDE, is_measured=False)  # fmt: skip

# Parameters in bfloat16, too

LOW = (
    "MSELoss", "CrossEntropyLoss, weights", "NLLLoss", "BCEWithLogitsLoss", "a mean, of numbers",
    "a mask, declared", "tokens, declared", "a mean times 1e6, of numbers", "decay beside a mean",
    "RMSNorm", "convolutions", "GroupNorm",
    "an encoder", "a recurrent layer", "dropout", "noise", "times of a diffusion",
)  # fmt: skip
for name in LOW:
    RIGHT[f"{name}, in bfloat16"] = dataclasses.replace(RIGHT[name], dtypes=("bfloat16",))
