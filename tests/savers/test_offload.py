"""Tensors saved for the backward are copied to the host once, and return unchanged."""

import contextlib
import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from automicro.memory.budget import MemoryBudget
from automicro.savers.offload import Offload, OffloadHooks

ROWS = 300  # 300 numbers each: 360000 bytes


def rows() -> Any:
    return torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(1))


class Counting(OffloadHooks):
    def __init__(self, staying: Any = ()) -> None:
        super().__init__(staying)
        self.out: list[int] = []

    def _copied(self, whole: Tensor, storage: torch.UntypedStorage) -> Any:
        self.out.append(storage.nbytes())
        return super()._copied(whole, storage)


def test_each_storage_is_offloaded_once():
    offload = Counting()
    leaf = rows().requires_grad_()
    with offload():
        product = leaf * 2
        first, second = product.chunk(2)
        loss = (first * second).sum() + (product * product).sum() + product.t().exp().sum()
    assert offload.out == [ROWS * ROWS * 4] * 2  # the product, and its exponentials
    loss.backward()


def test_modified_storage_is_offloaded_again():
    offload = Counting()
    leaf = rows().requires_grad_()
    with offload():
        state = leaf * 1
        one = (state.detach() * leaf).sum()
        with torch.no_grad():
            other = state.detach().clone()
        other_loss = (other * leaf).sum()
        with torch.no_grad():
            other.add_(1)
        again = (other * leaf).sum()
    assert len(offload.out) == 3
    again.backward()
    assert torch.equal(leaf.grad, leaf.detach() + 1)
    one.backward()
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        other_loss.backward()


class Look(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return tensors[0].sum()

    @staticmethod
    def backward(ctx, slope):
        Look.seen = list(ctx.saved_tensors)
        return slope.expand(Look.seen[0].shape), *[None] * (len(Look.seen) - 1)


def test_strides_are_preserved():
    base = rows()
    given = [
        (base * 1).requires_grad_().t(),
        base[10:20, 5:],
        base[:, :1].expand(ROWS, 9),
        base.to(torch.bfloat16),
        torch.zeros(0, 7),
        base.as_strided((50, 50), (2, 3), 7),
        torch.complex(base, base).conj(),
        base > 0,
    ]
    with OffloadHooks([])():
        loss = Look.apply(*given)
    loss.backward()
    for tensor, back in zip(given, Look.seen, strict=True):
        assert (back.size(), back.stride()) == (tensor.size(), tensor.stride())
        assert back.storage_offset() == tensor.storage_offset()
        assert torch.equal(back, tensor)


def after_sigmoid(leaf):
    output = torch.sigmoid(leaf * 1)  # it saves its output
    loss = (output * 2).sum()
    with torch.no_grad():
        output.add_(1)
    return loss


def after_product(leaf):
    product = leaf * 1
    loss = (product * product).sum()
    product.add_(1)
    return loss


def on_a_view(leaf):
    product = leaf * 1
    loss = product.exp().mul(product).sum()
    product[0].zero_()
    return loss


@pytest.mark.parametrize("size", [4, ROWS])  # one that is kept, and one that is offloaded
@pytest.mark.parametrize("loss_of", [after_sigmoid, after_product, on_a_view])
def test_inplace_modification_raises_same_error_as_without_offload(loss_of, size):
    told = []
    for hooks in (OffloadHooks([])(), contextlib.nullcontext()):
        with hooks:
            loss = loss_of(rows()[:size, :size].clone().requires_grad_())
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        one, other = str(caught.value), "is at version"
        told.append((one.split("modified by an inplace")[0], one.split(other)[1][:22]))
    assert told[0] == told[1]


def test_small_tensors_parameters_and_buffers_are_not_offloaded():
    model = nn.Linear(ROWS, ROWS)
    model.register_buffer("scale", rows())
    offload = Counting([*model.parameters(), *model.buffers()])
    given = torch.ones(2, ROWS, requires_grad=True)
    with offload():
        loss = (model(given) @ model.scale @ model.weight.t()).sum()
    assert offload.out == []
    loss.backward()


def test_budget_does_not_count_offloaded_tensors():
    held, peaks = [], []
    for hooks in (Offload([]).applied(), contextlib.nullcontext()):
        value = leaf = torch.ones(ROWS, ROWS, requires_grad=True)
        with MemoryBudget(None).track(leaf) as budget, hooks:
            for _ in range(20):
                value = torch.sin(value)
            held.append(budget.allocated_bytes)
            value.sum().backward()
        peaks.append(budget.peak_bytes)
    assert held[0] < 4 * ROWS * ROWS * 4 < held[1]
    assert peaks[0] < 8 * ROWS * ROWS * 4 < peaks[1]


def test_saved_tensors_are_freed_with_forward_output():
    # A packed tensor must not keep alive an operation that saves its own output.
    leaf = torch.ones(3, requires_grad=True)
    with Offload([]).applied():
        value = torch.relu(leaf * 2)
        saved = weakref.ref(value.untyped_storage())
        del value  # as if memory ran out: there is no backward
    gc.collect()
    assert saved() is None


def test_subclasses_and_sparse_tensors_keep_their_type():
    class Named(torch.Tensor):
        pass

    leaf = rows().requires_grad_()
    named = rows().as_subclass(Named)
    sparse = torch.eye(ROWS).to_sparse().requires_grad_()
    with Offload([]).applied():
        loss = (leaf * named).sum().as_subclass(torch.Tensor) + torch.sparse.mm(sparse, leaf).sum()
    loss.backward()
    assert torch.equal(leaf.grad, rows() + 1)


def test_oom_during_reload_is_raised():
    leaf = torch.ones(ROWS, ROWS, requires_grad=True)
    budget = MemoryBudget(3 * ROWS * ROWS * 4 + 4096).track(leaf)
    with budget, Offload([]).applied():
        value = torch.sin(torch.sin(leaf))
        with pytest.raises(torch.OutOfMemoryError):
            value.sum().backward()
