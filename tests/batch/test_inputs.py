"""Batches stay unchanged, and inputs receive their gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import BatchError, MemoryBudget, Microbatcher
from tests.cases import difference, gradients
from tests.models import ROWS, Mlp, x, y


class Writer(Mlp):
    """A model that scales its input in place and may run out of memory afterwards."""

    most = ROWS

    def forward(self, inputs: Tensor) -> Any:
        inputs.mul_(2)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs)


class LateWriter(Mlp):
    """A model that writes into its input only from the second batch on."""

    writes = False
    most = ROWS

    def forward(self, inputs: Tensor) -> Any:
        if self.writes:
            inputs.mul_(2)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs)


def on(model: nn.Module, **options: Any) -> Microbatcher:
    return Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **options)


def expected_of(model: nn.Module, inputs: Tensor) -> Any:
    """Return the gradients of the whole batch in plain torch, computed on a copy."""
    model.zero_grad()
    F.cross_entropy(model(inputs.clone()), y()).backward()
    found = gradients(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("size", [None, 3, "auto"])
@pytest.mark.parametrize("budgeted", [False, True])
def test_batch_is_unchanged_by_inplace_model_input(size: Any, budgeted: bool) -> None:
    model, inputs = Writer(), x()
    expected = expected_of(model, inputs)
    model.most = 3 if size == "auto" else ROWS
    microbatcher = on(model, microbatch_size=size, memory_limit="1GiB" if budgeted else None)
    for _ in range(3):
        model.zero_grad()
        result = microbatcher.backward((inputs, y()))
        assert torch.equal(inputs, x())
        assert difference(gradients(model), expected) < 1e-9
    assert result.num_microbatches == {None: 1, 3: 4, "auto": 4}[size]


def test_evaluation_leaves_batch_unchanged() -> None:
    model, inputs = Writer(), x()
    microbatcher = on(model, eval_microbatch_size=3)
    for _ in range(2):
        microbatcher.evaluate((inputs, y()))
        assert torch.equal(inputs, x())


def test_late_inplace_write_is_detected_for_next_batch() -> None:
    model, microbatcher, inputs = (model := LateWriter()), on(model, microbatch_size=3), x()
    microbatcher.backward((inputs, y()))
    model.writes = True
    microbatcher.backward((inputs, y()))
    inputs = x()
    microbatcher.backward((inputs, y()))
    assert torch.equal(inputs, x())


# Inputs that require a gradient


@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_input_that_requires_grad_gets_gradient_of_whole_batch(
    size: int | None, budgeted: bool
) -> None:
    model, inputs = Mlp(), x().requires_grad_()
    F.cross_entropy(model(inputs), y()).backward()
    expected, inputs.grad = inputs.grad, None
    limit = "1GiB" if budgeted else None
    microbatcher = on(model, microbatch_size=size, memory_limit=limit)
    for calls in (1, 2):
        microbatcher.backward((inputs, y()))
        assert inputs.grad is not None
        assert expected is not None
        assert torch.allclose(inputs.grad, calls * expected, rtol=0, atol=1e-9)


def test_input_gradient_is_rolled_back() -> None:
    class FailsLater(Mlp):
        def forward(self, inputs: Tensor) -> Any:
            if inputs[0, 0] == x()[-3, 0]:
                raise ValueError("bad row")
            return super().forward(inputs)

    inputs = x().requires_grad_()
    with pytest.raises(ValueError, match="bad row"):
        on(FailsLater(), microbatch_size=1, probe=False).backward((inputs, y()))
    assert inputs.grad is None


def test_split_of_non_leaf_input_is_rejected() -> None:
    cases: list[Any] = [3, "auto"]
    for size in cases:
        encoder, model = nn.Linear(6, 6).double(), Writer()
        model.most = ROWS if size == 3 else 3
        inputs = encoder(x())
        with pytest.raises(BatchError, match=r"'0'.*graph.*detach"):
            on(model, microbatch_size=size, probe=False).backward((inputs, y()))
        assert encoder.weight.grad is None
        assert all(parameter.grad is None for parameter in model.parameters())


# Transfer to the device


@pytest.mark.parametrize("size", [None, 2])
def test_aliased_views_stay_separate_if_conjugation_or_gradients_differ(
    size: int | None,
) -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        turned = (batch["z"] * batch["conjugate"]).real.mean()
        loss: Tensor = (model(batch["x"]) * batch["same"]).mean() * turned
        return loss

    model, found = nn.Linear(6, 6).double(), list[Tensor]()
    for is_ours in (False, True):
        inputs = x().requires_grad_()
        z = torch.complex(x()[:, 0], x()[:, 1])
        batch = {"same": inputs.detach(), "x": inputs, "z": z, "conjugate": z.conj()}
        if is_ours:
            whole = {"z": "shared", "conjugate": "shared"}
            Microbatcher(
                model, forward=forward, microbatch_size=size, probe=False, batch_layout=whole
            ).backward(batch)
        else:
            forward(model, batch).backward()
        assert inputs.grad is not None
        found.append(inputs.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)


def test_batch_of_inference_tensors_is_unchanged() -> None:
    cases: list[Any] = [None, 3]
    for size in cases:
        with torch.inference_mode():
            inputs = x()
        model = Writer()
        on(model, microbatch_size=size).backward((inputs, y()))
        assert torch.equal(inputs, x())


def test_budget_keeps_only_one_microbatch_on_device() -> None:
    model = nn.Linear(4096, 1).double()
    batch = (torch.randn(64, 4096, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64))
    peaks = {}
    for size in (64, 8):
        with MemoryBudget(None) as budget:
            microbatcher = Microbatcher(
                model, loss_fn=nn.MSELoss(), microbatch_size=size, probe=False
            )
            model.zero_grad()
            microbatcher.backward(batch)
        peaks[size] = budget.peak_bytes
    assert peaks[64] > 64 * 4096 * 8
    assert peaks[8] < 64 * 4096 * 8 / 2


def test_model_without_inplace_writes_receives_batch_memory() -> None:
    inputs = x()
    first, last = inputs.data_ptr(), inputs.data_ptr() + inputs.nbytes
    inside: list[bool] = []

    class Watches(Mlp):
        def forward(self, rows: Tensor) -> Any:
            inside.append(first <= rows.data_ptr() < last)
            return super().forward(rows)

    microbatcher = on(Watches(), microbatch_size=4, probe=False)
    microbatcher.backward((inputs, y()))
    inside.clear()
    microbatcher.backward((inputs, y()))
    assert inside == [True] * 3


@pytest.mark.parametrize("width", [6, 7])
def test_first_call_with_copies_matches_later_calls_bitwise(width: int) -> None:
    """Three rows of six numbers end within a cache line, where kernels round differently."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 40), nn.Tanh(), nn.Linear(40, 3))
    batch = torch.randn(16, width), torch.randint(3, (16,))
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=3, probe=False, device="cpu"
    )
    found = []
    for _ in range(2):
        model.zero_grad()
        microbatcher.backward(batch)
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *found))
