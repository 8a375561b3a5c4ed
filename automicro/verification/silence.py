"""Random draws made the same for every cut of a batch, and a watch on precision.

Two splits of one batch draw other dropout masks, so their gradients differ although nothing is
wrong. Here dropout lets everything through, and every other draw that can be is replaced by a
constant: what remains different between two splits is not chance.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class _Stream:
    """Draws that follow one another from a state that the forward has set.

    Attributes:
        seed: the state.
        state: after the last draw.
        is_of: the generator, by id, where this pass was the first to meet it.
        shapes: of what was drawn.
    """

    seed: bytes
    state: bytes
    is_of: int | None
    shapes: list[torch.Size] = field(default_factory=list)


class OwnSeeds:
    """Draws that a forward makes from a state of a generator that it has set by itself.

    A generator that an earlier pass has met, or that whoever begins a pass knows, is where it is
    meant to be when the pass begins. What it is found at without having drawn was set by the
    forward, and so was one that is made in each pass.
    """

    def __init__(self) -> None:
        self._generators = {id(torch.default_generator): torch.default_generator}
        self._passes: list[list[_Stream]] = []
        self._usual: dict[int, set[bytes]] = {}
        self._streams: dict[int, _Stream] = {}
        self._lasting: set[int] = set()

    def begin(self, known: Iterable[Any] = ()) -> None:
        """Another pass, over other rows.

        Args:
            known: generators that are there before it; those of others than torch are left out.
        """
        self._generators |= {id(each): each for each in known if isinstance(each, torch.Generator)}
        self._usual = {key: {_state(each)} for key, each in self._generators.items()}
        self._streams = {}
        self._passes.append([])

    def draws(self, generator: torch.Generator | None) -> None:
        """A draw comes."""
        if not self._passes:
            return
        generator = generator or torch.default_generator
        key, state = id(generator), _state(generator)
        self._generators.setdefault(key, generator)  # held, so that its id comes only once
        is_new = key not in self._usual
        if not is_new:
            self._lasting.add(key)
        if state in self._usual.get(key, ()):
            self._streams.pop(key, None)
        elif key not in self._streams or self._streams[key].state != state:
            stream = _Stream(seed=state, state=state, is_of=key if is_new else None)
            self._streams[key] = stream
            self._passes[-1].append(stream)

    def drew(self, generator: torch.Generator | None, values: Any) -> None:
        """It has come, of so many values."""
        if not self._passes:
            return
        generator = generator or torch.default_generator
        key, state = id(generator), _state(generator)
        stream = self._streams.get(key)
        if stream is None:
            self._usual[key].add(state)
        else:
            stream.state = state
            stream.shapes.append(getattr(values, "shape", torch.Size()))

    @property
    def repeat(self) -> bool:
        """Whether each pass drew from the same state, for as many rows as it had.

        Draws of the same shapes for all numbers of rows, as of a fixed projection, do not.
        """
        found = [self._shapes(each) for each in self._passes]
        common = set.intersection(*map(set, found)) if len(found) > 1 else set()
        return any(each[seed] != found[0][seed] for seed in common for each in found)

    def _shapes(self, streams: Iterable[_Stream]) -> dict[bytes, set[tuple[torch.Size, ...]]]:
        """What was drawn from each state; not by generators that later passes have met again."""
        shapes: dict[bytes, set[tuple[torch.Size, ...]]] = {}
        for each in streams:
            if each.is_of not in self._lasting:
                shapes.setdefault(each.seed, set()).add(tuple(each.shapes))
        return shapes


def _state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


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
        seeds: what is drawn from states that a forward sets by itself.
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
        self.seeds = OwnSeeds()
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
        self._note("dropout", args[0])
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
            values = given["input"]
            if given["p"] and given.get("train") is not False:
                self._note("dropout", values)
            return values.clone(), torch.ones_like(values, dtype=torch.bool)
        if name.strip("_") in _IN_ONE_PIECE:
            if given.get("p") == 0 or not given.get("train", given.get("training")):
                return func(*args, **kwargs)
            if "p" in given:
                self._note("dropout", args[0])
                return args[0] if name.endswith("_") else args[0].clone()
        if name in ("rrelu_with_noise", "rrelu_with_noise_"):
            slopes = (given["lower"] + given["upper"]) / 2
            values = given["self"]
            self._note("rrelu", values)
            given["noise"].copy_(torch.where(values <= 0, slopes, 1.0))
            return values.mul_(given["noise"]) if name.endswith("_") else values * given["noise"]
        constant, generator = _DRAWS.get(name), given.get("generator")
        if name == "multinomial" and not (given["replacement"] or given["num_samples"] == 1):
            constant = None
        if constant is None:
            self.unsilenced.add(f"torch.{name.strip('_')}")
            self.seeds.draws(generator)
            result = func(*args, **kwargs)
            self.seeds.drew(generator, result)
            return result
        if name.endswith("_"):
            drawn = given["self"]
        else:
            if generator is not None:
                kwargs["generator"] = None
            drawn = _drawn_aside(func, args, kwargs)
        # Dropout itself draws like this where no kernel is fused.
        self._note("dropout" if name == "bernoulli_" else name.strip("_"), drawn, generator)
        value = constant(given, drawn)
        if isinstance(value, Tensor):
            drawn.copy_(value.expand_as(drawn))
        else:
            drawn.fill_(value)
        return drawn

    def _note(self, name: str, values: Any, generator: torch.Generator | None = None) -> None:
        """Take note of a draw of so many values that is replaced by a constant."""
        self.drawn.add(name)
        self.seeds.draws(generator)
        self.seeds.drew(generator, values)


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


# Operations that do not come in parts in inference mode, and draw in training mode alone.
_IN_ONE_PIECE = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu")
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
