"""Rows that splitting does not change: none of them may cause a warning."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from automicro import Halving
from tests.acceptance.rows import (
    ROWS,
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
    sequences,
    squares,
    token_mean,
    tokens,
    weighted,
)
from tests.acceptance.wrong import (
    Autoencoder,
    Bayesian,
    Experts,
    Make,
    bayesian,
    beside,
    decay,
    each_of,
    evaluated,
    frames_per_target,
    giving,
    graphs,
    hooked,
    routed,
    some_ignored,
    speech,
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


def of_signs(d: Draws) -> Tensor:
    return d.normal(30, 3).sign()


def of_shares(d: Draws) -> Tensor:
    return d.normal(30, 3).softmax(1)


def weight() -> Tensor:
    return torch.tensor([0.25, 2.5, 1.0])


def some_pixels(d: Draws) -> Any:
    return d.normal(12, 3, 6, 6), d.whole(0, 3, 12, 6, 6).where(d.uniform(12, 6, 6) < 0.7, -100)


LOG = nn.LogSoftmax(1)
add("losses of torch", {
    **{type(loss).__name__: told(loss, of_numbers) for loss in (
        nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(beta=0.5), nn.HuberLoss(delta=0.3),
    )},
    "CrossEntropyLoss": told(nn.CrossEntropyLoss(), of_classes),
    "CrossEntropyLoss, weights": told(nn.CrossEntropyLoss(weight()), of_classes),
    "CrossEntropyLoss, some ignored": told(nn.CrossEntropyLoss(), of_some),
    "CrossEntropyLoss, own index": told(nn.CrossEntropyLoss(ignore_index=2), of_classes),
    "CrossEntropyLoss, pixels": job(
        model=lambda: nn.Conv2d(3, 3, 3, padding=1), batch=some_pixels,
        loss_fn=nn.CrossEntropyLoss(weight()), size=5,
    ),
    "cross_entropy, a partial": told(functools.partial(F.cross_entropy, ignore_index=2), of_classes),
    "NLLLoss": told(nn.NLLLoss(), of_classes, LOG),
    "KLDivLoss, a sum": told(nn.KLDivLoss(reduction="sum"), of_shares, LOG),
    "HingeEmbeddingLoss": told(nn.HingeEmbeddingLoss(), of_signs),
    "MultiLabelSoftMarginLoss": told(nn.MultiLabelSoftMarginLoss(), of_bits),
    "BCEWithLogitsLoss": told(nn.BCEWithLogitsLoss(), of_bits),
    "BCEWithLogitsLoss, a sum": told(nn.BCEWithLogitsLoss(reduction="sum"), of_bits),
    "a likelihood with a variance": job(
        lambda m, b: F.gaussian_nll_loss(m(b[0])[:, :3], b[1], m(b[0])[:, 3:].exp()),
        model=net(6, 8, 6), batch=numbers, loss_average="samples",
    ),
    "triplets in rows": job(
        lambda m, b: F.triplet_margin_loss(*map(m, b)),
        batch=lambda d: (d.normal(24, 6), d.normal(24, 6), d.normal(24, 6)),
    ),
    "frames over targets, declared": job(
        frames_per_target, model=net(6, 8, 7), batch=speech, size=4,
        loss_average=lambda batch: batch["lengths"].sum(),
    ),
})  # fmt: skip
add("losses of torch", {
    "LinearCrossEntropyLoss": job(
        model=net(6, 8), batch=classes, loss_fn=nn.LinearCrossEntropyLoss(8, 3)
    ),
    "LinearCrossEntropyLoss, some ignored": job(
        model=net(6, 8), batch=some_ignored, loss_fn=nn.LinearCrossEntropyLoss(8, 3)
    ),
}, dtypes=WIDE)  # fmt: skip

# Custom losses


def second_derivatives(model: Any, batch: Any) -> Any:
    x = batch[0].detach().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] - 0.1 * second[:, 0]).square().mean()


def tasks(d: Draws) -> Any:
    return {name: d.normal(8, 5, width) for name, width in (("a", 6), ("b", 3), ("c", 6), ("d", 3))}


def adapted_by_task(model: Any, batch: Any) -> Any:
    call, weights = torch.func.functional_call, dict(model.named_parameters())
    total: Any = 0
    for a, b, c, d in zip(*(batch[name] for name in "abcd"), strict=True):
        loss = F.mse_loss(call(model, weights, (a,)), b)
        slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
        fast = {k: v - 0.1 * g for (k, v), g in zip(weights.items(), slopes, strict=True)}
        total = total + F.mse_loss(call(model, fast, (c,)), d)
    return total / len(batch["a"])


def ratios(model: Any, batch: Any) -> Any:
    """A loss whose value is zero except for rounding, but whose gradient is not."""
    logs = -entropies(model, batch)
    return -((logs - logs.detach()).exp() * batch[2]).mean() + batch[2].mean()


def cancelling(model: Any, batch: Any) -> Any:
    out = model(batch[0] * 30)
    large = out.square().sum(1)
    return (large - large.detach() + out.sum(1) * 1e-3).mean()


def groups_of_four(model: Any, batch: Any) -> Any:
    """A loss over groups of four consecutive rows, which cuts keep together."""
    rewards = batch[2].view(-1, 4)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return (entropies(model, batch) * advantage.view(-1)).mean()


language = functools.partial(job, token_mean, model=Words, batch=tokens)
by_name = functools.partial(job, tokens_and_rows, model=Words, batch=tokens)
OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "a mean": lambda e: e.mean(),
    "a focal mean": lambda e: ((1 - torch.exp(-e)) ** 2 * e).mean(),
    "a mean of roots": lambda e: (e + 1e-6).sqrt().mean(),
    "a hinge": lambda e: (e - 1).relu().mean(),
    "a mean over a constant": lambda e: e.mean() / 1e4,
    "a mean times 1e-12": lambda e: e.mean() * 1e-12,
}
add("losses of one's own", {
    **each_of((name, of_rows(function)) for name, function in OF_ROWS.items()),
    **each_of([("a mean times 1e6", of_rows(lambda each: each.mean() * 1e6, lr=1e-9))]),
    "tokens, declared": language(loss_average="tokens"),
    "tokens, counted": language(loss_average=lambda batch: (batch["labels"] != -100).sum()),
    "a mask, declared": job(
        masked_mean, model=net(6, 8, 5), batch=masked, loss_average=lambda batch: batch["keep"].sum()
    ),
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
    "pairs in rows": job(
        lambda m, b: -F.logsigmoid(m(b[0]) - m(b[1])).mean(),
        batch=lambda d: (d.normal(24, 6), d.normal(24, 6)),
    ),
    "second derivatives": job(second_derivatives, batch=numbers),
    "adapted task by task": job(adapted_by_task, batch=tasks, size=3),
    "advantages": job(lambda m, b: (entropies(m, b) * b[2] * 100).mean(), batch=weighted),
    "ratios whose value is zero": job(ratios, batch=weighted),
    "large terms that cancel": job(cancelling, model=net(6, 3), batch=numbers),
    "two views of a row": job(
        lambda m, b: F.mse_loss(m(b[0]), m(b[0] * 0.9).detach()) + F.mse_loss(m(b[0]), b[1]),
        batch=numbers,
    ),
    "groups of four rows, cut at eight": job(groups_of_four, batch=weighted),
    "groups of four rows, in multiples of four": job(
        groups_of_four, batch=weighted, size=Halving(initial=8, multiple_of=4)
    ),
})  # fmt: skip

# Random draws


def drawing(spoil: Callable[[Tensor], Tensor]) -> Make:
    return job(lambda m, b: F.cross_entropy(m(spoil(b[0])), b[1]), loss_average="samples")


def diffusion(model: Any, batch: Any) -> Any:
    at = torch.randint(0, 100, (len(batch[0]), 1)).to(batch[0].dtype) / 100
    noise = torch.randn_like(batch[0])
    return F.mse_loss(model((1 - at) * batch[0] + at * noise), noise)


def hidden_patches(model: Any, batch: Any) -> Any:
    keep = torch.rand(batch[0].shape).argsort(1) < 3
    return ((model(batch[0] * keep) - batch[0]).square() * ~keep).sum(1).mean() / 3


def variational(model: Any, batch: Any) -> Any:
    mean, log = model.encode(batch[0]).chunk(2, -1)
    back = model.decode(mean + torch.randn_like(mean) * (log / 2).exp())
    divergence = (mean.square() + log.exp() - 1 - log).sum(1) / 2
    return ((back - batch[0]).square().sum(1) + divergence).mean()


def fixed_projection(model: Any, batch: Any) -> Any:
    fixed = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).to(batch[0].dtype)
    return F.mse_loss(model(batch[0] @ fixed), batch[1])


class Last(nn.Module):
    """The output of a sequence layer at the last position, or at every position."""

    def __init__(self, body: nn.Module, width: int = 6, *, each: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.each = body, nn.Linear(width, 3), each

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        out = self.head(out[0] if isinstance(out, tuple) else out)
        return out if self.each else out[:, -1]


def encoder(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 12, dropout=dropout, batch_first=True)


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
    "uniform noise": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "one scale for all": lambda x: x * torch.rand(()).to(x.dtype),
    "rows dropped": lambda x: x * torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype)),
    "features shuffled": lambda x: x[:, torch.randperm(x.shape[1])],
    "counts": lambda x: x + torch.poisson(x.float().abs()).to(x.dtype),
    "NumPy's noise": lambda x: x + torch.from_numpy(np.random.standard_normal(tuple(x.shape))).to(x.dtype),
}  # fmt: skip
add("draws", {
    **{name: drawing(spoil) for name, spoil in SPOILT.items()},
    "times of a diffusion": job(diffusion, model=net(6, 16, 6), batch=numbers, loss_average="samples"),
    "patches hidden at random": job(hidden_patches, model=net(6, 16, 6), batch=numbers, loss_average="samples"),
    "variational, a mean": job(variational, model=Autoencoder, batch=numbers),
    "dropout": layers(nn.Tanh, lambda: nn.Dropout(0.3)),
    "dropped channels": modelled(lambda: convolutional(nn.Dropout2d(0.3)), batch=images, size=5),
    "a recurrent layer that drops": modelled(
        lambda: Last(nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True)), batch=of_sequences, size=5
    ),
    "an encoder that drops": modelled(lambda: Last(encoder(0.2)), batch=of_sequences, size=5),
}, is_measured=False)  # fmt: skip
add("draws", {"a projection from a seed": job(fixed_projection, batch=numbers)})

# Models


class Adapted(nn.Module):
    """A frozen layer with an adapter, one half of which is initially zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Any:
        return self.frozen(x) + self.up(self.down(x))


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


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (10 * x).sin()


class Rounding(nn.Module):
    """Quantization to eight levels with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x + ((x * 8).round() / 8 - x).detach()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(30, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.bag(x))


class Frequent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(12, 40, [8, 20])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return -self.out(self.embed(x), y).output.mean()


class Attends(nn.Module):
    """Attention within rows, over unmasked positions."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor) -> Any:
        h = self.lift(x)
        return self.head(self.attend(h, h, h, key_padding_mask=~keep)[0])


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


def tabled(module: Any, h: Tensor) -> Any:
    if module.table is None:
        module.table = torch.arange(8).cos()
    return h + module.table.to(h.dtype)


def over_places(model: Any, batch: Any) -> Any:
    out = model(batch["x"], batch["keep"]) if isinstance(model, Attends) else model(batch["x"])
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


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
    "an adapter of zeros": modelled(Adapted, lr=0.5),
    "deep and narrow": layers(*[nn.Tanh, lambda: nn.Linear(8, 8)] * 12),
    "deep, with LayerNorm": layers(*[nn.GELU, lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8)] * 8),
    "RMSNorm": layers(lambda: nn.RMSNorm(8), nn.SiLU),
    "wide": layers(nn.ReLU, width=1024),
    "sines": layers(Sine, lambda: nn.Linear(8, 8), Sine),
    "rounded": layers(Rounding, lambda: nn.Linear(8, 8), Rounding),
    "maxout": layers(lambda: nn.Unflatten(1, (4, 4)), lambda: nn.AdaptiveMaxPool1d(2), nn.Flatten, lambda: nn.Linear(8, 16), width=16),
    "experts that nothing balances": job(routed, model=lambda: Experts(4)),
    "BatchNorm that is frozen": modelled(frozen_batchnorm),
    "convolutions": vision(nn.ReLU, lambda: nn.Conv2d(8, 8, 3), nn.ReLU),
    "convolutions, wide": vision(nn.ReLU, lambda: nn.Conv2d(64, 64, 3), nn.ReLU, width=64),
    "GroupNorm": vision(lambda: nn.GroupNorm(4, 8), nn.ReLU),
    "InstanceNorm, affine": vision(lambda: nn.InstanceNorm2d(8, affine=True), nn.ReLU),
    "LocalResponseNorm": vision(lambda: nn.LocalResponseNorm(2)),
    "pooling": vision(nn.ReLU, lambda: nn.MaxPool2d(2), lambda: nn.Conv2d(8, 8, 2), nn.ReLU),
    "depthwise": vision(nn.ReLU6, lambda: nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish),
    "BatchNorm that is frozen, of images": vision(lambda: nn.BatchNorm2d(8).eval(), nn.ReLU),
    "a recurrent layer": modelled(lambda: Last(nn.GRU(6, 6, batch_first=True)), batch=of_sequences, size=5),
    "an encoder": modelled(lambda: Last(encoder(0.0)), batch=of_sequences, size=5),
    "places of a recurrent layer, declared": job(
        over_places, model=lambda: Last(nn.GRU(6, 6, 2, batch_first=True), each=True), batch=sequences,
        size=5, loss_average="tokens",
    ),
    "attention over places, declared": job(
        over_places, model=Attends, batch=sequences, size=5, loss_average="tokens"
    ),
    "lists of graphs": job(
        lambda m, b: F.mse_loss(torch.stack([m(each).mean() for each in b["nodes"]]), b["y"]),
        batch=graphs, size=4,
    ),
    "targets of a million": job(
        lambda m, b: F.mse_loss(m(b[0] * 1e3), b[1] * 1e6), model=net(6, 8, 3, act=nn.ReLU),
        batch=numbers, lr=1e-9,
    ),
    "a hook that clamps": modelled(hooked_parameter),
    "a hook that clips": modelled(hooked_after),
    "a hidden gradient, clamped": hooked(lambda g: g.clamp(-1e-3, 1e-3)),
    "a teacher in a closure": job(fresh=taught),
    "rows counted, and what came last": modelled(between(counts, seen=lambda: 0, last=lambda: None)),
    "a table that the first call makes": modelled(between(tabled, table=lambda: None)),
})  # fmt: skip
add("models", {
    "a sparse embedding": modelled(Bag, batch=lambda d: (d.whole(0, 30, 16, 5), d.whole(0, 3, 16)), size=5),
    "frequent words apart": job(
        lambda m, b: m(*b), model=Frequent, batch=lambda d: (d.whole(0, 40, ROWS), d.whole(0, 40, ROWS))
    ),
    "orthogonal weights": modelled(
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    ),
}, dtypes=WIDE)  # fmt: skip
add("models", {"complex weights": modelled(Spectrum)}, dtypes=("float32",))

# Evaluation: losses and outputs

add("evaluation", {
    "evaluated: a mean": evaluated(lambda m, b: squares(m, b).mean(), batch=numbers),
    "evaluated: tokens, declared": evaluated(token_mean, model=Words, batch=tokens, loss_average="tokens"),
    "evaluated: noise": evaluated(
        lambda m, b: squares(m, (b[0] + 0 * torch.randn_like(b[0]), b[1])).mean(), batch=numbers
    ),
}, dtypes=WIDE)  # fmt: skip
add("outputs", {
    "outputs: plain": giving(lambda o: o),
    "outputs: by name": giving(lambda o: {"odds": o.softmax(1), "top": o.argmax(1)}),
    "outputs: a list of tensors": giving(lambda o: [one[one > 0] for one in o]),
    "outputs: boxes": giving(lambda o: [{"boxes": one[one > 0]} for one in o]),
    "outputs: words": giving(lambda o: [f"{float(one[0]):.3f}" for one in o]),
    "outputs: pairs": giving(lambda o: (o, (o, (o * 3,)))),
    "outputs: some of the rows": giving(lambda o: o[o[:, 0] > 0]),
    "outputs: several of each row": giving(lambda o: o.repeat_interleave(3, 0)),
    "outputs: as wide as a microbatch": giving(lambda o: o[:, :1].repeat(1, 8)),
    "outputs: infinite": giving(lambda o: o.masked_fill(o > 0, -torch.inf)),
    "outputs: truths": giving(lambda o: o > 0),
}, dtypes=WIDE)  # fmt: skip
add("numbers", {
    "a number: a mean": beside(lambda o: o.mean()),
    "a number: a confidence": beside(lambda o: o.softmax(1).amax(1).mean()),
    "a number: a share": beside(lambda o: (o[:, 0] > 0).float().mean()),
    "a number: a constant": beside(lambda o: torch.tensor(0.07)),
    "a number: zero": beside(lambda o: o.sum() * 0),
}, dtypes=WIDE, is_measured=False)  # fmt: skip

# Parameters in bfloat16, too

LOW = (
    "MSELoss", "CrossEntropyLoss, weights", "NLLLoss", "BCEWithLogitsLoss", "a mean, of numbers",
    "a mask, declared", "tokens, declared", "a mean times 1e6, of numbers", "decay beside a mean",
    "deep and narrow", "deep, with LayerNorm", "RMSNorm", "convolutions", "GroupNorm", "pooling",
    "an encoder", "a recurrent layer", "dropout", "noise", "times of a diffusion",
)  # fmt: skip
for name in LOW:
    RIGHT[f"{name}, in bfloat16"] = dataclasses.replace(RIGHT[name], dtypes=("bfloat16",))
