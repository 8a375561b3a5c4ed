"""Parameters that a forward changes temporarily while memory runs out."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher

Undo = Callable[[], object]


def merged(weight: Tensor) -> Undo:
    weight.data += 0.125
    return lambda: weight.data.sub_(0.125)


def quantized(weight: Tensor) -> Undo:
    before = weight.data.clone()
    weight.data.mul_(8).round_().div_(8)
    return lambda: weight.data.copy_(before)


def sliced(weight: Tensor) -> Undo:
    before = weight.data
    weight.data = before[:2]
    return lambda: setattr(weight, "data", before)


def cast(weight: Tensor) -> Undo:
    before = weight.data
    weight.data = before.float().double().half()
    return lambda: setattr(weight, "data", before)


class Changing(nn.Module):
    """A model whose forward changes its weight, and fails with more than two rows."""

    def __init__(self, change: Callable[[Tensor], Undo], most_rows: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.arange(12.0).double() / 16 - 0.375).reshape(4, 3))
        self.change, self.most_rows = change, most_rows

    def forward(self, inputs: Tensor) -> Tensor:
        undo = self.change(self.weight)
        if len(inputs) > self.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        undo()
        return (inputs @ self.weight.T).square().sum(1, keepdim=True)


def masked(weight: Tensor) -> Undo:
    before = weight.detach().clone()
    weight[0] = 0
    return lambda: weight.copy_(before)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [(each[:, :3], each[:, 3:]) for each in draw]


@pytest.mark.parametrize("change", [merged, quantized, sliced, cast])
def test_training_matches_plain_torch(change):
    model, plain = Changing(change), Changing(change, most_rows=8)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size="auto")
    for batch in batches():
        microbatcher.backward(batch)
        nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
        for each in (model, plain):
            assert each.weight.grad is not None
            each.weight.data -= 0.01 * each.weight.grad
            each.weight.grad = None
    assert microbatcher.microbatch_size == 2
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("change", [merged, quantized, sliced, cast, masked])
def test_evaluation_leaves_parameters_unchanged(change):
    model = Changing(change)
    before = model.weight.detach().clone()
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), eval_microbatch_size="auto")
    for batch in batches():
        microbatcher.evaluate(batch)
    assert torch.equal(model.weight, before)


def test_shape_changed_in_later_batch_is_restored():
    model = Changing(lambda weight: sliced(weight) if model.most_rows == 1 else int)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss())
    for batch in batches():
        microbatcher.backward(batch)
        model.most_rows = 1
    assert model.weight.shape == (4, 3)


@pytest.mark.parametrize("change", [Tensor.t, lambda weight: weight.view(9)])
def test_shape_changed_between_steps_is_kept(change):
    model, (rows, targets) = nn.Linear(3, 3), (torch.randn(8, 3), torch.randn(8, 3))
    most_rows = [8, 4]

    def forward(model: nn.Linear, batch: Any) -> Tensor:
        if len(batch[0]) > most_rows[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        output = nn.functional.linear(batch[0], model.weight.reshape(3, 3))
        return nn.functional.mse_loss(output, batch[1])

    microbatcher = Microbatcher(model, forward=forward, loss_average="samples")
    microbatcher.backward((rows, targets))
    model.weight.data, model.weight.grad = change(model.weight.data), None
    form = model.weight.shape, model.weight.stride()
    del most_rows[0]
    assert microbatcher.backward((rows, targets)).microbatch_size == 4
    assert (model.weight.shape, model.weight.stride()) == form


def test_replaced_parameter_is_freed():
    model = Changing(merged)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss())
    microbatcher.backward(batches()[0])
    replaced = weakref.ref(model.weight)
    model.weight = nn.Parameter(model.weight.detach().clone())
    microbatcher.backward(batches()[1])
    gc.collect()
    assert replaced() is None
