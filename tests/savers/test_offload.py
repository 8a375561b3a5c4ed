"""Tensors saved for the backward are copied to the host once, and return unchanged."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro.memory.budget import MemoryBudget
from automicro.savers.offload import Offload, OffloadHooks

ROWS = 300  # 300 numbers each: 360000 bytes


def rows() -> Tensor:
    return torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(1))


class Counting(OffloadHooks):
    def __init__(self, staying: Any = ()) -> None:
        super().__init__(staying)
        self.out: list[int] = []

    def _copied(self, whole: Tensor, storage: torch.UntypedStorage) -> Any:
        self.out.append(storage.nbytes())
        return super()._copied(whole, storage)


def test_each_storage_is_offloaded_once() -> None:
    offload = Counting()
    leaf = rows().requires_grad_()
    with offload():
        product = leaf * 2
        first, second = product.chunk(2)
        loss = (first * second).sum() + (product * product).sum() + product.t().exp().sum()
    assert offload.out == [ROWS * ROWS * 4] * 2  # the product, and its exponentials
    loss.backward()


def test_modified_storage_is_offloaded_again() -> None:
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
    assert torch.equal(leaf.grad, leaf.detach() + 1)  # type: ignore[arg-type]
    one.backward()
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        other_loss.backward()


def test_strides_are_preserved() -> None:
    seen: list[tuple[Any, ...]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Any:
            seen.extend((t.size(), t.stride(), t.storage_offset(), t) for t in ctx.saved_tensors)
            return (slope.expand(ctx.saved_tensors[0].shape), *[None] * (len(seen) - 1))

    base = rows()
    given = [
        base.t(),
        base[10:20, 5:],
        base[:, :1].expand(ROWS, 9),
        base.to(torch.bfloat16),
        base.view(3, 100, 300).permute(2, 0, 1),
        torch.zeros(0, 7),
        base.as_strided((50, 50), (2, 3), 7),
        torch.complex(base, base).conj(),
        base > 0,
    ]
    first = (base * 1).requires_grad_().t()
    with OffloadHooks([])():
        loss = Look.apply(first, *given)
    loss.backward()
    for tensor, (size, stride, offset, back) in zip([first, *given], seen, strict=True):
        assert (size, stride) == (tensor.size(), tensor.stride())
        assert offset == tensor.storage_offset()
        assert torch.equal(back, tensor)


def in_place_after_sigmoid(leaf: Tensor) -> Tensor:
    output = torch.sigmoid(leaf * 1)  # it saves its output
    loss = (output * 2).sum()
    with torch.no_grad():
        output.add_(1)
    return loss


def in_place_after_product(leaf: Tensor) -> Tensor:
    product = leaf * 1
    loss = (product * product).sum()
    product.add_(1)
    return loss


def in_place_on_a_view(leaf: Tensor) -> Tensor:
    product = leaf * 1
    loss = product.exp().mul(product).sum()
    product[0].zero_()
    return loss


@pytest.mark.parametrize("size", [4, ROWS])  # one that is kept, and one that is offloaded
@pytest.mark.parametrize(
    "loss_of", [in_place_after_sigmoid, in_place_after_product, in_place_on_a_view]
)
def test_inplace_modification_raises_same_error_as_without_offload(loss_of: Any, size: int) -> None:
    def message(*, offloads: bool) -> tuple[str, str]:
        leaf = rows()[:size, :size].clone().requires_grad_()
        offload = OffloadHooks([])
        hooks = offload() if offloads else torch.enable_grad()
        with hooks:
            loss = loss_of(leaf)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        text = str(caught.value)
        return text[: text.index("modified by an inplace")], text[text.index("is at version") :][
            :35
        ]

    assert message(offloads=True) == message(offloads=False)


def test_small_tensors_parameters_and_buffers_are_not_offloaded() -> None:
    model = nn.Linear(ROWS, ROWS)
    model.register_buffer("scale", rows())
    offload = Counting([*model.parameters(), *model.buffers()])
    given = torch.ones(2, ROWS, requires_grad=True)
    with offload():
        loss = (model(given) @ model.scale @ model.weight.t()).sum()
    assert offload.out == []
    loss.backward()


def test_budget_does_not_count_offloaded_tensors() -> None:
    def peaks(*, offloads: bool) -> tuple[int, int]:
        leaf = torch.ones(ROWS, ROWS, requires_grad=True)
        with MemoryBudget(None).track(leaf) as budget:
            value = leaf
            with Offload([]).applied() if offloads else torch.enable_grad():
                for _ in range(20):
                    value = torch.sin(value)
                held = budget.allocated_bytes
                value.sum().backward()
        return held, budget.peak_bytes

    (held, peak), (held_plain, peak_plain) = peaks(offloads=True), peaks(offloads=False)
    assert held < 4 * ROWS * ROWS * 4 < held_plain
    assert peak < 8 * ROWS * ROWS * 4 < peak_plain


def test_saved_tensors_are_freed_with_forward_output() -> None:
    # A packed tensor must not keep alive an operation that saves its own output.
    leaf = torch.ones(3, requires_grad=True)
    with Offload([]).applied():
        value = torch.relu(leaf * 2)
        saved = weakref.ref(value.untyped_storage())
        del value  # as if memory ran out: there is no backward
    gc.collect()
    assert saved() is None


def test_subclasses_and_sparse_tensors_keep_their_type() -> None:
    class Named(torch.Tensor):
        pass

    leaf = rows().requires_grad_()
    named = rows().as_subclass(Named)
    sparse = torch.eye(ROWS).to_sparse().requires_grad_()
    with Offload([]).applied():
        loss = (leaf * named).sum().as_subclass(torch.Tensor) + torch.sparse.mm(sparse, leaf).sum()
    loss.backward()
    assert torch.equal(leaf.grad, rows() + 1)  # type: ignore[arg-type]


def test_oom_during_reload_is_raised() -> None:
    leaf = torch.ones(ROWS, ROWS, requires_grad=True)
    budget = MemoryBudget(3 * ROWS * ROWS * 4 + 4096).track(leaf)
    with budget, Offload([]).applied():
        value = torch.sin(torch.sin(leaf))
        with pytest.raises(torch.OutOfMemoryError):
            value.sum().backward()
