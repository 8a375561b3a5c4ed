"""Values of every kind with a change to each, and places that can hold them."""

import array
import collections
import dataclasses
import functools
import random
import sys
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.state.undone import Box, count, quantized


class Called(Box):
    n: int

    def __call__(self, number=1):
        self.n += number


class Slotted:
    __slots__ = ("__hidden", "late", "n")

    def __init__(self):
        self.n, self.__hidden = 0, [0]

    def hide(self):
        self.__hidden[0] += 1


class SlottedMore(Slotted):
    __slots__ = ("__dict__",)


class Pair(NamedTuple):
    one: list
    other: int


class Mine(list):
    pass


@dataclasses.dataclass
class Data:
    n: int = 0


class Caching:
    @functools.cached_property
    def table(self):
        return []


def add(held, key=0, number=1):
    held[key] = held[key] + number


def twice(box):
    box.other = box
    return box


def renew(held):
    largest = max(held)
    held.remove(largest)
    held.add(largest + 1)


def turn(table):
    first = next(iter(table))
    table[first] = table.pop(first)


KEY = Box()


def less(owner):
    count(owner, number=-1)


# By name: a value, a change to it, and optionally how to undo and read the change.
# fmt: off
VALUES: dict[str, tuple[Any, ...]] = {
    "list": (list, lambda v: v.append(len(v)), lambda v: v.pop()),
    "list of lists": (lambda: [[[]]], lambda v: v[0][0].append(1), lambda v: v[0][0].pop()),
    "list of 300": (lambda: [0] * 300, add, lambda v: add(v, 0, -1)),
    "tensors of a list": (lambda: [torch.ones(1)], lambda v: v[0].add_(1), lambda v: v[0].sub_(1)),
    "attribute of a derived list": (Mine, count, less),
    "dict": (lambda: {"a": 0}, lambda v: add(v, "a"), lambda v: add(v, "a", -1)),
    "dict of tensors": (lambda: {"a": torch.ones(1)}, lambda v: v["a"].add_(1)),
    "dict turned round": (lambda: {"a": 0, "b": 1, "c": 2}, turn),
    "defaultdict": (lambda: collections.defaultdict(list), lambda v: v["a"].append(1), lambda v: v.clear()),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end(next(iter(v))), lambda v: v.move_to_end(next(iter(v)))),
    "UserDict": (lambda: collections.UserDict(a=0), lambda v: add(v, "a")),
    "ChainMap": (lambda: collections.ChainMap({"a": 0}), lambda v: add(v, "a")),
    "set of one size": (lambda: {1, 2}, renew),
    "deque": (lambda: collections.deque([1, 2, 3], 3), lambda v: v.append(v[-1] + 1), lambda v: v.appendleft(v[0] - 1)),
    "tensor and a view of it": (lambda: (lambda t: (t, t[::2]))(torch.zeros(6)), lambda v: v[1].add_(1), lambda v: v[1].sub_(1)),
    "sparse tensor": (lambda: [torch.eye(3).to_sparse()], lambda v: v[0].mul_(2), lambda v: v[0].div_(2)),
    "tuple of lists": (lambda: ([], 1), lambda v: v[0].append(1), lambda v: v[0].pop()),
    "NamedTuple": (lambda: Pair([], 1), lambda v: v.one.append(1), lambda v: v.one.pop()),
    "frozenset": (lambda: frozenset([Called(n=0)]), lambda v: next(iter(v))()),
    "array": (lambda: np.zeros(9), add, lambda v: add(v, 0, -1)),
    "array that holds others": (lambda: np.array([Box(), None]), lambda v: v.__setitem__(1, Box(n=v[1]))),
    "array that is resized": (lambda: np.zeros(3), lambda v: v.resize(len(v) + 1, refcheck=False)),
    "array of 300 KiB": (lambda: np.zeros(40_000), add, lambda v: add(v, 0, -1)),
    "bytearray that grows": (bytearray, lambda v: v.append(1)),
    "array.array": (lambda: array.array("i", [0]), add, lambda v: add(v, 0, -1)),
    "tensor": (lambda: torch.zeros(2), lambda v: v.add_(1), lambda v: v.sub_(1)),
    "tensor with NaN": (lambda: torch.tensor([0.0, torch.nan]), lambda v: v[:1].add_(1)),
    "bfloat16": (lambda: torch.zeros(2, dtype=torch.bfloat16), lambda v: v.add_(1)),
    "quantized": (quantized, lambda v: v.copy_(v.dequantize() + 1)),
    "resized tensor": (lambda: torch.zeros(1), lambda v: v.resize_(len(v) + 1).fill_(len(v))),
    "tensor of a megabyte": (lambda: torch.zeros(2**18), lambda v: v[-1:].add_(1), lambda v: v[-1:].sub_(1), lambda v: v[-1].item()),
    "attribute of a tensor": (lambda: torch.zeros(2), count, less),
    "object": (lambda: Box(n=0), count, less),
    "objects in a circle": (lambda: twice(Box(n=0)), lambda v: count(v.other)),
    "attribute that comes": (Box, lambda v: setattr(v, f"new{len(vars(v))}", 1)),
    "attribute that goes": (lambda: Box(**dict.fromkeys(map(chr, range(97, 400)), 1)), lambda v: v.__dict__.popitem()),
    "class of an object": (lambda: Box(n=0), lambda v: setattr(v, "__class__", Called if type(v) is Box else Box), lambda v: setattr(v, "__class__", Box)),
    "dataclass": (Data, count, less),
    "slot": (Slotted, count, less),
    "slot that is set late": (Slotted, lambda v: count(v, "late")),
    "slot of a private name": (Slotted, Slotted.hide),
    "slots and a dict": (SlottedMore, lambda v: count(v, "any")),
    "cached property": (Caching, lambda v: v.table.append(1), lambda v: v.__dict__.clear()),
    "bound method": (lambda: Called(n=0).__call__, lambda v: v(), lambda v: v(-1)),
    "partial": (lambda: functools.partial(add, {"a": 0}, key="a"), lambda v: v(), lambda v: v(number=-1)),
    "WeakKeyDictionary": (lambda: weakref.WeakKeyDictionary({KEY: 0}), lambda v: add(v, KEY), lambda v: add(v, KEY, -1), lambda v: [*v.values()]),
    "torch's generator": (torch.Generator, lambda v: torch.rand(1, generator=v)),
    "NumPy's generator": (lambda: np.random.default_rng(3), lambda v: v.random()),
    "NumPy's RandomState": (lambda: np.random.RandomState(3), lambda v: v.normal()),
    "Python's generator": (lambda: random.Random(3), lambda v: v.gauss(0, 1)),
}
# fmt: on

KEPT_GLOBALLY: Any = None
USERS = "automicro_tests_of_a_user"


def keeping(value, owner, name="kept"):
    setattr(owner, name, value)
    return owner


def closed(kept, wrap=lambda function: function):
    function: Any = lambda: kept  # noqa: E731
    return wrap(function), function.__closure__[0], "cell_contents"


def named(theirs):
    return (lambda: theirs.kept), theirs


def in_a_global(value):
    global KEPT_GLOBALLY
    KEPT_GLOBALLY = value
    return (lambda: KEPT_GLOBALLY), sys.modules[__name__], "KEPT_GLOBALLY"


def in_an_import(value):
    def function():
        import automicro_tests_of_a_user  # type: ignore[import-not-found]

        return automicro_tests_of_a_user.kept

    sys.modules[USERS] = theirs = keeping(value, types.ModuleType(USERS))
    return function, theirs


def in_a_hook(register, value):
    function, cell, name = closed(value)
    model: Any = nn.Sequential(nn.BatchNorm1d(1))
    owner = model[0].weight if hasattr(Tensor, register) else model[0]
    getattr(owner, register)(lambda *_: function() and None)
    return model, cell, name


def in_an_attribute_of(name, value):
    model: Any = nn.Sequential(nn.BatchNorm1d(1))
    return model, keeping(value, getattr(model[0], name))


HOOKED = [
    "forward_hook",
    "forward_pre_hook",
    "full_backward_hook",
    "full_backward_pre_hook",
    "hook",
]
# By name: the captured value, its owner, and its name if that is not `kept`.
# fmt: off
PLACES: dict[str, Any] = {
    "attribute": lambda v: ((o := keeping(v, nn.Linear(1, 1))), o),
    "attribute of an object": lambda v: (keeping([{"a": (o := keeping(v, Box()))}], nn.Linear(1, 1), "held"), o),
    "slot": lambda v: (closed(o := keeping(v, Slotted(), "n"))[0], o, "n"),
    "closure": closed,
    "closure of a closure": lambda v: closed(v, lambda function: lambda: function()),
    "what is decorated": lambda v: closed(v, torch.no_grad()),
    "default": lambda v: ((f := lambda kept=v: kept), f, "__defaults__"),
    "keyword default": lambda v: ((f := lambda *, kept=v: kept), f, "__kwdefaults__"),
    "attribute of a function": lambda v: ((f := keeping(v, lambda: None)), f),
    "partial": lambda v: (functools.partial(len, o := keeping(v, Box())), o),
    "owner of a method": lambda v: ((o := keeping(v, Called())).__call__, o),
    "global": in_a_global,
    "module of Python": lambda v: named(keeping(v, types.ModuleType(USERS))),
    "module that a function imports": in_an_import,
    "class": lambda v: ((o := type("Layer", (nn.ReLU,), {"kept": v}))(), o),
    "class of an object": lambda v: (keeping([(o := type("Kept", (), {"kept": v}))()], nn.Linear(1, 1), "held"), o),
    "class above": lambda v: (nn.Sequential(type("Layer", (o := type("Base", (nn.Module,), {"kept": v}),), {})()), o),
    "class that code names": lambda v: (closed(o := type("Registry", (), {"kept": v}))[0], o),
    **{each: functools.partial(in_an_attribute_of, each) for each in ("weight", "running_mean")},
    **{each: functools.partial(in_a_hook, f"register_{each}") for each in [*HOOKED, "post_accumulate_grad_hook"]},
}
# fmt: on
