"""Roots given by hosts: opaque objects by name, except skipped ones."""

import contextlib
import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch

from automicro.errors import StateWarning
from automicro.state import part
from automicro.state.capture import capture
from automicro.state.part import Replay, State
from tests.state.undone import Box, count, picture
from tests.torture.engine.faults import Boom, Fault, FaultMode
from tests.torture.subjects import StateOfEveryKind


class Meter(Box):
    n: int
    mean: Any


class Host(threading.Thread):
    """An object that is opaque because of its class, as trainers are because of their package."""

    data: list[int]
    told: list[Any]
    count: int


def test_host_attributes_are_restored_except_skipped_ones():
    host = Host()
    host.data, host.told, host.count = [1], [{"n": [2]}], 3
    state = State(lambda: {"host": host}, skip=lambda: [host.data])
    state.begin()
    host.data.append(4)
    host.told[0]["n"].append(5)
    host.count, host.late = 6, 7  # type: ignore[attr-defined]
    state.roll_back()
    assert (host.data, host.told, host.count) == ([1, 4], [{"n": [2]}], 3)
    assert not hasattr(host, "late")


def test_unrestorable_host_state_causes_warning():
    host = Host()
    host.told = [iter([1])]
    state = State(lambda: {"Host": host})
    state.begin()
    with pytest.warns(StateWarning, match=r"^Host\.told\[0\] \(of type list_iterator\): left as"):
        state.roll_back()


@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_host_holding_its_state_is_freed_without_gc(end: str):
    host: Any = Host()
    gone = weakref.ref(host)
    host.state = state = State(lambda: {"host": gone()}, is_held=False)
    gc.disable()
    try:
        state.begin()
        getattr(state, end)()
        del host, state
        assert gone() is None
    finally:
        gc.enable()


def test_only_replaced_roots_are_walked_again(monkeypatch):
    walks, held = list[Any](), [Meter(n=0, mean=torch.ones(1))]

    def walked(*given, **options):
        walks.append(given)
        return capture(*given, **options)

    monkeypatch.setattr(part, "capture", walked)
    state = State(lambda: {"it": held[0]})
    for number in (1, 1, 1, 2):
        held[0] = Meter(n=0, mean=torch.ones(1)) if number == 2 else held[0]
        state.begin()
        count(held[0])
        state.commit()
        assert len(walks) == number
        gone, held[0].mean = weakref.ref(held[0].mean), torch.ones(1)
        assert gone() is None
    state.begin()
    count(held[0])
    state.roll_back()
    assert held[0].n == 1


def test_replay_sees_earlier_state_and_leaves_current_state():
    replay, told = Replay({"told": (held := [])}), list[Any]()
    owner = Box()
    before = replay.take(owner)
    held.append(1)
    for _ in range(2):
        with replay.as_it_stood(before):
            told.append(list(held))
            held.append(2)
    assert (told, held) == ([[], []], [1])
    with replay.leaving_no_trace():
        held.append(3)
    undone = replay.undone()
    undone.begin()
    held.append(4)
    undone.roll_back()
    undone.begin()
    held.append(5)
    undone.commit()
    undone.roll_back()  # the transaction is over
    assert held == [1, 5]
    gone = weakref.ref(before)
    del owner, before
    assert replay.take() is gone()  # released, and reused


@pytest.mark.parametrize("kind", ["oom", "boom", "interrupt"])
def test_interrupted_rollback_finishes_before_raising(kind):
    model = StateOfEveryKind()
    state = State(lambda: {"model": model})

    def rolled_back(plan):
        before = picture(model)
        state.begin()
        model(torch.zeros(2, 5))
        with contextlib.suppress(Boom, KeyboardInterrupt), FaultMode(plan) as mode:
            state.roll_back()
            assert kind == "oom" or not mode.raised_at
        assert before == picture(model)
        return mode

    number = rolled_back([]).num_operations
    assert number >= 10
    for index, after in itertools.product(range(number), (False, True)):
        assert rolled_back([Fault(index, after, kind)]).raised_at == [index]
