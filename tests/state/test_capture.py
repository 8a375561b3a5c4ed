"""Everything that a forward may change comes back, whatever it is, into the same objects."""

import array
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import importlib
import io
import itertools
import random
import sys
import threading
import types
import typing
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from automicro.errors import RollbackError
from automicro.state import capture as module
from automicro.state.capture import capture
from tests.state.picture import picture


class Box:
    def __init__(self, **values):
        vars(self).update(values)


class Called(Box):
    def __call__(self):
        self.n += 1


class Slotted:
    __slots__ = ("__hidden", "late", "n")

    def __init__(self):
        self.n, self.__hidden = 0, [0]

    def hide(self):
        self.__hidden[0] += 1


class SlottedMore(Slotted):
    __slots__ = ("__dict__",)


@dataclasses.dataclass
class Data:
    n: int = 0
    many: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    many: list


class Pair(typing.NamedTuple):
    one: list
    other: int


class Mine(list):
    pass


class Caching:
    @functools.cached_property
    def table(self):
        return [1]


def increment(held, key=0):
    held[key] = held[key] + 1


def count(owner, name="n"):
    setattr(owner, name, getattr(owner, name, 0) + 1)


def linked():
    one, other = Box(n=0), Box(n=0)
    one.other, other.other = other, one
    return one


def renew(held):
    """Another member in place of one, at the same length."""
    largest = max(held)
    held.remove(largest)
    held.add(largest + 1)


def turn(table):
    """The same entries in another order."""
    first = next(iter(table))
    table[first] = table.pop(first)


def quantized():
    return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


def undone(roots, change, see=list, *, times=3, skip=()):
    """A change shows, comes back, comes back again, and is there to stay where it is committed."""
    captured = capture(roots, skip=skip)
    shown = []
    for _ in range(times):
        assert list(captured.changed()) == []
        before = picture(see())
        for _ in range(2):
            change()
            assert picture(see()) != before, "the test's change changes nothing"
            shown = list(captured.changed())
            assert shown, "the change does not show"
            captured.put_back()
            assert picture(see()) == before
            assert list(captured.changed()) == []
        captured.put_back()
        assert picture(see()) == before
        change()
        captured = captured.again()
    return shown


# ---------------------------------------------------------------- values

KEYS = [Box(), Box()]

# What an attribute holds, and a change to it.
VALUES = {
    "list": (list, lambda v: v.append(len(v))),
    "list of lists": (lambda: [[[]]], lambda v: v[0][0].append(1)),
    "list of 300": (lambda: [0] * 300, increment),
    "list turned round": (lambda: [1, 2, 3], lambda v: v.reverse()),
    "list of tensors": (lambda: [torch.ones(1)], lambda v: v.append(v[-1] + 1)),
    "tensors of a list": (lambda: [torch.ones(1)], lambda v: v[0].add_(1)),
    "list of objects": (lambda: [Box(n=0)], lambda v: v.append(Box(n=len(v)))),
    "list of a class of its own": (Mine, lambda v: v.append(1)),
    "attribute of such a list": (Mine, count),
    "dict": (lambda: {"a": 0}, lambda v: increment(v, "a")),
    "dict in dicts": (lambda: {"a": {"b": {"c": 0}}}, lambda v: increment(v["a"]["b"], "c")),
    "dict that grows": (dict, lambda v: v.update({f"{len(v)}": 1})),
    "dict of numbers": (lambda: {0: 1}, lambda v: v.update({len(v): 1})),
    "dict of tensors": (lambda: {"a": torch.ones(1)}, lambda v: v["a"].add_(1)),
    "dict of other tensors": (lambda: {"a": torch.ones(1)}, lambda v: v.update(a=v["a"] + 1)),
    "dict turned round": (lambda: {"a": 0, "b": 1, "c": 2}, turn),
    "deleted key": (lambda: dict.fromkeys("abcdefghij"), lambda v: v.popitem()),
    "Counter": (collections.Counter, lambda v: increment(v, "a")),
    "defaultdict": (lambda: collections.defaultdict(list), lambda v: v["a"].append(1)),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda v: v.move_to_end(next(iter(v))),
    ),
    "UserDict": (lambda: collections.UserDict(a=0), lambda v: increment(v, "a")),
    "ChainMap": (lambda: collections.ChainMap({"a": 0}), lambda v: increment(v, "a")),
    "set that grows": (set, lambda v: v.add(len(v))),
    "set of one size": (lambda: {1, 2}, renew),
    "deque": (lambda: collections.deque([0], 1), lambda v: v.append(v[0] + 1)),
    "deque that is turned": (lambda: collections.deque([0, 1, 2]), lambda v: v.rotate()),
    "tuple of lists": (lambda: ([], 1), lambda v: v[0].append(1)),
    "NamedTuple": (lambda: Pair([], 1), lambda v: v.one.append(1)),
    "frozenset": (lambda: frozenset([Called(n=0)]), lambda v: next(iter(v))()),
    "array": (lambda: np.zeros(9), increment),
    "array of 0 dimensions": (lambda: np.zeros(()), lambda v: v.__iadd__(1)),
    "structured array": (lambda: np.zeros(3, [("a", int)]), lambda v: increment(v["a"])),
    "view of an array": (lambda: np.zeros((3, 3))[:, 1], increment),
    "array's NumPy number": (lambda: Box(n=np.int64(0)), count),
    "bytearray": (lambda: bytearray(4), increment),
    "bytearray that grows": (bytearray, lambda v: v.append(1)),
    "array.array": (lambda: array.array("i", [0]), increment),
    "tensor": (lambda: torch.zeros(2), lambda v: v.add_(1)),
    "tensor past its version": (lambda: torch.zeros(2), lambda v: v.data.add_(1)),
    "tensor with NaN": (lambda: torch.tensor([0.0, torch.nan]), lambda v: v[:1].add_(1)),
    "-0.0": (lambda: torch.zeros(1), lambda v: v.neg_()),
    "bool tensor": (lambda: torch.zeros(2, dtype=torch.bool), lambda v: v.logical_not_()),
    "bfloat16": (lambda: torch.zeros(2, dtype=torch.bfloat16), lambda v: v.add_(1)),
    "complex": (lambda: torch.zeros(2, dtype=torch.cfloat), lambda v: v.add_(1j)),
    "quantized": (quantized, lambda v: v.copy_(v.dequantize() + 1)),
    "resized tensor": (lambda: torch.zeros(1), lambda v: v.resize_(len(v) + 1).fill_(len(v))),
    "tensor of a megabyte": (lambda: torch.zeros(2**18), lambda v: v[-1:].add_(1)),
    "attribute of a tensor": (lambda: torch.zeros(2), count),
    "object": (lambda: Box(n=0), count),
    "object that is called": (lambda: Called(n=0), lambda v: v()),
    "object in objects": (lambda: Box(a=Box(b=[Box(n=0)])), lambda v: count(v.a.b[0])),
    "objects in a circle": (linked, lambda v: count(v.other)),
    "attribute that comes": (Box, lambda v: setattr(v, f"new{len(vars(v))}", 1)),
    "attribute that goes": (lambda: Box(a=1, b=2, c=3, d=4), lambda v: vars(v).popitem()),
    "class of an object": (
        lambda: Box(n=0),
        lambda v: setattr(v, "__class__", Called if type(v) is Box else Box),
    ),
    "namespace": (lambda: types.SimpleNamespace(n=0), count),
    "dataclass": (Data, count),
    "list in a dataclass": (Data, lambda v: v.many.append(1)),
    "frozen dataclass": (lambda: Frozen([]), lambda v: v.many.append(1)),
    "slot": (Slotted, count),
    "slot that is set late": (Slotted, lambda v: count(v, "late")),
    "slot of a private name": (Slotted, Slotted.hide),
    "slots and a dict": (SlottedMore, lambda v: count(v, "any")),
    "bound method": (lambda: Called(n=0).__call__, lambda v: v()),
    "partial": (lambda: functools.partial(increment, {"a": 0}, key="a"), lambda v: v()),
    "WeakKeyDictionary": (
        weakref.WeakKeyDictionary,
        lambda v: v.__setitem__(KEYS[0], v.get(KEYS[0], 0) + 1),
    ),
    "torch's generator": (torch.Generator, lambda v: torch.rand(1, generator=v)),
    "NumPy's generator": (lambda: np.random.default_rng(3), lambda v: v.random()),
    "NumPy's MT19937": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda v: v.random(),
    ),
    "NumPy's RandomState": (lambda: np.random.RandomState(3), lambda v: v.normal()),
    "Python's generator": (lambda: random.Random(3), lambda v: v.gauss(0, 1)),
}


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", VALUES)
def test_what_an_attribute_holds_comes_back(kind):
    make, change = VALUES[kind]
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].kept = kept = make()
    shown = undone({"model": model}, lambda: change(model[0].kept), lambda: model[0].kept)
    assert all(path.startswith("model.0.kept") for path in shown), shown
    assert model[0].kept is kept


def test_cached_properties_and_methods_of_lists_come_back():
    model = nn.Linear(1, 1)
    model.kept, seen = Caching(), []
    model.add = seen.append
    captured = capture({"model": model})
    assert model.kept.table == [1]
    model.add(1)
    captured.put_back()
    assert (vars(model.kept), seen) == ({}, [])


# ---------------------------------------------------------------- places

KEPT_GLOBALLY: typing.Any = None


def imported(name="automicro_tests_of_a_user"):
    sys.modules[name] = found = types.ModuleType(name)
    return found


def in_an_attribute(value):
    model = nn.Linear(1, 1)
    model.kept = value
    return model, lambda: model.kept, lambda new: setattr(model, "kept", new)


def in_an_objects_attribute(value):
    model = nn.Linear(1, 1)
    model.held = [{"a": Box(kept=value)}]
    box = model.held[0]["a"]
    return model, lambda: box.kept, lambda new: setattr(box, "kept", new)


def in_a_slot(value):
    box = Slotted()
    box.n = value
    return lambda: box, lambda: box.n, lambda new: setattr(box, "n", new)


def in_a_closure(kept):
    def see():
        return kept

    def put(new):
        nonlocal kept
        kept = new

    return see, see, put


def in_a_closure_of_a_closure(kept):
    see, _, put = in_a_closure(kept)
    return lambda: see(), see, put


def in_a_default(value):
    def function(kept=value):
        return kept

    return function, lambda: function.__defaults__[0], None


def in_a_keyword_default(value):
    def function(*, kept=value):
        return kept

    def put(new):
        function.__kwdefaults__["kept"] = new

    return function, lambda: function.__kwdefaults__["kept"], put


def in_an_attribute_of_a_function(value):
    def function():
        return function.kept

    function.kept = value
    return function, function, lambda new: setattr(function, "kept", new)


def in_a_partial(value):
    held = [value]
    return functools.partial(len, held), lambda: held[0], lambda new: held.__setitem__(0, new)


def in_the_owner_of_a_method(value):
    box = Called(kept=value)
    return box.__call__, lambda: box.kept, lambda new: setattr(box, "kept", new)


def in_what_is_decorated(kept):
    see, _, put = in_a_closure(kept)
    return torch.no_grad()(see), see, put


def in_a_global(value):
    def put(new):
        global KEPT_GLOBALLY
        KEPT_GLOBALLY = new

    put(value)
    return lambda: KEPT_GLOBALLY, lambda: KEPT_GLOBALLY, put


def in_a_module_of_python(value):
    theirs = imported()
    theirs.kept = value
    return lambda: theirs.kept, lambda: theirs.kept, lambda new: setattr(theirs, "kept", new)


def in_a_module_that_a_function_imports(value):
    theirs = imported()
    theirs.kept = value

    def function():
        import automicro_tests_of_a_user  # type: ignore[import-not-found]

        return automicro_tests_of_a_user.kept

    return function, function, lambda new: setattr(theirs, "kept", new)


def in_a_class(value):
    class Layer(nn.Linear):
        kept = value

    return Layer(1, 1), lambda: Layer.kept, lambda new: setattr(Layer, "kept", new)


def in_a_class_above(value):
    class Base(nn.Module):
        kept = value

    class Layer(Base):
        pass

    return nn.Sequential(Layer()), lambda: Base.kept, lambda new: setattr(Base, "kept", new)


def in_a_class_that_code_names(value):
    class Registry:
        kept = value

    return lambda: Registry, lambda: Registry.kept, lambda new: setattr(Registry, "kept", new)


def in_a_hook(register):
    def place(kept):
        see, _, put = in_a_closure(kept)
        model = nn.Sequential(nn.BatchNorm1d(1))
        tensor = model[0].weight if hasattr(Tensor, register) else model[0]
        getattr(tensor, register)(lambda *_: see() and None)
        return model, see, put

    place.__name__ = register
    return place


def in_an_attribute_of(name):
    def place(value):
        model = nn.Sequential(nn.BatchNorm1d(1))
        tensor = getattr(model[0], name)
        tensor.kept = value
        return model, lambda: tensor.kept, lambda new: setattr(tensor, "kept", new)

    place.__name__ = f"in_an_attribute_of_{name}"
    return place


PLACES = [
    in_an_attribute,
    in_an_objects_attribute,
    in_a_slot,
    in_a_closure,
    in_a_closure_of_a_closure,
    in_a_default,
    in_a_keyword_default,
    in_an_attribute_of_a_function,
    in_a_partial,
    in_the_owner_of_a_method,
    in_what_is_decorated,
    in_a_global,
    in_a_module_of_python,
    in_a_module_that_a_function_imports,
    in_a_class,
    in_a_class_above,
    in_a_class_that_code_names,
    in_an_attribute_of("weight"),
    in_an_attribute_of("running_mean"),
    *map(
        in_a_hook,
        [
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
            "register_hook",
            "register_post_accumulate_grad_hook",
        ],
    ),
]


@pytest.fixture(autouse=True)
def nothing_imported():
    yield
    sys.modules.pop("automicro_tests_of_a_user", None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["list", "object", "tensor", "NumPy's generator"])
def test_what_lies_in_a_place_comes_back(kind, place):
    make, change = VALUES[kind]
    kept = make()
    root, see, _ = place(kept)
    shown = undone({"root": root}, lambda: change(see()), see)
    assert see() is kept
    assert "?" not in "".join(shown)


OTHERS = {
    "number": lambda n: n,
    "list": lambda n: [n],
    "tensor": lambda n: torch.full((2,), float(n)),
    "function": lambda n: [len, abs, min, max][n % 4],
    "module": lambda n: nn.ReLU() if n % 2 else nn.Linear(n + 1, 1),
}


@pytest.mark.parametrize("place", [place for place in PLACES if place is not in_a_default])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_a_place_holds_instead_goes_again(kind, place):
    number = itertools.count()
    root, see, put = place(OTHERS[kind](next(number)))
    undone({"root": root}, lambda: put(OTHERS[kind](next(number))), lambda: [id(see()), see()])


def test_names_that_come_and_go_where_code_looks_them_up():
    def function():
        return late, COMING  # type: ignore[name-defined]  # noqa: F821

    def change(is_back=False):
        nonlocal late
        late, globals()["COMING"], function.late = 1, 2, 3

    late = 0
    del late
    captured = capture({"function": function, "change": change})
    change()
    assert len(list(captured.changed())) >= 3
    captured.put_back()
    assert ("COMING" in globals(), hasattr(function, "late")) == (False, False)
    with pytest.raises(NameError):
        function()


@contextlib.contextmanager
def patched(owner, name, value):
    """What a forward that fails half-way leaves patched, and this test must not."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


PATCHES = {
    "function of torch": (F, "scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x, x, x)),
    "method of a class of torch": (nn.Linear, "forward", lambda x: nn.Linear.forward),
    "function of NumPy": (np, "einsum", lambda x: np.einsum("i", x)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PATCHES)
def test_patches_of_libraries_that_code_names_go_again(kind):
    owner, name, function = PATCHES[kind]
    original = vars(owner)[name]
    captured = capture({"function": function})
    with patched(owner, name, len):
        assert any(name in path for path in captured.changed())
        captured.put_back()
        assert vars(owner)[name] is original
    with patched(owner, name, len):
        captured = captured.again()
        captured.put_back()
        assert vars(owner)[name] is len  # it stood before the attempt


def patch_the_instance(model):
    model.forward = lambda x: x


def patch_the_class(model):
    type(model).forward = lambda self, x: x


@pytest.mark.parametrize("patch", [patch_the_instance, patch_the_class])
def test_patches_of_the_callers_own_go_again(patch):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model, x = Layer(2, 2), torch.randn(3, 2)
    before = model(x)
    captured = capture({"model": model})
    patch(model)
    assert torch.equal(model(x), x)
    captured.put_back()
    assert torch.equal(model(x), before)


def enter_autocast(dtype=torch.bfloat16):
    torch.autocast("cpu", dtype).__enter__()


def disable_cache():
    torch.set_autocast_cache_enabled(False)


MODES = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "autocast": (enter_autocast, lambda: torch.is_autocast_enabled("cpu")),
    "dtype of autocast": (
        lambda: enter_autocast(torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "nesting of autocast": (lambda: (enter_autocast(), enter_autocast()), None),
    "cache of autocast": (disable_cache, torch.is_autocast_cache_enabled),
}


def nesting():
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@pytest.mark.parametrize("kind", MODES)
def test_modes_of_the_thread_come_back(kind):
    change, see = MODES[kind]
    see = see or nesting
    captured, before = capture({}), (see(), nesting())
    change()
    assert see() != before[0]
    assert list(captured.changed())
    captured.put_back()
    assert (see(), nesting()) == before
    assert list(captured.changed()) == []


def test_modes_that_stand_before_an_attempt_stay():
    captured = capture({})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        captured = captured.again()
        torch.set_grad_enabled(True)
        enter_autocast()
        captured.put_back()
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), nesting()) == (
            False,
            True,
            1,
        )
    assert nesting() == 0


# ---------------------------------------------------------------- modules


class Layers(nn.Module):
    """Has one of each."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.drop = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.n, self.seen, self.table, self.mean = 0, [1], {"a": 1}, torch.zeros(2)
        self.box, self.last, self.note = Box(n=0), None, 1

    def forward(self, x):
        return self.norm(self.one(x))

    def disturb(self):
        """What an attempt may do."""
        self.n += 1
        self.seen.append(self.n)
        self.table["a"] = self.table.pop("a", 0)
        self.box.n += 1
        self.mean.add_(1)
        self.last = [self(torch.randn(3, 2))]
        self.late, self.box.late = 1, 1
        self.eval()
        self.one.requires_grad_(False)
        self.norm.register_forward_hook(len)
        self.norm.register_buffer("late", torch.ones(1))
        self.add_module("more", nn.ReLU())


def replace_parameter(model):
    model.one.weight = nn.Parameter(torch.ones(2, 2))


def replace_in_order(model):
    model.one, model.norm = model.norm, model.one
    model._modules["drop"] = model._modules.pop("drop")


# What may lie between two captures: it stays, and what an attempt does after it goes.
BETWEEN = {
    "nothing": lambda m: None,
    "constant": lambda m: count(m),
    "constant becomes a text": lambda m: setattr(m, "note", "text"),
    "constant becomes a list": lambda m: (setattr(m, "late", [1]), setattr(m, "n", 3)),
    "list grows": lambda m: m.seen.append(1),
    "list grows by an object": lambda m: m.seen.append(Box(n=1)),
    "list grows by a tensor": lambda m: m.seen.append(torch.ones(1)),
    "list replaced": lambda m: setattr(m, "seen", [2]),
    "list becomes a dict": lambda m: setattr(m, "table", {"a": [1]}),
    "list added": lambda m: setattr(m, "new", [Box(n=1)]),
    "dict grows": lambda m: m.table.update(b=[1]),
    "dict emptied": lambda m: m.table.clear(),
    "attribute removed": lambda m: delattr(m.box, "n") or setattr(m.box, "n", 2),
    "object replaced": lambda m: setattr(m, "box", Box(n=5)),
    "class of an object": lambda m: setattr(m.box, "__class__", Called),
    "tensor in place": lambda m: m.mean.add_(1),
    "tensor replaced": lambda m: setattr(m, "mean", m.mean + 1),
    "tensor resized": lambda m: m.mean.resize_(3).fill_(1),
    "tensor given other memory": lambda m: setattr(m.mean, "data", torch.ones(4)),
    "tensor in the place of none": lambda m: setattr(m, "last", torch.ones(2)),
    "buffer in place": lambda m: m.norm.running_mean.add_(1),
    "buffer replaced": lambda m: setattr(m.norm, "running_mean", torch.ones(2)),
    "buffer removed": lambda m: setattr(m.norm, "num_batches_tracked", None),
    "buffer registered": lambda m: m.register_buffer("new", torch.ones(2)),
    "parameter replaced": replace_parameter,
    "parameter written": lambda m: m.one.weight.data.mul_(2),
    "parameter registered": lambda m: m.register_parameter("new", nn.Parameter(torch.ones(1))),
    "parameter's attribute": lambda m: count(m.one.weight),
    "module added": lambda m: m.add_module("new", Layers()),
    "module replaced": lambda m: setattr(m, "drop", nn.BatchNorm1d(2)),
    "module removed": lambda m: delattr(m, "drop"),
    "modules in another order": replace_in_order,
    "hook registered": lambda m: m.one.register_forward_hook(lambda *_: None),
    "hook beside another": lambda m: [m.register_forward_hook(lambda *_: None) for _ in range(2)],
    "hook of a parameter": lambda m: m.one.weight.register_hook(lambda g: None),
    "hook after a gradient": lambda m: m.one.bias.register_post_accumulate_grad_hook(len),
    "evaluation": lambda m: m.eval(),
    "frozen": lambda m: m.norm.requires_grad_(False),
    "dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("settled", [0, 2])
@pytest.mark.parametrize("kind", BETWEEN)
def test_what_lies_between_two_captures_stays(kind, settled):
    model = Layers()
    captured = capture({"model": model})
    for _ in range(settled):
        captured = captured.again()
    BETWEEN[kind](model)
    before = picture(model)
    captured = captured.again()
    for _ in range(2):
        assert list(captured.changed()) == []
        with contextlib.suppress(AttributeError, RuntimeError):  # it fails somewhere
            Layers.disturb(model)
        assert picture(model) != before
        assert list(captured.changed())
        captured.put_back()
        assert picture(model) == before
        captured = captured.again()
    BETWEEN["nothing"](model)


def test_hooks_that_the_user_registers_between_captures_stay_and_fire():
    model, fired = nn.Linear(2, 2), []
    captured = capture({"model": model}).again()
    model.register_forward_hook(lambda *_: fired.append("module"))
    model.weight.register_hook(lambda grad: fired.append("gradient"))
    model.bias.register_post_accumulate_grad_hook(lambda leaf: fired.append("after"))
    captured = captured.again()
    captured.put_back()
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(fired) == ["after", "gradient", "module"]


@pytest.mark.parametrize("name", [name for name in vars(nn.Module()) if "hook" in name])
def test_each_table_of_hooks_comes_back(name):
    if "state_dict" in name or not hasattr(vars(nn.Module())[name], "clear"):
        pytest.skip("a forward registers none of these")
    model = nn.Sequential(nn.Linear(1, 1))
    table = vars(model[0])[name]
    table[-1] = first = len
    captured = capture({"model": model})
    table[-2] = max
    table[-1] = min
    captured.put_back()
    assert dict(table) == {-1: first}


def spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))


def parametrized():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    parametrizations.weight_norm(model[1])
    return model


class Building(nn.Module):
    """Makes at its first forward what it keeps."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(4), persistent=False)
            self.inner = nn.Linear(4, 4)
            self.cache, self.seen = {4: self.scale}, collections.deque(maxlen=2)
        self.seen.append(x.detach().mean())
        return self.inner(x) * self.scale


class Scripted(nn.Module):
    n: int

    def __init__(self):
        super().__init__()
        self.norm, self.n, self.mean = nn.BatchNorm1d(4), 0, torch.zeros(1)

    def forward(self, x):
        self.n += 1
        self.mean = self.mean + 1
        return self.norm(x) * self.n


MODELS = {
    "spectral norm": spectral,
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "parametrized": parametrized,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()),
    "building": Building,
    "scripted": lambda: nn.Sequential(torch.jit.script(Scripted())),
    "traced": lambda: torch.jit.trace(nn.BatchNorm1d(4), torch.randn(6, 4), check_trace=False),
    "InstanceNorm": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_an_attempt_after_failed_ones_is_as_if_there_had_been_none(make):
    def run(failures):
        torch.manual_seed(0)
        model, x = make().train(), torch.randn(6, 4)
        captured, state = None, torch.get_rng_state()
        for _ in range(failures):
            captured = capture({"model": model}) if captured is None else captured.again()
            model(x).square().sum().backward()
            captured.put_back()
            torch.set_rng_state(state)
            model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        grads = [each.grad for each in model.parameters()]
        return picture([output, grads, *model.buffers()]), list(model.state_dict())

    assert run(0) == run(2)


# ---------------------------------------------------------------- buffers


def over(buffer):
    buffer[0].add_(1)


def dense(*shape):
    return torch.zeros(*shape).double()


def eye(layout):
    return lambda: dense(4, 4).fill_diagonal_(1).to_sparse(layout=layout)


def uncoalesced():
    places = torch.tensor([[0, 0], [1, 1]])
    return torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (4, 4))


# A buffer, and a change to it; "replaced" and so on take the module, too.
BUFFERS = {
    "dense": (lambda: dense(3, 3), lambda b: b.add_(1)),
    "scalar": (lambda: torch.tensor(0), lambda b: b.add_(1)),
    "empty": (lambda: dense(0), lambda b: b.resize_(len(b) + 1).fill_(len(b))),
    "column": (lambda: dense(5, 3)[:, 1], lambda b: b.add_(1)),
    "transposed": (lambda: dense(5, 3).T, lambda b: b.add_(1)),
    "expanded": (lambda: dense(1).expand(4), lambda b: b[:1].add_(1)),
    "overlapping": (lambda: dense(6).as_strided((4, 3), (1, 1)), over),
    "conjugated": (lambda: dense(3).to(torch.cdouble).conj(), lambda b: b.add_(1j)),
    "channels last": (
        lambda: dense(2, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda b: b.add_(1),
    ),
    "past its version": (lambda: dense(3), lambda b: b.data.add_(1)),
    "given other memory": (lambda: dense(3), lambda b: setattr(b, "data", b.data + 1)),
    "given another type": (
        lambda: dense(3),
        lambda b: setattr(
            b, "data", b.data.to(torch.half if b.dtype != torch.half else torch.float)
        ),
    ),
    "turned in place": (lambda: dense(4, 3), lambda b: b.add_(1).t_()),
    "coo": (eye(torch.sparse_coo), lambda b: b.mul_(2)),
    "coo that grows": (eye(torch.sparse_coo), lambda b: b.add_(torch.ones(4, 4).to_sparse())),
    "uncoalesced": (uncoalesced, lambda b: b.mul_(2)),
    "csr": (eye(torch.sparse_csr), lambda b: b.values().add_(1)),
    "csc": (eye(torch.sparse_csc), lambda b: b.values().add_(1)),
    "quantized": (quantized, lambda b: b.copy_(b.dequantize() + 1)),
}


@pytest.mark.filterwarnings("ignore:Sparse ")
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_every_layout_come_back(kind, is_tied):
    make, change = BUFFERS[kind]
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_buffer("kept", kept := make())
    if is_tied:
        model[1].register_buffer("tied", kept, persistent=False)
    times = 1 if kind == "coo that grows" else 3
    shown = undone({"model": model}, lambda: change(model[0].kept), lambda: kept, times=times)
    assert "model.0.kept" in shown
    assert model[0].kept is kept
    assert not is_tied or model[1].tied is kept


def test_views_of_one_memory_stay_views():
    model, base = nn.Linear(1, 1), torch.zeros(5, 2)
    model.register_buffer("base", base)
    model.register_buffer("column", base[:, 1])
    model.turned = base.T
    undone({"model": model}, lambda: model.base.add_(1), lambda: [model.column, model.turned])
    model.base.fill_(7)
    assert model.column.tolist() == [7] * 5
    assert model.turned[0, 0] == 7


def test_versions_and_addresses_of_buffers_stay():
    model = nn.BatchNorm1d(3)
    captured = capture({"model": model})
    for _ in range(3):
        model(torch.randn(4, 3))
        before = [(each.data_ptr(), each._version) for each in model.buffers()]
        captured.put_back()
        assert [(each.data_ptr(), each._version) for each in model.buffers()] == before
        captured = captured.again()
        assert [(each.data_ptr(), each._version) for each in model.buffers()] == before


def test_inference_tensors_come_back():
    with torch.inference_mode():
        model = nn.BatchNorm1d(3)
        undone({"model": model}, lambda: model(torch.randn(4, 3)), lambda: list(model.buffers()))


@pytest.mark.parametrize("name", ["buffer", "tensor"])
def test_a_large_tensor_is_put_back_or_named(name):
    model = nn.Linear(1, 1)
    large = torch.zeros(5 * 2**20)
    model.register_buffer("kept", large) if name == "buffer" else setattr(model, "kept", large)
    captured = capture({"model": model})
    model.kept[3] = 1
    model.n = 1
    assert "model.kept" in list(captured.changed())
    if name == "buffer":
        captured.put_back()
        assert not large.any()
    else:
        with pytest.raises(RollbackError, match=r"model\.kept"):
            captured.put_back()
    assert not hasattr(model, "n")  # all else is back


def test_what_parameters_hold_is_left_to_another_part():
    model = nn.Sequential(nn.Linear(2, 2))
    captured = capture({"model": model})
    with torch.no_grad():
        model[0].weight.fill_(2)
    model[0].weight.grad = torch.ones(2, 2)
    assert list(captured.changed()) == []
    captured.put_back()
    assert model[0].weight.tolist() == [[2, 2], [2, 2]]
    assert model[0].weight.grad is not None


# ---------------------------------------------------------------- identity, strangers


def test_aliases_stay_aliases():
    shared, tensor = [Box(n=0)], torch.zeros(2)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].seen = model[1].seen = shared
    model[0].mean, model[1].view, model[1].itself = tensor, tensor[:1], model
    captured = capture({"model": model})
    model[0].seen.append(1)
    model[1].seen, model[1].view = [2], None
    shared[0].n += 1
    captured.put_back()
    assert model[0].seen is model[1].seen is shared
    assert (len(shared), shared[0].n) == (1, 0)
    model[1].view.fill_(5)
    assert tensor.tolist() == [5, 0]
    assert model[1].itself is model


def fail(*_, **__):
    raise AssertionError("code of the caller's was run")


_METHODS = ["__iter__", "__len__", "__getitem__", "__setitem__", "__eq__", "__bool__", "clear"]
_METHODS += ["append", "extend", "copy", "items", "keys", "values", "update", "pop"]
_OF_OBJECTS = [
    "__getattr__",
    "__getattribute__",
    "__setattr__",
    "__delattr__",
    "__eq__",
    "__bool__",
]
_OF_OBJECTS += ["__len__", "__iter__", "__call__", "__contains__", "__repr__", "__copy__"]
HostileList = type("HostileList", (list,), dict.fromkeys(_METHODS, fail))
HostileDict = type("HostileDict", (dict,), dict.fromkeys(_METHODS, fail))
HostileOrdered = type("HostileOrdered", (collections.OrderedDict,), dict.fromkeys(_METHODS, fail))
Hostile = type("Hostile", (), dict.fromkeys(_OF_OBJECTS, fail) | {"prop": property(fail)})
HostileModule = type("HostileModule", (nn.Module,), {"__getattr__": fail, "__len__": fail})


def test_no_code_of_the_callers_is_run():
    model = nn.Module()
    model.a, model.b, model.c, model.inner = (
        HostileList(),
        HostileDict(),
        HostileOrdered(),
        HostileModule(),
    )
    vars(model)["d"] = hostile = Hostile()
    held = object.__getattribute__(hostile, "__dict__")

    def change():
        list.append(model.a, 2)
        dict.__setitem__(model.b, "b", 1)
        collections.OrderedDict.__setitem__(model.c, "b", 1)
        vars(model.inner)["n"] = held["n"] = 1

    captured = capture({"model": model})
    change()
    assert len(list(captured.changed())) >= 5
    captured.put_back()
    lengths = list.__len__(model.a), dict.__len__(model.b), collections.OrderedDict.__len__(model.c)
    assert (*lengths, held, "n" in vars(model.inner)) == (0, 0, 0, {}, False)
    change()
    captured.again().put_back()
    assert list.__len__(model.a) == 1


class Colour(enum.Enum):
    RED = [1]


def numbers():
    yield 1


STRANGE = {
    "lock": threading.Lock,
    "thread": lambda: threading.Thread(target=numbers),
    "bytes in memory": io.BytesIO,
    "generator": numbers,
    "iterator": lambda: iter([1]),
    "enum": lambda: Colour.RED,
    "library": lambda: torch,
    "module of Python": lambda: importlib,
    "class": lambda: Box,
    "torch's class": lambda: nn.Linear,
    "optimizer": lambda: torch.optim.Adam([nn.Parameter(torch.ones(1))]),
    "loader": lambda: torch.utils.data.DataLoader([1]),
    "error": lambda: ValueError(1),
    "weak reference": lambda: weakref.ref(KEYS[0]),
    "dead reference": lambda: weakref.ref(Box()),
    "proxy": lambda: weakref.proxy(KEYS[0]),
    "function of C": lambda: torch.relu,
    "ufunc": lambda: np.add,
    "view of a dict": lambda: {}.keys(),
    "storage": lambda: torch.ones(2).untyped_storage(),
    "meta tensor": lambda: torch.ones(2, device="meta"),
    "uninitialized": lambda: nn.parameter.UninitializedBuffer(),
    "unfinished module": lambda: nn.Linear.__new__(nn.Linear),
    "memory": lambda: memoryview(b"a"),
    "object array": lambda: np.array([Box(), None], dtype=object),
    "masked array": lambda: np.ma.masked_array([1, 2], [0, 1]),
    "5000 lists": lambda: functools.reduce(lambda inner, _: [inner], range(5000), 0),
    "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.ones(1))]),
    "lru_cache": lambda: functools.lru_cache(numbers),
    "ContextVar": lambda: contextvars.ContextVar("a"),
    "thread-local": threading.local,
    "return type": lambda: torch.max(torch.ones(2, 2), 0),
    "SystemRandom": random.SystemRandom,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_values_are_survived(kind):
    model = nn.Linear(1, 1)
    model.strange, model.n = strange, _ = STRANGE[kind](), 0
    captured = capture({"model": model})
    for _ in range(3):
        model.strange, model.n = None, 1
        assert len(list(captured.changed())) == 2
        captured.put_back()
        assert (model.strange is strange, model.n) == (True, 0)
        captured = captured.again()


# ---------------------------------------------------------------- what is left out


def left_out(captured):
    return [value for value, why in captured.left_out if why]


NAMED = {
    "iterator": lambda: iter([1, 2]),
    "generator": numbers,
    "count": itertools.count,
    "lru_cache": lambda: functools.lru_cache(numbers),
    "object array": lambda: np.array([Box(), None], dtype=object),
    "large array": lambda: np.zeros(3_000_000),
    "list of 20,000": lambda: [0] * 20_000,
    "list of 20,000 tensors": lambda: [torch.ones(1)] * 20_000,
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_cannot_be_put_back_is_named(kind):
    model = nn.Linear(1, 1)
    model.kept = kept = NAMED[kind]()
    captured = capture({"model": model})
    assert any(each is kept for each in left_out(captured))
    assert any(each is kept for each in left_out(captured.again()))


@pytest.mark.parametrize("make", [lambda: 0.5, lambda: torch.ones(1), lambda: {"loss": 1.0}])
def test_a_long_list_that_has_only_grown_comes_back(make):
    model = nn.Linear(1, 1)
    model.history = [make()] * 20_000
    captured = capture({"model": model})
    for length in (20_000, 20_001):
        model.history.append(make())
        assert any(path.startswith("model.history") for path in captured.changed())
        captured.put_back()
        assert len(model.history) == length
        model.history.append(make())
        captured = captured.again()
    model.history[3] = None
    with pytest.raises(RollbackError, match=r"model\.history"):
        captured.put_back()


def test_what_exceeds_the_budget_is_named_and_left_alone(monkeypatch):
    monkeypatch.setattr(module, "MOST_VALUES", 50)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    model.first = [1]
    for each in model:
        each.seen = [1]
        each.register_forward_hook(len)
    captured = capture({"model": model})
    assert captured.left_out
    model.first.append(1)
    captured.put_back()
    assert model.first == [1]
    assert all(each.seen == [1] and len(each._forward_hooks) == 1 for each in model)
    assert all(each.weight is not None for each in model)


def test_skipped_objects_and_classes_stay_as_they_become():
    model = nn.Linear(1, 1)
    model.mine, model.box, model.other = [], Box(n=0), []
    captured = capture({"model": model}, skip=[model.mine, Box])
    for length in (1, 2):
        model.mine.append(1)
        model.other.append(1)
        model.box.n = length
        captured.put_back()
        assert (len(model.mine), model.other, model.box.n) == (length, [], length)
        captured = captured.again()


# ---------------------------------------------------------------- memory

GRAPHS = {
    "attribute": lambda h: h,
    "list": lambda h: [h, 1],
    "dict": lambda h: {"h": h, "n": 1},
    "tuple": lambda h: (h, 1),
    "nested": lambda h: {"all": [(h, 1)]},
    "object": lambda h: Box(h=h),
}


class Keeping(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.net, self.how, self.kept = nn.Linear(4, 4), how, None

    def forward(self, x):
        self.kept = self.how(self.net(x))


def tensor_in(value):
    while not isinstance(value, Tensor):
        value = vars(value) if isinstance(value, Box) else value
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


@pytest.mark.parametrize("settled", [0, 2])
@pytest.mark.parametrize("how", GRAPHS)
def test_a_capture_keeps_no_graph_alive(how, settled):
    model = Keeping(GRAPHS[how])
    captured = capture({"model": model})
    for _ in range(settled + 1):
        model(torch.ones(1, 4))
        captured = captured.again()
    old, content = weakref.ref(tensor_in(model.kept)), tensor_in(model.kept).detach().clone()
    tensor_in(model.kept).grad_fn.metadata["mark"] = mark = Box()
    graph = weakref.ref(mark)
    del mark
    model(torch.ones(1, 4) * 2)
    gc.collect()
    assert (old(), graph()) == (None, None)
    failed = weakref.ref(tensor_in(model.kept))
    captured.put_back()
    gc.collect()
    assert failed() is None
    assert torch.equal(tensor_in(model.kept), content)
    assert type(model.kept) is type(GRAPHS[how](content))


@pytest.mark.parametrize("how", GRAPHS)
def test_a_graph_that_stays_is_the_same_again(how):
    model = Keeping(GRAPHS[how])
    model(torch.ones(1, 4))
    kept, tensor = model.kept, tensor_in(model.kept)
    captured = capture({"model": model})
    assert list(captured.changed()) == []
    model.kept = None
    captured.put_back()
    assert tensor_in(model.kept) is tensor
    assert type(model.kept) is type(kept)


@pytest.mark.parametrize("settled", [0, 2])
def test_what_a_failed_attempt_made_is_gone(settled):
    model = nn.Linear(4, 4)
    model.seen, model.box = [], Box()
    captured = capture({"model": model})
    for _ in range(settled):
        captured = captured.again()
    made = [torch.ones(1000), Box(), nn.Linear(1, 1)]
    model.seen += made
    model.late, model.box.late, model.layer = made
    gone = list(map(weakref.ref, made))
    del made
    captured.put_back()
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_nothing_that_was_captured_is_alive_after_the_capture():
    model = nn.Linear(4, 4)
    model.box, model.mean, model.inner = Box(), torch.ones(3), nn.Linear(1, 1)
    gone = [weakref.ref(each) for each in (model.box, model.mean, model.inner)]
    captured = capture({"model": model})
    del model.box, model.mean, model.inner
    assert all(each() is not None for each in gone)
    gone.append(weakref.ref(captured))
    del captured
    assert [each() for each in gone] == [None] * 4  # without a collection: there is no cycle


def test_captures_one_after_another_leave_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Keeping(GRAPHS["nested"]), Layers())
    captured = capture({"model": model})

    def attempt(captured):
        captured = captured.again()
        model[2](model[1](model[0](torch.randn(5, 4))))
        model[3].disturb()
        captured.put_back()
        return captured

    for _ in range(3):
        captured = attempt(captured)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        captured = attempt(captured)
    gc.collect()
    assert len(gc.get_objects()) <= before + 10


# ---------------------------------------------------------------- cost


def calls(function):
    """Functions of Python that run."""
    number = 0

    def see(frame, event, argument):
        nonlocal number
        number += event == "call"

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return number


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()
        self.drop, self.n, self.mean = nn.Dropout(), 0, torch.zeros(1)

    def step(self):
        self.n += 1
        self.mean = self.mean * 0.9


MOVES = {
    "nothing": lambda model: None,
    "counters and averages": lambda model: [each.step() for each in model],
    "training flags": lambda model: model.train(not model.training),
    "an empty list that grows": lambda model: model[0].seen.append(1.0),
}


@pytest.mark.parametrize("kind", MOVES)
def test_capturing_again_costs_a_fraction_of_a_walk(kind):
    model = nn.Sequential(*(Block() for _ in range(36)))
    assert len(list(model.modules())) == 181
    model[0].seen = [0.0]
    walk = calls(lambda: capture({"model": model}))
    captured = capture({"model": model})
    for _ in range(3):
        MOVES[kind](model)
        captured = captured.again()
    MOVES[kind](model)
    settled = calls(captured.again)
    assert settled < walk / 5, (settled, walk)
