"""Writes of forwards to parameters: seen operation by operation, and undone."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from automicro.state.tensors import Copies
from automicro.torch_private import drop_empty_hooks
from automicro.torch_private_execution import OperationMode, schema_of
from automicro.values import same_content


class ParameterWrites(OperationMode):
    """Detection and rollback of writes to parameters in forwards, including through ``.data``.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> before = linear.weight.clone()
        >>> writes = ParameterWrites(linear.parameters())
        >>> for _ in range(2):
        ...     with writes:
        ...         _ = linear.weight.data.mul_(0.9)
        >>> [each is linear.weight for each in writes.changed(once=False)]
        [True]
        >>> writes.put_back()
        >>> torch.equal(linear.weight, before)
        True
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        # Autograd counts no writes to `parameter.data`, with which many encoders of moving averages
        # are updated. Writes to the memory of plain parameters and replaced memory are detected.
        self._parameters = {
            id(each): each
            for each in parameters
            if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
            if each.device.type != "meta" and each.numel()
        }
        # An alias keeps the memory, even if a forward replaces it (`.data = …`).
        self._memory = {key: each.detach() for key, each in self._parameters.items()}
        self._in: dict[int, list[int]] = collections.defaultdict(list)
        for key, memory in self._memory.items():
            # By storage, so that a write to any view of a parameter is found.
            self._in[memory.untyped_storage().data_ptr()].append(key)
        self.copies: dict[int, Copies] = {}  # made before a write
        self._before: dict[int, Tensor] = {}  # values before the current forward
        # Forwards that changed each parameter: of the current pass, and the most of any pass.
        self._calls: collections.Counter[int] = collections.Counter()
        self._most: collections.Counter[int] = collections.Counter()

    def __enter__(self) -> Self:
        self._before = {}
        # Their memory at the beginning of the forward.
        self._lay = {key: each.detach() for key, each in self._parameters.items()}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for key, parameter in self._parameters.items():
            if parameter.data_ptr() != self._lay[key].data_ptr():
                self._before.setdefault(key, self._lay[key])
        for key, before in self._before.items():
            # A write that changes no value, such as a satisfied constraint, does not count.
            self._calls[key] += not same_content(before, self._parameters[key])
        self._before, self._lay = {}, {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and copy the parameters that it is about to write to."""
        self.keep_written(func, args, kwargs)
        return func(*args, **kwargs)

    def keep_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy the parameters that an operation is about to write to."""
        for tensor in _written(schema_of(func), args, kwargs):
            for key in self._in.get(tensor.untyped_storage().data_ptr(), ()):
                parameter = self._parameters[key]
                if key not in self.copies:
                    self.copies[key] = Copies([parameter], self._parameters)
                if key not in self._before:
                    self._before[key] = parameter.detach().clone()

    def begin_again(self) -> None:
        """Restore parameters and count the writes of the next pass as first writes."""
        self._most |= self._calls
        self._calls.clear()
        self.put_back()

    def changed(self, *, once: bool) -> list[Tensor]:
        """Return the parameters that only the first forward of a pass changed, or several did."""
        # If several did, it was no one-time initialization.
        counts = self._most | self._calls
        keys = (key for key, count in counts.items() if count and (count == 1) is once)
        return [self._parameters[key] for key in keys]

    def put_back(self) -> None:
        """Restore the original memory and values of the parameters."""
        for key, parameter in self._parameters.items():
            if parameter.data_ptr() != self._memory[key].data_ptr():
                parameter.data = self._memory[key]
        for copies in self.copies.values():
            list(copies.put_back())  # all are copied, because they count as buffers

    @property
    def written(self) -> dict[int, Tensor]:
        """The parameters that were copied before a write, by id."""
        return {key: self._parameters[key] for key in self.copies}


class GradientWrites(OperationMode):
    """Detection of writes to ``.grad`` in a backward other than the additions of autograd.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> with GradientWrites([weight]) as writes:
        ...     weight.sum().backward()
        ...     _ = weight.grad.data.mul_(0.5)
        >>> [each is weight for each in writes.touched()]
        [True]
    """

    # Versions do not show them: fused and multi-tensor kernels, as of clipping, do not count.
    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._leaves = leaves
        # After the last addition. A caller may also compute and add gradients without autograd.
        self._last: dict[int, Tensor | None] = {}
        self._written = set[int]()  # memory that was written to since

    def __enter__(self) -> Self:
        self._handles = [
            leaf.register_post_accumulate_grad_hook(self._added)  # type: ignore[no-untyped-call]
            for leaf in self._leaves
            if leaf.requires_grad
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        drop_empty_hooks(self._leaves)

    def _added(self, leaf: Tensor) -> None:
        self._last[id(leaf)] = leaf.grad
        self._written -= _memory_of(leaf.grad)

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and record the memory that it writes to."""
        for tensor in _written(schema_of(func), args, kwargs):
            self._written |= _memory_of(tensor)
        return func(*args, **kwargs)

    def touched(self) -> list[Tensor]:
        """Return the leaves whose gradient was replaced or written to after an addition."""
        added = [leaf for leaf in self._leaves if id(leaf) in self._last]
        return [
            leaf
            for leaf in added
            if leaf.grad is not self._last[id(leaf)] or self._written & _memory_of(leaf.grad)
        ]


def _memory_of(tensor: Any) -> set[int]:
    # Subclasses may have no memory of their own, and an empty tensor has none.
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return {tensor.untyped_storage().data_ptr()} - {0} if is_plain else set()


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the plain tensors that an operation is about to write to."""
    for index, argument in enumerate(schema.arguments if schema and schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            for each in given if isinstance(given, list | tuple) else (given,):
                if isinstance(each, Tensor) and each.layout is torch.strided:
                    yield each
