"""What is examined: the caller's model and loss, and copies of them in another precision."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automicro.errors import text_of
from automicro.reach import captured_modules
from automicro.slicing import map_tensors


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and what computes its loss."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    loss_fn: Callable[..., Any] | None
    forward: Callable[[Any, Any], Any] | None

    @property
    def roots(self) -> dict[str, nn.Module]:
        """Every module that takes part, by the prefix of its names."""
        roots = {"": self.model}
        roots |= {f"modules[{index}].": module for index, module in enumerate(self.modules)}
        if isinstance(self.loss_fn, nn.Module) and self.loss_fn not in roots.values():
            roots["loss_fn."] = self.loss_fn
        return roots

    @property
    def loss_name(self) -> str:
        """What computes the loss, by a name that its author knows."""
        function = self.forward or self.loss_fn
        while isinstance(function, functools.partial):
            function = function.func
        if function is None:
            return f"{type(self.model).__name__}'s own loss"
        name = str(getattr(function, "__name__", type(function).__name__))
        return "the loss" if name == "<lambda>" else name

    def why_not_copied(self) -> str:
        """Why a copy cannot stand for the originals; empty where it can."""
        for name, function in (("forward", self.forward), ("loss_fn", self.loss_fn)):
            captured = [] if isinstance(function, nn.Module) else captured_modules(function)
            if captured:
                return f"{name} uses a {type(captured[0]).__name__} past its arguments"
        try:
            self.copy()
        except Exception as error:
            first = text_of(error).partition(". ")[0].partition("\n")[0]
            return f"the model cannot be copied ({type(error).__name__}: {first.rstrip('.')})"
        return ""

    def copy(self, dtype: torch.dtype | None = None) -> "Subject":
        """A deep copy, without gradients, its floating point tensors of this type if given."""
        model, modules, loss_fn, forward = copy.deepcopy(
            (self.model, self.modules, self.loss_fn, self.forward)
        )
        if dtype is not None:
            loss_fn, forward = _converted(loss_fn, dtype), _converted(forward, dtype)
        twin = Subject(model=model, modules=modules, loss_fn=loss_fn, forward=forward)
        for root in twin.roots.values():
            if dtype is not None:
                _convert(root, dtype)
            for parameter in root.parameters():
                parameter.grad = None
        return twin

    def captured(self) -> list[nn.Module]:
        """Modules that only the functions know of."""
        known = {id(module) for root in self.roots.values() for module in root.modules()}
        functions = (self.forward, self.loss_fn)
        found = [m for f in functions if not isinstance(f, nn.Module) for m in captured_modules(f)]
        return [module for module in found if id(module) not in known]

    def lowest_dtype(self) -> torch.dtype:
        """The least precise floating point type of its parameters and buffers."""
        tensors: list[Tensor] = []
        for root in self.roots.values():
            tensors += [*root.parameters(), *root.buffers()]
        found = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        return min(found, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A batch, or anything with tensors in it, with its floating point tensors of this type."""
    return map_tensors(value, lambda each: each.to(dtype) if each.is_floating_point() else each)


def _convert(root: nn.Module, dtype: torch.dtype) -> None:
    root.to(dtype)
    for module in root.modules():
        _convert_attributes(module, dtype)


def _convert_attributes(owner: Any, dtype: torch.dtype) -> None:
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            vars(owner)[name] = cast(value, dtype)


def _converted(function: Any, dtype: torch.dtype) -> Any:
    if isinstance(function, functools.partial):
        keywords: Mapping[str, Any] = cast(dict(function.keywords), dtype)
        return functools.partial(function.func, *cast(function.args, dtype), **keywords)
    is_function = function is None or hasattr(function, "__code__")
    if not is_function and not isinstance(function, nn.Module) and hasattr(function, "__dict__"):
        _convert_attributes(function, dtype)
    return function
