"""Random losses drawn from a grammar: each that splitting changes is named, and no other.

python -m tests.checking.grammar FIRST LAST
"""

import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.errors import AutomicroWarning

ROWS, INPUTS, OUTPUTS = 12, 5, 4
BATCHES = 2
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}

Batch = dict[str, Tensor]

# A value for each row: of the output and the batch.
TERMS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "squares": lambda out, b: (out - b["t"]).square().mean(1),
    "absolute": lambda out, b: (out - b["t"]).abs().sum(1),
    "cross entropy": lambda out, b: F.cross_entropy(out, b["y"], reduction="none"),
    "Huber": lambda out, b: F.huber_loss(out, b["t"], reduction="none").mean(1),
    "logistic": lambda out, b: F.softplus(-out * b["t"].sign()).mean(1),
    "worst output": lambda out, b: (out - b["t"]).square().amax(1),
    "margin": lambda out, b: F.multi_margin_loss(out, b["y"], reduction="none"),
    "entropy": lambda out, b: -(out.softmax(1) * out.log_softmax(1)).sum(1),
}


def _by_class(v: Tensor, b: Batch) -> Tensor:
    return torch.stack([v[b["y"] == each].mean() for each in b["y"].unique()]).mean()


def _within(v: Tensor) -> Tensor:
    low, high = v.amin().detach(), v.amax().detach()
    return ((v - low) / (high - low + 1e-9)).mean()


# One number of the rows' values; the first two are means over rows.
REDUCTIONS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "mean": lambda v, b: v.mean(),
    "mean, weighted": lambda v, b: (v * b["w"]).mean(),
    "sum": lambda v, b: v.sum(),
    "sum by a constant": lambda v, b: v.sum() / 7,
    "mean of the masked": lambda v, b: (v * b["m"]).sum() / b["m"].sum().clamp(min=1),
    "sum of the masked": lambda v, b: (v * b["m"]).sum(),
    "weighted mean": lambda v, b: (v * b["w"]).sum() / b["w"].sum(),
    "largest": lambda v, b: v.amax(),
    "logsumexp": lambda v, b: v.logsumexp(0),
    "mean, squared": lambda v, b: v.mean() ** 2,
    "root of the mean": lambda v, b: (v.mean().abs() + 1e-3).sqrt(),
    "variance": lambda v, b: v.var(),
    "deviation": lambda v, b: v.std(correction=0),
    "hardest half": lambda v, b: v.topk(max(1, len(v) // 2)).values.mean(),
    "median": lambda v, b: v.median(),
    "geometric mean": lambda v, b: (v.abs() + 0.1).log().mean().exp(),
    "first half": lambda v, b: v[: (len(v) + 1) // 2].mean(),
    "mean of classes": _by_class,
    "first": lambda v, b: v[0],
    "within the range": lambda v, b: _within(v),
    "running means": lambda v, b: (v.cumsum(0) / torch.arange(1, len(v) + 1)).mean(),
}
MEANS = list(REDUCTIONS)[:2]

# A statistic of the batch, by which a term is multiplied or which is added.
STATISTICS: dict[str, Callable[[Tensor, Batch], Any]] = {
    "one": lambda out, b: 1.0,
    "deviation of outputs": lambda out, b: out.std(0).mean(),
    "largest target": lambda out, b: b["t"].abs().amax(),
    "sum of weights": lambda out, b: b["w"].sum() / ROWS,
    "rows": lambda out, b: len(out) / ROWS,
    "pairs": lambda out, b: (out[:, None] - out[None]).square().sum(2).mean(),
    "covariance": lambda out, b: torch.cov(out.T).abs().mean(),
    "spread": lambda out, b: (out - out.mean(0)).square().mean(),
    "norm": lambda out, b: out.norm() / len(out) ** 0.5,
    "mean without gradient": lambda out, b: out.detach().mean().abs() + 0.5,
}


@dataclass(frozen=True)
class Judged:
    """A loss, how far splitting moved it or its gradient, and what was said."""

    name: str
    is_wrong: bool
    off_by: float
    said: list[str]

    @property
    def outcome(self) -> str:
        unchecked = [each for each in self.said if "could not check" in each]
        if len(unchecked) < len(self.said):
            return "named" if self.is_wrong else "false alarm"
        if unchecked:
            return "unchecked"
        return "silent" if self.is_wrong else "right"


def draw(chosen: random.Random) -> tuple[str, Callable[[nn.Module, Batch], Tensor]]:
    """A loss, and its name; half of them are means over rows."""
    is_mean = chosen.random() < 0.5
    terms = []
    for _ in range(chosen.choice([1, 1, 2, 3])):
        reduction = chosen.choice(MEANS if is_mean else ["mean", "mean", *REDUCTIONS])
        statistic = "one" if is_mean else chosen.choice(["one"] * 8 + [*STATISTICS])
        operation = "×" if is_mean else chosen.choice("××+")
        factor = chosen.choice([1.0, 0.5, 0.1, 0.01, 2.0])
        terms.append((factor, chosen.choice(list(TERMS)), reduction, operation, statistic))

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out, total = model(b["x"]), torch.zeros(())
        for factor, term, reduction, operation, statistic in terms:
            value = REDUCTIONS[reduction](TERMS[term](out, b), b)
            other = STATISTICS[statistic](out, b)
            total = total + factor * (value * other if operation == "×" else value + other)
        return total

    return " + ".join(f"{f} × {r} of {t} {o} {s}" for f, t, r, o, s in terms), loss


def judge(seed: int) -> Judged:
    """Train two batches, each beside the whole batch's loss and gradient."""
    chosen, dtype = random.Random(seed), torch.float64 if seed % 3 else torch.float32
    name, loss = draw(chosen)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    middle = chosen.choice([nn.Tanh(), nn.ReLU(), nn.LayerNorm(8), nn.GELU()])
    model = nn.Sequential(nn.Linear(INPUTS, 8), middle, nn.Linear(8, OUTPUTS)).to(dtype)
    size = chosen.choice([2, 3, 4, 5, 6])
    step = Microbatcher(model, forward=loss, microbatch_size=size)
    off_by, said = 0.0, []
    for _ in range(BATCHES):
        batch = {
            "x": torch.randn(ROWS, INPUTS, generator=generator, dtype=dtype),
            "t": torch.randn(ROWS, OUTPUTS, generator=generator, dtype=dtype),
            "y": torch.randint(OUTPUTS, (ROWS,), generator=generator),
            "m": (torch.rand(ROWS, generator=generator) > 0.3).to(dtype),
            "w": torch.rand(ROWS, generator=generator, dtype=dtype) + 0.2,
        }
        whole = loss(model, batch)
        expected = torch.autograd.grad(whole, list(model.parameters()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = step.backward(batch)
        said += [str(w.message) for w in caught if issubclass(w.category, AutomicroWarning)]
        found = torch.cat([each.grad.flatten() for each in model.parameters()])  # type: ignore[union-attr]
        wanted = torch.cat([each.flatten() for each in expected])
        gradient = (found - wanted).norm() / wanted.norm().clamp(min=1e-300)
        value = (result.loss - whole.detach()).abs() / whole.detach().abs().clamp(min=1e-12)
        off_by = max(off_by, float(gradient), float(value))
        model.zero_grad()
    return Judged(f"{name}, {size} rows, {dtype}", off_by > TOLERANCE[dtype], off_by, said)


def main() -> None:
    logging.disable(logging.WARNING)
    outcomes = Counter[str]()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        judged = judge(seed)
        outcomes[judged.outcome] += 1
        if judged.outcome in ("silent", "false alarm", "unchecked"):
            print(
                seed, judged.outcome, judged.name, f"{judged.off_by:.2g}", judged.said, flush=True
            )
    print(dict(outcomes))


if __name__ == "__main__":
    main()
