"""Batches stay unchanged, inputs receive their gradients, and gradients keep their format."""

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

    writes = True
    most = ROWS

    def forward(self, inputs: Tensor) -> Any:
        if self.writes:
            inputs.mul_(2)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs)


def on(model: nn.Module, **options: Any) -> Microbatcher:
    return Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **options)


@pytest.mark.parametrize(
    ("size", "limit"), [(None, "1GiB"), (None, None), (3, None), ("auto", "1GiB")]
)
def test_batch_is_unchanged_by_inplace_model_input(size: Any, limit: str | None) -> None:
    model, inputs = Writer(), x()
    F.cross_entropy(model(inputs.clone()), y()).backward()
    expected = gradients(model)
    model.most = 3 if size == "auto" else ROWS
    microbatcher = on(model, microbatch_size=size, memory_limit=limit)
    for _ in range(3):
        model.zero_grad()
        result = microbatcher.backward((inputs, y()))
        assert torch.equal(inputs, x())
        assert difference(gradients(model), expected) < 1e-9
    assert result.num_microbatches == {None: 1, 3: 4, "auto": 4}[size]
    microbatcher = on(model, eval_microbatch_size=3)
    for _ in range(2):
        microbatcher.evaluate((inputs, y()))
        assert torch.equal(inputs, x())


@pytest.mark.parametrize("size", [None, 3])
def test_batch_of_inference_tensors_is_unchanged(size: int | None) -> None:
    with torch.inference_mode():
        inputs = x()
    on(Writer(), microbatch_size=size).backward((inputs, y()))
    assert torch.equal(inputs, x())


def test_late_inplace_write_is_detected_for_next_batch() -> None:
    model, inputs = Writer(), x()
    microbatcher = on(model, microbatch_size=3)
    for model.writes in (False, True):
        microbatcher.backward((inputs, y()))
    inputs = x()
    microbatcher.backward((inputs, y()))
    assert torch.equal(inputs, x())


@pytest.mark.parametrize(("size", "limit"), [(None, "1GiB"), (None, None), (1, None), (3, "1GiB")])
def test_input_that_requires_grad_gets_gradient_of_whole_batch(
    size: int | None, limit: str | None
) -> None:
    model, inputs = Mlp(), x().requires_grad_()
    F.cross_entropy(model(inputs), y()).backward()
    expected, inputs.grad = inputs.grad, None
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


@pytest.mark.parametrize("size", [3, "auto"])
def test_split_of_non_leaf_input_is_rejected(size: Any) -> None:
    encoder, model = nn.Linear(6, 6).double(), Writer()
    model.most = ROWS if size == 3 else 3
    with pytest.raises(BatchError, match=r"'0'.*graph.*detach"):
        on(model, microbatch_size=size, probe=False).backward((encoder(x()), y()))
    assert encoder.weight.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("size", [None, 2])
def test_aliased_views_stay_separate_if_conjugation_or_gradients_differ(
    size: int | None,
) -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        turned = (batch["z"] * batch["conjugate"]).real.mean()
        loss: Tensor = (model(batch["x"]) * batch["same"]).mean() * turned
        return loss

    model, found = nn.Linear(6, 6).double(), list[Tensor]()
    layout: Any = {"z": "shared", "conjugate": "shared"}
    step = Microbatcher(
        model, forward=forward, microbatch_size=size, probe=False, batch_layout=layout
    )
    for run in (lambda batch: forward(model, batch).backward(), step.backward):
        inputs = x().requires_grad_()
        z = torch.complex(x()[:, 0], x()[:, 1])
        run({"same": inputs.detach(), "x": inputs, "z": z, "conjugate": z.conj()})
        assert inputs.grad is not None
        found.append(inputs.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)


def test_budget_keeps_only_one_microbatch_on_device() -> None:
    model = nn.Linear(4096, 1).double()
    batch = (torch.randn(64, 4096, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64))
    peaks = {}
    for size in (64, 8):
        step = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=size, probe=False)
        model.zero_grad()
        with MemoryBudget(None) as budget:
            step.backward(batch)
        peaks[size] = budget.peak_bytes
    assert peaks[64] > batch[0].nbytes
    assert peaks[8] < batch[0].nbytes / 2


def test_model_without_inplace_writes_receives_batch_memory() -> None:
    inputs, inside = x(), list[bool]()
    first, last = inputs.data_ptr(), inputs.data_ptr() + inputs.nbytes

    class Watches(Mlp):
        def forward(self, rows: Tensor) -> Any:
            inside.append(first <= rows.data_ptr() < last)
            return super().forward(rows)

    microbatcher = on(Watches(), microbatch_size=4, probe=False)
    for _ in range(2):
        microbatcher.backward((inputs, y()))
    assert inside[3:] == [True] * 3


@pytest.mark.parametrize("width", [6, 7])
def test_first_call_with_copies_matches_later_calls_bitwise(width: int) -> None:
    """Three rows of six numbers end within a cache line, where kernels round differently."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 40), nn.Tanh(), nn.Linear(40, 3))
    batch = torch.randn(16, width), torch.randint(3, (16,))
    microbatcher = on(model, microbatch_size=3, probe=False, device="cpu")
    found = []
    for _ in range(2):
        model.zero_grad()
        microbatcher.backward(batch)
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("conv", "memory_format"),
    [(nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)],
)
def test_accumulated_gradients_keep_memory_format(conv: Any, memory_format: Any) -> None:
    model: Any = nn.Sequential(conv(3, 8, 3, padding=1), nn.ReLU(), conv(8, 5, 3), nn.Flatten())
    model[2].weight.data = model[2].weight.data.to(memory_format=memory_format)
    inputs = torch.randn(6, 3, *[4] * (model[0].weight.dim() - 2))
    for _ in range(2):
        on(model, microbatch_size=4).backward((inputs, torch.randint(5, (6,))))
    gradient = model[2].weight.grad
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=memory_format)
