"""Who holds what in a step that runs: sums, names, and that nothing is changed by looking."""

import copy
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

from automicro import MemoryBudget
from automicro.memory.timeline import record_step


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


def test_samples_add_up_to_what_a_budget_counts() -> None:
    model, optimizer, x = make()
    budget = MemoryBudget(None)
    with budget.track(model, x):
        step(model, optimizer, x)
    again, second, _ = make()
    samples = record_step(
        lambda: step(again, second, x), modules=[again], optimizer=second, batch=x
    )
    assert max(sum(held.values()) for _, held in samples) == budget.peak_bytes
    assert sum(samples[-1][1].values()) == budget.allocated_bytes


def test_modules_hold_what_they_compute_until_the_backward_lets_go() -> None:
    model, optimizer, x = make()
    samples = record_step(
        lambda: step(model, optimizer, x), modules=[model], optimizer=optimizer, batch=x
    )
    peaks = {each: max(held.get(each, 0) for _, held in samples) for _, h in samples for each in h}
    # Linear and tanh hold rows × 128 numbers, dropout the same and its mask.
    assert peaks["body.0"] == peaks["body.1"] == 64 * 128 * 4
    assert peaks["body.2"] >= 64 * 128 * 4
    assert peaks["head"] == 64 * 8 * 4
    assert {"gradients", "optimizer", "parameters", "batch"} <= peaks.keys()
    assert peaks["optimizer"] >= 2 * peaks["parameters"] * 0.9
    last = samples[-1][1]
    assert last.keys() == {"parameters", "optimizer", "batch"}


def test_what_a_model_computes_itself_and_what_nobody_does_stay_apart() -> None:
    class Doubles(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).mul(2).exp()

    class Halves(Doubles):
        pass

    first, second, x = Doubles(8, 16), Halves(16, 32), torch.randn(32, 8)
    kept: list[Tensor] = []

    def work() -> None:
        kept.clear()
        kept.append(second(first(x)))
        kept.append(torch.ones(64, 64))
        kept[0].sum().backward()

    last = record_step(work, modules=[first, second], batch=x)[-1][1]
    assert last["Halves"] == 32 * 32 * 4
    assert last["outside of modules"] == 64 * 64 * 4
    samples = record_step(work, modules=[first, second], batch=x)
    peaks = {each: max(held.get(each, 0) for _, held in samples) for _, h in samples for each in h}
    assert peaks["Doubles"] >= 2 * 32 * 16 * 4
    assert "backward" in peaks


def test_host_memory_is_not_a_devices() -> None:
    model, x = nn.Linear(32, 8, device="meta"), torch.zeros(64, 32)
    samples = record_step(lambda: model(x.to("meta") + 1), modules=[model], batch=x)
    peak = max(samples, key=lambda sample: sum(sample[1].values()))[1]
    assert "batch" not in peak
    assert peak["outside of modules"] == x.nbytes * 2
    assert peak["parameters"] == (32 * 8 + 128) * 4


def test_batches_are_known_in_any_mapping() -> None:
    x = torch.randn(64, 32)
    samples = record_step(lambda: x + 1, modules=[], batch=UserDict(inputs=[x]))
    assert samples[0][1] == {"batch": x.nbytes}


def test_looking_changes_no_bit_and_leaves_nothing_behind() -> None:
    model, optimizer, x = make()
    other = copy.deepcopy(model)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    torch.manual_seed(1)
    step(other, other_optimizer, x)
    torch.manual_seed(1)
    record_step(lambda: step(model, optimizer, x), modules=[model], optimizer=optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


def test_an_error_in_the_step_passes_through_and_hooks_are_gone() -> None:
    model, *_ = make()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record_step(lambda: model(torch.zeros(2, 3)), modules=[model])
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_compiled_model_is_refused() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(model, nn.Module)
    with pytest.raises(ValueError, match="compiled"):
        record_step(lambda: None, modules=[model])


def test_many_operations_are_thinned_and_the_peak_stays() -> None:
    model = nn.Linear(16, 16)
    x = torch.randn(4, 16)

    def work() -> None:
        for number in range(1500):
            if number == 700:
                torch.zeros(1 << 20)
            x + 1
            model(x)

    samples = record_step(work, modules=[model])
    assert len(samples) <= 2000
    assert max(sum(held.values()) for _, held in samples) >= 4 << 20
