"""Random draws made the same for every cut of a batch, and a watch on lost precision.

Two splits of one batch draw other dropout masks, so their gradients differ although nothing is
wrong. Here dropout lets everything through, and every other draw that can be is replaced by a
constant: what remains different between two splits is not chance.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from automicro.torch_private import run_backward

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    torch.dropout_,
    torch.alpha_dropout_,
    torch.feature_dropout_,
    torch.feature_alpha_dropout_,
}
_RECURRENT = {torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh}
# What draws and gives 0.5 instead: the mean of a uniform draw, and for a normal one not its mean,
# because a factor of zero would hide a part of the gradient.
_CONSTANTS = {torch.rand, torch.rand_like, torch.randn, torch.randn_like}
_UNSILENCED = {
    torch.randint,
    torch.randint_like,
    torch.randperm,
    torch.multinomial,
    torch.poisson,
    torch.binomial,
    torch.rrelu,
    Tensor.multinomial,
    Tensor.random_,
    Tensor.cauchy_,
    Tensor.geometric_,
    Tensor.log_normal_,
    F.rrelu,
    F.fractional_max_pool2d,
    F.fractional_max_pool3d,
}
# Their dropout is an argument among others: its position.
_ATTENTION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class Silence(TorchFunctionMode):
    """While this mode is active, torch's draws are constant and downcasts are noted.

    Attributes:
        drawn: names of the functions that would have drawn.
        unsilenced: names of those that did, because no constant can stand for what they draw.
        lowest: the lowest floating point type that something in float64 was cast to, if any.

    Example:
        >>> with Silence() as silence:
        ...     F.dropout(torch.ones(3))
        tensor([1., 1., 1.])
        >>> sorted(silence.drawn)
        ['dropout']
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: set[str] = set()
        self.unsilenced: set[str] = set()
        self.lowest: torch.dtype | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward or func is torch.autograd.backward:
            # A checkpointed forward runs again in the backward, and must be as silent there. The
            # engine itself does not ask modes, so this one can be active while it runs.
            with self:
                return _backward(func, args, kwargs)
        result = self._call(func, args, kwargs)
        if _is_lower(result) and any(map(_is_float64, _values(args, kwargs))):
            known = [result.dtype] if self.lowest is None else [result.dtype, self.lowest]
            self.lowest = min(known, key=lambda dtype: dtype.itemsize)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _DROPOUTS:
            return self._dropout(func, args, kwargs)
        if func in _ATTENTION:
            position = _ATTENTION[func]
            probability = _argument(args, kwargs, position, "dropout_p", 0.0)
            args, kwargs = _without(args, kwargs, position, "dropout_p")
            # In evaluation mode attention passes on a probability that it then does not use.
            if probability and kwargs.get("training", True):
                self.drawn.add("dropout")
            return func(*args, **kwargs)
        if func in _RECURRENT:
            return func(*self._recurrent(args), **kwargs)
        if func is F.gumbel_softmax and not kwargs.get("hard"):
            self.drawn.add("gumbel_softmax")
            return torch.softmax(args[0] / kwargs.get("tau", 1), kwargs.get("dim", -1))
        if func in _CONSTANTS:
            self.drawn.add(func.__name__)
            return _filled(func(*args, **kwargs), lambda drawn: drawn.fill_(0.5))
        if func in _REPLACED:
            self.drawn.add(func.__name__.strip("_"))
            return _filled(
                func(*args, **kwargs), functools.partial(_REPLACED[func], args=args, kwargs=kwargs)
            )
        if func in _UNSILENCED:
            self.unsilenced.add(f"torch.{func.__name__.strip('_')}")
        return func(*args, **kwargs)

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        probability = _argument(args, kwargs, 1, "p", 0.5)
        is_training = _argument(args, kwargs, 2, "training", True) and kwargs.get("train", True)
        if probability and is_training:
            self.drawn.add("dropout")
        return args[0] if args else kwargs["input"]

    def _recurrent(self, args: Any) -> Any:
        position = next((i for i, value in enumerate(args) if type(value) is float), None)
        if position is None:
            return args
        if args[position] and args[position + 1]:
            self.drawn.add("dropout")
        return (*args[:position], 0.0, *args[position + 1 :])


def _backward(func: Any, args: Any, kwargs: Any) -> None:
    second = "gradient" if func is Tensor.backward else "grad_tensors"
    names = ("tensors", second, "retain_graph", "create_graph")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = given["tensors"]
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = given.get("grad_tensors", given.get("gradient"))
    if gradients is None:
        gradients = [torch.ones_like(tensor) for tensor in tensors]
    gradients = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients)
    inputs = given.get("inputs") or ()
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    create_graph = bool(given.get("create_graph"))
    retain = given.get("retain_graph")
    run_backward(
        tensors,
        gradients,
        retain_graph=create_graph if retain is None else retain,
        create_graph=create_graph,
        inputs=inputs,
    )


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _without(args: Any, kwargs: Any, position: int, name: str) -> tuple[Any, Any]:
    """The arguments with a probability of zero."""
    if len(args) > position:
        return (*args[:position], 0.0, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: 0.0} if name in kwargs else kwargs


def _filled(drawn: Any, fill: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad():
        fill(drawn.detach())
    return drawn


def _uniform(drawn: Tensor, *, args: Any, kwargs: Any) -> None:
    low = _argument(args, kwargs, 1, "from", 0.0)
    high = _argument(args, kwargs, 2, "to", 1.0)
    drawn.fill_((low + high) / 2)


def _normal_in_place(drawn: Tensor, *, args: Any, kwargs: Any) -> None:
    mean = _argument(args, kwargs, 1, "mean", 0.0)
    drawn.fill_(mean + _argument(args, kwargs, 2, "std", 1.0) / 2)


def _normal(drawn: Tensor, *, args: Any, kwargs: Any) -> None:
    mean = torch.as_tensor(_argument(args, kwargs, 0, "mean", 0.0), device=drawn.device)
    std = torch.as_tensor(_argument(args, kwargs, 1, "std", 1.0), device=drawn.device)
    drawn.copy_((mean + std / 2).expand_as(drawn))


def _bernoulli(drawn: Tensor, *, args: Any, kwargs: Any) -> None:
    probability = _argument(args, kwargs, 1, "p", None)
    if probability is None:
        drawn.copy_(args[0] if args else kwargs["input"])
    else:
        drawn.fill_(probability)


def _bernoulli_in_place(drawn: Tensor, *, args: Any, kwargs: Any) -> None:
    probability = torch.as_tensor(_argument(args, kwargs, 1, "p", 0.5), device=drawn.device)
    drawn.copy_(probability.expand_as(drawn))


def _exponential(drawn: Tensor, *, args: Any, kwargs: Any) -> None:
    drawn.fill_(1 / _argument(args, kwargs, 1, "lambd", 1.0))


_REPLACED: dict[Any, Callable[..., None]] = {
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_in_place,
    Tensor.uniform_: _uniform,
    Tensor.normal_: _normal_in_place,
    Tensor.exponential_: _exponential,
}


def _values(args: Any, kwargs: Any) -> Iterator[Any]:
    yield from args
    yield from kwargs.values()


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64


def _is_lower(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
    )
