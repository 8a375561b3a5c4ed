"""Capture reports state that it cannot restore, and handles unusual objects."""

import contextvars
import enum
import functools
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from automicro.state import capture as module
from automicro.state.capture import capture
from tests.state.undone import Box, count

Colour = enum.Enum("Colour", {"RED": [1]})


def numbers():
    yield 1


def nested(depth):
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


# fmt: off
STRANGE: dict[str, Any] = {
    "thread": lambda: threading.Thread(target=numbers),
    "generator": numbers,
    "enum": lambda: Colour.RED,
    "library": lambda: torch,
    "class": lambda: Box,
    "error": lambda: ValueError(1),
    "weak reference": lambda: weakref.ref(Box),
    "meta tensor": lambda: torch.ones(2, device="meta"),
    "uninitialized": lambda: nn.parameter.UninitializedBuffer(),
    "unfinished module": lambda: nn.Linear.__new__(nn.Linear),
    "object array": lambda: np.array([Box(), None], dtype=object),
    "5000 lists": lambda: nested(5000),
    "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.ones(1))]),
    "lru_cache": lambda: functools.lru_cache(numbers),
    "ContextVar": lambda: contextvars.ContextVar("a"),
    "thread-local": threading.local,
    "SystemRandom": random.SystemRandom,
}
# fmt: on


@pytest.mark.parametrize("kind", STRANGE)
def test_unusual_values_do_not_break_capture(kind):
    model: Any = nn.Linear(1, 1)
    model.strange, model.n = strange, _ = STRANGE[kind](), 0
    captured = capture({"model": model})
    for _ in range(3):
        model.strange, model.n = None, 1
        assert len(list(captured.changed())) == 2
        captured.put_back()
        assert (model.strange is strange, model.n) == (True, 0)
        captured = captured.again()


def test_objects_in_array_are_restored():
    captured = capture({"kept": (kept := np.array([Box(n=0)]))})
    count(kept[0])
    captured.put_back()
    assert kept[0].n == 0


NAMED = {
    "iterator": lambda: iter([1, 2]),
    "large array": lambda: np.zeros(3_000_000),
    "list of 2,000,000": lambda: [0] * 2_000_000,
    "list of 20,000 tensors": lambda: [torch.ones(1)] * 20_000,
}


@pytest.mark.parametrize("kind", NAMED)
def test_unrestorable_state_is_reported(kind):
    model: Any = nn.Linear(1, 1)
    model.kept = kept = NAMED[kind]()
    captured = capture({"model": model})
    for each in (captured, captured.again()):
        assert any(value is kept for value, why in each.left_out if why)


def test_uncaptured_state_keeps_its_changes():
    model: Any = nn.Linear(1, 1)
    model.local, model.context = threading.local(), contextvars.ContextVar("n", default=Box(n=0))  # noqa: B039
    model.cached = functools.lru_cache(str)
    captured = capture({"model": model})
    model.local.n = model.cached(1)
    count(model.context.get())
    captured.put_back()
    assert (model.local.n, model.context.get().n, model.cached.cache_info().currsize) == ("1", 1, 1)


class Table(dict):
    def append(self, value):
        self[len(self)] = value


@pytest.mark.parametrize(("kind", "make"), [(list, lambda: torch.ones(1)), (Table, dict)])
def test_long_list_or_dict_is_restored(kind, make):
    model: Any = nn.Linear(1, 1)
    model.history = kind((n, make()) for n in range(20_000))
    captured = capture({"model": model})
    for length in (20_000, 20_001):
        model.history.append(make())
        model.history[length // 2] = None
        assert any(path.startswith("model.history") for path in captured.changed())
        captured.put_back()
        assert len(model.history) == length
        assert model.history[length // 2] is not None
        model.history.append(make())
        captured = captured.again()


def test_state_beyond_capture_limit_is_reported_and_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_VALUES", 50)
    model: Any = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    model.first = [1]
    for each in model:
        each.seen = [1]
        each.register_forward_hook(len)
    captured = capture({"model": model})
    assert captured.left_out
    assert not capture({"given": [[1]] * 60}).left_out
    model.first.append(1)
    captured.put_back()
    assert model.first == [1]
    assert all(each.seen == [1] and len(each._forward_hooks) == 1 for each in model)
    assert all(each.weight is not None for each in model)


def test_skipped_objects_keep_their_changes():
    model: Any = nn.Linear(1, 1)
    model.mine, model.box, model.other = [], Box(n=0), []
    captured = capture({"model": model}, skip=[model.mine, Box])
    for length in (1, 2):
        model.mine.append(1)
        model.other.append(1)
        model.box.n = length
        captured.put_back()
        assert (len(model.mine), model.other, model.box.n) == (length, [], length)
        captured = captured.again()
