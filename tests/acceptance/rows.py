"""Components of table rows: seeded batches, small models, and jobs for one run."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 32
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "autocast": torch.float32,
    "bfloat16": torch.bfloat16,
}
ALL = ("float64", "float32", "autocast")
WIDE = ("float64", "float32")


@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of one batch."""

    generator: torch.Generator
    real: torch.dtype
    step: int

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.real)

    def uniform(self, *shape: int) -> Tensor:
        drawn = torch.rand(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.real)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def mask(self, rows: int, width: int) -> Tensor:
        """Return True at the first few positions of each row, at least one."""
        return torch.arange(width) < self.whole(1, width + 1, rows, 1)


Batch = Callable[[Draws], Any]
Forward = Callable[[Any, Any], Any]


@dataclasses.dataclass(kw_only=True)
class Job:
    """One run: a model, its batches by step, and the options of the Microbatcher."""

    model: nn.Module
    batch: Callable[[int], Any]
    options: dict[str, Any]
    size: Any = 8
    steps: int = 3
    lr: float = 1e-2
    evaluates: bool = False

    def plainly(self, batch: Any) -> tuple[Any, Any]:
        """Return the loss of a whole batch, and the outputs, from a loop in plain torch."""
        options = self.options
        if options.get("forward") is not None:
            result, out = options["forward"](self.model, batch), None
        elif options.get("loss_fn") is not None:
            out = self.model(batch[0])
            result = options["loss_fn"](out, batch[1])
        else:
            found = self.model(**batch)
            result, out = found["loss"], None
        if isinstance(result, tuple):
            result, out = result
        if isinstance(result, Mapping):
            result = result["loss"] if "loss" in result else sum(result.values())
        return result, out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        kind: the heading under which it is counted.
        is_wrong: whether splitting changes what is computed.
        make: makes a new job from a seed and the name of a precision.
        is_measured: whether one run can show it; False if draws differ between runs.
        dtypes: precisions in which it can be distinguished from rounding.
        says: a part of a message about it that is unrelated to splitting.
    """

    kind: str
    is_wrong: bool
    make: Callable[[int, str], Job]
    is_measured: bool = True
    dtypes: tuple[str, ...] = ALL
    says: str = ""


def job(
    forward: Forward | None = None,
    *,
    model: Callable[[], nn.Module] | None = None,
    batch: Batch | None = None,
    fresh: Callable[[], Forward] | None = None,
    size: Any = 8,
    steps: int = 3,
    **more: Any,
) -> Callable[[int, str], Job]:
    """Return a function that makes jobs."""
    own = {name: more.pop(name) for name in ("lr", "evaluates") if name in more}

    def make(seed: int, precision: str) -> Job:
        real = DTYPES[precision]
        torch.manual_seed(1000 + seed)
        made = (model or net(6, 8, 3))().to(real)

        def batches(step: int) -> Any:
            generator = torch.Generator().manual_seed(7919 * seed + step)
            return (batch or classes)(Draws(generator, real, step))

        options = dict(more)
        given = fresh() if fresh is not None else forward
        if given is not None:
            options["forward"] = given
        if isinstance(options.get("loss_fn"), nn.Module):
            options["loss_fn"] = copy.deepcopy(options["loss_fn"]).to(real)
        if precision == "autocast":
            options["precision"] = "bf16"
        return Job(model=made, batch=batches, options=options, size=size, steps=steps, **own)

    return make


# Models and batches that many rows share


def net(*widths: int, act: Callable[[], nn.Module] = nn.Tanh) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for one, other in itertools.pairwise(widths):
            layers += [nn.Linear(one, other), act()]
        return nn.Sequential(*layers[:-1])

    return build


class Between(nn.Module):
    """Two layers, with a function of the hidden rows in between, which also gets this module."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **members: Any) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function
        for name, value in members.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.function(self, self.first(x))))


def between(
    function: Callable[[Any, Tensor], Any], **members: Callable[[], Any]
) -> Callable[[], nn.Module]:
    return lambda: Between(function, **{name: make() for name, make in members.items()})


class Words(nn.Module):
    """A model from tokens to outputs per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 8), nn.Linear(8, 19)

    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.embed(ids)))


def convolutional(*between: nn.Module, width: int = 4) -> nn.Sequential:
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *between, *ends)


def classes(d: Draws) -> Any:
    return d.normal(ROWS, 6), d.whole(0, 3, ROWS)


def numbers(d: Draws) -> Any:
    """Return inputs, and targets that are far from each other."""
    return d.normal(ROWS, 6), d.normal(ROWS, 3) * d.uniform(ROWS, 1) * 3


def weighted(d: Draws) -> Any:
    return *classes(d), d.uniform(ROWS)


def masked(d: Draws) -> Any:
    keep = d.mask(ROWS, 5).to(d.real)
    return {"x": d.normal(ROWS, 6), "y": d.normal(ROWS, 5), "keep": keep}


def tokens(d: Draws) -> Any:
    ids = d.whole(1, 19, ROWS, 7)
    return {"ids": ids, "labels": ids.where(d.mask(ROWS, 7), -100)}


def images(d: Draws) -> Any:
    return d.normal(16, 3, 6, 6), d.whole(0, 3, 16)


def sequences(d: Draws) -> Any:
    labels = d.whole(0, 3, 16, 7)
    keep = d.mask(16, 7)
    return {"x": d.normal(16, 7, 6), "keep": keep, "labels": labels.where(keep, -100)}


# Losses of rows, and a loss over tokens


def entropies(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def squares(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean(1)


def token_mean(model: Any, batch: Any, **more: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), **more)


def masked_mean(model: Any, batch: Any, add: float = 0.0, scale: float = 1.0) -> Any:
    each = (model(batch["x"]) - batch["y"]).square() * batch["keep"]
    return scale * each.sum() / (batch["keep"].sum() + add)


def of_rows(each: Callable[[Tensor], Any], **more: Any) -> dict[str, Callable[[int, str], Job]]:
    """A loss made of the losses of rows: once of classes, once of numbers."""
    return {
        "classes": job(lambda model, batch: each(entropies(model, batch)), **more),
        "numbers": job(lambda model, batch: each(squares(model, batch)), batch=numbers, **more),
    }
