"""Levels and separately sized parts when a real device runs out of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, StepResult
from automicro.features import Nested
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    accelerator,
    allocated_bytes,
    differences,
    requested_bytes,
    room,
    snapshot,
    to_device,
)
from tests.gpu.subjects import (
    CLASSES,
    PLENTY,
    ROOM,
    ROWS,
    SHAPE,
    Hungry,
    batch,
    microbatcher,
    model,
)

pytestmark = GPU

# Per row and block; less on a CPU.
KEPT = (32 if DEVICE.type == "cuda" else 4) * MIB
BLOCKS = 8
SIZE = 4
LIMIT = 20 * KEPT  # a microbatch saves 32


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x.mean(tuple(range(1, x.dim())))[:, None].repeat(1, KEPT // x.element_size())
        ctx.save_for_backward(kept)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [kept], [gradient] = ctx.saved_tensors, gradients
        scale = 1 + 0.1 * (kept[:, 0] + kept[:, -1])  # moved tensors must have returned
        return gradient * scale.reshape(-1, *[1] * (gradient.dim() - 1))


class Keeping(nn.Module):
    """A block with dropout that saves much memory for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SHAPE[-1], SHAPE[-1])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = x + self.dropout(_Keep.apply(self.linear(x)))
        return kept


class Stack(nn.Module):
    """Blocks, and a prediction for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(BLOCKS))
        self.head = nn.Linear(SHAPE[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def keeping() -> nn.Module:
    torch.manual_seed(1)
    return Stack().to(DEVICE)


def trained(limit: int, size: Any = SIZE, steps: int = 3, **options: Any) -> Any:
    """Return the state after some steps, the last result, and the peak memory above the start."""
    net = keeping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = microbatcher(net, size, optimizer=optimizer, **options)
    torch.manual_seed(3)
    small = to_device(batch(1))
    net(small[0])  # so that libraries allocate their memory
    before = requested_bytes()
    accelerator.reset_peak_memory_stats(DEVICE)
    with room(limit):
        for seed in range(steps):
            result = step.backward(batch(seed=seed))
            optimizer.step()
            optimizer.zero_grad()
    assert result.loss.isfinite()
    return snapshot(net, optimizer), result, requested_bytes("peak") - before


LEVELS: dict[str, Any] = {
    "recompute": "recompute",
    "offload": "offload",
    "recompute + offload": ["recompute", "offload"],
}


@pytest.mark.parametrize("level", ["recompute", "offload"])
@pytest.mark.usefixtures("deterministic")
def test_level_reached_by_oom_is_bit_identical_to_plain(
    level: str, record_property: Record
) -> None:
    plain, _, most = trained(PLENTY)
    found, result, needed = trained(LIMIT, when_too_large=LEVELS[level])
    record_property("peak", [most, needed])
    assert (result.level, result.microbatch_size) == (level, SIZE)
    assert differences(plain, found) == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("deterministic")
def test_level_halves_peak_memory_and_leaves_nothing_allocated(
    level: str, record_property: Record
) -> None:
    def run(savers: Any) -> int:
        net = keeping()
        step = microbatcher(net, SIZE, when_too_large=savers, probe=False)
        rows = to_device(batch())
        step.backward(rows)
        net.zero_grad()
        last = step._levels[-1]
        step._train.applying = lambda level: last.applied()  # type: ignore[method-assign]
        left = []
        for _ in range(3):
            before = requested_bytes()
            accelerator.reset_peak_memory_stats(DEVICE)
            step.backward(rows)
            peak = requested_bytes("peak") - before
            net.zero_grad()
            left.append(allocated_bytes())
        assert left[0] == left[-1]
        return peak

    plain, needed = run("error"), run(LEVELS[level])
    record_property("peak", [plain, needed])
    assert needed < plain / 2


@pytest.mark.usefixtures("deterministic")
def test_auto_finds_level_and_changes_no_bit(record_property: Record) -> None:
    plain, _, _ = trained(PLENTY, steps=12)
    found, result, _ = trained(LIMIT, steps=12, when_too_large="auto")
    record_property("level", result.level)
    assert result.level in LEVELS
    assert differences(plain, found) == []


class Tailed(nn.Module):
    """A small body, and a tail with its loss that needs much memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))
        self.tail = Tail()

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return {"loss": self.tail(self.body(x), target)}


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hungry, self.head = Hungry(64, 64), nn.Linear(256, 4)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        logits = self.head(self.hungry(hidden)).flatten(1)
        return nn.functional.cross_entropy(logits, target)


@pytest.mark.parametrize(
    ("part", "precision"), [("tail", "fp32"), ("tail", "bf16"), ("hungry", "fp32")]
)
@pytest.mark.usefixtures("deterministic")
def test_oom_in_part_shrinks_only_that_part_bit_identically(part: str, precision: str) -> None:
    """The part is at the end, with the loss, or in the middle."""

    def run(size: Any, limit: int) -> tuple[dict[str, Tensor], StepResult]:
        inputs, targets = batch()
        rows: Any = {"x": inputs, "target": targets} if part == "tail" else (inputs, targets)
        net = Tailed().to(DEVICE) if part == "tail" else model(Hungry(64, 0))
        loss: Any = {} if part == "tail" else {"loss_fn": nn.CrossEntropyLoss()}
        step = Microbatcher(net, features=[Nested({part: size})], precision=precision, **loss)
        torch.manual_seed(3)
        with room(limit):
            result = step.backward(rows)
        return {**snapshot(net), "loss": result.loss.cpu()}, result

    found, result = run("auto", 400 * MIB if part == "tail" else ROOM)
    size = result.nested_sizes[part]
    assert (result.microbatch_size, size < ROWS) == (ROWS, True)
    assert differences(found, run(size, PLENTY)[0]) == []
