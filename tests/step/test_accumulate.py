"""Gradient accumulation over several batches: one denominator, one transaction."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from automicro import MemoryBudget, Microbatcher
from automicro.features import UpdateMetric
from tests.models import Memory

CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)


def batch(rows, ignored=0):
    targets = torch.arange(rows) % 3
    targets[:ignored] = -100
    return torch.randn(rows, 6, dtype=torch.float64), targets


def model() -> Any:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def gradients(model):
    return [each.grad for each in model.parameters()]


@pytest.mark.parametrize("size", [3, 20])
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["mean", "class weights", "sum"],
)
def test_uneven_batches_match_gradient_of_concatenated_batch(loss_fn, size):
    batches, network = [batch(7, 3), batch(4), batch(1)], model()
    ours = copy.deepcopy(network)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = loss_fn(network(inputs), targets)
    expected.backward()
    result = Microbatcher(ours, loss_fn=loss_fn, microbatch_size=size).accumulate(batches)
    torch.testing.assert_close(gradients(ours), gradients(network), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=0)
    assert (result.num_samples, result.num_microbatches) == (12, 6 if size == 3 else 3)


@pytest.mark.parametrize("rows", [(8, 4, 4), (4, 4, 8)])
def test_oom_in_any_batch_rolls_back_all_batches(rows):
    batches, seen, ours = [batch(each) for each in rows], MeanMetric(), model()
    fixed = copy.deepcopy(ours)

    def update(metric, outputs, microbatch):
        metric.update(outputs.mean(), weight=len(microbatch[1]))

    options: Any = {"loss_fn": nn.CrossEntropyLoss(), "loss_average": "samples", "probe": False}
    failing = Microbatcher(Memory(ours, most=4), features=[UpdateMetric(update)], **options)
    result = failing.accumulate(batches, seen)
    assert (result.attempts, result.failed_sizes) == (2, (8,))
    assert (result.microbatch_size, result.num_microbatches) == (4, 4)
    assert seen.weight == 16
    Microbatcher(fixed, microbatch_size=4, **options).accumulate(batches)
    torch.testing.assert_close(gradients(ours), gradients(fixed), rtol=0, atol=0)


def test_peak_memory_is_independent_of_batch_count():
    peaks = []
    for count in (2, 6):  # the second batch is the first to add to existing gradients
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 3))
        batches = [(torch.randn(32, 64), torch.randint(3, (32,))) for _ in range(count)]
        with MemoryBudget(None) as budget:
            Microbatcher(network, loss_fn=nn.CrossEntropyLoss(), probe=False).accumulate(batches)
        peaks.append(budget.peak_bytes)
    assert peaks[1] <= 1.02 * peaks[0]


def test_empty_batch_list_raises_value_error():
    with pytest.raises(ValueError, match="there is no batch to accumulate; pass at least one"):
        Microbatcher(model(), loss_fn=nn.CrossEntropyLoss()).accumulate([])
