"""One call of a part, computed slice by slice: as one operation of autograd, with its gradients.

Only one slice's activations are alive at a time. Two operations do it:

- A *tail* gives a loss. The gradient of each slice is taken at once, in the forward, so nothing is
  computed twice; what waits for the backward are gradients, as large as inputs and parameters. This
  is what fused linear cross-entropy kernels do (Hsu et al. 2024, Liger Kernel), for any tail.
- A *middle* part gives outputs for each row. Its slices run without a graph, and again with one in
  the backward, as activation checkpointing does (Chen et al. 2016), with the same random numbers.

Parameters enter both as inputs, and slices see aliases of them: so hooks on them, and those of
wrappers that reduce gradients over ranks, run once, as they do for a part that is not cut. Where
memory runs out in a slice, that slice is undone and cut smaller, and nothing else is.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError
from automicro.loss.averages import Average
from automicro.loss.weights import BatchWeights, CutBatch
from automicro.memory.oom import Failure, classify, release
from automicro.torch_private import all_versions
from automicro.transaction.rng import RandomState
from automicro.transaction.transaction import Transaction

T = TypeVar("T")


class Sizer(Protocol):
    """Proposes the rows of a slice, and is told what became of it."""

    def begin(self) -> int:
        """Rows of a slice, at most."""

    def smaller(self, size: int) -> int | None:
        """Rows to go on with after a size that did not fit; None where there is nothing smaller."""

    def end(self, sizes: Sequence[int]) -> None:
        """All slices went through."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a part was called with, and how a slice of it is computed.

    Attributes:
        batch: the arguments by name: a batch of its own.
        layout: of the batch.
        compute: the output for a slice of the batch, with other tensors in place of parameters.
        parameters: by name, those that need a gradient.
        averages: what the loss averages over; None where the part gives no loss.
        sizer: of the slices.
        device: that it computes on.
        undoing: gives what undoes a slice: buffers of the part, random numbers.
        random: gives what remembers where random numbers stand.
    """

    batch: Mapping[str, Any]
    layout: BatchLayout
    compute: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Any]
    parameters: Mapping[str, Tensor]
    averages: Mapping[str, Average] | None
    sizer: Sizer
    device: torch.device
    undoing: Callable[[], Transaction]
    random: Callable[[], RandomState]

    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the batch that need a gradient, by their paths."""
        return {path: leaf for path, leaf in tensor_leaves(self.batch) if leaf.requires_grad}


@dataclass
class Slice:
    """Some rows of a batch.

    Attributes:
        index: among the slices.
        start: the first row.
        stop: the row after the last.
        batch: of these rows.
        random: numbers that it began with before, where it drew any.
    """

    index: int
    start: int
    stop: int
    batch: Any
    random: RandomState | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class Walk:
    """Through the rows of a batch, slice by slice.

    Args:
        call: of the part.
        batch: of the call; with other tensors, maybe, of the same rows.
        earlier: rows of each slice, and the random numbers that it began with, where the rows were
            walked through before; else sizes are found.
    """

    def __init__(
        self,
        call: Call,
        batch: Any,
        earlier: Sequence[tuple[int, RandomState | None]] | None = None,
    ) -> None:
        self._call, self._batch = call, batch
        self._num_rows = call.layout.num_rows(batch)
        self._earlier = None if earlier is None else list(earlier)
        self._has_shrunk = False
        self._index = self._start = 0
        if earlier is None:
            self._cut(balanced_sizes(self._num_rows, call.sizer.begin()))
        else:
            self._cut([size for size, _ in earlier])

    def _cut(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._pieces = self._call.layout.split(self._batch, self.sizes)
        self._weights: BatchWeights | None = None

    @property
    def weights(self) -> BatchWeights:
        """Of the losses of slices, as they are cut now."""
        if self._weights is None:
            assert self._call.averages is not None
            cut = CutBatch(batch=self._batch, microbatches=self._pieces, sizes=self.sizes)
            self._weights = BatchWeights(self._call.averages, [cut])
        return self._weights

    def slices(self) -> Iterator[Slice]:
        """Those that are left. After one that failed, call `shrink` and ask again."""
        while self._index < len(self.sizes):
            size = self.sizes[self._index]
            stop = self._start + size
            random = None if self._earlier is None else self._earlier[self._index][1]
            yield Slice(self._index, self._start, stop, self._pieces[self._index], random)
            self._index, self._start = self._index + 1, stop
        if self._earlier is None or self._has_shrunk:
            self._call.sizer.end(self.sizes)

    def shrink(self, failure: BaseException) -> None:
        """Cut what is left smaller than the slice that failed.

        Where rows were walked through before, a slice that drew random numbers stays as it is: its
        numbers are those of all its rows. The next call has smaller ones.

        Raises:
            BaseException: the failure, where there is nothing smaller.
        """
        failed = self.sizes[self._index]
        size = self._call.sizer.smaller(failed)
        if size is None:
            raise failure
        self._has_shrunk = True
        done = self.sizes[: self._index]
        if self._earlier is None:
            self._cut([*done, *balanced_sizes(self._num_rows - self._start, size)])
            return
        if self._earlier[self._index][1] is not None:
            raise failure
        parts = balanced_sizes(failed, size)
        self._earlier[self._index : self._index + 1] = [(each, None) for each in parts]
        self._cut([size for size, _ in self._earlier])


def run_slices(call: Call, walk: Walk, compute: Callable[[Slice], T]) -> Iterator[tuple[Slice, T]]:
    """Compute slice after slice; those that do not fit are undone, and cut smaller.

    Args:
        call: of the part.
        walk: through its rows.
        compute: what is wanted of a slice. It may keep nothing of one that fails.

    Raises:
        BaseException: whatever else than running out of memory, or that of the smallest slice.
    """
    while True:
        failure: BaseException | None = None
        for each in walk.slices():
            undo = call.undoing()
            undo.begin()
            tensors = [leaf for _, leaf in tensor_leaves(each.batch)]
            versions = all_versions(tensors)
            try:
                found = compute(each)
            except Exception as error:
                if classify(error) is not Failure.RETRYABLE:
                    raise
                failure = error
                break
            undo.commit()
            yield each, found
            del found
        if failure is None:
            return
        # Outside "except": inside it the traceback keeps the tensors of the slice alive.
        try:
            release(failure, call.device)
            undo.roll_back()
            if versions != all_versions(tensors):
                raise BatchError(
                    "a part with a size of its own writes into its input, which a slice that did "
                    "not fit cannot undo; let it compute new tensors (relu(x) and not relu_(x))"
                ) from failure
            walk.shrink(failure)
        finally:
            failure = None  # it holds this frame: a cycle


def loss_of(call: Call, batch: Any) -> Tensor:
    """The loss of a batch without any gradient, slice by slice."""
    walk = Walk(call, batch)
    total: Tensor | None = None
    for each, loss in run_slices(call, walk, lambda each: call.compute(each.batch, {})):
        weighted, _ = walk.weights.apply(each.index, cast(Tensor, loss), {})
        total = weighted if total is None else total + weighted
    assert total is not None
    return total


def outputs_of(call: Call, batch: Any) -> Any:
    """The outputs of all rows without any gradient, slice by slice."""
    outputs = Joined(call.layout.num_rows(batch))
    for each, found in run_slices(call, Walk(call, batch), lambda one: call.compute(one.batch, {})):
        outputs.put(each, found)
    return outputs.whole()


class Joined:
    """The outputs of slices as those of all rows.

    Args:
        num_rows: of all slices together.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._form: Any = None
        self.tensors: list[Tensor] = []

    def put(self, each: Slice, output: Any) -> None:
        """Take the output of a slice.

        Raises:
            BatchError: it has no rows, or other shapes than that of the slices before.
        """
        leaves = [leaf for _, leaf in tensor_leaves(output)]
        for leaf in leaves:
            if leaf.dim() == 0 or leaf.shape[0] != each.num_rows:
                raise BatchError(
                    f"a part with a size of its own gave a tensor of shape {tuple(leaf.shape)} for "
                    f"a slice of {each.num_rows} rows; every output needs the rows in dimension 0 "
                    "(a loss is a tensor without any dimension, and the only output)"
                )
        if not self.tensors:
            self.tensors = [leaf.new_empty((self._num_rows, *leaf.shape[1:])) for leaf in leaves]
            self._form = map_tensors(output, lambda leaf: leaf[:0])
        for whole, leaf in zip(self.tensors, leaves, strict=True):
            if whole.shape[1:] != leaf.shape[1:]:
                raise BatchError(
                    f"slices of a part give shapes {tuple(whole.shape[1:])} and "
                    f"{tuple(leaf.shape[1:])} behind the rows; pad to the length of the whole "
                    "batch, and not to that of the slice"
                )
            whole[each.start : each.stop] = leaf

    def whole(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """The outputs of all rows, in the structure of one slice's."""
        waiting = iter(self.tensors if tensors is None else tensors)
        return map_tensors(self._form, lambda _: next(waiting))


class Gradients:
    """Sums of gradients: of inputs row by row, of parameters and shared inputs over slices.

    They lie there before the first slice: else that one would have more room than all others.

    Args:
        inputs: by their paths.
        parameters: of the part.
        row_dims: where inputs have the rows, by their paths; others are shared by all rows.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        parameters: Iterable[Tensor],
        row_dims: Mapping[str, int],
    ) -> None:
        self._dims = [row_dims.get(path) for path in inputs]
        tensors = [*inputs.values(), *parameters]
        self._types = [each.dtype for each in tensors]
        self._dims += [None] * (len(tensors) - len(inputs))
        self._sums = [
            torch.zeros_like(each, dtype=each.dtype if dim is not None else _wide(each.dtype))
            for each, dim in zip(tensors, self._dims, strict=True)
        ]

    def add(self, each: Slice, gradients: Sequence[Tensor | None]) -> None:
        """Those of one slice, in this order."""
        for whole, dim, gradient in zip(self._sums, self._dims, gradients, strict=True):
            if gradient is None:
                continue
            if dim is None:
                whole += gradient
            else:
                whole.narrow(dim, each.start, each.num_rows).copy_(gradient)

    def all(self, factor: Tensor | None = None) -> list[Tensor]:
        """All of them, multiplied, in the types of inputs and parameters."""
        if factor is not None:
            for each in self._sums:
                each.mul_(factor)
        return [each.to(dtype) for each, dtype in zip(self._sums, self._types, strict=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients add up in, so that they are rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def with_inputs(batch: Any, inputs: Mapping[str, Tensor]) -> Any:
    """The same batch, with other tensors at these paths."""
    by_id = {id(leaf): inputs[path] for path, leaf in tensor_leaves(batch) if path in inputs}
    return map_tensors(batch, lambda leaf: by_id.get(id(leaf), leaf))


def _marked(batch: Any, paths: Sequence[str]) -> tuple[Any, list[Tensor]]:
    """A slice whose tensors at these paths need a gradient, and these tensors."""
    leaves = {path: leaf.detach().requires_grad_() for path, leaf in _at(batch, paths).items()}
    # The part may write into what it is given, as it may into any output of the layer before.
    seen = {path: leaf.view_as(leaf) for path, leaf in leaves.items()}
    return with_inputs(batch, seen), list(leaves.values())


def _at(batch: Any, paths: Sequence[str]) -> dict[str, Tensor]:
    found = dict(tensor_leaves(batch))
    return {path: found[path] for path in paths}


def aliases_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves with the values of parameters: hooks of these do not run for each slice."""
    return {name: each.detach().requires_grad_() for name, each in parameters.items()}


class _Tail(torch.autograd.Function):
    """The loss of all slices; gradients are taken slice by slice in the forward."""

    @staticmethod
    def forward(ctx: Any, call: Call, paths: Sequence[str], *tensors: Tensor) -> Tensor:
        inputs = dict(zip(paths, tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        sums = Gradients(inputs, call.parameters.values(), call.layout.row_dims(batch))
        aliases = aliases_of(call.parameters)
        walk = Walk(call, batch)

        def loss_and_gradients(each: Slice) -> tuple[Tensor, Sequence[Tensor | None]]:
            with torch.enable_grad():
                rows, leaves = _marked(each.batch, paths)
                loss = call.compute(rows, aliases)
                weighted, _ = walk.weights.apply(each.index, loss, {})
                wanted = [*leaves, *aliases.values()]
                return weighted.detach(), _gradients(weighted, wanted)

        total: Tensor | None = None
        for each, (loss, gradients) in run_slices(call, walk, loss_and_gradients):
            sums.add(each, gradients)
            del gradients
            total = loss if total is None else total + loss
        ctx.sums = sums
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "the gradients of a part with a size of its own were used by an earlier backward; "
                "call backward once (retain_graph=True does not keep them), or compute it again"
            )
        return None, None, *sums.all(gradient)


class _Recomputed(torch.autograd.Function):
    """Outputs of all slices, or their loss; computed again in the backward, for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, paths: Sequence[str], joined: Joined | None, *tensors: Tensor
    ) -> Any:
        inputs = dict(zip(paths, tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        walk = Walk(call, batch)
        replays: list[RandomState | None] = []
        total: Tensor | None = None

        def compute(each: Slice) -> tuple[Any, RandomState | None]:
            before = call.random()
            before.begin()
            output = call.compute(each.batch, {})
            return output, before if before.has_moved else None

        for each, (output, replay) in run_slices(call, walk, compute):
            replays.append(replay)
            if joined is not None:
                joined.put(each, output)
            else:
                loss, _ = walk.weights.apply(each.index, output, {})
                total = loss if total is None else total + loss
            del output
        # Autograd keeps the inputs, and whoever watches it may keep them elsewhere meanwhile.
        template = with_inputs(call.batch, {path: torch.empty(0) for path in paths})
        ctx.call, ctx.paths = replace(call, batch=template), paths
        ctx.slices = list(zip(walk.sizes, replays, strict=True))
        ctx.autocast = Autocast(call.device)
        ctx.is_tail = joined is None
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if joined is None:
            assert total is not None
            return total
        ctx.mark_non_differentiable(*(t for t in joined.tensors if not t.is_floating_point()))
        return tuple(joined.tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        call, paths = ctx.call, ctx.paths
        inputs = dict(zip(paths, ctx.saved_tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        sums = Gradients(inputs, call.parameters.values(), call.layout.row_dims(batch))
        aliases = aliases_of(call.parameters)
        walk = Walk(call, batch, ctx.slices)

        def gradients_of(each: Slice) -> Sequence[Tensor | None]:
            again = contextlib.nullcontext() if each.random is None else each.random.replaying()
            with again, torch.enable_grad(), ctx.autocast.again():
                rows, leaves = _marked(each.batch, paths)
                output = call.compute(rows, aliases)
            wanted = [*leaves, *aliases.values()]
            if ctx.is_tail:
                with torch.enable_grad():
                    weighted, _ = walk.weights.apply(each.index, output, {})
                return _gradients(weighted, wanted, given[0])
            outputs, weights = [], []
            for (_, leaf), gradient in zip(tensor_leaves(output), given, strict=True):
                if gradient is not None and leaf.requires_grad:
                    outputs.append(leaf)
                    weights.append(gradient[each.start : each.stop])
            if not outputs:
                return [None] * len(wanted)
            return torch.autograd.grad(outputs, wanted, weights, allow_unused=True)

        with _leaving_no_trace(call):
            for each, gradients in run_slices(call, walk, gradients_of):
                sums.add(each, gradients)
                del gradients
        return None, None, None, *sums.all()


def _gradients(
    loss: Tensor, wanted: Sequence[Tensor], gradient: Tensor | None = None
) -> Sequence[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(loss, wanted, gradient, allow_unused=True)


@contextlib.contextmanager
def _leaving_no_trace(call: Call) -> Iterator[None]:
    """What is computed again has changed the buffers of the part already."""
    undo = call.undoing()
    undo.begin()
    try:
        yield
    finally:
        undo.roll_back()


class Autocast:
    """How autocast is set, to be set so again.

    Args:
        device: that the part computes on.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = dict.fromkeys((device.type, "cpu"))
        self._settings = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield


def _apply(operation: Any, *given: Any) -> Any:
    return operation.apply(*given)


def split_loss(call: Call, *, recompute: bool) -> Tensor:
    """The loss of a tail, slice by slice.

    Args:
        call: of the part.
        recompute: whether gradients are taken in the backward, where a loss scale is known.
    """
    inputs = call.inputs()
    if not torch.is_grad_enabled() or not (inputs or call.parameters):
        return loss_of(call, call.batch)
    tensors = [*inputs.values(), *call.parameters.values()]
    if recompute:
        return cast(Tensor, _apply(_Recomputed, call, list(inputs), None, *tensors))
    return cast(Tensor, _apply(_Tail, call, list(inputs), *tensors))


def split_outputs(call: Call) -> Any:
    """The outputs of a part for all rows, slice by slice."""
    inputs = call.inputs()
    if not torch.is_grad_enabled() or not (inputs or call.parameters):
        return outputs_of(call, call.batch)
    joined = Joined(call.layout.num_rows(call.batch))
    tensors = [*inputs.values(), *call.parameters.values()]
    found = _apply(_Recomputed, call, list(inputs), joined, *tensors)
    return joined.whole(found)
