"""Roots of a host's: an opaque object that is given by name, apart from what is skipped."""

import gc
import threading
import weakref
from typing import Any

import pytest

from automicro.errors import StateWarning
from automicro.state.part import State


class Host(threading.Thread):
    """Opaque by its kind, as trainers are by their package."""

    data: list[int]
    told: list[Any]
    count: int


def test_the_attributes_of_a_host_that_is_given_by_name_come_back_and_what_is_skipped_stays():
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


def test_what_of_a_host_cannot_be_put_back_is_named():
    host = Host()
    host.told = [iter([1])]
    state = State(lambda: {"Host": host})
    state.begin()
    with pytest.warns(StateWarning, match=r"^Host\.told\[0\] \(of type list_iterator\): left as"):
        state.roll_back()


@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_a_host_that_holds_its_state_is_free_without_the_garbage_collector(end: str):
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
