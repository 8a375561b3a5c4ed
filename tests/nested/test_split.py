"""A part with a size of its own: loss, outputs and gradients are those of the part in one piece."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher, NestedSplit, split
from automicro.errors import BatchError, LossAverageError, UnsplittableModelError

ROWS, WIDTH, CLASSES = 10, 8, 50


class Tail(nn.Module):
    """Linear head and cross-entropy."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES).double()
        self.reduction = reduction

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), targets, reduction=self.reduction)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    targets = torch.randint(CLASSES, (ROWS,))
    targets[3:5] = -100
    return hidden, targets


def gradients(part: Any, module: nn.Module, *given: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of what it was given and of the parameters."""
    for tensor in [*given, *module.parameters()]:
        tensor.grad = None
    output = part(*given)
    (output if output.dim() == 0 else output.square().sum() * 3).backward()
    tensors = [*given, *module.parameters()]
    return output.detach(), [each.grad for each in tensors if each.grad is not None]


@pytest.mark.parametrize("size", [1, 3, 4, 10, 99, "auto", None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_tail_in_slices_has_the_loss_and_gradients_of_the_whole(
    reduction: str, size: Any
) -> None:
    tail = Tail(reduction)
    loss, wanted = gradients(tail, tail, *inputs())
    nested = NestedSplit(tail, microbatch_size=size)
    split_loss, found = gradients(nested, tail, *inputs())
    torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert sum(nested.sizes) == ROWS


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_middle_part_in_slices_has_the_outputs_and_gradients_of_the_whole(size: int) -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    hidden, _ = inputs()
    output, wanted = gradients(part, part, hidden)
    nested = split(part, microbatch_size=size)
    split_output, found = gradients(part, part, hidden)
    torch.testing.assert_close(split_output, output, rtol=1e-12, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    nested.remove()
    assert "forward" not in vars(part)


def test_dropout_is_replayed_in_the_backward() -> None:
    part = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    hidden, _ = inputs()
    torch.manual_seed(1)
    _, wanted = gradients(
        lambda x: torch.cat([part(rows) for rows in x.split([3, 3, 2, 2])]), part, hidden
    )
    drawn = torch.rand(1)
    split(part, microbatch_size=3)
    torch.manual_seed(1)
    _, found = gradients(part, part, hidden)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert torch.equal(torch.rand(1), drawn)  # the backward drew nothing for others


def test_memory_that_runs_out_inside_shrinks_the_part_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 2))
    )
    batch = torch.randn(64, 16), torch.randn(64, 2)
    whole = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=None)
    whole.backward(batch)
    wanted = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), nested={"1": "auto"}, memory_limit="2.5MiB"
    )
    for attempts in (None, 1):
        model.zero_grad()
        result = microbatcher.backward(batch)
        assert result.microbatch_size == 64
        assert result.failed_sizes == ()
        assert attempts is None or result.attempts == attempts
        for parameter, other in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-7)
    state = microbatcher.state_dict()
    microbatcher.load_state_dict(state)
    assert microbatcher.state_dict() == state


def test_a_slice_that_does_not_fit_is_undone_and_cut_smaller() -> None:
    with MemoryBudget("18KiB"):
        tail, (hidden, targets) = Tail(), inputs()
        nested = NestedSplit(tail)
        loss, found = gradients(nested, tail, hidden, targets)
    assert len(set(nested.sizes)) > 1  # it ran out of memory in the middle
    again, wanted = gradients(tail, tail, hidden, targets)
    torch.testing.assert_close(loss, again, rtol=1e-12, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_part_that_compares_rows_is_refused() -> None:
    class Centred(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden - hidden.mean(0)

    part = Centred()
    split(part, microbatch_size=2)
    with pytest.raises(UnsplittableModelError, match="computes something over rows"):
        part(inputs()[0])


def test_a_loss_that_compares_rows_is_refused() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))

    with pytest.raises(LossAverageError, match="neither as a mean"):
        NestedSplit(tail, microbatch_size=2)(*inputs())


def test_a_declared_average_that_is_wrong_is_refused() -> None:
    tail = Tail("sum")
    with pytest.raises(LossAverageError, match="it is 'none'"):
        NestedSplit(tail, microbatch_size=2, loss_average="tokens")(*inputs())


def test_gradients_that_would_be_lost_are_refused() -> None:
    scale = torch.ones((), dtype=torch.double, requires_grad=True)

    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(hidden * scale, targets.clamp(0, WIDTH - 1))

    with pytest.raises(UnsplittableModelError, match="neither an argument nor a parameter"):
        NestedSplit(tail, microbatch_size=2)(*inputs())


def test_what_cannot_be_cut_is_refused() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.ones(ROWS, 2)

    class Attention(nn.Module):
        def forward(self, hidden: Tensor, cache: Cache) -> Tensor:
            return hidden + cache.keys.sum()

    part = Attention()
    split(part, microbatch_size=2)
    with pytest.raises(BatchError, match="'cache' is of type Cache"):
        part(inputs()[0], Cache())
