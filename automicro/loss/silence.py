"""Random draws made the same for every cut of a batch, and a watch on precision.

Two splits of one batch draw other dropout masks, so their gradients differ although nothing is
wrong. Here dropout lets everything through, and every other draw that can be is replaced by a
constant: what remains different between two splits is not chance.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from automicro.torch_private import (
    DIRICHLET_DRAW,
    GAMMA_DRAW,
    OperationMode,
    is_collective,
    schema_of,
)


class CollectiveError(Exception):
    """A forward on one rank alone was about to communicate with the others."""


def needs_other_ranks(how: str = "sharded parameters, say") -> str:
    """Why nothing can be looked at where a forward needs other ranks, for messages."""
    return (
        f"the forward or the loss communicates with other ranks ({how}), and one rank alone cannot "
        "look"
    )


class Silence(OperationMode):
    """While this mode is active, torch's draws are constant and precision is noted.

    It sees operations, not functions: draws inside fused modules, scripted code and checkpoints
    that recompute too. Draws with a generator of the caller's leave that generator alone.

    Args:
        is_alone: whether to raise before a collective operation, which other ranks would not meet.

    Attributes:
        drawn: names of the operations that would have drawn.
        unsilenced: names of those that did, because no constant can stand for what they draw.
        dtypes: floating point types that operations gave.
        lowest: the lowest floating point type that something in float64 was cast to, if any.

    Example:
        >>> with Silence() as silence:
        ...     torch.nn.functional.dropout(torch.ones(3))
        tensor([1., 1., 1.])
        >>> silence.drawn
        {'dropout'}
    """

    def __init__(self, *, is_alone: bool = False) -> None:
        super().__init__()
        self._is_alone = is_alone
        self.drawn: set[str] = set()
        self.unsilenced: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self.lowest: torch.dtype | None = None

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, a constant in place of what it draws."""
        if self._is_alone and is_collective(func):
            raise CollectiveError(f"{func.namespace}.{func.overloadpacket.__name__}")
        name, draws, shares_of_dropout = _told(func)
        if draws:
            return self._draw(func, name, args, dict(kwargs))
        for index, given in shares_of_dropout:
            args, kwargs = self._without_dropout(index, given, args, kwargs)
        if name == "native_dropout_backward":
            return args[0] * args[1]  # by the mask alone, as the forward went
        result = func(*args, **kwargs)
        if type(result) is Tensor and (result.is_floating_point() or result.is_complex()):
            self._note_precision(result, args)
        return result

    def _note_precision(self, result: Tensor, args: Any) -> None:
        dtype = result.dtype.to_real()
        self.dtypes.add(dtype)
        if dtype is not torch.float64 and any(
            isinstance(each, Tensor) and each.dtype is torch.float64 for each in args
        ):
            known = [dtype] if self.lowest is None else [dtype, self.lowest]
            self.lowest = min(known, key=lambda dtype: dtype.itemsize)

    def _without_dropout(self, index: int, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args[index] if len(args) > index else kwargs.get(name)
        if not isinstance(given, float) or not given:
            return args, kwargs
        self.drawn.add("dropout")
        if len(args) > index:
            return (*args[:index], 0.0, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: 0.0}

    def _draw(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        defaults = {each.name: each.default_value for each in schema_of(func).arguments}
        given = {**defaults, **dict(zip(_names(func), args, strict=False)), **kwargs}
        if "dropout_p" in given:  # attention that drops
            index = _names(func).index("dropout_p")
            args, kwargs = self._without_dropout(index, "dropout_p", args, kwargs)
            return func(*args, **kwargs)
        if name == "native_dropout":
            if given["p"] and given.get("train") is not False:
                self.drawn.add("dropout")
            values = given["input"]
            return values.clone(), torch.ones_like(values, dtype=torch.bool)
        if name in ("rrelu_with_noise", "rrelu_with_noise_"):
            self.drawn.add("rrelu")
            slopes = (given["lower"] + given["upper"]) / 2
            values = given["self"]
            given["noise"].copy_(torch.where(values <= 0, slopes, 1.0))
            return values.mul_(given["noise"]) if name.endswith("_") else values * given["noise"]
        constant = _DRAWS.get(name)
        if constant is None:
            self.unsilenced.add(f"torch.{name.strip('_')}")
            return func(*args, **kwargs)
        if name == "multinomial" and not (given["replacement"] or given["num_samples"] == 1):
            self.unsilenced.add("torch.multinomial")
            return func(*args, **kwargs)
        # Dropout itself draws like this where no kernel is fused.
        self.drawn.add("dropout" if name == "bernoulli_" else name.strip("_"))
        if name.endswith("_"):
            drawn = given["self"]
        else:
            if kwargs.get("generator") is not None:
                kwargs["generator"] = None
            drawn = _drawn_aside(func, args, kwargs)
        value = constant(given, drawn)
        if isinstance(value, Tensor):
            drawn.copy_(value.expand_as(drawn))
        else:
            drawn.fill_(value)
        return drawn


def _drawn_aside(func: Any, args: Any, kwargs: Any) -> Tensor:
    """What a draw gives, for its shape; the next one is as if it had not been.

    Otherwise what cannot be silenced would depend on how many rows were drawn for before.
    """
    host = torch.get_rng_state()
    given = kwargs.get("device") or next(
        (each.device for each in args if isinstance(each, Tensor)), torch.device("cpu")
    )
    device = torch.device(given)
    if device.type in ("cpu", "meta"):
        drawn: Tensor = func(*args, **kwargs)
    else:
        module = torch.get_device_module(device)
        there = module.get_rng_state(device)
        drawn = func(*args, **kwargs)
        module.set_rng_state(there, device)
    torch.set_rng_state(host)
    return drawn


@functools.cache
def _told(func: Any) -> tuple[str, bool, tuple[tuple[int, str], ...]]:
    """An operation's name, whether it draws, and which of its arguments are shares of dropout."""
    name, names = func.overloadpacket.__name__, _names(func)
    draws = name in _DRAWS or torch.Tag.nondeterministic_seeded in func.tags
    shares = ("dropout_p", "dropout")
    return name, draws, tuple((names.index(each), each) for each in shares if each in names)


def _names(func: Any) -> list[str]:
    return [argument.name for argument in schema_of(func).arguments]


def _middle(given: Mapping[str, Any], _: Tensor) -> Any:
    return (given["from"] + given["to"]) / 2


def _near_mean(given: Mapping[str, Any], _: Tensor) -> Any:
    # Not the mean of zero: a factor of zero would hide a part of the gradient.
    mean, std = given.get("mean"), given.get("std")
    return (0.0 if mean is None else mean) + (1.0 if std is None else std) / 2


def _probability(given: Mapping[str, Any], _: Tensor) -> Any:
    return given["self"] if given.get("p") is None else given["p"]


def _integer(given: Mapping[str, Any], _: Tensor) -> Any:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return 0 if high is None else (low + high) // 2


def _likeliest(given: Mapping[str, Any], _: Tensor) -> Tensor:
    values: Tensor = given["self"]
    return values.argmax(-1, keepdim=True)


def _simplex(given: Mapping[str, Any], _: Tensor) -> Tensor:
    values: Tensor = given["self"]
    return values / values.sum(-1, keepdim=True)


_DRAWS: dict[str, Callable[[Mapping[str, Any], Tensor], Any] | None] = {
    "native_dropout": None,
    "bernoulli": _probability,
    "bernoulli_": _probability,
    "rand": lambda given, drawn: 0.5,
    "rand_like": lambda given, drawn: 0.5,
    "uniform": _middle,
    "uniform_": _middle,
    "randn": _near_mean,
    "randn_like": _near_mean,
    "normal": _near_mean,
    "normal_": _near_mean,
    "normal_functional": _near_mean,
    "exponential_": lambda given, drawn: 1 / given["lambd"],
    "log_normal_": lambda given, drawn: 1.5,
    "cauchy_": lambda given, drawn: 0.5,
    "geometric_": lambda given, drawn: 1,
    "random_": _integer,
    "randint": _integer,
    "randint_like": _integer,
    "poisson": lambda given, drawn: given["self"],
    "binomial": lambda given, drawn: given["count"] * given["prob"],
    GAMMA_DRAW: lambda given, drawn: given["self"],
    DIRICHLET_DRAW: _simplex,
    "multinomial": _likeliest,
}
