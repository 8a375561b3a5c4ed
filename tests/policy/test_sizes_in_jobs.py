"""Final sizes of real jobs under simulated memory, and the exactness of their results."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Halving, MemoryBudget, Microbatcher
from automicro.memory import device as memory_device
from automicro.memory.device import AllocatorCounts
from tests.callbacks.runs import Scripted, Sizes, assert_equal, copy_of, trainer_with

pytestmark = pytest.mark.sweep

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = 96
DATA = [
    (torch.randn(ROWS, 8, 16, generator=torch.Generator().manual_seed(number)), torch.arange(ROWS))
    for number in range(12)
]
# Outside a Trainer, a budget keeps counting batches that it has seen, so one batch is reused.
BATCH = DATA[0]


class Reader(nn.Module):
    """A one-layer transformer: activations of a row need far more memory than its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs).mean(1)[:, :4]
        return logits


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets % 4)


def train(
    microbatch_size: Any, *, limit: int | None, model: nn.Module | None = None
) -> tuple[nn.Module, Sizes]:
    model, sizes = model or Reader(), Sizes()
    trainer_with(
        sizes,
        model=model,
        train_dataloader=DATA,
        loss_fn=loss_fn,
        memory_limit=limit,
        microbatch_size=microbatch_size,
    ).fit()
    return model, sizes


def limit_for(rows: int, *, training: bool) -> int:
    """Return slightly more than the peak of a step with microbatches of these rows."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    sizes: dict[str, Any] = {"microbatch_size": rows, "eval_microbatch_size": rows}
    step = Microbatcher(model, loss_fn=loss_fn, optimizer=optimizer, probe=False, **sizes)
    with MemoryBudget(None).track(model) as budget:
        for _ in range(2):
            budget.reset_peak()
            if training:
                step.backward(BATCH)
                optimizer.step()
                optimizer.zero_grad()
            else:
                step.evaluate(BATCH)
        return int(budget.peak_bytes * 1.03)


def test_training_with_auto_refines_to_three_microbatches() -> None:
    limit = limit_for(ROWS // 3, training=True)
    _, halving = train(Halving(refine=False), limit=limit)
    model, auto = train("auto", limit=limit)
    assert halving.sizes[-1] == ROWS // 4
    assert auto.sizes[-1] == ROWS // 3
    assert sum(auto.ooms) <= sum(halving.ooms) + 1
    expected, _ = train(Scripted(auto.sizes), limit=None)
    assert_equal(copy_of(model), copy_of(expected))


def test_evaluation_with_auto_refines_to_three_microbatches() -> None:
    limit = limit_for(ROWS // 3, training=False)
    found = {}
    for name, size in (("halving", Halving(refine=False)), ("auto", "auto")):
        step = Microbatcher(
            Reader(), loss_fn=loss_fn, eval_microbatch_size=size, memory_limit=limit, probe=False
        )
        ooms = sum(step.evaluate(BATCH).ooms for _ in range(12))
        last = step.evaluate(BATCH, return_outputs=True)
        found[name] = last.num_microbatches, ooms + last.ooms
        assert step.microbatch_size is None
    assert found["halving"][0] == 4
    assert found["auto"][0] == 3
    assert found["auto"][1] <= found["halving"][1] + 1
    exact = Microbatcher(Reader(), loss_fn=loss_fn, eval_microbatch_size=ROWS // 3)
    expected = exact.evaluate(BATCH, return_outputs=True)
    assert torch.equal(last.outputs, expected.outputs)


def test_drawn_sizes_follow_lengths_and_neighbor() -> None:
    """The figure of the documentation: its stored data, limits, and how sizes change."""
    drawing = runpy.run_path(str(DOCS / "draw_sizes.py"))
    trace = drawing["trace"]()
    batches = trace["batches"]
    drawn = json.loads((DOCS / "images" / "sizes.json").read_text(encoding="utf-8"))
    names = ("length", "num_microbatches", "failed_sizes", "neighbour_bytes")
    assert [[each[name] for name in names] for each in drawn["batches"]] == [
        [each[name] for name in names] for each in batches
    ]
    assert trace["steps"] == len(batches)
    assert max(each["peak_bytes"] for each in batches) <= trace["limit_bytes"]
    failures = sum(len(each["failed_sizes"]) for each in batches)
    assert failures <= math.log2(trace["rows"]) + 2
    arrives, leaves = drawing["ARRIVES"], drawing["LEAVES"]
    short, long = drawing["SHORT"], drawing["LONG"]

    def counts(since: int, until: int, length: int) -> set[int]:
        return {b["num_microbatches"] for b in batches[since:until] if b["length"] == length}

    assert counts(0, arrives, short) == {1}
    assert min(counts(arrives, leaves, short)) > 1
    assert min(counts(arrives, leaves, long)) > max(counts(0, arrives, long))
    # The first two batches only reveal the free memory.
    assert counts(leaves + 2, len(batches), short) == {1}
    assert counts(leaves + 2, len(batches), long) == counts(0, arrives, long)
    for before, middle, after in zip(batches, batches[1:], batches[2:], strict=False):
        is_still = before["neighbour_bytes"] == after["neighbour_bytes"]
        if middle["length"] == long and is_still:
            assert middle["num_microbatches"] > after["num_microbatches"]
            assert after["num_microbatches"] <= before["num_microbatches"]


class Allocator:
    """A fake allocator with retries, and a fake clock with given seconds per row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: dict[int, float]) -> None:
        self.retries = 0
        self.now = 0.0
        self._seconds = seconds
        monkeypatch.setattr(
            memory_device, "read_counts", lambda _: AllocatorCounts(alloc_retries=self.retries)
        )
        monkeypatch.setattr("automicro.memory.device.time.perf_counter", lambda: self.now)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows = len(batch[0])
        self.now += self._seconds[rows] * rows
        self.retries += rows == max(self._seconds)
        return loss_fn(model(batch[0]), batch[1])


def test_repeated_allocator_retries_lead_to_faster_smaller_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator, model = Allocator(monkeypatch, seconds={8: 2.0, 4: 1.0}), nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Microbatcher(model, forward=allocator.forward, optimizer=optimizer, probe=False)
    sizes = []
    for _ in range(8):
        result = step.backward((torch.randn(8, 8), torch.arange(8)))
        assert result.attempts == 1
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(result.microbatch_size)
    assert sizes == [8, 8, 8, *[4] * 5]
