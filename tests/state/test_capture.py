"""Everything that a forward may change is restored in the same objects."""

import collections
import contextlib
import contextvars
import itertools
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cuda
from torch.nn.modules import module as hooked
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from automicro.state.capture import capture
from tests.state.undone import Box, count, picture, undone
from tests.state.values import PLACES, USERS, VALUES, add


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", VALUES)
def test_attribute_value_is_restored(kind):
    make, change, *_ = VALUES[kind]
    model: Any = nn.Sequential(nn.Linear(1, 1))
    model[0].kept = kept = make()
    shown = undone({"model": model}, lambda: change(model[0].kept), lambda: model[0].kept)
    assert all(path.startswith("model.0.kept") for path in shown), shown
    assert model[0].kept is kept


@pytest.fixture(autouse=True)
def nothing_imported():
    yield
    sys.modules.pop(USERS, None)


@pytest.mark.parametrize("place", PLACES)
def test_change_and_replacement_in_any_place_are_undone(place):
    number = itertools.count()

    def fresh():
        return torch.full((2,), float(next(number)))

    root, owner, *name = PLACES[place](kept := fresh())
    (name,) = name or ["kept"]
    shown = undone({"root": root}, lambda: kept.add_(1), lambda: kept)
    assert "?" not in "".join(shown)
    if "default" not in place:
        assert getattr(owner, name) is kept
        see = lambda: [id(getattr(owner, name)), getattr(owner, name)]  # noqa: E731
        undone({"root": root}, lambda: setattr(owner, name, fresh()), see)


def test_function_defaults_are_restored():
    def original(one=1, *, two=2):
        return one, two

    function: Any = original
    undone({"it": function}, lambda: add(function.__kwdefaults__, "two"), function)
    for name, value in (("__defaults__", (5,)), ("__kwdefaults__", {"two": 9})):
        undone({"it": function}, lambda n=name, v=value: setattr(function, n, v), function, times=1)


def test_added_names_are_removed():
    late = 0

    def function():
        return late, COMING  # type: ignore[name-defined]  # noqa: F821

    def change():
        nonlocal late
        late, globals()["COMING"] = 1, 2
        count(function, "late")

    del late
    captured = capture({"function": function, "change": change})
    change()
    assert len(list(captured.changed())) >= 3
    captured.put_back()
    assert (globals().pop("COMING", None), vars(function)) == (None, {})
    with pytest.raises(NameError):
        function()


def nesting():
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def test_modes_entered_before_attempt_are_kept():
    captured = capture({})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        captured = captured.again()
        torch.set_grad_enabled(True)
        torch.autocast("cpu", torch.float16).__enter__()
        assert list(captured.changed()) == ["torch"]
        captured.put_back()
        found = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), nesting()
        assert found == (False, True, 1)
    assert nesting() == 0


class Layers(nn.Module):
    box: Any

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.drop = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.n, self.seen, self.table, self.mean = 0, [1], {"a": 1}, torch.zeros(2)
        self.box, self.last, self.note = Box(n=0), None, 1
        self.norm.weight.register_hook(len)
        self.norm.weight.register_post_accumulate_grad_hook(len)

    def forward(self, x):
        return self.norm(self.one(x))

    def count(self):
        self.n += 1
        self.mean = self.mean * 0.9

    def disturb(self):
        """Change state in every way that an attempt might."""
        self.n += 1
        self.seen.append(self.n)
        self.table["a"] = self.table.pop("a", 0)
        self.box.n += 1
        self.mean.add_(1)
        self.last = [self(torch.randn(3, 2))]
        self.late, self.box.late = 1, 1
        self.eval()
        self.one.requires_grad_(False)
        self.norm.register_forward_hook(lambda *_: None)
        for leaf in self.parameters():
            leaf.register_hook(min)
            leaf.register_post_accumulate_grad_hook(max)
        self.norm.register_buffer("late", torch.ones(1))
        self.add_module("more", nn.ReLU())


def replace_parameter(model):
    model.one.weight = nn.Parameter(torch.ones(2, 2))


def replace_in_order(model):
    model.one, model.norm = model.norm, model.one
    model._modules["drop"] = model._modules.pop("drop")


# Changes between two captures are kept, and later changes by an attempt are undone.
BETWEEN: dict[str, Any] = {
    "nothing": lambda m: None,
    "constant becomes a list": lambda m: setattr(m, "note", [1]),
    "list grows by an object": lambda m: m.seen.append(Box(n=1)),
    "list becomes a dict": lambda m: setattr(m, "table", {"a": [1]}),
    "dict emptied": lambda m: m.table.clear(),
    "attribute removed": lambda m: delattr(m, "last"),
    "tensor in the place of none": lambda m: setattr(m, "last", torch.ones(2)),
    "buffer removed": lambda m: setattr(m.norm, "num_batches_tracked", None),
    "parameter replaced": replace_parameter,
    "parameter written": lambda m: m.one.weight.data.mul_(2),
    "parameter given other memory": lambda m: setattr(m.one.weight, "data", torch.zeros(2, 2)),
    "module removed": lambda m: delattr(m, "drop"),
    "modules in another order": replace_in_order,
    "hook beside another": lambda m: [m.register_forward_hook(lambda *_: None) for _ in range(2)],
    "hook after a gradient": lambda m: m.one.bias.register_post_accumulate_grad_hook(len),
    "table of parameters": lambda m: vars(m.one).update(_parameters=nn.Linear(2, 2)._parameters),
    "dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_changes_between_captures_are_kept(kind):
    model = Layers()
    captured = capture({"model": model}).again().again()
    BETWEEN[kind](model)
    before = picture(model)
    captured = captured.again()
    for _ in range(2):
        assert list(captured.changed()) == []
        with contextlib.suppress(AttributeError, RuntimeError):  # it fails midway
            Layers.disturb(model)
        assert picture(model) != before
        assert list(captured.changed())
        captured.put_back()
        assert picture(model) == before
        captured = captured.again()


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


# By name: a change, and the code that detects it.
BEYOND = {
    "function of a library": (lambda: setattr(F, "relu", F.gelu), lambda: F.relu),
    "hook of all modules": (
        lambda: hooked.register_module_forward_hook(lambda *_: None),
        lambda: len(hooked._global_forward_hooks),
    ),
    "mode of functions": (lambda: Passing().__enter__(), torch._C._len_torch_function_stack),
    "kernel of attention": (lambda: cuda.enable_flash_sdp(False), cuda.flash_sdp_enabled),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_global_state_is_restored(kind):
    change, see = BEYOND[kind]
    captured, before = capture({"change": change}), see()
    for _ in range(2):
        change()
        assert see() != before
        assert list(captured.changed())
        captured.put_back()
        assert see() == before
        captured = captured.again()


def test_hook_tables_are_restored():
    model = nn.Linear(1, 1)
    names = [n for n, v in vars(model).items() if "hook" in n and hasattr(v, "clear")]
    tables = {name: vars(model)[name] for name in names if "state_dict" not in name}
    for table in tables.values():
        table[-1] = len
    captured = capture({"model": nn.Sequential(model)})
    for name, table in tables.items():
        table[-1], table[-2], vars(model)[name] = min, max, {}
    captured.put_back()
    for name, table in tables.items():
        assert (vars(model)[name] is table, dict(table)) == (True, {-1: len}), name


def parametrized():
    model: Any = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    parametrizations.weight_norm(model[1])
    return model


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
    "parametrized": parametrized,
    "scripted": lambda: nn.Sequential(torch.jit.script(Scripted())),
    "traced": lambda: torch.jit.trace(nn.BatchNorm1d(4), torch.randn(6, 4), check_trace=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_failed_attempts_do_not_affect_next_attempt(make):
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


def test_aliases_are_preserved():
    shared: list[Any] = [Box(n=0)]
    tensor = torch.zeros(2)
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
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


# fmt: off
_METHODS = ["iter", "len", "getitem", "setitem", "eq", "bool"]
_OF_OBJECTS = ["getattr", "getattribute", "setattr", "delattr", "eq", "bool", "len", "iter", "call", "contains", "repr", "copy"]
_METHODS, _OF_OBJECTS = ([f"__{each}__" for each in names] for names in (_METHODS, _OF_OBJECTS))
_METHODS += ["clear", "append", "extend", "copy", "items", "keys", "values", "update", "pop"]
# fmt: on
HostileList = type("HostileList", (list,), dict.fromkeys(_METHODS, fail))
HostileDict = type("HostileDict", (dict,), dict.fromkeys(_METHODS, fail))
HostileOrdered = type("HostileOrdered", (collections.OrderedDict,), dict.fromkeys(_METHODS, fail))
Hostile = type("Hostile", (), dict.fromkeys(_OF_OBJECTS, fail) | {"prop": property(fail)})
HostileModule = type("HostileModule", (nn.Module,), {"__getattr__": fail, "__len__": fail})


def test_capture_runs_no_user_code():
    model: Any = nn.Module()
    model.a, model.b, model.c = HostileList(), HostileDict(), HostileOrdered()
    model.inner, vars(model)["d"] = HostileModule(), (hostile := Hostile())
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


def calls(function):
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


MOVES = {
    "counters and averages": lambda model: [each.count() for each in model],
    "training flags": lambda model: model.train(not model.training),
    "a list that grows by tuples": lambda model: model[0].seen.append((1, (2.0, "text"))),
}


@pytest.mark.parametrize("kind", MOVES)
def test_recapture_is_cheaper_than_full_walk(kind):
    model: Any = nn.Sequential(*(Layers() for _ in range(36)))
    walk, captured = calls(lambda: capture({"model": model})), capture({"model": model})
    for _ in range(3):
        MOVES[kind](model)
        captured = captured.again()
    MOVES[kind](model)
    settled = calls(captured.again)
    assert settled < walk / 3, (settled, walk)


def test_parameter_dtype_is_restored():
    model = nn.Linear(2, 2)
    before, captured = model.weight.detach().clone(), capture({"model": model})
    model.double()
    captured.put_back()
    assert torch.equal(model.weight, before)


def test_context_variable_values_are_freed_after_attempt():
    variable, box = contextvars.ContextVar[Any]("variable", default=None), Box(n=0)
    token, alive = variable.set(box), weakref.ref(box)
    captured = capture({"model": nn.Linear(2, 2)})
    variable.reset(token)
    del token, box
    captured.let_go()
    assert alive() is None


def test_context_variables_set_by_import_are_kept(monkeypatch):
    variable = contextvars.ContextVar[int]("variable", default=0)
    captured = capture({"model": nn.Linear(2, 2)})
    monkeypatch.setitem(sys.modules, "imported_late", torch)
    token = variable.set(1)
    captured.put_back()
    assert variable.get() == 1
    variable.reset(token)
