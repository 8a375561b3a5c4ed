"""Levels and separately sized parts when a real device runs out of memory."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Contrastive, Microbatcher, StepResult
from automicro.contrastive import InfoNCE
from automicro.features import Nested
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    allocated_bytes,
    differences,
    requested_bytes,
    room,
    snapshot,
    to_device,
)
from tests.gpu.subjects import CLASSES, ROWS, SHAPE, Hungry, batch, microbatcher, model
from tests.gpu.test_oom_gpu import ROOM

pytestmark = GPU

# Per row and block; less on a CPU.
KEPT = (32 if DEVICE.type == "cuda" else 4) * MIB
BLOCKS = 8
SIZE = 4
LIMIT = 20 * KEPT  # a microbatch saves 32
PLENTY = 64 * 1024 * MIB


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
    torch.get_device_module(DEVICE).reset_peak_memory_stats(DEVICE)
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
    assert result.level == level
    assert result.microbatch_size == SIZE
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
            torch.get_device_module(DEVICE).reset_peak_memory_stats(DEVICE)
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

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hungry = Hungry(64, 64)
            self.head = nn.Linear(256, 4)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            logits = self.head(self.hungry(hidden)).flatten(1)
            return nn.functional.cross_entropy(logits, target)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))
        self.tail = self.Tail()

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return {"loss": self.tail(self.body(x), target)}


def named(seed: int = 2) -> dict[str, Tensor]:
    inputs, targets = batch(seed=seed)
    return {"x": inputs, "target": targets}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("deterministic")
def test_oom_in_tail_shrinks_only_tail_bit_identically(precision: str) -> None:
    def run(size: Any, limit: int) -> tuple[dict[str, Tensor], StepResult]:
        net = Tailed().to(DEVICE)
        step = Microbatcher(net, features=[Nested({"tail": size})], precision=precision)
        torch.manual_seed(3)
        with room(limit):
            result = step.backward(named())
        return {**snapshot(net), "loss": result.loss.cpu()}, result

    found, result = run("auto", 400 * MIB)
    size = result.nested_sizes["tail"]
    assert (result.microbatch_size, size < ROWS) == (ROWS, True)
    assert differences(found, run(size, PLENTY)[0]) == []


@pytest.mark.usefixtures("deterministic")
def test_oom_in_middle_part_shrinks_only_that_part() -> None:
    def run(size: Any, limit: int) -> tuple[dict[str, Tensor], StepResult]:
        net = model(Hungry(64, 0))
        step = microbatcher(net, nested={"hungry": size})
        torch.manual_seed(3)
        with room(limit):
            result = step.backward(batch())
        return {**snapshot(net), "loss": result.loss.cpu()}, result

    found, result = run("auto", ROOM)
    size = result.nested_sizes["hungry"]
    assert (result.microbatch_size, size < ROWS) == (ROWS, True)
    assert differences(found, run(size, PLENTY)[0]) == []


def errors(net: nn.Module, reference: nn.Module) -> float:
    """Return the largest relative error of any gradient."""
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    return max(
        float((one.grad - other.grad).norm() / other.grad.norm())  # type: ignore[operator, union-attr]
        for one, other in pairs
    )


@pytest.mark.usefixtures("deterministic")
def test_sliced_contrastive_loss_has_full_batch_gradient() -> None:
    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16)).double().to(DEVICE)
    reference = copy.deepcopy(encoder)
    one, other = torch.randn(2, 32, 64, dtype=torch.float64).unbind()
    loss = InfoNCE(trains_temperature=False, microbatch_size=7)
    net = Contrastive({"one": encoder, "other": encoder}, loss, microbatch_size=5)
    Microbatcher(
        net, microbatch_size=None, eval_microbatch_size=None, loss_average="samples"
    ).backward({"one": one, "other": other})
    a, b = (nn.functional.normalize(reference(x.to(DEVICE))) for x in (one, other))
    scores, right = a @ b.T / loss.temperature, torch.arange(32, device=DEVICE)
    cross_entropy = nn.functional.cross_entropy
    ((cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2).backward()
    assert errors(encoder, reference) < 1e-6  # the temperature is a float32


@pytest.mark.usefixtures("deterministic")
def test_sliced_exact_batchnorm_has_full_batch_gradient() -> None:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(8 * 64, 4))
    net = net.double().to(DEVICE)
    reference = copy.deepcopy(net)
    pictures, labels = torch.randn(12, 3, 12, 12, dtype=torch.float64), torch.arange(12) % 4
    loss_fn = nn.CrossEntropyLoss()
    step = Microbatcher(net, loss_fn=loss_fn, microbatch_size=5, batchnorm="exact")
    step.backward((pictures, labels))
    loss_fn(reference(pictures.to(DEVICE)), labels.to(DEVICE)).backward()
    assert errors(net, reference) < 1e-9
    for one, other in zip(net.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-12, atol=0)
