"""Gradients of earlier batches through failed and committed attempts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro.transaction.gradients import Gradients
from automicro.transaction.transaction import Transaction
from automicro.transaction.writes import GradientWrites
from tests.torture.engine.faults import Boom, Fault, FaultMode


def none(parameter: nn.Parameter) -> Tensor | None:
    return None


def zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter)


def numbers(parameter: nn.Parameter) -> Tensor:
    return torch.full_like(parameter, 0.5)


def bucket_view(parameter: nn.Parameter) -> Tensor:
    return torch.arange(10.0)[2 : 2 + parameter.numel()].view_as(parameter)


EARLIER = [none, zeros, numbers, bucket_view]


def begun(
    earlier: Callable[[nn.Parameter], Any],
) -> tuple[nn.Parameter, Tensor | None, Transaction]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    weight.grad = given = earlier(weight)
    transaction = Transaction([Gradients({id(weight): weight})])
    transaction.begin()
    assert weight.grad is None
    return weight, given, transaction


@pytest.mark.parametrize("earlier", EARLIER)
def test_commit_accumulates_into_same_tensor(earlier: Callable[[nn.Parameter], Any]) -> None:
    weight, given, transaction = begun(earlier)
    expected = weight.detach() * 2 + (0 if given is None else given)
    weight.square().sum().backward()
    transaction.commit()
    assert weight.grad is not None
    assert given is None or weight.grad is given
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("reached", [True, False])
def test_rollback_restores_same_tensor(
    earlier: Callable[[nn.Parameter], Any], reached: bool
) -> None:
    weight, given, transaction = begun(earlier)
    content = torch.empty(0) if given is None else given.clone()
    if reached:
        weight.square().sum().backward()
    transaction.roll_back()
    assert weight.grad is given
    assert given is None or torch.equal(given, content)


def test_parameter_not_reached_by_batch_keeps_its_gradient() -> None:
    weight, _, transaction = begun(numbers)
    transaction.commit()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("size", [6, 3])
def test_overwritten_gradient_bucket_is_restored(size: int) -> None:
    bucket = torch.ones(size)
    weight, _, transaction = begun(lambda _: bucket[:3])
    bucket.zero_()
    transaction.roll_back()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_sparse_gradients_are_accumulated() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    given = embedding.weight.grad
    transaction = Transaction([Gradients({id(embedding.weight): embedding.weight})])
    transaction.begin()
    embedding(torch.tensor([1, 3])).sum().backward()
    transaction.commit()
    assert embedding.weight.grad is given
    assert given is not None
    assert given.to_dense().sum(1).tolist() == [0.0, 4.0, 0.0, 2.0]


def commit_with_faults(plan: Sequence[Fault]) -> tuple[nn.Parameter, Tensor, BaseException | None]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    other = nn.Parameter(torch.ones(3))
    weight.grad = given = torch.full((3,), 0.5)
    other.grad = torch.ones(3)
    transaction = Transaction([Gradients({id(each): each for each in (weight, other)})])
    transaction.begin()
    (weight.square().sum() + other.sum()).backward()
    try:
        with FaultMode(plan):
            transaction.commit()
    except BaseException as error:
        return weight, given, error
    return weight, given, None


TOTAL = [2.5, 4.5, 6.5]
FIRST_COPY = 2  # after the addition of two totals


@pytest.mark.parametrize("after", [False, True])
def test_copy_is_retried_after_one_oom(after: bool) -> None:
    weight, given, error = commit_with_faults([Fault(FIRST_COPY, after)])
    assert error is None
    assert weight.grad is given
    assert given.tolist() == TOTAL


def test_sums_stay_in_new_tensors_if_copies_do_not_fit() -> None:
    plan = [Fault(FIRST_COPY), Fault(FIRST_COPY + 1)]
    weight, given, error = commit_with_faults(plan)
    assert error is None
    assert weight.grad is not None
    assert weight.grad is not given
    assert weight.grad.tolist() == TOTAL


@pytest.mark.parametrize("kinds", [("interrupt",), ("boom",), ("oom", "boom"), ("boom", "oom")])
def test_other_error_during_copy_is_raised_after_commit(kinds: tuple[str, ...]) -> None:
    plan = [Fault(FIRST_COPY + index, kind=kind) for index, kind in enumerate(kinds)]
    weight, _, error = commit_with_faults(plan)
    assert isinstance(error, KeyboardInterrupt | Boom)
    assert "the batch was committed" in error.__notes__[0]
    assert weight.grad is not None
    assert weight.grad.tolist() == TOTAL


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_watched_backward_leaves_no_table_of_hooks(is_hooked: bool) -> None:
    weight, seen = nn.Parameter(torch.ones(2)), list[Tensor]()
    if is_hooked:
        weight.register_post_accumulate_grad_hook(seen.append)
    for _ in range(2):
        with GradientWrites([weight]):
            weight.sum().backward()
    assert (weight._post_accumulate_grad_hooks is not None) is is_hooked
    weight.register_post_accumulate_grad_hook(seen.append)
    weight.sum().backward()
    assert len(seen) == (4 if is_hooked else 1)
