"""What is computed again in the backward finds everything as it stood the first time.

Torch's own checkpoint computes again, with the autocast of the first time. Its context puts the
rest back: generators, buffers, modes and attributes of modules, objects and variables that a
forward reaches, parameters that were in place for a while. What the second time changes is undone.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from automicro.state.part import Replay
from automicro.torch_private import saving
from automicro.transaction.rng import RandomState


class AsItStood(contextlib.AbstractContextManager[None]):
    """What a computation finds beside its arguments, as it stands now. Entered, it stands again.

    Args:
        replays: of what the computation reaches.
        random: of every generator that it may draw from.

    Example:
        >>> import torch
        >>> x, scale = torch.ones(2, requires_grad=True), [3.0]
        >>> stood = AsItStood([Replay({"scale": scale})], RandomState([]))
        >>> y = computed_again(lambda x: (scale[0] * x).exp(), (x,), {}, stood)
        >>> scale[0] = 0.0
        >>> y.sum().backward()
        >>> torch.equal(x.grad, 3 * y), scale
        (True, [0.0])
    """

    def __init__(self, replays: Sequence[Replay], random: RandomState) -> None:
        self._replays, self._random = replays, random
        self.before = [replay.take(self) for replay in replays]
        random.begin()
        self._has_drawn = True
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Around the first run."""
        yield
        self._has_drawn = self._random.has_moved
        if not self._has_drawn:
            self._random.commit()  # some kilobytes, of each of many slices

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around each further run."""
        moved: set[int | None] = set()
        with contextlib.ExitStack() as stack:
            if self._has_drawn:
                stack.enter_context(self._random.replaying())
            for replay, before in zip(self._replays, self.before, strict=True):
                changed = before.changed_tensors(by_content=False)
                moved |= {storage_of(each) for each in before.tensors if id(each) in changed}
                stack.enter_context(replay.as_it_stood(before))
            if moved:
                # What is saved of them is read by the backward, when they are as they are now.
                stack.enter_context(
                    saving(lambda each: each.clone() if storage_of(each) in moved else each)
                )
            yield

    # Torch enters one object before each further run, of which there may be several.
    def __enter__(self) -> None:
        context = self.again()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def written(self) -> list[Tensor]:
        """Large tensors and frozen parameters that were written into, and cannot be put back."""
        return [tensor for before in self.before for tensor in before.written()]


def storage_of(tensor: Tensor) -> int | None:
    """Tells the memory of one tensor from that of others, as long as it lives; None: it has none.

    >>> import torch
    >>> tensor = torch.ones(2)
    >>> storage_of(tensor) == storage_of(tensor[1:])
    True
    """
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return id(tensor.untyped_storage())
    return None


@dataclass(frozen=True)
class _Place:
    """Where a tensor stood among the arguments."""

    index: int


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dictionaries, with something else in them.

    >>> changed([1, (2, {"a": 3})], lambda each: each + 1)
    [2, (3, {'a': 4})]
    """
    if type(value) is tuple or type(value) is list:
        return type(value)([changed(each, change) for each in value])
    if type(value) is dict:
        return {key: changed(each, change) for key, each in value.items()}
    return change(value)


def computed_again(
    function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], stood: AsItStood
) -> Any:
    """Call a function that keeps its arguments alone, and is called again in the backward.

    Autograd keeps the tensors among them, and sees when they change.
    """
    tensors: list[Tensor] = []

    def take_out(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Place(len(tensors) - 1)

    structure = changed((args, kwargs), take_out)
    waiting = [(args, kwargs)]  # the first time: the caller sees what is done to its lists
    del args, kwargs

    def run(*tensors: Tensor) -> Any:
        def put_in(value: Any) -> Any:
            return tensors[value.index] if type(value) is _Place else value

        args, kwargs = waiting.pop() if waiting else changed(structure, put_in)
        return function(*args, **kwargs)

    return checkpoint(
        run,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (stood.first(), stood),
    )
