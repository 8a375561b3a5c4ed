"""Gradients of earlier batches through failed and committed attempts."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro.transaction.gradients import Gradients
from automicro.transaction.transaction import Transaction
from automicro.transaction.writes import GradientWrites
from tests.torture.engine.faults import Boom, Fault, FaultMode

EARLIER: dict[str, Any] = {
    "none": lambda: None,
    "numbers": lambda: torch.full((3,), 0.5),
    "view of a bucket": lambda: torch.arange(10.0)[2:5],
}


def begun(earlier: Any, *more: Any) -> tuple[Any, Any, Transaction]:
    weight: Any = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    weight.grad = given = earlier
    transaction = Transaction([Gradients({id(each): each for each in (weight, *more)})])
    transaction.begin()
    assert weight.grad is None
    return weight, given, transaction


@pytest.mark.parametrize("earlier", EARLIER)
def test_commit_accumulates_into_same_tensor(earlier):
    weight, given, transaction = begun(EARLIER[earlier]())
    expected = weight.detach() * 2 + (0 if given is None else given)
    weight.square().sum().backward()
    transaction.commit()
    assert given is None or weight.grad is given
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("reached", [True, False])
def test_rollback_restores_same_tensor(earlier, reached):
    weight, given, transaction = begun(EARLIER[earlier]())
    if reached:
        weight.square().sum().backward()
    transaction.roll_back()
    assert weight.grad is given
    assert given is None or torch.equal(given, EARLIER[earlier]())


def test_parameter_not_reached_by_batch_keeps_its_gradient():
    weight, _, transaction = begun(torch.full((3,), 0.5))
    transaction.commit()
    assert weight.grad.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("size", [6, 3])
def test_overwritten_gradient_bucket_is_restored(size):
    bucket = torch.ones(size)
    weight, _, transaction = begun(bucket[:3])
    bucket.zero_()
    transaction.roll_back()
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_sparse_gradients_are_accumulated():
    embedding: Any = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    given: Any = embedding.weight.grad
    transaction = Transaction([Gradients({id(embedding.weight): embedding.weight})])
    transaction.begin()
    embedding(torch.tensor([1, 3])).sum().backward()
    transaction.commit()
    assert embedding.weight.grad is given
    assert given.to_dense().sum(1).tolist() == [0.0, 4.0, 0.0, 2.0]


FIRST_COPY = 2  # after the addition of two totals


def commit_with_faults(*plan: Fault) -> tuple[bool, Any]:
    """Return whether the gradient is still the same tensor, and the error."""
    other, error = nn.Parameter(torch.ones(3)), None
    other.grad = torch.ones(3)
    weight, given, transaction = begun(torch.full((3,), 0.5), other)
    (weight.square().sum() + other.sum()).backward()
    try:
        with FaultMode(plan):
            transaction.commit()
    except BaseException as raised:
        error = raised
    assert weight.grad.tolist() == [2.5, 4.5, 6.5]
    return weight.grad is given, error


@pytest.mark.parametrize("after", [False, True])
def test_copy_is_retried_after_one_oom(after):
    assert commit_with_faults(Fault(FIRST_COPY, after)) == (True, None)


def test_sums_stay_in_new_tensors_if_copies_do_not_fit():
    assert commit_with_faults(Fault(FIRST_COPY), Fault(FIRST_COPY + 1)) == (False, None)


@pytest.mark.parametrize("kinds", [("interrupt",), ("oom", "boom"), ("boom", "oom")])
def test_other_error_during_copy_is_raised_after_commit(kinds):
    plan = [Fault(FIRST_COPY + index, kind=kind) for index, kind in enumerate(kinds)]
    _, error = commit_with_faults(*plan)
    assert isinstance(error, KeyboardInterrupt | Boom)
    assert "the batch was committed" in error.__notes__[0]


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_watched_backward_leaves_no_table_of_hooks(is_hooked):
    weight, seen = nn.Parameter(torch.ones(2)), list[Any]()
    if is_hooked:
        weight.register_post_accumulate_grad_hook(seen.append)
    for _ in range(2):
        with GradientWrites([weight]):
            weight.sum().backward()
    assert (weight._post_accumulate_grad_hooks is not None) is is_hooked
    weight.register_post_accumulate_grad_hook(seen.append)
    weight.sum().backward()
    assert len(seen) == (4 if is_hooked else 1)
