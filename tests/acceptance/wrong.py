"""Rows that splitting changes: each must cause a warning or an error."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.acceptance.rows import (
    ROWS,
    WIDE,
    Between,
    Draws,
    Job,
    Row,
    Words,
    between,
    classes,
    entropies,
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

Make = Callable[[int, str], Job]
WRONG: dict[str, Row] = {}


def add(kind: str, rows: dict[str, Make], **more: Any) -> None:
    for name, make in rows.items():
        assert name not in WRONG, name
        WRONG[name] = Row(kind=kind, is_wrong=True, make=make, **more)


def each_of(tables: Iterable[tuple[str, dict[str, Make]]]) -> dict[str, Make]:
    return {f"{name}, of {of}": make for name, table in tables for of, make in table.items()}


# Losses that average over something other than rows


def rare_class(d: Draws) -> Any:
    y = d.whole(0, 2, 256) * 2
    y[torch.randperm(240, generator=d.generator)[:8]] = 1
    return d.normal(256, 6), y


def boxes(d: Draws) -> Any:
    lists = [d.uniform(int(count), 3) for count in d.whole(1, 6, 16)]
    return {"x": d.normal(16, 6), "boxes": lists}


def over_boxes(model: Any, batch: Any) -> Any:
    out = zip(model(batch["x"]), batch["boxes"], strict=True)
    return sum((one - each).abs().sum() for one, each in out) / sum(map(len, batch["boxes"]))


def graphs(d: Draws) -> Any:
    return {"nodes": [d.normal(int(n), 6) * n for n in d.whole(1, 9, 12)], "y": d.normal(12)}


def pixels(d: Draws) -> Any:
    y = d.whole(0, 3, 12, 6, 6).where(d.uniform(12, 6, 6) > d.uniform(12, 1, 1), 255)
    return d.normal(12, 3, 6, 6), y


def speech(d: Draws) -> Any:
    lengths = d.whole(1, 5, 16)
    return {"x": d.normal(16, 12, 6), "y": d.whole(1, 7, 16, 4), "lengths": lengths}


def frames_per_target(model: Any, batch: Any) -> Any:
    odds, frames = (
        model(batch["x"]).log_softmax(-1).transpose(0, 1),
        torch.full((len(batch["x"]),), 12),
    )
    each = F.ctc_loss(odds, batch["y"], frames, batch["lengths"], reduction="none")
    return each.sum() / batch["lengths"].sum()


def indexed(d: Draws) -> Any:
    return *numbers(d), d.uniform(ROWS) < 0.5


def by_share_of_positives(model: Any, batch: Any) -> Any:
    y = (batch[1][:, None] == 1).to(batch[0].dtype)
    weight = (len(y) - y.sum()) / y.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, :1], y, pos_weight=weight)


def class_weighted(*weights: float) -> Callable[[Any, Any], Any]:
    def forward(model: Any, batch: Any) -> Any:
        weight = torch.tensor(weights, dtype=batch[0].dtype)
        return F.cross_entropy(model(batch[0]), batch[1], weight)

    return forward


def row_means_of_tokens(model: Any, batch: Any) -> Any:
    out, labels = model(batch["ids"]).transpose(1, 2), batch["labels"]
    return (F.cross_entropy(out, labels, reduction="none").sum(1) / (labels != -100).sum(1)).mean()


def tokens_and_rows(model: Any, batch: Any) -> Any:
    out = model(batch["ids"])
    loss = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
    return {"language": loss, "size": out.mean(1).square().mean()}


def decay(model: Any) -> Any:
    return sum(each.square().sum() for each in model.parameters())


class Bayesian(nn.Linear):
    """A layer with a divergence of its weights, which does not depend on rows."""

    def divergence(self) -> Any:
        return sum((p.square() - p.square().clamp(min=1e-4).log()).sum() for p in self.parameters())


def bayesian(model: Any, batch: Any, reduction: str, scale: float = 0.1) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)
    return {"data": loss, "divergence": scale * model.divergence()}


def some_ignored(d: Draws) -> Any:
    x, y = classes(d)
    return x, y.where(d.uniform(ROWS) < 0.6, -100)


def summed_bayesian(model: Any, batch: Any) -> Any:
    return sum(bayesian(model, batch, "sum").values())


language = functools.partial(job, model=Words, batch=tokens)
add("average", {
    **each_of([("a sum", of_rows(torch.sum)), ("a sum over 32", of_rows(lambda e: e.sum() / 32))]),
    "a mean over tokens": language(token_mean),
    "a mean over tokens, smoothed": language(functools.partial(token_mean, label_smoothing=0.1)),
    "a mean over tokens, declared samples": language(token_mean, loss_average="samples"),
    "a mean of means of rows, declared tokens": language(row_means_of_tokens, loss_average="tokens"),
    "tokens and rows by name": language(tokens_and_rows),
    "tokens and rows in one": language(lambda m, b: sum(tokens_and_rows(m, b).values())),
    "a mask": job(masked_mean, model=net(6, 8, 5), batch=masked),
    "a mask, and a little": job(functools.partial(masked_mean, add=1e-6), model=net(6, 8, 5), batch=masked),
    "a mask, times 1e-7": job(functools.partial(masked_mean, scale=1e-7), model=net(6, 8, 5), batch=masked),
    "what an index keeps": job(
        lambda m, b: F.l1_loss(m(b[0][b[2]]), b[1][b[2]]), model=net(6, 3), batch=indexed
    ),
    "weights over their sum": job(
        lambda m, b: (entropies(m, b) * b[2]).sum() / b[2].sum(), batch=weighted
    ),
    "weights of classes": job(class_weighted(1, 4, 9)),
    "a weight of a rare class": job(class_weighted(1, 20, 1), model=net(6, 3), batch=rare_class, size=64),
    "positives by their share": job(by_share_of_positives),
    "frames over targets": job(frames_per_target, model=net(6, 8, 7), batch=speech, size=4),
    "over boxes": job(over_boxes, batch=boxes, size=4),
    "nodes of graphs": job(
        lambda m, b: torch.cat([m(each) for each in b["nodes"]]).square().mean(), batch=graphs, size=4
    ),
    "pixels that count": job(
        lambda m, b: F.cross_entropy(m(b[0]), b[1], ignore_index=255),
        model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)),
        batch=pixels,
        size=4,
    ),
    "targets ignored, in an own function": job(
        loss_fn=lambda out, y: F.cross_entropy(out, y), batch=some_ignored
    ),
    "decay beside a sum, declared a sum": job(
        lambda m, b: squares(m, b).sum() + 0.1 * decay(m), batch=numbers, loss_average="none"
    ),
    "a divergence of weights beside a sum": job(summed_bayesian, model=lambda: Bayesian(6, 3)),
    "a divergence of weights, declared a sum": job(
        summed_bayesian, model=lambda: Bayesian(6, 3), loss_average="none"
    ),
    "a divergence of weights beside a sum, by name": job(
        functools.partial(bayesian, reduction="sum"), model=lambda: Bayesian(6, 3)
    ),
})  # fmt: skip


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        mean, log = self.encode(x).chunk(2, -1)
        divergence = (mean.square() + log.exp() - 1 - log).sum() / 2
        return self.decode(mean + torch.randn_like(mean) * (log / 2).exp()), divergence


def variational(model: Any, batch: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    back, divergence = model(batch[0])
    return F.mse_loss(back, batch[0], reduction=reduction) + scale * divergence


def dropped(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(F.dropout(batch[0], 0.4)), batch[1], reduction="sum")


variational_mean = functools.partial(variational, reduction="mean", scale=1e-2)
add("average", {
    "variational, a sum": job(variational, model=Autoencoder),
    "variational, a mean beside a sum": job(variational_mean, model=Autoencoder),
    "dropped inputs in a sum": job(dropped, batch=numbers),
}, is_measured=False)  # fmt: skip

# Losses that depend on a value of the whole batch

OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "the hardest 16": lambda e: e.topk(min(16, len(e))).values.mean(),
    "those above the 16th": lambda e: e[e >= e.detach().kthvalue(max(1, len(e) - 15)).values].mean(),
    "divided by itself": lambda e: e.mean() / e.mean().detach(),
    "those above the mean": lambda e: e[e >= e.detach().mean()].mean(),
    "clipped at a quantile": lambda e: e.clamp(max=e.detach().quantile(0.9)).mean(),
    "without the top tenth": lambda e: e.sort().values[: -len(e) // 10].mean(),
    "over the largest": lambda e: (e / e.detach().max()).mean(),
    "weighted by a softmax": lambda e: (e * e.detach().softmax(0)).sum(),
    "a mean and its spread": lambda e: e.mean() + 0.1 * e.std(),
}  # fmt: skip


def normalised(values: Tensor) -> Tensor:
    return (values - values.mean(0)) / (values.std(0) + 1e-8)


def robust(model: Any, batch: Any) -> Any:
    off = model(batch[0]) - batch[1]
    delta = 1.35 * off.detach().abs().median()
    return torch.where(off.abs() < delta, off**2 / 2, delta * (off.abs() - delta / 2)).mean()


def correlation(model: Any, batch: Any) -> Any:
    one, other = (values[:, 0] - values[:, 0].mean() for values in (model(batch[0]), batch[1]))
    return 1 - F.cosine_similarity(one, other, dim=0)


def survival(model: Any, batch: Any) -> Any:
    order = batch[2].argsort(descending=True)
    risk, event = model(batch[0])[order, 0], (batch[1][order] > 0).to(batch[0].dtype)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


add("value of the batch", {
    **each_of((name, of_rows(function)) for name, function in OF_ROWS.items()),
    "advantages, normalised": job(
        lambda m, b: (entropies(m, b) * normalised(b[2])).mean(), batch=weighted
    ),
    "targets, normalised": job(lambda m, b: F.mse_loss(m(b[0]), normalised(b[1])), batch=numbers),
    "inputs over the largest": job(lambda m, b: entropies(m, (b[0] / b[0].abs().max(), b[1])).mean()),
    "a threshold at the median": job(robust, batch=numbers),
    "a correlation": job(correlation, batch=numbers),
    "survival, over those at risk": job(survival, batch=weighted),
    "a square that many rows agree on": job(loss_fn=lambda out, y: F.mse_loss(out, y) ** 2, batch=numbers),
})  # fmt: skip
# Rarely visible in a few batches, because three deviations are very rare.
WRONG["clamped at three deviations"] = Row(
    kind="value of the batch",
    is_wrong=True,
    make=job(
        lambda m, b: (lambda e: e.clamp(max=(e.mean() + 3 * e.std()).detach()).mean())(
            squares(m, b)
        ),
        batch=lambda d: (d.normal(64, 6), d.normal(64, 3) * d.uniform(64, 1) ** 4 * 20),
        size=16,
    ),
)

# Comparisons between rows


def attracted(model: Any, batch: Any) -> Any:
    z, eye = F.normalize(model(batch[0]), dim=1), torch.eye(len(batch[0]), dtype=batch[0].dtype)
    same = (batch[1][:, None] == batch[1]).to(z.dtype) - eye
    return -(((z @ z.T - 10 * eye).log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def halves(out: Tensor) -> Any:
    one, other = out[: len(out) // 2 * 2].chunk(2)
    return -F.logsigmoid(one - other).mean()


def kernel(one: Tensor, other: Tensor) -> Tensor:
    return (-(one[:, None] - other).square().sum(-1)).exp().mean()


def matched(model: Any, batch: Any) -> Any:
    z, noise = model(batch[0]), batch[1]
    return kernel(z, z) + kernel(noise, noise) - 2 * kernel(z, noise)


def assigned(out: Tensor) -> Any:
    shares = out.detach().exp()
    for _ in range(3):
        shares = shares / shares.sum(0)
        shares = shares / shares.sum(1, keepdim=True)
    return -(shares * out.log_softmax(1)).sum(1).mean()


class CentredBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient - gradient.mean(0)


class Normalised(torch.autograd.Function):
    """A custom layer with the statistics of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(scale := x.std(0, keepdim=True) + 1e-3)
        return (x - x.mean(0, keepdim=True)) / scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient - gradient.mean(0, keepdim=True)) / ctx.saved_tensors[0]


class Experts(nn.Module):
    """The best of several experts, with limited capacity, and a balance loss."""

    def __init__(self, count: int, room: float = 1.0) -> None:
        super().__init__()
        self.gate, self.room = nn.Linear(6, count), room
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        odds = self.gate(x).softmax(-1)
        one = F.one_hot(odds.argmax(-1), len(self.experts)).to(odds.dtype)
        kept = one * (one.cumsum(0) <= max(1, int(self.room * len(x))))
        each = torch.stack([expert(x) for expert in self.experts], 1)
        out = (each * (kept * odds)[..., None]).sum(1)
        return out, len(self.experts) * (one.mean(0) * odds.mean(0)).sum()


def routed(model: Any, batch: Any, share: float = 0.0) -> Any:
    out, balance = model(batch[0])
    return F.cross_entropy(out, batch[1]) + share * balance


def covariance(out: Tensor) -> Any:
    out = out - out.mean(0)
    return (out.T @ out / len(out)).square().sum()


OVER_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "centred": lambda h: h - h.mean(0),
    "centred a little": lambda h: h - 0.05 * h.mean(0),
    "normalised": lambda h: (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt(),
    "normalised by an autograd function": Normalised.apply,
    "a softmax over rows": lambda h: h * h.softmax(0) * 8,
    "scaled by the norm of all": lambda h: 8 * h / h.norm(),
    "a cosine to the mean": lambda h: h * F.cosine_similarity(h, h.mean(0, keepdim=True))[:, None],
    "whitened": lambda h: h - 0.5 * h @ (h.T @ h / len(h)),
    "a gradient centred by an autograd function": CentredBackward.apply,
    "sorted rows beside": lambda h: h + 0.3 * h.sort(0).values,
    "a running sum over rows": lambda h: h + 0.1 * h.cumsum(0),
}
TERMS: dict[str, Callable[[Tensor], Any]] = {
    "a uniform mean prediction": lambda o: -(o.softmax(1).mean(0)).log().mean() * 0.1,
    "a uniform mean prediction, 1e-2": lambda o: o.softmax(1).mean(0).square().sum() * 1e-2,
    "a small covariance": lambda o: covariance(o) * 1e-1,
    "a spread of one": lambda o: (1 - o.std(0)).relu().mean(),
    "a cosine of predictions to their mean": lambda o: -F.cosine_similarity(o, o.mean(0, keepdim=True)).mean(),
    "assignments that are balanced": assigned,
    "pairs in order": lambda o: (0.1 - (o[:, None, 0] - o[None, :, 0])).relu().mean(),
    "neighbours alike": lambda o: 0.1 * (o[1:] - o[:-1]).square().mean(),
    "one half against the other": halves,
}  # fmt: skip


def with_term(term: Callable[[Tensor], Any]) -> Make:
    def forward(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + term(out)

    return job(forward)


def over_rows(function: Callable[[Tensor], Any]) -> Make:
    return job(model=between(lambda _, h: function(h)), loss_fn=nn.CrossEntropyLoss())


class Training(Between):
    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.second(torch.tanh(h - h.mean(0) if self.training else h))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 6), nn.GRU(6, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.embed(x))[0])


add("rows compared", {
    **{name: over_rows(function) for name, function in OVER_ROWS.items()},
    **{name: with_term(term) for name, term in TERMS.items()},
    "centred in training alone": job(
        model=lambda: Training(lambda _, h: h), loss_fn=nn.CrossEntropyLoss()
    ),
    "classes attract": job(attracted),
    "pairs of halves": job(lambda m, b: halves(m(b[0]))),
    "a distribution matched": job(matched, batch=numbers),
    "experts with little room": job(routed, model=lambda: Experts(2, 0.4), batch=lambda d: (d.normal(ROWS, 6) + 1, d.whole(0, 3, ROWS))),
    "time comes first": job(
        lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()),
        model=TimeFirst, batch=lambda d: (d.whole(0, 11, 20, 4), d.whole(0, 11, 20, 4)),
        size=5, loss_average="samples",
    ),
    "a scale as long as there are rows": job(
        lambda m, b: F.cross_entropy(m(b["x"] * b["scale"].repeat(6 // len(b["scale"]))), b["y"]),
        batch=lambda d: {"x": d.normal(6, 6), "scale": d.uniform(6) * 3, "y": d.whole(0, 3, 6)}, size=3,
    ),
    "batch normalisation": job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        loss_fn=nn.CrossEntropyLoss(),
    ),
})  # fmt: skip
add(
    "rows compared",
    {
        "a small covariance, 1e-5": with_term(lambda o: covariance(o) * 1e-5),
        "a uniform mean prediction, 1e-3": with_term(
            lambda o: o.softmax(1).mean(0).square().sum() * 1e-3
        ),
    },
    dtypes=WIDE,
)

# Wrong gradients with a correct loss


class Hooked(Between):
    """A hook on hidden activations."""

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.function(self, gradient))
        return self.second(hidden)


def hooked(hook: Callable[[Tensor], Any]) -> Make:
    return job(model=lambda: Hooked(lambda _, g: hook(g)), loss_fn=nn.CrossEntropyLoss())


def scaled_by_a_module_hook() -> nn.Module:
    model = net(6, 8, 8, 3)()
    model[2].register_full_backward_hook(  # type: ignore[index]
        lambda _, given, __: (given[0] / given[0].abs().max(),)
    )
    return model


def value_of_all_gradient_of(share: int) -> Callable[[Any, Any], Any]:
    def forward(model: Any, batch: Any) -> Any:
        each = entropies(model, batch)
        hardest = each.topk(max(1, min(16, len(each) // share))).values.mean()
        return each.mean().detach() + hardest - hardest.detach()

    return forward


add("gradient alone", {
    "a hidden gradient, clipped by its norm": hooked(lambda g: g * (0.01 / g.norm()).clamp(max=1)),
    "a hidden gradient of norm one": hooked(lambda g: g / (g.norm() + 1e-12)),
    "a hidden gradient, centred": hooked(lambda g: g - g.mean(0)),
    "a module's gradient, scaled": job(model=scaled_by_a_module_hook, loss_fn=nn.CrossEntropyLoss()),
    "the value of all, the gradient of the hardest": job(value_of_all_gradient_of(4)),
    "the value of all, the gradient of the hardest 16": job(
        value_of_all_gradient_of(1), batch=lambda d: (d.normal(64, 6), d.whole(0, 3, 64)), size=16
    ),
})  # fmt: skip

# State carried from call to call


def quantised(module: Any, h: Tensor) -> Any:
    near = torch.cdist(h.detach().to(module.codes.dtype), module.codes).argmin(1)
    codes = module.codes[near]
    if module.training:
        one = F.one_hot(near, 5).to(module.codes.dtype)
        means = one.T @ h.detach().to(one.dtype) / one.sum(0).clamp(min=1)[:, None]
        module.codes.copy_(
            torch.where(one.sum(0)[:, None] > 0, module.codes * 0.7 + means * 0.3, module.codes)
        )
    return h + (codes - h).detach()  # fmt: skip


def queued(module: Any, h: Tensor) -> Any:
    out = h + (h @ module.queue.to(h.dtype).T).softmax(1) @ module.queue.to(h.dtype)
    module.queue = torch.cat([h.detach().to(module.queue.dtype), module.queue])[:ROWS]
    return out


def warmed(module: Any, h: Tensor) -> Any:
    module.calls += 1
    return h * min(1.0, module.calls / 20)


def by_rows_seen(start: int) -> Callable[[Any, Tensor], Any]:
    """A weight that grows with the rows seen; the total does not depend on the cut."""

    def grown(module: Any, h: Tensor) -> Any:
        share = min(1.0, max(0.0, (module.seen - start) / 200))
        module.seen += len(h)
        return h * (1 - 0.5 * share)

    return grown


def counted_by_a_closure() -> Callable[[Any, Any], Any]:
    calls = [0]

    def forward(model: Any, batch: Any) -> Any:
        calls[0] += 1
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + min(1.0, calls[0] / 20) * out.square().mean()

    return forward


def counted_on_a_parameter(model: Any, batch: Any) -> Any:
    weight = model[0].weight
    weight.rows = getattr(weight, "rows", 0) + len(batch[0])
    return entropies(model, batch).mean() * (1 + weight.rows / 100)


def spectral() -> nn.Module:
    first, second = (
        parametrizations.spectral_norm(nn.Linear(*sizes)) for sizes in ((6, 8), (8, 3))
    )
    return nn.Sequential(first, nn.Tanh(), second)


add("state", {
    "a codebook of moving averages": job(
        model=between(quantised, codes=lambda: torch.randn(5, 8)), loss_fn=nn.CrossEntropyLoss()
    ),
    "a queue of rows": job(
        model=between(queued, queue=lambda: torch.randn(ROWS, 8)), loss_fn=nn.CrossEntropyLoss()
    ),
    "a weight by the number of calls": job(
        model=between(warmed, calls=lambda: 0), loss_fn=nn.CrossEntropyLoss()
    ),
    "spectral norms": job(model=spectral, loss_fn=nn.CrossEntropyLoss()),
    "a weight by the number of rows seen": job(
        model=between(by_rows_seen(0), seen=lambda: 0), loss_fn=nn.CrossEntropyLoss()
    ),
    "calls, counted by a closure": job(fresh=counted_by_a_closure),
    "rows, counted on a parameter": job(counted_on_a_parameter, loss_average="samples"),
})  # fmt: skip


class Taught(nn.Module):
    """A teacher whose parameters are updated without autograd in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            one.data.mul_(0.9).add_(other.data, alpha=0.1)
        return F.mse_loss(self.student(x), self.teacher(x))


def own_seed(model: Any, batch: Any) -> Any:
    drawn = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(3))
    return F.mse_loss(model(batch[0] + drawn.to(batch[0].dtype)), batch[1])


def seed_of_all(model: Any, batch: Any) -> Any:
    torch.manual_seed(7)
    return F.mse_loss(model(F.dropout(batch[0], 0.3)), batch[1])


add("state", {
    "draws from a seed of its own": job(own_seed, batch=numbers, loss_average="samples"),
    "sets the seed of all": job(seed_of_all, batch=numbers, loss_average="samples"),
    "moves a teacher": job(lambda m, b: m(b[0]), model=Taught),
}, is_measured=False)  # fmt: skip

# Late effects, or effects hidden by zeros


def late_padding(begins: int) -> Callable[[Draws], Any]:
    def batch(d: Draws) -> Any:
        drawn = tokens(d)
        return drawn if d.step >= begins else {**drawn, "labels": drawn["ids"]}

    return batch


def late_class(begins: int) -> Callable[[Draws], Any]:
    def batch(d: Draws) -> Any:
        x, y = d.normal(ROWS, 6), d.whole(0, 2, ROWS)
        if d.step >= begins:
            y[5] = 2
        return x, y

    return batch


def late_term(begins: int) -> Callable[[], Callable[[Any, Any], Any]]:
    """A term that depends on the batch number, which is part of the batch."""

    def forward(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        return loss + (1 - out.std(0)).relu().mean() if int(batch[2][0]) >= begins else loss

    return lambda: forward


def numbered(d: Draws) -> Any:
    return *classes(d), torch.full((ROWS,), d.step)


def zero_words() -> nn.Module:
    model = Words()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def zero_between() -> nn.Module:
    model = Between(lambda _, h: h - h.mean(0))
    nn.init.zeros_(model.second.weight)
    return model


class Config:
    """A config as in some libraries: any unknown attribute raises KeyError."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


def configured() -> Callable[[Any, Any], Any]:
    config = Config(scale=2.0)
    return lambda model, batch: masked_mean(model, batch, scale=config.scale)


def tasks(d: Draws) -> Any:
    return {**masked(d), "task": "rows" if d.step < 4 else "masked"}


def of_a_task(model: Any, batch: Any) -> Any:
    is_masked = batch["task"] == "masked"
    whole = (model(batch["x"]) - batch["y"]).square().mean()
    return masked_mean(model, batch) if is_masked else whole


class Holding(nn.Module):
    """A loss that holds the model and compares rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net(6, 8, 3)()

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def held_pairs(model: Any, batch: Any) -> Any:
    scores = model(batch[0]) @ model.model(batch[0].flip(1)).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


add("average", {
    "a config whose attributes are KeyErrors": job(
        fresh=configured, model=net(6, 8, 5), batch=masked
    ),
})  # fmt: skip
add("rows compared", {"a loss that holds the model": job(held_pairs, model=Holding)})
add("late", {
    "another task at batch 5": job(of_a_task, model=net(6, 8, 5), batch=tasks, steps=6),
}, dtypes=WIDE)  # fmt: skip

for at in (3, 25):
    add("late", {
        f"padding begins at batch {at}": job(token_mean, model=Words, batch=late_padding(at), steps=27),
        f"a heavy class comes at batch {at}": job(class_weighted(1, 1, 9), batch=late_class(at), steps=27),
        f"a term over rows begins at batch {at}": job(
            fresh=late_term(at), batch=numbered, steps=27
        ),
    }, dtypes=WIDE)  # fmt: skip
add("late", {
    "a mean over tokens behind a head of zeros": job(
        token_mean, model=zero_words, batch=tokens, lr=0.5, steps=6
    ),
    "rows compared behind a head of zeros": job(
        model=zero_between, loss_fn=nn.CrossEntropyLoss(), lr=0.5, steps=6
    ),
    "rows seen that count late": job(
        model=between(by_rows_seen(400), seen=lambda: 0), loss_fn=nn.CrossEntropyLoss(), steps=20
    ),
}, dtypes=WIDE)  # fmt: skip

# Evaluation: losses and outputs

evaluated = functools.partial(job, evaluates=True)
add("evaluation", {
    "evaluated: a mean over tokens": evaluated(token_mean, model=Words, batch=tokens),
    "evaluated: a sum": evaluated(lambda m, b: squares(m, b).sum(), batch=numbers),
    "evaluated: the root of the mean": evaluated(lambda m, b: squares(m, b).mean().sqrt(), batch=numbers),
    "evaluated: the hardest 16": evaluated(
        lambda m, b: OF_ROWS["the hardest 16"](squares(m, b)), batch=numbers
    ),
}, dtypes=WIDE)  # fmt: skip


def giving(outputs: Callable[[Tensor], Any]) -> Make:
    return evaluated(
        lambda m, b: (entropies(m, b).mean(), outputs(m(b[0]))), loss_average="samples"
    )


add("outputs", {
    "outputs: centred": giving(lambda o: o - o.mean(0)),
    "outputs: a softmax over rows": giving(lambda o: o.softmax(0)),
    "outputs: pairs of rows": giving(lambda o: o @ o.T),
    "outputs: rows behind": giving(lambda o: o.T),
    "outputs: of the whole batch": giving(lambda o: o.mean(0)),
    "outputs: sorted over rows": giving(lambda o: o.sort(0).values),
    "outputs: places in the batch": giving(
        lambda o: {"place": (o > 0).nonzero(), "score": o[o > 0]}
    ),
    "outputs: a table beside them": giving(lambda o: {"out": o, "table": torch.ones(7, 3, dtype=o.dtype)}),
}, dtypes=WIDE)  # fmt: skip


def beside(number: Callable[[Tensor], Any]) -> Make:
    def forward(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        return {"loss": F.cross_entropy(out, batch[1]), "number": number(out.detach())}

    return job(forward, loss_average="samples")


add("numbers", {
    "a number: a sum": beside(lambda o: o.abs().sum()),
    "a number: a maximum": beside(lambda o: o.max()),
    "a number: a deviation": beside(lambda o: o.std()),
    "a number: an exponential of a mean": beside(lambda o: o.square().mean().exp()),
}, dtypes=WIDE, is_measured=False)  # fmt: skip
