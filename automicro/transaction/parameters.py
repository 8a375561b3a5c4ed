"""Parameters and other tensors during an attempt: compared by version, or copied and restored."""

import collections
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Self

import torch
from torch import Tensor, nn

from automicro.errors import RollbackError, StateWarning, warn
from automicro.state.tensors import Copies
from automicro.torch_private import (
    OperationMode,
    all_versions,
    schema_of,
)
from automicro.values import same_content


class Parameters:
    """The check that forward and backward do not change the parameters."""

    # Copies would double the largest part of memory, and an attempt must not change parameters: the
    # optimizer steps after the commit.
    def __init__(
        self,
        parameters: Sequence[Tensor],
        names_of: Callable[[Iterable[Tensor]], Sequence[str]] = lambda _: (),
        *,
        is_training: bool = True,
    ) -> None:
        self._parameters, self._names_of = parameters, names_of
        self._is_training = is_training
        self._versions: list[int] | None = None

    def begin(self) -> None:
        self._versions = all_versions(self._parameters)

    def prepare(self) -> None:
        if self._is_training:
            self._refuse_changes()

    def commit(self) -> None:
        self._versions = None

    def roll_back(self) -> None:
        self._refuse_changes()
        self._versions = None

    def _refuse_changes(self) -> None:
        before, now = self._versions, all_versions(self._parameters)
        if before is None or before == now:
            return
        # Only once: the rollback after a failed `prepare` must not fail for them, too.
        self._versions = None
        names = self._names_of(compress(self._parameters, map(operator.ne, before, now)))
        if self._is_training:
            raise refused_writes(names)
        # The forward may have restored them itself, in a finally block.
        warn(
            f"a failed attempt of an evaluation changed parameters{_listed(names)}, which cannot "
            "be rolled back. If a forward changes parameters for a while, restore them in a "
            "finally block",
            StateWarning,
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return f" ({', '.join(map(repr, names[:3]))}{more})" if names else ""


def refused_writes(names: Sequence[str]) -> RollbackError:
    """Return the error for parameters that a forward or backward changed."""
    return RollbackError(
        f"the forward or backward changed parameters{_listed(names)}, which cannot be "
        "rolled back. Call optimizer.step() after backward() returns (in a single process also in "
        "a post-accumulate hook that cannot fail). Update moving averages (a teacher, a key "
        "encoder) and constrain parameters after the step (an embedding with max_norm constrains "
        "itself in the forward). If layers initialize themselves, run a whole batch through them "
        "first, under torch.no_grad()"
    )


class ParameterWrites(OperationMode):
    """Detection and rollback of writes to parameters in forwards, including through ``.data``.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> before = linear.weight.clone()
        >>> writes = ParameterWrites(linear.parameters())
        >>> for _ in range(2):
        ...     with writes:
        ...         _ = linear.weight.data.mul_(0.9)
        >>> [each is linear.weight for each in writes.moving]
        [True]
        >>> writes.put_back()
        >>> torch.equal(linear.weight, before)
        True
    """

    # Autograd counts no writes to `parameter.data`, with which many encoders of moving averages are
    # updated. Writes to the memory of plain parameters and replaced memory are detected.
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        plain = {
            id(each): each
            for each in parameters
            if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
            if each.device.type != "meta" and each.numel()
        }
        self._parameters = plain
        # An alias keeps the memory, even if a forward replaces it (`.data = …`).
        self._memory = {key: each.detach() for key, each in plain.items()}
        self._in: dict[int, list[int]] = collections.defaultdict(list)
        for key, memory in self._memory.items():
            # By storage, so that a write to any view of a parameter is found.
            self._in[memory.untyped_storage().data_ptr()].append(key)
        self._copies: dict[int, Copies] = {}
        self._before: dict[int, Tensor] = {}  # values before the current forward
        self._calls: collections.Counter[int] = collections.Counter()

    def __enter__(self) -> Self:
        self._before = {}
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
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            for tensor in _written(schema, args, kwargs):
                for key in self._in.get(tensor.untyped_storage().data_ptr(), ()):
                    parameter = self._parameters[key]
                    if key not in self._copies:
                        self._copies[key] = Copies([parameter], self._parameters)
                    if key not in self._before:
                        self._before[key] = parameter.detach().clone()
        return func(*args, **kwargs)

    @property
    def moving(self) -> list[Tensor]:
        """Parameters that more than one forward changed, so that it was not a constraint."""
        return [self._parameters[key] for key, count in self._calls.items() if count > 1]

    @property
    def set_once(self) -> list[Tensor]:
        """Parameters that exactly one forward changed."""
        return [self._parameters[key] for key, count in self._calls.items() if count == 1]

    def put_back(self) -> None:
        """Restore the original memory and values of the parameters."""
        for key, parameter in self._parameters.items():
            if parameter.data_ptr() != self._memory[key].data_ptr():
                parameter.data = self._memory[key]
        for copies in self._copies.values():
            list(copies.put_back())  # all are copied, because they count as buffers


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the plain tensors that an operation is about to write to."""
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                yield each
