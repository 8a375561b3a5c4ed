"""Random losses drawn from a grammar: each that splitting changes is named, and no other."""

import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.errors import AutomicroWarning

ROWS, INPUTS, OUTPUTS = 12, 5, 4
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
    "mean of classes": lambda v, b: torch.stack(
        [v[b["y"] == each].mean() for each in b["y"].unique()]
    ).mean(),
    "first": lambda v, b: v[0],
    "share of the largest": lambda v, b: (v / v.amax().detach()).mean(),
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


def drawn(chosen: random.Random) -> tuple[str, Callable[[nn.Module, Batch], Tensor]]:
    """A loss, and its name; half of them are means over rows."""
    is_mean = chosen.random() < 0.5
    terms = []
    for _ in range(chosen.choice([1, 1, 2, 3])):
        reduction = chosen.choice(MEANS if is_mean else ["mean", "mean", *REDUCTIONS])
        statistic = "one" if is_mean else chosen.choice(["one"] * 8 + [*STATISTICS])
        operation = "×" if is_mean else chosen.choice("××+")
        factor = chosen.choice([1.0, 0.5, 0.1, 0.01, 2.0])
        terms.append((factor, reduction, chosen.choice(list(TERMS)), operation, statistic))

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out, total = model(b["x"]), torch.zeros(())
        for factor, reduction, term, operation, statistic in terms:
            value = REDUCTIONS[reduction](TERMS[term](out, b), b)
            other = STATISTICS[statistic](out, b)
            total = total + factor * (value * other if operation == "×" else value + other)
        return total

    return str(terms), loss


def judged(seed: int) -> tuple[str, str]:
    """Train two batches, each beside the whole batch's loss and gradient: the outcome, and what."""
    chosen, dtype = random.Random(seed), torch.float64 if seed % 3 else torch.float32
    name, loss = drawn(chosen)
    torch.manual_seed(seed)
    middle = chosen.choice([nn.Tanh(), nn.ReLU(), nn.LayerNorm(8), nn.GELU()])
    model = nn.Sequential(nn.Linear(INPUTS, 8), middle, nn.Linear(8, OUTPUTS)).to(dtype)
    size, masked = chosen.choice([2, 3, 4, 5, 6]), chosen.choice([0.3, 0.3, 0.7])
    step = Microbatcher(model, forward=loss, microbatch_size=size)
    is_wrong, said = False, []
    for _ in range(2):
        batch = {
            "x": torch.randn(ROWS, INPUTS, dtype=dtype),
            "t": torch.randn(ROWS, OUTPUTS, dtype=dtype),
            "y": torch.randint(OUTPUTS, (ROWS,)),
            "m": (torch.rand(ROWS) > masked).to(dtype),
            "w": torch.rand(ROWS, dtype=dtype) + 0.2,
        }
        whole = loss(model, batch)
        wanted = [whole.detach(), *torch.autograd.grad(whole, list(model.parameters()))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = step.backward(batch)
        said += [str(w.message) for w in caught if issubclass(w.category, AutomicroWarning)]
        found: list[Any] = [result.loss, *(each.grad for each in model.parameters())]
        sides = [(found[:1], wanted[:1]), (found[1:], wanted[1:])]
        flat = [[torch.cat([e.flatten() for e in side]) for side in pair] for pair in sides]
        is_wrong |= any((a - b).norm() > TOLERANCE[dtype] * b.norm() for a, b in flat)
        model.zero_grad()
    is_named = any("could not check" not in each for each in said)
    outcome = ("named" if is_wrong else "false alarm") if is_named else "silent"
    outcome = "right" if not (said or is_wrong) else outcome
    return outcome, f"{seed}: {name}, {size} rows, {dtype}: {said}"


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 2000), marks=pytest.mark.slow)], ids=str
)
def test_each_loss_that_splitting_changes_is_named_and_no_other(seeds: range) -> None:
    found = [judged(seed) for seed in seeds]
    assert [each for each in found if each[0] not in ("named", "right")] == []
    assert min(Counter(outcome for outcome, _ in found).values()) >= len(seeds) // 3
