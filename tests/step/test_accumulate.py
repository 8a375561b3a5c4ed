"""Gradient accumulation over several batches: one denominator, one transaction."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from automicro import MemoryBudget, Microbatcher
from automicro.features import with_features
from tests.models import Memory
from tests.sweeps import mostly_in_sweeps

ROWS = (7, 4, 1)


def batch(rows: int, ignored: int = 0) -> tuple[Tensor, Tensor]:
    targets = torch.arange(rows) % 3
    targets[:ignored] = -100
    return torch.randn(rows, 6, dtype=torch.float64), targets


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("size", mostly_in_sweeps([1, 2, 3, 5, 20], quick=[3, 20]))
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["mean", "class weights", "sum"],
)
def test_uneven_batches_match_gradient_of_concatenated_batch(loss_fn: nn.Module, size: int) -> None:
    batches = [batch(rows, ignored) for rows, ignored in zip(ROWS, (3, 0, 0), strict=True)]
    network = model()
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = loss_fn(network(whole[0]), whole[1])
    expected.backward()
    ours = copy.deepcopy(network)
    ours.zero_grad()
    result = Microbatcher(ours, loss_fn=loss_fn, microbatch_size=size).accumulate(batches)
    for mine, theirs in zip(ours.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=0)
    assert result.num_samples == sum(ROWS)
    assert result.num_microbatches == sum(-(-rows // size) for rows in ROWS)


@pytest.mark.parametrize("rows", [(8, 4, 4), (4, 8, 4), (4, 4, 8)])
def test_oom_in_any_batch_rolls_back_all_batches(rows: tuple[int, ...]) -> None:
    batches = [batch(each) for each in rows]
    seen = MeanMetric()
    ours, fixed = model(), model()
    options: dict[str, Any] = {
        "loss_average": "samples",
        "probe": False,
        "update_metric": lambda metric, outputs, microbatch: metric.update(
            outputs.mean(), weight=len(microbatch[1])
        ),
    }
    options["loss_fn"] = nn.CrossEntropyLoss()
    result = Microbatcher(Memory(ours, most=4), **with_features(options)).accumulate(batches, seen)
    assert (result.attempts, result.failed_sizes) == (2, (8,))
    assert (result.microbatch_size, result.num_microbatches) == (4, 4)
    assert seen.weight == 16
    Microbatcher(fixed, microbatch_size=4, **with_features(options)).accumulate(batches)
    for mine, theirs in zip(ours.parameters(), fixed.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_peak_memory_is_independent_of_batch_count() -> None:
    peaks = []
    for count in (2, 6):  # the second batch is the first to add to existing gradients
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 3))
        batches = [(torch.randn(32, 64), torch.randint(3, (32,))) for _ in range(count)]
        with MemoryBudget(None) as budget:
            Microbatcher(network, loss_fn=nn.CrossEntropyLoss(), probe=False).accumulate(batches)
        peaks.append(budget.peak_bytes)
    assert peaks[1] <= 1.02 * peaks[0]


def test_empty_batch_list_raises_value_error() -> None:
    with pytest.raises(ValueError, match="there is no batch to accumulate; pass at least one"):
        Microbatcher(model(), loss_fn=nn.CrossEntropyLoss()).accumulate([])
