"""Hold random draws constant during checks, and record the draws that cannot be held."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from automicro.torch_private_execution import DIRICHLET_DRAW, GAMMA_DRAW, is_collective, schema_of
from automicro.transaction.writes import ParameterWrites


class CollectiveError(Exception):
    """A forward running on a single rank was about to communicate with other ranks."""


class LossCollectiveError(CollectiveError):
    """The loss was about to, outside of the model."""


def needs_other_ranks(how: str = "sharded parameters, say") -> str:
    """Return the reason, for messages, why a forward that needs other ranks cannot be checked."""
    return (
        f"the forward or the loss communicates with other ranks ({how}), and a check runs on one "
        "rank"
    )


class HeldDraws(ParameterWrites):
    """Mode that makes torch's random draws constant, and records precision and own seeds.

    It works on operations, so it covers fused modules, scripted code and recomputed checkpoints.
    Writes to parameters are recorded and undone, as in the base class.

    Example:
        >>> with HeldDraws() as draws:
        ...     torch.nn.functional.dropout(torch.ones(3))
        tensor([1., 1., 1.])
        >>> draws.drawn
        {'dropout of 0.5'}
    """

    def __init__(self, parameters: Iterable[Tensor] = (), *, is_alone: bool = False) -> None:
        super().__init__(parameters)
        self._is_alone = is_alone
        self.number = 0  # number of the current pass, set by the caller
        self.drawn: set[str] = set()  # names of the operations whose draws were replaced
        self.unheld: set[str] = set()  # names of the operations without a constant replacement
        self.lowest = torch.float64  # lowest floating point dtype of any result
        # Keyed by generator state before a draw: the draws that each pass made from it.
        self._seeds: dict[bytes, dict[int, list[Any]]] = {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation with a constant in place of its random draw."""
        # Raised before the operation runs, because no other rank would join it.
        if self._is_alone and is_collective(func):
            raise CollectiveError(f"{func.namespace}.{func.overloadpacket.__name__}")
        # Before a draw, too, because it can be into a parameter.
        self.keep_written(func, args, kwargs)
        name, draws, shares = _told(func)
        for at, given in shares:
            args, kwargs = self._without_dropout(at, given, args, kwargs)
        if name == "native_dropout_backward":
            return args[0] * args[1]  # by the mask only, as in the forward
        if draws and not shares:
            return self._draw(func, name, args, dict(kwargs))
        result = func(*args, **kwargs)
        if type(result) is Tensor and (result.is_floating_point() or result.is_complex()):
            self.lowest = min(self.lowest, result.dtype.to_real(), key=lambda each: each.itemsize)
        return result

    def _without_dropout(self, at: int, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args[at] if len(args) > at else kwargs.get(name)
        if not isinstance(given, float) or not given:
            return args, kwargs
        self.drawn.add(f"dropout of {given:g}")
        if len(args) > at:
            return (*args[:at], 0.0, *args[at + 1 :]), kwargs
        return args, {**kwargs, name: 0.0}

    def _draw(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        defaults = {each.name: each.default_value for each in schema_of(func).arguments}
        given = {**defaults, **dict(zip(_names(func), args, strict=False)), **kwargs}
        # Nothing is drawn in evaluation mode.
        if given.get("training") is False:
            return func(*args, **kwargs)
        if name in ("rrelu_with_noise", "rrelu_with_noise_"):
            slopes = (given["lower"] + given["upper"]) / 2
            self.drawn.add("rrelu")
            given["noise"].copy_(torch.where(given["self"] <= 0, slopes, 1.0))
            multiply = Tensor.mul_ if name[-1] == "_" else Tensor.mul
            return multiply(given["self"], given["noise"])
        constant = _CONSTANTS.get(name)
        if name == "multinomial" and not (given["replacement"] or given["num_samples"] == 1):
            constant = None
        before = _state(given, args)
        drawn = func(*args, **kwargs)  # the generator advances as usual
        shape = getattr(drawn, "shape", ())
        self._seeds.setdefault(before, {}).setdefault(self.number, []).append(shape)
        if constant is None:
            self.unheld.add(f"torch.{name.strip('_')}")
            return drawn
        value = constant(given)
        # Without a fused kernel, dropout draws with bernoulli_.
        is_dropout = name == "bernoulli_" and isinstance(value, float)
        self.drawn.add(f"dropout of {1 - value:g}" if is_dropout else name.strip("_"))
        return drawn.copy_(value) if isinstance(value, Tensor) else drawn.fill_(value)

    @property
    def repeats(self) -> bool:
        """Whether passes drew from one state, with shapes that follow the number of rows."""
        # Draws of the same shape for any number of rows, as for a fixed projection, do not count.
        return any(
            one != other
            for shapes in self._seeds.values()
            for one, other in itertools.pairwise(shapes.values())
        )


def _state(given: Mapping[str, Any], args: Any) -> bytes:
    """Return the state of the generator that an operation is about to draw from."""
    if given.get("generator") is not None:
        state = given["generator"].get_state()
    else:
        tensors = (each.device for each in args if isinstance(each, Tensor))
        device = torch.device(given.get("device") or next(tensors, "cpu"))
        is_there = device.type not in ("cpu", "meta")
        states: Any = torch.get_device_module(device) if is_there else torch
        state = states.get_rng_state(device) if is_there else states.get_rng_state()
    return bytes(state.cpu().numpy().tobytes())


@functools.cache
def _told(func: Any) -> tuple[str, bool, tuple[tuple[int, str], ...]]:
    """Return an operation's name, whether it draws, and its dropout probabilities."""
    name, names = func.overloadpacket.__name__, _names(func)
    draws = name in _CONSTANTS or torch.Tag.nondeterministic_seeded in func.tags
    shares = ("dropout_p", "dropout", *["p"] * (name.strip("_") in _DROPOUTS))
    return name, draws, tuple((names.index(each), each) for each in shares if each in names)


def _names(func: Any) -> list[str]:
    schema = schema_of(func)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def _near_mean(given: Mapping[str, Any]) -> Any:
    # Not the exact mean: a factor of zero would hide part of the gradient.
    mean, std = given.get("mean"), given.get("std")
    return (0.0 if mean is None else mean) + (1.0 if std is None else std) / 2


def _integer(given: Mapping[str, Any]) -> Any:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return 0 if high is None else (low + high) // 2


def _reversed(given: Mapping[str, Any]) -> Any:
    # Not the identity, which would hide the neighbors that a permutation creates.
    return torch.arange(given["n"]).flip(0)


def _middle(given: Mapping[str, Any]) -> Any:
    return (given["from"] + given["to"]) / 2


def _probability(given: Mapping[str, Any]) -> Any:
    return given["self"] if given.get("p") is None else given["p"]


# native_dropout appears with fused kernels, the others in inference mode; otherwise dropout is
# decomposed.
_DROPOUTS = {
    *("native_dropout", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
}
# Constants are the same for every row, regardless of its position.
_CONSTANTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict.fromkeys(("bernoulli", "bernoulli_"), _probability),
    **dict.fromkeys(("rand", "rand_like", "cauchy_"), lambda given: 0.5),
    **dict.fromkeys(("uniform", "uniform_"), _middle),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "normal_functional"), _near_mean),
    **dict.fromkeys(("random_", "randint", "randint_like"), _integer),
    "randperm": _reversed,
    **dict.fromkeys(("poisson", GAMMA_DRAW), lambda given: given["self"]),
    DIRICHLET_DRAW: lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
    "binomial": lambda given: given["count"] * given["prob"],
    "exponential_": lambda given: 1 / given["lambd"],
    "geometric_": lambda given: 1,
    "log_normal_": lambda given: 1.5,
    "multinomial": lambda given: given["self"].argmax(-1, keepdim=True),
}
