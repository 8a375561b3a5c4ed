"""Memory by owner during a step: sums and names. Recording changes nothing."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from automicro import MemoryBudget
from automicro.memory.timeline import ACTIVATIONS, BACKWARD, Recorder, Trace


def make() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Dropout(0.5)))
    model.add_module("head", nn.Linear(128, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.randn(64, 32)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def record(work: Callable[[], object], *modules: nn.Module) -> Trace:
    recorder = Recorder()
    with recorder, recorder.watching(modules):
        work()
    return recorder.trace()


def held_after_each(trace: Trace) -> list[dict[str, int]]:
    """Return the bytes that each owner holds after each event; activations belong to modules."""
    held: Counter[str] = Counter()
    found = []
    for number, delta in zip(trace.numbers.tolist(), trace.deltas.tolist(), strict=True):
        owner = trace.owners[number]
        held[owner.module if owner.kind == ACTIVATIONS else owner.kind] += delta
        found.append(dict(held))
    return found


def most(trace: Trace) -> dict[str, int]:
    """Return the largest number of bytes that each owner held."""
    held = held_after_each(trace)
    return {name: max(each.get(name, 0) for each in held) for name in held[-1]}


def test_timeline_and_budget_count_same_bytes() -> None:
    model, optimizer, x = make()
    with MemoryBudget(None) as budget:
        step(model, optimizer, x)
    again, second, _ = make()
    trace = record(lambda: step(again, second, x), again)
    assert trace.peak_bytes == budget.peak_bytes
    assert trace.totals[-1] == budget.allocated_bytes


def test_activations_belong_to_modules_until_backward_frees_them() -> None:
    model, _, x = make()
    trace = record(lambda: model(x).square().mean().backward(), model)
    peaks = most(trace)
    # Linear and tanh save rows × 128 numbers each; dropout saves as many, and its mask.
    assert peaks["body.1"] == 64 * 128 * 4
    assert peaks["body.2"] >= 64 * 128 * 4
    assert peaks["gradients"] >= sum(each.nbytes for each in model.parameters())
    assert held_after_each(trace)[-1]["body.1"] == 0


def test_tensors_outside_modules_are_counted_separately() -> None:
    class Doubles(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            x: Tensor = super().forward(input)
            return x.mul(2).exp()

    model, x = Doubles(nn.Linear(8, 16)), torch.randn(32, 8)
    kept: list[Tensor] = []

    def work() -> None:
        kept.extend([model(x), torch.ones(64, 64)])
        kept[0].sum().backward()

    peaks = most(record(work, model))
    assert peaks[""] >= 2 * 32 * 16 * 4
    assert peaks["outside of modules"] >= 64 * 64 * 4
    assert BACKWARD in peaks


def test_recording_changes_no_bit_and_removes_its_hooks() -> None:
    model, optimizer, x = make()
    other, other_optimizer, _ = make()
    torch.manual_seed(1)
    step(other, other_optimizer, x)
    torch.manual_seed(1)
    record(lambda: step(model, optimizer, x), model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record(lambda: model(torch.zeros(2, 3)), model)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
