"""Levels train on rows that do not fit otherwise, with identical bits."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, SampleTooLargeError, Trainer
from automicro.features import with_features
from tests.outside import Unreached
from tests.sweeps import mostly_in_sweeps

WIDTH, BLOCKS, LENGTH = 32, 16, 512
LEVELS = ["recompute", "offload"]


class Block(nn.Module):
    """A transformer block without attention, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.dropout(self.narrow(torch.relu(self.wide(hidden))))


class Model(nn.Module):
    """Blocks, and a prediction for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(32, 2)

    def forward(self, hidden: Tensor) -> Any:
        return self.head(self.blocks(hidden).mean(1))


def batches(count: int = 4, rows: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(rows, LENGTH, WIDTH), torch.randint(2, (rows,))) for _ in range(count)]


def step_of(model: nn.Module, **options: Any) -> Microbatcher:
    return Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **with_features(options))


def trained(rows: int = 1, **options: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and the result of each step."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatcher = step_of(model, **options)
    results = []
    for batch in batches(rows=rows):
        results.append(microbatcher.backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}, results


@functools.cache
def needed() -> int:
    """Return the bytes that one row needs without a level."""
    return int(trained(memory_limit="1GiB")[1][-1].peak_bytes)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "when", mostly_in_sweeps(["recompute", "offload", LEVELS, "auto"], quick=["offload", "auto"])
)
def test_too_large_row_trains_bit_identically_with_levels(when: Any) -> None:
    wanted, _ = trained()
    found, results = trained(memory_limit=needed() // 3, when_too_large=when)
    assert same(found, wanted)
    assert {result.level for result in results} <= {"recompute", "offload", "recompute + offload"}
    assert [result.attempts for result in results[1:]] == [1, 1, 1]  # it stays at the level


@pytest.mark.sweep
def test_fixed_size_raises_level_and_keeps_size() -> None:
    wanted, _ = trained(rows=4, microbatch_size=4)
    _, whole = trained(rows=4, memory_limit="1GiB")
    limit = int(whole[-1].peak_bytes * 0.7)
    found, results = trained(4, microbatch_size=4, memory_limit=limit, when_too_large=LEVELS)
    assert same(found, wanted)
    assert {result.microbatch_size for result in results} == {4}
    assert results[-1].level == "recompute"


def test_run_summary_names_level() -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"memory_limit": int(needed() * 0.5), "when_too_large": "recompute"}
    options |= {"loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "device": "cpu"}
    summary = Trainer(Model(), batches(), progress=False, **options).fit()
    assert summary.level == "recompute"
    assert "recompute" in str(summary)


class SlowToLaunch(Model):
    """A model with a fixed time per microbatch, and a time per row in each block."""

    now = Unreached()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 0.0
        monkeypatch.setattr("automicro.memory.device.time.perf_counter", lambda: self.now)
        for block in self.blocks:
            block.register_forward_hook(self._block_took)

    def _block_took(self, block: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.now += 2e-6 * len(output)

    def forward(self, hidden: Tensor) -> Any:
        self.now += 0.02
        return super().forward(hidden)


Found = tuple[list[Any], list[str]]


@pytest.fixture
def level_found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """Run steps in the memory of two rows until a level is chosen; return results and messages."""

    def found(steps: int = 60, **options: Any) -> Found:
        torch.manual_seed(1)
        batch = torch.randn(16, 64, WIDTH), torch.randint(2, (16,))
        model = SlowToLaunch(monkeypatch)
        two = step_of(model, memory_limit="1GiB").backward((batch[0][:2], batch[1][:2]))
        assert two.peak_bytes is not None
        model.zero_grad()
        job = step_of(model, memory_limit=int(1.2 * two.peak_bytes) + batch[0].nbytes, **options)
        results, told = [], []
        for _ in range(steps):
            results.append(job.backward(batch))
            model.zero_grad()
            exploration = results[-1].exploration
            if exploration is not None and exploration.is_news:
                told.append(str(exploration))
                if exploration.ended is not None:
                    break
        results.append(job.backward(batch))
        return results, told

    return found


@pytest.mark.sweep
def test_auto_chooses_level_with_faster_larger_microbatches(
    level_found: Callable[..., Found],
) -> None:
    results, told = level_found(when_too_large="auto")
    plain = max(each.microbatch_size for each in results if each.level == "plain")
    assert results[-1].level != "plain"
    assert results[-1].microbatch_size > plain
    assert f" rows, {results[-1].level}, " in told[-1]
    assert told[-1].startswith("explored for ")
    results, told = level_found(8, when_too_large="auto", repeatable=True)
    assert {result.level for result in results} == {"plain"}, "not chosen by time"
    assert not told


def refusal(model: nn.Module, call: str = "backward", **options: Any) -> str:
    with pytest.raises(SampleTooLargeError) as caught:
        getattr(step_of(model, probe=False, **options), call)(batches(1)[0])
    return str(caught.value)


@pytest.mark.sweep
def test_error_at_level_names_further_remedies() -> None:
    text = refusal(Model(), memory_limit=needed() // 4, when_too_large="recompute")
    assert "not even with recompute" in text
    assert "activation checkpointing" not in text
    assert "(when_too_large=['recompute', 'offload'])" in text
    text = refusal(Model(), memory_limit="2500KiB", when_too_large=LEVELS)
    assert "not even with recompute + offload" in text
    text = refusal(Model(), "evaluate", memory_limit="1200KiB")
    assert "when_too_large" not in text
    assert "precision='bf16'" in text
