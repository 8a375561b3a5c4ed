"""Levels train on rows that do not fit otherwise, with identical bits."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, SampleTooLargeError, Trainer
from automicro.features import Nested, WhenTooLarge, with_features
from tests.outside import Unreached
from tests.sweeps import mostly_in_sweeps

WIDTH, BLOCKS, LENGTH = 32, 16, 512


class Block(nn.Module):
    """A transformer block without attention, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 8 * WIDTH)
        self.narrow = nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = hidden + self.dropout(self.narrow(torch.relu(self.wide(hidden))))
        return found


class Model(nn.Module):
    """Blocks, and a prediction for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def batches(count: int = 4, rows: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(rows, LENGTH, WIDTH), torch.randint(2, (rows,))) for _ in range(count)]


def trained(rows: int = 1, **options: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and the result of each step."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **with_features(options))
    results = []
    for batch in batches(rows=rows):
        results.append(microbatcher.backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}, results


@functools.cache
def needed() -> int:
    """Return the bytes that one row needs without a level."""
    _, results = trained(memory_limit="1GiB")
    return int(results[-1].peak_bytes)


def too_small() -> int:
    """Return a limit under which no row fits without a level."""
    return needed() // 3


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "when",
    mostly_in_sweeps(
        ["recompute", "offload", ["recompute", "offload"], "auto"], quick=["offload", "auto"]
    ),
)
def test_too_large_row_trains_bit_identically_with_levels(when: Any) -> None:
    wanted, _ = trained()
    found, results = trained(memory_limit=too_small(), when_too_large=when)
    assert same(found, wanted)
    assert {result.level for result in results} <= {"recompute", "offload", "recompute + offload"}
    assert [result.attempts for result in results[1:]] == [1, 1, 1]  # it stays at the level


@pytest.mark.sweep
def test_fixed_size_raises_level_and_keeps_size() -> None:
    wanted, _ = trained(rows=4, microbatch_size=4)
    _, whole = trained(rows=4, memory_limit="1GiB")
    limit = int(whole[-1].peak_bytes * 0.7)
    found, results = trained(
        rows=4, microbatch_size=4, memory_limit=limit, when_too_large=["recompute", "offload"]
    )
    assert same(found, wanted)
    assert {result.microbatch_size for result in results} == {4}
    assert results[-1].level == "recompute"


@pytest.mark.sweep
def test_error_is_raised_when_no_level_fits() -> None:
    with pytest.raises(SampleTooLargeError, match="not even with recompute \\+ offload"):
        trained(memory_limit="2500KiB", when_too_large=["recompute", "offload"])


def test_run_summary_names_level() -> None:
    torch.manual_seed(1)
    limit = int(needed() * 0.5)
    trainer = Trainer(
        Model(),
        batches(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        memory_limit=limit,
        when_too_large="recompute",
        progress=False,
        device="cpu",
    )
    summary = trainer.fit()
    assert summary.level == "recompute"
    assert "recompute" in str(summary)


class SlowToLaunch(Model):
    """A model with a fixed time per microbatch, and a time per row in each block.

    It sets the clock itself, so a busy machine does not change the result.
    """

    now = Unreached()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 0.0
        monkeypatch.setattr("automicro.memory.device.time.perf_counter", lambda: self.now)
        for block in self.blocks:
            block.register_forward_hook(self._block_took)

    def _block_took(self, block: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.now += 2e-6 * len(output)

    def forward(self, hidden: Tensor) -> Tensor:
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

        def microbatcher(limit: Any, **more: Any) -> Microbatcher:
            model.zero_grad()
            return Microbatcher(
                model, loss_fn=nn.CrossEntropyLoss(), memory_limit=limit, **with_features(more)
            )

        two = microbatcher("1GiB").backward((batch[0][:2], batch[1][:2]))
        assert two.peak_bytes is not None
        job = microbatcher(int(1.2 * two.peak_bytes) + batch[0].nbytes, **options)
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


@pytest.mark.slow
def test_explore_finds_size_and_level(level_found: Callable[..., Found]) -> None:
    results, told = level_found(when_too_large="recompute", microbatch_size="explore")
    assert results[-1].level == "recompute"
    assert ", recompute, " in told[-1]


@pytest.mark.sweep
def test_repeatable_runs_do_not_choose_by_time(
    level_found: Callable[..., Found],
) -> None:
    results, told = level_found(8, when_too_large="auto", repeatable=True)
    assert {result.level for result in results} == {"plain"}
    assert not told


def refusal(model: nn.Module, batch: Any, limit: int | str, **options: Any) -> str:
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        memory_limit=limit,
        probe=False,
        **with_features(options),
    )
    with pytest.raises(SampleTooLargeError) as caught:
        microbatcher.backward(batch)
    return str(caught.value)


@pytest.mark.sweep
def test_error_at_level_names_further_remedies() -> None:
    text = refusal(Model(), batches(1)[0], needed() // 4, when_too_large="recompute")
    assert "not even with recompute" in text
    assert "activation checkpointing" not in text
    assert "(when_too_large=['recompute', 'offload'])" in text


def test_evaluation_error_does_not_suggest_levels() -> None:
    microbatcher = Microbatcher(Model(), loss_fn=nn.CrossEntropyLoss(), memory_limit="1200KiB")
    with pytest.raises(SampleTooLargeError) as caught:
        microbatcher.evaluate(batches(1)[0])
    text = str(caught.value)
    assert "when_too_large" not in text
    assert "precision='bf16'" in text


def test_refusal_restores_model_and_random_state() -> None:
    limit, model, batch = too_small(), Model(), batches(1)[0]
    before, random_before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    refusal(model, batch, limit)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.sweep
def test_nested_part_runs_whole_when_memory_suffices() -> None:
    model, batch = Model(), batches(1, rows=8)[0]
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        features=[WhenTooLarge("auto"), Nested({"head": "auto"})],
    )
    for _ in range(3):
        result = microbatcher.backward(batch)
    assert (result.microbatch_size, result.level) == (8, "plain")
    assert result.nested_sizes == {"head": 8}
