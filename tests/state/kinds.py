"""Kinds of state that a forward sets and unsets, or counts: without ``try``, as people write it."""

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
from tests.state.undone import count, put

# Of a batch's first microbatch, or the forward of its second: then a backward has run.
PHASES = {"forward": ("forward", 1), "backward": ("backward", 1), "later": ("forward", 2)}
FUSED = F.scaled_dot_product_attention
GLOBAL_LIST: list[Tensor] = []
Around = Callable[[Tensor], Iterator[Any]]
Kind = tuple[Around, Callable[[], Any]]
Row = tuple[Callable[[Tensor], Any], Callable[[], Any], Callable[[], Any]]


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


class Teacher(nn.Module):
    count: Tensor
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("center", torch.zeros(8), persistent=False)


class Meter:
    def __init__(self) -> None:
        self.count, self.parts = 0, [[0]]
        self.current: Tensor | None = None


@dataclasses.dataclass
class Record:
    count: int = 0
    parts: tuple[list[Tensor], ...] = dataclasses.field(default_factory=lambda: ([],))


def push(held: list[Any], value: Any) -> Any:
    held.append(value)
    return sum(held) if isinstance(value, Tensor) else 0


def enter(context: Any) -> Any:
    context.__enter__()
    return context


def filled(held: list[Tensor]) -> Row:
    held.clear()
    return lambda v: push(held, v), held.clear, lambda: len(held)


def use(net: Any, name: str) -> None:
    net.active = name
    for each, module in net.adapters.items():
        module.requires_grad_(each == name)


def class_attribute(net: Any = None) -> Row:
    put(Net, seen=0, doubles=False)
    return (
        lambda v: (count(Net, "seen"), put(type(net), doubles=True)),
        lambda: put(type(net), doubles=False),
        lambda: (Net.seen, Net.doubles),
    )


def behind_an_import(net: Any = None) -> Row:
    meters.COUNT = 0
    meters.ROWS.clear()
    return lambda v: meters.bump(1), lambda: None, lambda: (meters.COUNT, list(meters.ROWS))


def without_bias(net: Any) -> Any:
    return lambda x: F.linear(x, net.second.weight)


def global_list(net: Any = None) -> Row:
    GLOBAL_LIST.clear()
    return lambda v: push(GLOBAL_LIST, v), lambda: GLOBAL_LIST.clear(), lambda: len(GLOBAL_LIST)


# What sets a kind, and gives what the loss takes from it; what unsets it; what there is to compare.
# fmt: off
KINDS: dict[str, Callable[[Any], Row]] = {
    "train_flag": lambda n: (lambda v: n.eval(), lambda: n.train(), lambda: [m.training for m in n.modules()]),
    "requires_grad": lambda n: (lambda v: n.second.requires_grad_(False), lambda: n.second.requires_grad_(True), lambda: [p.requires_grad for p in n.second.parameters()]),
    "grad_mode": lambda n: (lambda v: torch._C._set_grad_enabled(False), lambda: torch._C._set_grad_enabled(True), torch.is_grad_enabled),
    "default_dtype": lambda n: (lambda v: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32), torch.get_default_dtype),
    "autocast_by_hand": lambda n: (lambda entered: (lambda v: push(entered, enter(torch.autocast("cpu", dtype=torch.bfloat16))), lambda: entered.pop().__exit__(None, None, None), lambda: len(entered)))([]),
    "plain_attribute": lambda n: (lambda v: put(n, scale=2.0), lambda: put(n, scale=1.0), lambda: n.scale),
    "list_on_the_module": lambda n: filled(n.auxiliary),
    "list_in_a_closure": lambda n: filled([]),
    "global_list": global_list,
    "dictionary": lambda n: (lambda v: n.cache.setdefault("auxiliary", v), lambda: n.cache.pop("auxiliary"), lambda: list(n.cache)),
    "hook": lambda n: (lambda handles: (lambda v: push(handles, n.first.register_forward_hook(lambda module, args, out: out * 2)), lambda: handles.pop().remove(), lambda: (len(handles), len(n.first._forward_hooks))))([]),
    "method_of_the_instance": lambda n: (lambda v: put(n.second, forward=without_bias(n)), lambda: delattr(n.second, "forward"), lambda: "forward" in vars(n.second)),
    "method_of_the_class": lambda n: (lambda v: put(Head, forward=lambda self, x: F.linear(x, self.weight)), lambda: delattr(Head, "forward"), lambda: "forward" in vars(Head)),
    "function_of_the_library": lambda n: (lambda v: put(F, scaled_dot_product_attention=lambda q, k, v: v * 2), lambda: put(F, scaled_dot_product_attention=FUSED), lambda: F.scaled_dot_product_attention is FUSED),
    "attribute_of_a_parameter": lambda n: (lambda v: (count(n.second.weight, "calls"), put(n.second.weight, is_busy=True)), lambda: delattr(n.second.weight, "is_busy"), lambda: dict(vars(n.second.weight))),
    "own_generators": lambda n: (lambda t, n, p: (lambda v: torch.rand((), generator=t) + n.random() + p.random(), lambda: None, lambda: (t.get_state().tolist(), n.bit_generator.state, p.getstate())))(torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)),
    "adapter": lambda n: use(n, "a") or (lambda v: use(n, "b"), lambda: use(n, "a"), lambda: (n.active, [p.requires_grad for p in n.adapters.parameters()])),
    "teacher": lambda n: (lambda t: (lambda v: (t.eval(), put(t, count=t.count.add_(1)), t.center.add_(0.5)), t.train, lambda: (t.training, [b.tolist() for b in t.buffers()])))(Teacher()),
    "object_of_a_class": lambda n: (lambda m: (lambda v: (count(m, "count"), put(m, current=v), m.parts[0].append(m.parts[0].pop() + 1)), lambda: put(m, current=None), lambda: (m.count, m.parts[0][0], m.current is None)))(Meter()),
    "dataclass": lambda n: (lambda r: (lambda v: (count(r, "count"), push(r.parts[0], v))[1], r.parts[0].clear, lambda: (r.count, len(r.parts[0]))))(Record()),
    "class_attribute": class_attribute,
    "behind_an_import": behind_an_import,
}
# fmt: on


def kind_of(name: str, net: Net) -> Kind:
    change, undo, read = KINDS[name](net)

    def around(value: Tensor) -> Iterator[Any]:
        extra = change(value)
        yield extra if isinstance(extra, Tensor) else 0
        undo()

    return around, read


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
            make()
