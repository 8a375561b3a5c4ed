"""Doing once what writes in place, or saying that it may be half done.

Running out of memory in the middle of such work may leave some tensors changed and others not.
Trying again would change those twice. So it is tried again only where it is shown that nothing
was written yet: before the first write to anything that existed. Tensor versions show nothing:
fused kernels do not touch them, and no list operation (``foreach=True``) does while a dispatch
mode, such as a memory budget, is active.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from automicro.errors import OptimizerStepError, text_of
from automicro.memory.oom import Failure, classify, release
from automicro.torch_private import OperationMode, schema_of

T = TypeVar("T")


def run_once(
    action: Callable[[], T],
    device: torch.device,
    *,
    refused: str,
    half_applied: str,
    undo: Callable[[], object] = lambda: None,
    watched: bool = True,
) -> T:
    """Run something that writes in place; once more if memory ran out before its first write.

    Example:
        >>> run_once(lambda: 3, torch.device("cpu"), refused="twice", half_applied="perhaps")
        3

    Args:
        action: what to do.
        device: whose memory to give back before trying again.
        refused: what to say where memory ran out twice with nothing written.
        half_applied: what to say where it ran out and something may have been written.
        undo: drops what a failed try has built beside what existed.
        watched: whether to look for the first write; if not, anything may have been written.

    Raises:
        OptimizerStepError: as above. Other exceptions pass through.
    """
    for is_retry in (False, True):
        result, failure, has_written = _try(action, watched)
        if failure is None:
            break
        try:
            release(failure, device)
            if not has_written:
                undo()
            if is_retry or has_written:
                text = half_applied if has_written else refused
                raise OptimizerStepError(f"{text} It said: {text_of(failure)}") from failure
        finally:
            failure = None  # it holds this frame: a cycle
    return result[0]


def _try(action: Callable[[], T], watched: bool) -> tuple[list[T], BaseException | None, bool]:
    """The result in a list, or the out-of-memory error and whether it may have written."""
    watch = WriteWatch() if watched else None
    try:
        if watch is None:
            return [action()], None, True
        with watch:
            return [action()], None, True
    except Exception as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        return [], error, watch is None or watch.has_written


class WriteWatch(OperationMode):
    """Notes before an operation that it will write into a tensor made outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_written = False
        self._made_inside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self.has_written:
            written = _tensors(_written(func, args, kwargs))
            self.has_written = not all(map(self._is_from_inside, written))
            if self.has_written:
                self.on_first_write(func)
        if self.has_written:
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        given = set()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(…): nobody else has it
            given = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _tensors(output):
            storage = each.untyped_storage()
            if id(storage) not in given:
                self._made_inside[id(storage)] = weakref.ref(storage)
        return output

    def on_first_write(self, func: Any) -> None:
        """Called before the operation runs; may raise, so that it does not."""

    def _is_from_inside(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._made_inside.get(id(storage))
        return known is not None and known() is storage


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes into."""
    schema = schema_of(func)
    if schema is None:  # a higher-order operator: any of them
        yield from (args, kwargs)
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)
