"""Random programs that change any state, fail at any point, and are retried without a trace.

A program has a model and a forward. The forward changes some places (an attribute, a closure, a
buffer, a mode of torch …) at some times, and its loss depends on their content. automicro runs it
with failures; plain torch runs it without, in microbatches of the same sizes. Losses, gradients and
places must be bit-identical, or a warning or an error names the place.
"""

import collections
import contextlib
import contextvars
import dataclasses
import itertools
import random
import re
import sys
import warnings
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from automicro import Microbatcher, is_extra_pass
from automicro.errors import StateWarning
from automicro.values import CELL
from tests.outside import Outside, Unreached
from tests.state.undone import Box, count, picture
from tests.state.values import PLACES, USERS, VALUES, add
from tests.sweeps import mostly_in_sweeps

BATCHES, ROWS = 3, 8
CLOCK = Outside(batch=0, ticks={}, failures=[], made=[], has_failed=False, seed=1)


class UserError(Exception):
    pass


def tick(where):
    """Count an operation, and fail if a failure is planned here."""
    CLOCK.ticks[where] = number = CLOCK.ticks.get(where, 0) + 1
    for each in CLOCK.failures:
        if (each.batch, each.where, each.at) == (CLOCK.batch, where, number):
            CLOCK.failures = [other for other in CLOCK.failures if other is not each]
            CLOCK.fired = CLOCK.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory.") if each.is_memory else UserError()


def made(value):
    """Record a tensor that must be freed before a failed attempt is repeated."""
    if not is_extra_pass():
        CLOCK.made.append(weakref.ref(value))
    return value


def num_alive():
    return sum(each() is not None for each in CLOCK.made)


class Theirs(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class At:
    """A place: the attribute ``v`` of an owner of some kind, which may belong to a module."""

    owner = Unreached()  # reachable only through the code or the model

    def __init__(self, owner, module, name):
        self.owner, self.module, self.name = owner, module, name

    v = property(
        lambda self: getattr(self.owner, self.name, None),
        lambda self, value: setattr(self.owner, self.name, value),
        lambda self: delattr(self.owner, self.name),
    )

    def buffer(self, value):
        self.owner = self.module
        self.module.register_buffer(self.name, value)
        return value

    def of(self, owner, name="", code=None):
        self.owner, self.name, self.code = owner, name or self.name, code or owner
        return self

    def inside(self, place, value):
        code, owner, *name = PLACES[place](value)
        return self.of(owner, name[0] if name else "kept", code)

    @property
    def kept(self):
        held = self.v["kept"] if isinstance(self.v, dict) else self.v
        return held[0] if isinstance(held, tuple) else held


def up(at):
    at.v = at.v + 1


def down(at):
    at.v = at.v - 1


def put(at, value):
    at.v = value


def scale_rate(optimizer, factor):
    optimizer.param_groups[0]["lr"] *= factor


class Stepping(torch.optim.SGD):
    """Keeps a number next to its options, like optimizers with their own hooks."""

    seen = 0


def see(optimizer, number):
    optimizer.seen += number


def weight(at):
    named = at.module.named_parameters()
    return next(each for name, each in named if "flag" not in name)


def modes(_=None):
    torch.autocast_increment_nesting()
    nesting, dtype = torch.autocast_decrement_nesting(), torch.get_autocast_dtype("cpu")
    found = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_dtype()
    chosen = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    return *map(str, (*found, *chosen, dtype, torch.is_autocast_cache_enabled())), nesting


EINSUM: Any = np.einsum
SDPA: Any = F.scaled_dot_product_attention
LINEAR: Any = nn.Linear.forward
OWN: Any = Theirs.forward
ANY = ("before", "after", "around", "first", "turn", "backward", "through")
DRAWN = ("before", "after", "backward")  # phases in which the program cannot undo a change itself
AROUND = ("around", "turn", "pulse", "first")
PULSE = ("pulse",)
LATE: int
VARIABLE = contextvars.ContextVar[int]("VARIABLE")
DEFAULTED = contextvars.ContextVar[int]("DEFAULTED", default=0)


def enter(held, context):
    held.append(context)
    context.__enter__()


def leave(held):
    held.pop().__exit__(None, None, None)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def of_value(make, change, undo=None, see=None):
    steps = lambda a: make(), lambda a: change(a.v), lambda a: undo(a.v)
    return *steps, see and (lambda a: see(a.v)), ANY if undo else DRAWN


def of_place(place):
    """Yield a counter at the place, if possible, and a list that grows there."""
    name = re.sub(r"\W", "_", place)
    if {"default", "global", "imports"}.isdisjoint(place.split()):  # each of these exists only once
        yield f"counts_in_{name}", (lambda a: a.inside(place, 0), up, down)
    grow = lambda a: a.kept.append(1), lambda a: a.kept.pop(), lambda a: a.kept
    yield f"grows_in_{name}", (lambda a: a.inside(place, []), *grow)


def filled(at):
    cell = PLACES["closure"](0)
    empty(at.of(cell[1], cell[2], cell[0]))
    return at


def empty(at):
    at.v = 0
    del at.v


# By name: the initial value, its change and undo, the code that reads it, and its phases.
# fmt: off
KINDS: dict[str, tuple[Any, ...]] = {
    **{"its_" + re.sub(r"\W", "_", name): of_value(*row) for name, row in VALUES.items()},
    "attribute_comes": (lambda a: a, lambda a: count(a.owner, a.name), lambda a: vars(a.owner).pop(a.name, 0)),
    "attribute_goes": (lambda a: 1, lambda a: delattr(a.owner, a.name), lambda a: put(a, 1), None, ("around", "turn", "through")),
    "list_of_20000_counts": (lambda a: [0] * 20_000, lambda a: add(a.v, 9000), lambda a: add(a.v, 9000, -1), lambda a: a.v[9000]),
    **{name: row for place in PLACES for name, row in of_place(place)},
    "closure_is_filled": (filled, lambda a: put(a, 1), empty, lambda a: bool(CELL.read(a.owner))),
    "global_comes": (lambda a: a.of(sys.modules[__name__], "LATE", lambda: LATE), lambda a: put(a, 1), lambda a: globals().pop("LATE", 0)),  # noqa: F821
    "keyword_default_changes": (lambda a: a.inside("keyword default", 0), lambda a: put(a, {"kept": a.v["kept"] + 1}), lambda a: put(a, {"kept": a.v["kept"] - 1})),
    "function_of_a_library": (lambda a: a.of(F, "scaled_dot_product_attention", lambda: F.scaled_dot_product_attention), lambda a: put(a, len), lambda a: put(a, SDPA), lambda a: a.v is SDPA, AROUND),
    "class_of_a_library": (lambda a: a.of(nn.Linear, "forward", lambda: nn.Linear.forward), lambda a: put(a, len), lambda a: put(a, LINEAR), lambda a: a.v is LINEAR, PULSE),
    # Tensors and modules.
    "tensor_of_20_megabytes": (lambda a: torch.zeros(5 * 2**20), lambda a: a.v[:1].add_(1), lambda a: a.v[:1].sub_(1), lambda a: a.v[0].item()),
    "tensor_with_a_graph": (lambda a: None, lambda a: put(a, made(weight(a).sum() + (a.v is None))), lambda a: put(a, None), lambda a: str(a.v)[:12]),
    "buffer_in_place": (lambda a: a.buffer(torch.zeros(2)), lambda a: a.v.add_(1), lambda a: a.v.sub_(1)),
    "buffer_is_replaced": (lambda a: a.buffer(torch.zeros(2)), up, down),
    "buffer_is_resized": (lambda a: a.buffer(torch.zeros(1)), lambda a: a.v.resize_(len(a.v) + 1).fill_(1), lambda a: a.v.resize_(1).fill_(0)),
    "buffer_of_other_memory": (lambda a: a.buffer(torch.zeros(2)), lambda a: setattr(a.v, "data", a.v + 1), lambda a: setattr(a.v, "data", a.v - 1)),
    "buffer_is_registered": (lambda a: a, lambda a: a.module.register_buffer("late", torch.ones(1)), lambda a: a.module._buffers.pop("late", 0), lambda a: sorted(a.module.state_dict())),
    "attribute_of_a_parameter": (lambda a: a.of(weight(a)) and 0, up, down),
    "training_flag": (lambda a: a.of(a.owner, "training"), lambda a: a.module.eval(), lambda a: a.module.train(), lambda a: a.module.training, AROUND),
    "requires_grad_flag": (lambda a: nn.Parameter(torch.ones(1)), lambda a: a.v.requires_grad_(False), lambda a: a.v.requires_grad_(True)),
    "hook_is_registered": (lambda a: [], lambda a: a.v.append(a.module.register_forward_hook(lambda m, i, o: o * 2)), lambda a: a.v.pop().remove(), lambda a: len(a.module._forward_hooks)),
    "hook_of_a_parameter": (lambda a: [], lambda a: a.v.append(weight(a).register_hook(lambda g: g * 2)), lambda a: a.v.pop().remove(), lambda a: len(weight(a)._backward_hooks or ()), ("around", "pulse")),  # a batch calls hooks once
    "module_is_swapped": (lambda a: nn.Identity(), lambda a: put(a, nn.ReLU()), lambda a: put(a, nn.Identity())),
    "module_is_added": (lambda a: a, lambda a: a.module.add_module("added", nn.BatchNorm1d(1)), lambda a: a.module._modules.pop("added", 0), lambda a: sorted(a.module.state_dict()), AROUND),
    "method_on_the_instance": (lambda a: [Theirs(2, 2)], lambda a: setattr(a.v[0], "forward", len), lambda a: vars(a.v[0]).pop("forward", 0)),
    "method_on_the_class": (lambda a: [Theirs(2, 2)], lambda a: setattr(Theirs, "forward", len), lambda a: setattr(Theirs, "forward", OWN), lambda a: vars(Theirs)["forward"] is len, AROUND),
    # Modes, generators, and state that can only be reported.
    "grad_mode": (lambda a: a, lambda a: torch.set_grad_enabled(False), lambda a: torch.set_grad_enabled(True), modes, PULSE),
    "autocast": (lambda a: autocast(), lambda a: a.v.__enter__(), lambda a: a.v.__exit__(None, None, None), modes, PULSE),
    "autocast_in_a_list": (lambda a: [], lambda a: enter(a.v, autocast()), lambda a: leave(a.v), modes, PULSE),
    "generator_in_a_context": (lambda a: [], lambda a: (enter(a.v, torch.random.fork_rng()), torch.rand(1)), lambda a: leave(a.v), lambda a: picture(torch.get_rng_state()), PULSE),
    "autocast_to_another_dtype": (lambda a: a, lambda a: torch.set_autocast_dtype("cpu", torch.float16), lambda a: torch.set_autocast_dtype("cpu", torch.bfloat16), modes, ("turn",)),
    "nesting_of_autocast": (lambda a: a, lambda a: torch.autocast_increment_nesting(), lambda a: torch.autocast_decrement_nesting(), modes, PULSE),
    "context_variable": (lambda a: VARIABLE.set(0), lambda a: VARIABLE.set(VARIABLE.get() + 1), lambda a: VARIABLE.set(VARIABLE.get() - 1), lambda a: VARIABLE.get()),
    "context_variable_with_a_default": (lambda a: a, lambda a: put(a, DEFAULTED.set(1)), lambda a: DEFAULTED.reset(a.v), lambda a: DEFAULTED.get(), PULSE),
    "errors_of_numpy": (lambda a: np.seterr(over="warn"), lambda a: np.seterr(over="ignore"), lambda a: np.seterr(over="warn"), lambda a: np.geterr()["over"], PULSE),
    "learning_rate": (lambda a: torch.optim.SGD([torch.ones(1)], 1.0), lambda a: scale_rate(a.v, 2), lambda a: scale_rate(a.v, 0.5), lambda a: a.v.param_groups[0]["lr"]),
    "attribute_of_an_optimizer": (lambda a: Stepping([torch.ones(1)], 1.0), lambda a: see(a.v, 1), lambda a: see(a.v, -1), lambda a: a.v.seen),
    "function_of_numpy": (lambda a: a.of(np, "einsum", lambda: np.einsum), lambda a: put(a, len), lambda a: put(a, EINSUM), lambda a: a.v is EINSUM, AROUND),
    "matmul_precision": (lambda a: a, lambda a: torch.set_float32_matmul_precision("medium"), lambda a: torch.set_float32_matmul_precision("highest"), modes, PULSE),
    "choices_of_cudnn": (lambda a: a, lambda a: setattr(torch.backends.cudnn, "benchmark", True), lambda a: setattr(torch.backends.cudnn, "benchmark", False), modes, PULSE),
    "number_of_threads": (lambda a: torch.get_num_threads(), lambda a: torch.set_num_threads(a.v + 1), lambda a: torch.set_num_threads(a.v), lambda a: torch.get_num_threads() - a.v, PULSE),
    "default_dtype": (lambda a: a, lambda a: torch.set_default_dtype(torch.float64), lambda a: torch.set_default_dtype(torch.float32), modes, ("pulse", "around")),
    "global_generators": (lambda a: a, lambda a: (random.random(), np.random.random(), torch.rand(1)), None, lambda a: (random.getstate(), str(np.random.get_state()), picture(torch.get_rng_state())), DRAWN),
    "iterator": (lambda a: itertools.count(), lambda a: next(a.v), None, lambda a: repr(a.v), DRAWN),
}
# fmt: on
Use = collections.namedtuple("Use", "kind phase owner module since")
Failure = collections.namedtuple("Failure", "batch where at is_memory")
Program = collections.namedtuple("Program", "uses failures size probe has_norm")


def fully(name):
    row = KINDS[name]
    return (*row, *(None, ANY)[len(row) - 3 :])


@st.composite
def uses(draw, name):
    number = st.integers(0, 3)
    phase = draw(st.sampled_from(fully(name)[-1]))
    return Use(name, phase, draw(number), draw(number), draw(st.integers(0, BATCHES - 1)))


@st.composite
def failures(draw):
    where = draw(st.sampled_from(["forward", "backward", "after", "hook"]))
    at = draw(st.integers(1, 7) if where == "forward" else st.sampled_from([1, 1, 1, 2, 3]))
    return Failure(draw(st.integers(0, BATCHES - 1)), where, at, draw(st.booleans()))


@st.composite
def programs(draw):
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True))
    return Program(
        uses=tuple(draw(uses(name)) for name in names),
        failures=tuple(draw(st.lists(failures(), min_size=1, max_size=3))),
        size=draw(st.sampled_from(["auto", None, 2, 3, 4])),
        probe=draw(st.booleans()),
        has_norm=draw(st.booleans()),
    )


class Mutation:
    """A change of a place at a point in time."""

    def __init__(self, use, row, owner, module):
        self.kind, self.phase, *_, self.since = use
        self.at = At(owner, module, self.kind)
        first, self.do, self.undo, self._look, _ = row
        value = first(self.at)
        if value is not self.at:
            self.at.v = value
        self.told = "kept" if self.at.name in ("cell_contents", "n") else self.at.name.strip("_")
        self.first = self.read()

    def read(self):
        return picture(self.at.v if self._look is None else self._look(self.at))

    def enter(self):
        if self.phase in ("before", "around", "through", "pulse") or (
            self.phase in ("first", "turn") and self.read() == self.first
        ):
            self.do(self.at)
        elif self.phase == "turn":
            self.undo(self.at)
        if self.phase == "pulse":
            tick("forward")
            self.undo(self.at)

    def graphs(self):
        """Return the tensors with a graph that a forward keeps until it ends."""
        held = self.at.v if "graph" in self.kind and self.phase == "around" else None
        return [] if held is None else [held]

    def end(self, undone, done):
        """End the forward or the backward."""
        if self.phase in (undone, done):
            (self.undo if self.phase == undone else self.do)(self.at)


class InTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mutations):
        ctx.mutations = mutations
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        for each in ctx.mutations:
            tick("backward")
            each.end("through", "backward")
        tick("backward")
        return grad, None


class Net(nn.Module):
    def __init__(self, has_norm):
        super().__init__()
        norm = nn.BatchNorm1d(4) if has_norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(3, 4), norm, nn.Dropout(0.2))
        self.head = nn.Linear(4, 1)
        self.helper, self.held = Box(), {"a": [Box()]}

    def forward(self, x):
        x = self.layers(x)
        tick("forward")
        return self.head(x)


def make(program):
    """Return the model and the forward of a program."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, teacher = Net(program.has_norm), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    owners = [model, model.helper, model.held["a"][0], teacher]
    modules = [model, model.head, model.layers[0], teacher]
    mutations = [
        Mutation(use, fully(use.kind), owners[use.owner], modules[use.module])
        for use in program.uses
    ]
    model.head.weight.register_post_accumulate_grad_hook(lambda _: tick("hook"))

    def forward(model, batch):
        if CLOCK.has_failed:
            CLOCK.left, CLOCK.has_failed = CLOCK.left + num_alive(), False
        active = [each for each in mutations if each.since <= CLOCK.batch]
        for each in active:
            tick("forward")
            each.enter()
        with torch.no_grad():
            goal = teacher(batch["x"])
        found = [zlib.crc32(repr(each.read()).encode()) % 97 for each in active]
        output = InTheBackward.apply(made(model(batch["x"]) - goal), active)
        loss = (output - batch["y"]).square().mean() * (1 + sum(found) / 97)
        loss = made(loss + sum(tensor for each in active for tensor in each.graphs()))
        for each in active:
            each.end("around", "after")
            tick("forward")
        return loss

    return model, forward, mutations


def backward(loss):
    loss.backward()
    tick("after")


@contextlib.contextmanager
def everything_global():
    """Restore all global state at the end."""
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
        F.scaled_dot_product_attention, np.einsum = SDPA, EINSUM
        setattr(nn.Linear, "forward", LINEAR)  # noqa: B010
        setattr(Theirs, "forward", OWN)  # noqa: B010
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)
        while modes()[-1]:
            torch.autocast_decrement_nesting()
        sys.modules.pop(USERS, None)
        np.seterr(over="warn")
        globals().pop("LATE", None)


@dataclasses.dataclass
class Trace:
    sizes: list[int] = dataclasses.field(default_factory=list)
    numbers: list[Any] = dataclasses.field(default_factory=list)
    places: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    told: str = ""
    fired: bool = False
    left: int = 0  # tensors of a failed attempt that are alive at the retry


def run(program, failures=(), wrap=lambda model: model, **options):
    """Train with a `Microbatcher`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, forward, mutations = make(program)
        options = {"microbatch_size": program.size, "probe": False} | options
        microbatcher = Microbatcher(
            wrap(model),
            forward=forward,
            backward=backward,
            loss_average="samples",
            batchnorm="ignore",
            **options,
        )
        trace = train(model, mutations, failures, lambda batch: of(microbatcher, batch))
    trace.told += " ".join(str(each.message) for each in caught if each.category is StateWarning)
    return trace


def of(microbatcher, batch):
    result = microbatcher.backward(batch)
    return result.loss, result.microbatch_size


def plainly(program, sizes):
    """Train in plain torch with the same microbatches, then with whole batches."""
    model, forward, mutations = make(program)
    left = [*sizes, *[ROWS] * BATCHES]

    def step(batch):
        total, size = torch.zeros(()), left.pop(0)
        for parts in zip(*(each.split(size) for each in batch.values()), strict=True):
            loss = forward(model, dict(zip(batch, parts, strict=True))) * (len(parts[0]) / ROWS)
            backward(loss)
            total = total + loss.detach()
        return total, size

    return train(model, mutations, (), step)


def train(model, mutations, failures, step):
    """Train on some batches, retrying each one after a failure."""
    trace = Trace()
    CLOCK.failures, CLOCK.fired, CLOCK.left = list(failures), False, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(CLOCK.seed)
    for CLOCK.batch in range(BATCHES):
        CLOCK.ticks, CLOCK.made, CLOCK.has_failed = {}, [], False
        batch = {name: torch.randn(ROWS, n, generator=data) for name, n in (("x", 3), ("y", 1))}
        result, errors = attempted(step, batch, attempts=1 + len(failures))
        trace.told += " ".join(map(str, errors))
        if result is None:
            trace.numbers.append(errors[-1])
            break
        loss, size = result
        trace.sizes.append(size)
        trace.numbers.append(picture([loss, *(each.grad for each in model.parameters())]))
        trace.places.append({each.kind: each.read() for each in mutations})
        trace.places[-1] |= {"modes": modes(), "model": picture(model.state_dict())}
        trace.places[-1] |= {"alive": num_alive()}
        optimizer.step()
        optimizer.zero_grad()
    trace.fired, trace.left = CLOCK.fired, CLOCK.left
    return trace


def attempted(step, batch, attempts):
    """Return the result of a step, and the errors of earlier attempts."""
    errors: list[str] = []
    for _ in range(attempts):
        try:
            return step(batch), errors
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return None, errors


def judge(program):
    """Return ``equal``, ``named`` or ``silent``, and the differences."""
    with everything_global():
        failed = run(program, program.failures, probe=program.probe)
    with everything_global():
        clean = plainly(program, failed.sizes)
    if len(clean.sizes) < BATCHES:
        return "invalid", [clean.told]
    pairs = zip(failed.places, clean.places, strict=False)
    differing = sorted({n for one, other in pairs for n in one if one[n] != other[n]})
    if failed.left:
        differing.append(f"{failed.left} tensors of a failed attempt are held")
    if len(failed.sizes) < BATCHES:
        differing.append(f"batch {len(failed.sizes)} is never trained: {failed.numbers[-1]}")
    elif not differing and failed.numbers != clean.numbers:
        differing.append("gradients")
    if not differing:
        return "equal" if failed.fired else "unfired", []
    names = {each.kind: each.told for each in make(program)[2]}
    places = names.keys() & set(differing) or names
    is_named = any(names[place] in failed.told for place in places)
    return "named" if is_named else "silent", [*differing, failed.told]


def check(program):
    verdict, differing = judge(program)
    if verdict in ("silent", "invalid"):
        pytest.fail(f"{verdict}: {differing} after {program}", pytrace=False)


# Without shrinking failing programs, which would take many runs.
DRAWN_ONLY: Any = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}


@given(programs())
@settings(max_examples=40, **DRAWN_ONLY)
@pytest.mark.sweep
def test_sampled_programs_recover_without_trace(program):
    check(program)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(programs())
@settings(max_examples=2_000, **DRAWN_ONLY)
def test_many_programs_recover_without_trace(program):
    check(program)


# Points of failure: between a change and its undo, in the backward, after a backward.
FAILURES = ("nowhere", "forward", "backward", "after")
NAMED = {"list_of_20000_counts", "tensor_of_20_megabytes", "iterator"}  # not restored
PHASES = (*ANY, *PULSE)
QUICK = [("first", "nowhere"), ("turn", "forward")]


@pytest.mark.parametrize(("phase", "where"), mostly_in_sweeps(PHASES, FAILURES, quick=QUICK, few=8))
def test_state_kinds_match_plain_torch_after_failure(phase, where):
    names = [name for name in sorted(KINDS.keys() - NAMED) if phase in fully(name)[-1]]
    for number in range(4):
        some = tuple(Use(name, phase, number, number, 0) for name in names[number::4])
        fault = Failure(1, where, len(some) + 1 if where == "forward" else 1, True)
        faults = () if where == "nowhere" else (fault,)
        found = judge(Program(some, faults, 4, where == "backward", True))
        assert found == ("equal" if faults else "unfired", [])
