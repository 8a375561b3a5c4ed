"""Kinds of state that a forward sets and unsets, or counts: without ``try``, as people write it.

Each makes a generator function, which sets, yields what the loss takes from it and unsets, and
a function that gives the state as values to compare.
"""

import contextlib
import dataclasses
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import is_extra_pass
from tests.outside import Outside
from tests.state import meters

# Of a batch's first microbatch, or the forward of its second: then a backward has run.
PHASES = {"forward": ("forward", 1), "backward": ("backward", 1), "later": ("forward", 2)}
FUSED = F.scaled_dot_product_attention
GLOBAL_LIST: list[Tensor] = []
Around = Callable[[Tensor], Iterator[Any]]
Kind = tuple[Around, Callable[[], Any]]


class Head(nn.Linear):
    pass


class Net(nn.Module):
    """What a microbatch computes is the step that it is given."""

    seen, doubles = 0, False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(6, 8), nn.Dropout(0.3), Head(8, 3)
        self.adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
        self.active, self.scale = "a", 1.0
        self.auxiliary: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, batch: Any, step: Callable[["Net", Any], Tensor]) -> Tensor:
        return step(self, batch)

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.dropout(torch.tanh(self.first(x)))
        return encoded

    def decode(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.adapters[self.active](hidden)
        each = hidden.view(len(hidden), 1, 2, 4)
        mixed = F.scaled_dot_product_attention(each, each, each).reshape(len(hidden), 8)
        logits: Tensor = self.second(mixed) * torch.full((3,), self.scale)
        return logits * (2 if Net.doubles else 1)


def train_flag(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        net.eval()
        yield 0
        net.train()

    return around, lambda: [module.training for module in net.modules()]


def requires_grad(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        net.second.requires_grad_(False)
        yield 0
        net.second.requires_grad_(True)

    return around, lambda: [p.requires_grad for p in net.second.parameters()]


def grad_mode(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        torch._C._set_grad_enabled(False)
        yield 0
        torch._C._set_grad_enabled(True)

    return around, torch.is_grad_enabled


def default_dtype(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        torch.set_default_dtype(torch.float64)
        yield 0
        torch.set_default_dtype(torch.float32)

    return around, torch.get_default_dtype


def autocast_by_hand(net: Net) -> Kind:
    entered: list[Any] = []

    def around(_: Tensor) -> Iterator[Any]:
        entered.append(torch.autocast("cpu", dtype=torch.bfloat16))
        entered[-1].__enter__()
        yield 0
        entered.pop().__exit__(None, None, None)

    return around, lambda: len(entered)


def plain_attribute(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        net.scale = 2.0
        yield 0
        net.scale = 1.0

    return around, lambda: net.scale


def filled(held: list[Tensor]) -> Kind:
    def around(value: Tensor) -> Iterator[Any]:
        held.append(value)
        yield sum(held)
        held.clear()

    return around, lambda: len(held)


def list_on_the_module(net: Net) -> Kind:
    return filled(net.auxiliary)


def list_in_a_closure(net: Net) -> Kind:
    return filled([])


def global_list(net: Net) -> Kind:
    GLOBAL_LIST.clear()

    def around(value: Tensor) -> Iterator[Any]:
        GLOBAL_LIST.append(value)
        yield sum(GLOBAL_LIST)
        GLOBAL_LIST.clear()

    return around, lambda: len(GLOBAL_LIST)


def dictionary(net: Net) -> Kind:
    def around(value: Tensor) -> Iterator[Any]:
        yield net.cache.setdefault("auxiliary", value)
        del net.cache["auxiliary"]

    return around, lambda: list(net.cache)


def hook(net: Net) -> Kind:
    handles: list[Any] = []

    def around(_: Tensor) -> Iterator[Any]:
        handles.append(net.first.register_forward_hook(lambda module, args, out: out * 2))
        yield 0
        handles.pop().remove()

    return around, lambda: (len(handles), len(net.first._forward_hooks))


def method_of_the_instance(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        second: Any = net.second
        second.forward = lambda x: F.linear(x, second.weight)
        yield 0
        del second.forward

    return around, lambda: "forward" in vars(net.second)


def method_of_the_class(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        setattr(Head, "forward", lambda self, x: F.linear(x, self.weight))  # noqa: B010
        yield 0
        del Head.forward

    return around, lambda: "forward" in vars(Head)


def function_of_the_library(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        setattr(F, "scaled_dot_product_attention", lambda q, k, v: v * 2)  # noqa: B010
        yield 0
        setattr(F, "scaled_dot_product_attention", FUSED)  # noqa: B010

    return around, lambda: F.scaled_dot_product_attention is FUSED


def attribute_of_a_parameter(net: Net) -> Kind:
    def around(_: Tensor) -> Iterator[Any]:
        weight: Any = net.second.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        weight.is_busy = True
        yield 0
        del weight.is_busy

    return around, lambda: dict(vars(net.second.weight))


def own_generators(net: Net) -> Kind:
    of_torch, of_numpy, of_python = torch.Generator(), np.random.default_rng(0), random.Random(0)
    of_torch.manual_seed(0)

    def around(_: Tensor) -> Iterator[Any]:
        yield torch.rand((), generator=of_torch) + of_numpy.random() + of_python.random()

    def place() -> Any:
        return of_torch.get_state().tolist(), of_numpy.bit_generator.state, of_python.getstate()

    return around, place


def adapter(net: Net) -> Kind:
    def use(name: str) -> None:
        net.active = name
        for each, module in net.adapters.items():
            module.requires_grad_(each == name)

    def around(_: Tensor) -> Iterator[Any]:
        use("b")
        yield 0
        use("a")

    use("a")
    return around, lambda: (net.active, [p.requires_grad for p in net.adapters.parameters()])


class Teacher(nn.Module):
    count: Tensor
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("center", torch.zeros(8), persistent=False)


def teacher(net: Net) -> Kind:
    moved = Teacher()

    def around(_: Tensor) -> Iterator[Any]:
        moved.eval()
        moved.count += 1
        moved.center.add_(0.5)
        yield 0
        moved.train()

    return around, lambda: (moved.training, [b.tolist() for b in moved.buffers()])


class Meter:
    def __init__(self) -> None:
        self.count, self.parts = 0, [[0]]
        self.current: Tensor | None = None


def object_of_a_class(net: Net) -> Kind:
    meter = Meter()

    def around(value: Tensor) -> Iterator[Any]:
        meter.count += 1
        meter.parts[0][0] += 1
        meter.current = value
        yield 0
        meter.current = None

    return around, lambda: (meter.count, meter.parts[0][0], meter.current is None)


@dataclasses.dataclass
class Record:
    count: int = 0
    parts: tuple[list[Tensor], ...] = dataclasses.field(default_factory=lambda: ([],))


def dataclass(net: Net) -> Kind:
    record = Record()

    def around(value: Tensor) -> Iterator[Any]:
        record.count += 1
        record.parts[0].append(value)
        yield sum(record.parts[0])
        record.parts[0].clear()

    return around, lambda: (record.count, len(record.parts[0]))


def class_attribute(net: Net) -> Kind:
    Net.seen, Net.doubles = 0, False

    def around(_: Tensor) -> Iterator[Any]:
        Net.seen += 1
        type(net).doubles = True
        yield 0
        type(net).doubles = False

    return around, lambda: (Net.seen, Net.doubles)


def behind_an_import(net: Net) -> Kind:
    meters.COUNT = 0
    meters.ROWS.clear()

    def around(_: Tensor) -> Iterator[Any]:
        meters.bump(1)
        yield 0

    return around, lambda: (meters.COUNT, list(meters.ROWS))


KINDS: dict[str, Callable[[Net], Kind]] = {
    make.__name__: make
    for make in (
        *(train_flag, requires_grad, grad_mode, default_dtype, autocast_by_hand, plain_attribute),
        *(list_on_the_module, list_in_a_closure, global_list, dictionary, hook),
        *(method_of_the_instance, method_of_the_class, function_of_the_library),
        *(attribute_of_a_parameter, own_generators, adapter, teacher, object_of_a_class),
        *(dataclass, class_attribute, behind_an_import),
    )
}


class Watch:
    """Fails once, and keeps weak references to what each attempt makes."""

    def __init__(self, phase: str = "", at: int = -1) -> None:
        self.due = (at, *PHASES[phase]) if phase in PHASES else None
        self.batch = self.calls = self.fired = 0
        self.made: list[weakref.ref[Tensor]] = []
        self.left_at_the_retry = 0

    def begin(self) -> None:
        if not is_extra_pass():
            self.calls += 1
            if self.fired == 1:
                self.fired, self.left_at_the_retry = 2, self.alive()

    def alive(self) -> int:
        return sum(each() is not None for each in self.made)

    def reach(self, where: str) -> None:
        if not is_extra_pass() and not self.fired and self.due == (self.batch, where, self.calls):
            self.fired = 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


OUTSIDE = Outside(watch=Watch())


def pass_through(kinds: Sequence[Kind], where: str, value: Tensor, inner: Callable[[], Any]) -> Any:
    """Set all kinds, compute, and unset them, if nothing fails between."""
    OUTSIDE.watch.made.append(weakref.ref(value))
    running = [around(value) for around, _ in kinds]
    extra = sum(next(each) for each in running)
    OUTSIDE.watch.reach(where)
    result = inner() + extra
    for each in reversed(running):
        next(each, None)
    return result


class Backward(torch.autograd.Function):
    """Sets and unsets in its backward, too, as one that computes again does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kinds: Sequence[Kind]) -> Tensor:
        ctx.kinds = kinds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pass_through(ctx.kinds, "backward", gradient.square().mean(), lambda: 0)
        return gradient, None


def step_of(kinds: Sequence[Kind]) -> Callable[[Net, Any], Tensor]:
    """What a microbatch computes: a pass, and one more while all kinds are set."""

    def step(net: Net, batch: Any) -> Tensor:
        x, y = batch
        OUTSIDE.watch.begin()
        hidden = net.encode(x)
        OUTSIDE.watch.made.append(weakref.ref(hidden))
        loss = F.cross_entropy(net.decode(Backward.apply(hidden, kinds)), y)
        within = pass_through(
            kinds,
            "forward",
            hidden.square().mean(),
            lambda: net.decode(net.encode(x)).tanh().mean(),
        )
        return loss + 0.1 * within  # type: ignore[no-any-return]

    return step


def modes() -> dict[str, Any]:
    """What torch has for the whole process, or the thread."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), nesting),
        "attention": F.scaled_dot_product_attention is FUSED,
        "random state": torch.get_rng_state().tolist(),
    }


@contextlib.contextmanager
def modes_put_back() -> Iterator[None]:
    """Leave nothing to later runs of what a failed attempt has left behind."""
    dtype = torch.get_autocast_dtype("cpu")
    try:
        yield
    finally:
        while torch.autocast_decrement_nesting() >= 0:
            pass
        torch.autocast_increment_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", dtype)
        torch._C._set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        setattr(F, "scaled_dot_product_attention", FUSED)  # noqa: B010
        if "forward" in vars(Head):
            del Head.forward
        for make in (class_attribute, global_list, behind_an_import):
            make(Net())
