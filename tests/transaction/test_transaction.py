"""Guarantees of a transaction, and all its parts except gradients."""

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from automicro import RollbackError
from automicro.modules import ModuleIndex
from automicro.state.part import PART, State
from automicro.transaction.parameters import Parameters
from automicro.transaction.transaction import Transaction


def two_parts(**fails: BaseException) -> tuple[Transaction, list[str]]:
    log: list[str] = []

    def act(called):
        log.append(called.replace("_", " ", 1))
        if called in fails:
            raise fails.pop(called)

    def part(name) -> Any:
        calls = {each: functools.partial(act, f"{name}_{each}") for each in PART}
        return types.SimpleNamespace(**calls)

    return Transaction([part("a"), part("b")]), log


def test_all_parts_prepare_before_any_commits():
    transaction, log = two_parts()
    transaction.begin()
    transaction.commit()
    assert log == ["a begin", "b begin", "a prepare", "b prepare", "a commit", "b commit"]


def test_failed_prepare_rolls_back_all_parts():
    transaction, log = two_parts(b_prepare=MemoryError())
    transaction.begin()
    with pytest.raises(MemoryError):
        transaction.commit()
    transaction.roll_back()
    assert "a commit" not in log
    assert log[-2:] == ["b roll_back", "a roll_back"]


def test_part_that_fails_to_begin_is_rolled_back():
    transaction, log = two_parts(a_begin=MemoryError())
    with pytest.raises(MemoryError):
        transaction.begin()
    transaction.roll_back()
    assert log == ["a begin", "a roll_back"]


def test_interrupt_during_commit_is_raised_after_commit():
    interrupt = KeyboardInterrupt()
    transaction, log = two_parts(a_commit=interrupt)
    transaction.begin()
    with pytest.raises(KeyboardInterrupt) as caught:
        transaction.commit()
    assert caught.value is interrupt
    assert "the batch was committed" in caught.value.__notes__[0]
    transaction.roll_back()
    assert log[-1] == "b commit"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ValueError()])
def test_rollback_continues_after_one_part_fails(error):
    transaction, log = two_parts(b_roll_back=error)
    transaction.begin()
    with pytest.raises(type(error)) as caught:
        transaction.roll_back()
    assert caught.value is error
    assert log[-2:] == ["b roll_back", "a roll_back"]
    transaction.roll_back()  # retries only the failed part
    assert log[-1] == "b roll_back"
    assert log.count("a roll_back") == 1


@pytest.mark.parametrize("writes", [False, True])
def test_restoring_buffer_does_not_count_as_change(writes):
    """Part of an attempt may be rolled back separately before the attempt looks for changes."""
    module = nn.Module()
    module.register_buffer("mean", mean := torch.zeros(3))
    index = ModuleIndex([module])
    attempt, part = State(lambda: {"": module}), State(lambda: {"": module})
    moved = functools.partial(attempt.changed_tensors, by_content=False)
    attempt.begin()
    part.begin()
    if writes:
        mean.data.fill_(4)
    part.roll_back()
    assert index.changed_buffers(moved()) == []
    mean.add_(1)
    assert index.changed_buffers(moved()) == ["mean"]


def test_changed_parameters_raise_rollback_error():
    weight = nn.Parameter(torch.ones(2))
    parameters = Parameters([weight])
    parameters.begin()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RollbackError, match="changed parameters"):
        parameters.roll_back()
