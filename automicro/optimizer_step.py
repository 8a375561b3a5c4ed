"""One optimizer step, applied once or reported as half applied.

Running out of memory inside ``optimizer.step()`` may leave some parameters stepped and others
not. Trying again would step those twice. So it is tried again only where it is shown that nothing
was applied: in a first step, of a class of `torch.optim`, before its first write to anything that
existed. That is when memory runs out most, because the state is built then. Tensor versions show
nothing: fused kernels do not touch them, and no list operation (``foreach=True``) does while a
dispatch mode, such as a memory budget, is active.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.errors import OptimizerStepError
from automicro.memory.torch_private import TorchDispatchMode, is_wrapper
from automicro.oom import Failure, classify, release


def step_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Step once.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> step_optimizer(torch.optim.SGD([weight], lr=0.5), torch.device("cpu"))
        >>> weight.tolist()
        [0.5, 0.5]

    Raises:
        OptimizerStepError: memory ran out and the step may be half applied, or memory ran out
            twice with nothing applied; the message says which.
    """
    # Later steps write from their first operation on, so there is nothing to watch for.
    watched = not optimizer.state and type(optimizer).__module__.startswith("torch.optim.")
    for is_retry in (False, True):
        failure, has_written = try_watched(optimizer.step, watched=watched)
        if failure is None:
            return
        try:
            release(failure, device)
            if not has_written:
                optimizer.state.clear()  # half-built state breaks every later step
            if is_retry or has_written:
                raise OptimizerStepError(_describe(optimizer, failure, has_written)) from failure
        finally:
            failure = None  # it holds this frame: a cycle


def _describe(optimizer: torch.optim.Optimizer, failure: BaseException, has_written: bool) -> str:
    name = type(optimizer).__name__
    if not has_written:
        return (
            f"{name}.step() ran out of memory twice; nothing was applied. It needs more than "
            "parameters and gradients leave: use foreach=False, an optimizer with less state, or "
            f"a larger device. It said: {failure}"
        )
    return (
        f"{name}.step() ran out of memory and may be half applied: some parameters or states may "
        "have changed. Continue from a checkpoint, with foreach=False or an optimizer with less "
        f"state. It said: {failure}"
    )


def try_watched(
    action: Callable[[], object], *, watched: bool = True
) -> tuple[BaseException | None, bool]:
    """The out-of-memory error of an action, if any, and whether it may have written before it.

    What the action itself has made does not count. Other exceptions pass through.

    Args:
        action: what to do.
        watched: whether to look; if not, it may always have written.
    """
    watch = _WriteWatch() if watched else None
    try:
        if watch is None:
            action()
        else:
            with watch:
                action()
    except Exception as error:
        if classify(error) is not Failure.RETRYABLE:
            raise
        return error, watch is None or watch.has_written
    return None, True


class _WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes before an operation that it will write into a tensor made outside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_written = False
        self._made_inside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and any(map(is_wrapper, types)):
            return NotImplemented  # its parts come by here one operation at a time
        kwargs = kwargs or {}
        if self.has_written:
            return func(*args, **kwargs)
        written = list(_tensors(_written(func, args, kwargs)))
        if not all(map(self._is_from_inside, written)):
            self.has_written = True
        output = func(*args, **kwargs)
        given = set()
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(…): nobody else has it
            given = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _tensors(output):
            storage = each.untyped_storage()
            if id(storage) not in given:
                self._made_inside[id(storage)] = weakref.ref(storage)
        return output

    def _is_from_inside(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._made_inside.get(id(storage))
        return known is not None and known() is storage


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes into."""
    for position, argument in enumerate(func._schema.arguments):
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
