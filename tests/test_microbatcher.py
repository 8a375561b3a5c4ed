"""Sizes, failures and evaluations of a Microbatcher."""

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import (
    Halving,
    MemoryBudget,
    Microbatcher,
)
from automicro.features import with_features
from automicro.loss.averages import BatchWeights
from tests.callbacks.runs import Scripted
from tests.cases import difference, gradients
from tests.models import CLASSES, Memory, Mlp, numbers, pair
from tests.sweeps import mostly_in_sweeps


def on(model: nn.Module, **options: Any) -> Microbatcher:
    options = {"loss_fn": None if "forward" in options else nn.CrossEntropyLoss(), **options}
    return Microbatcher(model, **with_features({"probe": False, **options}))


def test_state_dict_contains_sizes() -> None:
    model = Memory(Mlp(), most=3)
    microbatcher, other = on(model), on(model)
    microbatcher.backward(pair())
    microbatcher.evaluate(pair())
    state = microbatcher.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.backward(pair()).attempts == 1
    assert other.evaluate(pair()).attempts == 1
    with pytest.raises(ValueError, match=r"lacks \['train'\]; pass what .*state_dict"):
        other.load_state_dict({"eval": {}})


def test_strict_divisible_makes_auto_use_divisors() -> None:
    model = Memory(Mlp(), most=4)
    on(model, strict_divisible=True).backward(pair(6))
    assert model.seen == [6, 3, 3]


# Running out of memory


class Drawing(nn.Module):
    """A model that draws from every random stream and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(6, 256), nn.BatchNorm1d(256)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(256, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.drop(torch.relu(self.norm(self.wide(inputs))))
        return self.head(hidden) * (1 + random.random()) + float(np.random.rand())


def streams() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def steps_under(size: Any, limit: int | None) -> tuple[Any, ...]:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    model = Drawing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"microbatch_size": size, "memory_limit": limit}
    microbatcher = on(model, optimizer=optimizer, batchnorm="ignore", **options)
    results = []
    for step in range(6):
        batch = numbers(32, 6, seed=step), torch.arange(32) % CLASSES
        results.append(microbatcher.backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    return results, model.state_dict(), streams()


def test_recovery_is_bit_identical_to_run_with_same_sizes() -> None:
    results, state, drawn = steps_under("auto", 280 * 1024)
    sizes = [result.microbatch_size for result in results]
    assert sum(result.ooms for result in results) >= 2
    assert len(set(sizes)) > 1  # refined
    fixed_results, fixed_state, fixed_drawn = steps_under(Scripted(sizes), None)
    assert [each.loss.item() for each in results] == [each.loss.item() for each in fixed_results]
    assert drawn == fixed_drawn
    assert all(torch.equal(state[name], fixed_state[name]) for name in state)
    microbatches = sum(result.num_microbatches for result in results)
    assert int(state["norm.num_batches_tracked"]) == microbatches


class Interrupted(nn.Module):
    """A model that changes everything a forward may change, and then fails in its third call."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.net, self.error, self.calls = Drawing(), error, 0
        self.register_buffer("codes", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        self.get_buffer("codes").add_(1)
        outputs = self.net(inputs)
        if self.calls == 3:
            raise self.error
        return outputs


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug")])
def test_other_errors_propagate_unchanged_and_restore_state(error: BaseException) -> None:
    model, metric = Interrupted(error), MulticlassAccuracy(CLASSES)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    tensors = [p.grad for p in model.parameters()]
    before = gradients(model), {k: v.clone() for k, v in model.state_dict().items()}, streams()
    with pytest.raises(type(error)) as raised:
        on(model, microbatch_size=3, batchnorm="ignore").backward(pair(), metrics=metric)
    assert raised.value is error
    assert difference(gradients(model), before[0]) == 0
    assert all(torch.equal(v, before[1][k]) for k, v in model.state_dict().items())
    assert streams() == before[2]
    assert metric.update_count == 0
    assert all(p.grad is t for p, t in zip(model.parameters(), tensors, strict=True))


# Memory


def test_result_keeps_no_graph_or_activations() -> None:
    with MemoryBudget(None) as budget:
        model = nn.Linear(6, 4096).double()
        step = on(model, forward=lambda m, batch: m(batch[0]).square().mean(), microbatch_size=4)
        result = step.backward(pair())
        held = sum(p.nbytes for p in model.parameters())
        assert budget.allocated_bytes < 2 * held + 4096
    assert result.loss.grad_fn is None
    assert result.loss.dim() == 0


@pytest.mark.parametrize("size", [4, "auto"])
def test_model_memory_is_freed_when_unreferenced(size: Any) -> None:
    batch = torch.randn(64, 8), torch.randint(3, (64,))

    def run() -> tuple[weakref.ref[nn.Module], int]:
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
        step = on(model, microbatch_size=size)
        with MemoryBudget("24KiB"):
            return weakref.ref(model), step.backward(batch).ooms

    run()  # lazy imports of torch keep the frames that they were imported in
    gc.collect()
    gc.disable()
    try:
        model, num_ooms = run()
        assert (num_ooms > 0) == (size == "auto")
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_kept_error_does_not_hold_attempt_memory(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Noted(BatchWeights):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr("automicro.step.passes.BatchWeights", Noted)
    step = on(Memory(Mlp(), fails=(3,)), microbatch_size=2, eval_microbatch_size=2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        getattr(step, call)(pair())
    assert caught.value.__traceback__ is not None
    assert made
    assert not any(each() for each in made)


# Notes of errors in the user's code


class Squeezes(nn.Linear):
    """A model that loses the dimension of rows if there is only one row."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.unsqueeze(1)).squeeze()


@pytest.mark.parametrize(
    ("rows", "size", "which"),
    [(5, 2, "the last microbatch has one of 5 rows"), (4, 1, "each microbatch has one of 4 rows")],
)
def test_error_note_explains_squeezed_row(rows: int, size: int, which: str) -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        on(Squeezes(6, 5).double(), microbatch_size=size).backward(pair(rows))
    [note] = caught.value.__notes__
    assert note.startswith(f"automicro: {which}. ")
    assert note.endswith("name the dimension to squeeze, as in .squeeze(-1)")


def group_loss(model: nn.Module, batch: Any) -> Tensor:
    scores: Tensor = model(batch).view(-1, 4)  # four consecutive rows belong to one query
    return scores.logsumexp(1).mean()


@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_error_note_for_split_groups_names_remedies(call: str) -> None:
    batch, model = torch.randn(24, 8), nn.Linear(8, 1)

    def run(size: Any) -> Any:
        sizes = {"microbatch_size": size, "eval_microbatch_size": size}
        return getattr(on(model, forward=group_loss, **sizes), call)(batch).loss

    with pytest.raises(RuntimeError, match="is invalid for input of size 6") as caught:
        run(7)
    [note] = caught.value.__notes__
    assert note.startswith("automicro: microbatches have at most 6 of 24 rows. ")
    assert "microbatch_size=Halving(multiple_of=4)" in note
    assert "batch_layout={'its name': 'shared'}" in note
    whole = group_loss(model, batch).detach()
    torch.testing.assert_close(run(Halving(multiple_of=4, initial=7)), whole)
    with pytest.raises(RuntimeError, match="is invalid for input of size 7") as caught:
        on(model, forward=group_loss, microbatch_size=8).backward(batch[:7])
    assert not getattr(caught.value, "__notes__", ())


@pytest.mark.parametrize("limit", [None, "1MiB"])
@pytest.mark.parametrize("row", mostly_in_sweeps([0, 40, 63], quick=[40]))
def test_out_of_range_target_error_is_unchanged(limit: str | None, row: int) -> None:
    model = nn.Linear(8, 10)
    step = on(model, optimizer=torch.optim.Adam(model.parameters()), probe=True)
    targets = torch.randint(10, (64,))
    targets[row] = 10
    batch = torch.randn(64, 8), targets
    unchanged = pytest.raises(IndexError, match=r"^Target 10 is out of bounds")
    with MemoryBudget(limit), unchanged as caught:
        step.backward(batch)  # a warning would raise
    assert not hasattr(caught.value, "__notes__")
