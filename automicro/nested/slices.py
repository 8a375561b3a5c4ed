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
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, UnsplittableModelError
from automicro.loss.averages import Average, CutBatch
from automicro.loss.passes import is_extra_pass
from automicro.loss.weights import BatchWeights
from automicro.memory.oom import Failure, classify, release
from automicro.state.part import Replay
from automicro.torch_private import FakeTensor, all_versions, uncheckpointed
from automicro.transaction.rng import RandomState
from automicro.transaction.transaction import Transaction
from automicro.values import same_values

T = TypeVar("T")

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 3e-2
_OF_DRY = 2  # slices of tensors without data: the first, and one while its gradients are there


def tolerance_of(value: Tensor) -> float:
    """How far two ways of computing a value may be apart.

    >>> tolerance_of(torch.ones(1)), tolerance_of(torch.ones(1, dtype=torch.bfloat16))
    (0.0001, 0.03)
    """
    return _TOLERANCES.get(value.dtype, _COARSE)


class Sizer(Protocol):
    """Proposes the rows of a slice, and is told what became of it."""

    def begin(self) -> int:
        """Rows of a slice, at most."""

    def smaller(self, size: int) -> int | None:
        """Rows to go on with after a size that did not fit; None where there is nothing smaller."""

    def end(self, sizes: Sequence[int]) -> None:
        """All slices went through."""


class Calls:
    """Calls of parts in something that is run again in a backward, to be cut the same way there.

    Sizes may have changed by then, and other slices draw other random numbers.
    """

    def __init__(self) -> None:
        self._found: list[tuple[object, Sequence[Earlier]]] = []
        self._waiting: Iterator[tuple[object, Sequence[Earlier]]] | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around the first run."""
        self._found, self._waiting = [], None
        with self._running():
            yield

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Around each further run."""
        self._waiting = iter(self._found)
        with self._running():
            yield

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def earlier(self, call: object) -> "Sequence[Earlier] | None":
        """The slices of the next call in the first run; None where this is the first."""
        if self._waiting is None:
            return None
        known, slices = next(self._waiting, (None, None))
        return slices if known == call else None

    def begin(self, call: object) -> "list[Earlier] | None":
        """What takes the slices of the next call in the first run; it stays empty for one piece."""
        if self._waiting is not None:
            return None
        slices: list[Earlier] = []
        self._found.append((call, slices))
        return slices

    def forget_inside(self, slices: "list[Earlier] | None") -> None:
        """Leave out what has begun since a call did, for it begins again."""
        if slices is None:
            return
        at = next(n for n, (_, each) in enumerate(self._found) if each is slices)
        del self._found[at + 1 :]


_num_shrunk = 0


def num_shrunk() -> int:
    """How often a slice did not fit in this process, and was cut smaller."""
    return _num_shrunk


_running: ContextVar[Calls | None] = ContextVar("_running", default=None)


def running_calls() -> Calls | None:
    """Those of what is run now, where that is run again in a backward, and not looked at alone."""
    return None if is_extra_pass() else _running.get()


@dataclass(frozen=True)
class Earlier:
    """A slice of a call that was run before.

    Attributes:
        size: rows.
        random: numbers that it began with, where it drew any.
        calls: of parts inside of it.
    """

    size: int
    random: RandomState | None = None
    calls: Calls | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a part was called with, and how a slice of it is computed.

    Attributes:
        batch: the arguments by name: a batch of its own.
        layout: of the batch.
        compute: the output for a slice of the batch, with other tensors in place of parameters:
            as many, in their order, or none; None: all is left as it is.
        holding: other tensors in place of parameters meanwhile, likewise.
        parameters: those that need a gradient.
        averages: what the loss averages over; None where the part gives no loss.
        sizer: of the slices.
        device: that it computes on.
        state: all that the part reaches.
        standing: the same for its backward, with copies of nothing that is large.
        random: gives what remembers where random numbers stand.
        min_rows: that a slice needs, where there are as many.
        is_dry: whether tensors are without data. Then two slices stand for all.
        earlier: slices of this call in the first run, where it is run again, none of one piece;
            else None.
        ran: takes the slices of this call; None where nobody runs it again.
    """

    batch: Mapping[str, Any]
    layout: BatchLayout
    compute: Callable[[Mapping[str, Any], Sequence[Tensor] | None], Any]
    holding: Callable[[Sequence[Tensor] | None], contextlib.AbstractContextManager[None]]
    parameters: Sequence[Tensor]
    averages: Mapping[str, Average] | None
    sizer: Sizer
    device: torch.device
    state: Replay
    standing: Replay
    random: Callable[[], RandomState]
    min_rows: int = 1
    is_dry: bool = False
    earlier: Sequence[Earlier] | None = None
    ran: list[Earlier] | None = None

    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the batch that need a gradient, by their paths."""
        return {path: leaf for path, leaf in tensor_leaves(self.batch) if leaf.requires_grad}

    def check_inputs(self) -> None:
        """Refuse gradients of tensors that are rows of a list: slices do not have all of them.

        Raises:
            UnsplittableModelError: there are some.
        """
        inputs = self.inputs()
        inside = [path for path in inputs if "." in path]
        if not inside:
            return
        rows = self.layout.row_dims(self.batch)
        last = self.layout.num_rows(self.batch) - 1
        few = dict(tensor_leaves(self.layout.take_rows(self.batch, [last])))
        for path in inside:
            if path not in rows and few.get(path) is not inputs[path]:
                raise UnsplittableModelError(
                    f"a part with a size of its own is given {path!r}, which needs a gradient, in "
                    "a list of rows: lists of such tensors cannot be cut; give it one padded "
                    "tensor with the rows in dimension 0, and their lengths"
                )

    def cut(self, num_rows: int, size: int) -> list[int]:
        """Sizes of slices of at most so many rows."""
        return balanced_sizes(num_rows, size, min_rows=self.min_rows)

    def undoing(self) -> Transaction:
        """What undoes all that a slice changes."""
        return Transaction([self.state.undone(), self.random()])

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Put back afterwards what is changed meanwhile."""
        random = self.random()
        random.begin()
        with self.state.leaving_no_trace():
            try:
                yield
            finally:
                random.roll_back()

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Slices of a batch, those that are computed."""
        if not self.is_dry:
            return self.layout.split(batch, sizes)
        few = list(sizes[:_OF_DRY])
        left = self.layout.num_rows(batch) - sum(few)
        return self.layout.split(batch, [*few, left] if left else few)[:_OF_DRY]


@dataclass
class Slice:
    """Some rows of a batch.

    Attributes:
        index: among the slices.
        start: the first row.
        stop: the row after the last.
        batch: of these rows.
        random: numbers that it began with before, where it drew any.
        calls: of parts inside of it.
    """

    index: int
    start: int
    stop: int
    batch: Any
    random: RandomState | None = None
    calls: Calls = field(default_factory=Calls)

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class Walk:
    """Through the rows of a batch, slice by slice.

    Args:
        call: of the part.
        batch: of the call; with other tensors, maybe, of the same rows.
        earlier: the slices, where the rows were walked through before; else sizes are found.
    """

    def __init__(
        self,
        call: Call,
        batch: Any,
        earlier: Sequence[Earlier] | None = None,
    ) -> None:
        self._call, self._batch = call, batch
        self._num_rows = call.layout.num_rows(batch)
        self._earlier = None if earlier is None else list(earlier)
        self._has_shrunk = False
        self._index = self._start = 0
        if earlier is None:
            self._cut(call.cut(self._num_rows, call.sizer.begin()))
        else:
            self._cut([each.size for each in earlier])

    def _cut(self, sizes: Sequence[int]) -> None:
        self._pieces = self._call.split(self._batch, sizes)
        self.sizes = list(sizes[: len(self._pieces)])
        self._weights: BatchWeights | None = None

    @property
    def is_second(self) -> bool:
        """Whether the rows were walked through before."""
        return self._earlier is not None

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
            found = Slice(self._index, self._start, stop, self._pieces[self._index])
            if self._earlier is not None:
                earlier = self._earlier[self._index]
                found.random, found.calls = earlier.random, earlier.calls or Calls()
            yield found
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
        if size is None or size < self._call.min_rows:
            raise failure
        self._has_shrunk = True
        global _num_shrunk
        _num_shrunk += 1
        done = self.sizes[: self._index]
        if self._earlier is None:
            self._cut([*done, *self._call.cut(self._num_rows - self._start, size)])
            return
        if self._earlier[self._index].random is not None:
            raise failure
        parts = self._call.cut(failed, size)
        self._earlier[self._index : self._index + 1] = map(Earlier, parts)
        self._cut([each.size for each in self._earlier])


def run_slices(
    call: Call, walk: Walk, compute: Callable[[Slice], T], done: list[Earlier] | None = None
) -> Iterator[tuple[Slice, T]]:
    """Compute slice after slice; those that do not fit are undone, and cut smaller.

    Args:
        call: of the part.
        walk: through its rows.
        compute: what is wanted of a slice. It may keep nothing of one that fails.
        done: takes the slices as they were, to run them again; None where nobody does.

    Raises:
        BaseException: whatever else than running out of memory, or that of the smallest slice.
    """
    while True:
        failure: BaseException | None = None
        for each in walk.slices():
            random = call.random()
            undo = Transaction([call.state.undone(), random])
            undo.begin()
            inputs = Unwritten(each.batch)
            try:
                with each.calls.repeating() if walk.is_second else each.calls.noting():
                    found = compute(each)
            except Exception as error:
                if classify(error) is not Failure.RETRYABLE:
                    raise
                failure = error
                break
            inputs.check()
            has_drawn = done is not None and random.has_moved
            if done is not None:
                drawn = copy.copy(random) if has_drawn else None
                done.append(Earlier(each.num_rows, drawn, each.calls))
            undo.commit()
            yield each, found
            del found
        if failure is None:
            return
        # Outside "except": inside it the traceback keeps the tensors of the slice alive.
        try:
            release(failure, call.device)
            undo.roll_back()
            inputs.check(failure)
            walk.shrink(failure)
        finally:
            failure = None  # it holds this frame: a cycle


class Standing:
    """What a part computes with besides its inputs and trained parameters, as it stands now.

    It is computed again in the backward, and its mode may be another one by then, or what
    ``torch.func.functional_call`` put there may be gone.

    Args:
        call: of the part.
    """

    def __init__(self, call: Call) -> None:
        self._state = call.state
        self._before = call.standing.take(self)
        self._own: set[int] = set()

    def settle(self) -> None:
        """The part itself may have changed what is another than at first."""
        self._own = set(map(id, self._before.written()))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it stood, for a while.

        Raises:
            UnsplittableModelError: the values of a tensor are others by now.
        """
        for each in self._before.written():
            if id(each) not in self._own and each.is_floating_point():
                path, _ = self._before.names().get(id(each), ("?", ""))
                raise UnsplittableModelError(
                    f"{path.partition('.')[2]!r} of a part with a size of its own was written into "
                    "between its forward and its backward, which computes the part again; call "
                    "backward before, or put a new tensor in its place"
                )
        with self._state.as_it_stood(self._before):
            yield


class Unwritten:
    """Watches that a part writes nothing into what it is given.

    Args:
        batch: that it is given.
    """

    def __init__(self, batch: Any) -> None:
        self._leaves = [each for each in tensor_leaves(batch) if not each[1].is_inference()]
        self._versions = all_versions(leaf for _, leaf in self._leaves)

    def check(self, cause: BaseException | None = None) -> None:
        """Refuse a part that did.

        Raises:
            UnsplittableModelError: it did; a slice can neither be undone nor computed again.
        """
        now = all_versions(leaf for _, leaf in self._leaves)
        if now == self._versions:
            return
        index = next(n for n, (a, b) in enumerate(zip(now, self._versions, strict=True)) if a != b)
        raise UnsplittableModelError(
            f"a part with a size of its own writes into its input {self._leaves[index][0]!r}, so "
            "that a slice can neither be undone nor computed again; let it compute a new tensor: "
            "relu(x) and not relu_(x), nn.ReLU() and not nn.ReLU(inplace=True) as its first layer"
        ) from cause


def loss_of(call: Call, batch: Any) -> Tensor:
    """The loss of a batch without any gradient, slice by slice."""
    walk = Walk(call, batch, call.earlier)
    total: tuple[Tensor, torch.dtype] | None = None
    for each, loss in run_slices(call, walk, lambda each: call.compute(each.batch, ()), call.ran):
        total = _added(total, walk.weights.apply(each.index, cast(Tensor, loss), {})[0])
    return _narrow(total)


def _added(total: tuple[Tensor, torch.dtype] | None, loss: Tensor) -> tuple[Tensor, torch.dtype]:
    """A sum of losses, rounded once, and the type that they have."""
    loss = loss.detach()
    wide = loss.to(_wide(loss.dtype))
    return wide if total is None else total[0] + wide, loss.dtype


def _narrow(total: tuple[Tensor, torch.dtype] | None) -> Tensor:
    assert total is not None
    return total[0].to(total[1])


def outputs_of(call: Call, batch: Any) -> Any:
    """The outputs of all rows without any gradient, slice by slice."""
    outputs = Joined(call.layout.num_rows(batch))
    walk = Walk(call, batch, call.earlier)
    for each, found in run_slices(call, walk, lambda each: call.compute(each.batch, ()), call.ran):
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

    def _is_formed_like(self, output: Any) -> bool:
        """Whether what stands beside tensors is that of the first slice."""
        known = [leaf for _, leaf in tensor_leaves(self._form)]
        if known and isinstance(known[0], FakeTensor):
            return True
        waiting = iter(known)
        return same_values(self._form, map_tensors(output, lambda leaf: next(waiting, leaf)))

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
            self._form = map_tensors(output, lambda leaf: leaf.new_empty(0))
        elif not self._is_formed_like(output):
            raise UnsplittableModelError(
                "a part with a size of its own gives beside tensors something that is another one "
                "for each slice (a number, a text, None in place of a tensor): that of all rows is "
                "not known; give it as a tensor with the rows in dimension 0, or compute it "
                "outside of the part"
            )
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
        self._is_reached = [False] * len(tensors)
        self._is_empty = True
        self._dims += [None] * (len(tensors) - len(inputs))
        self._sums = [
            torch.zeros_like(each, dtype=each.dtype if dim is not None else _wide(each.dtype))
            for each, dim in zip(tensors, self._dims, strict=True)
        ]

    def add(self, each: Slice, gradients: Sequence[Tensor | None]) -> None:
        """Those of one slice, in this order."""
        if not gradients:  # no target of this slice counts
            return
        self._is_empty = False
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            whole, dim = self._sums[index], self._dims[index]
            is_first = not self._is_reached[index]
            self._is_reached[index] = True
            if dim is None and gradient.is_sparse and (is_first or whole.is_sparse):
                wide = gradient.to(whole.dtype)
                self._sums[index] = wide if is_first else (whole + wide).coalesce()
            elif dim is None and whole.is_sparse:
                self._sums[index] = gradient.to(whole.dtype) + whole
            elif dim is None:
                whole += gradient
            else:
                whole.narrow(dim, each.start, each.num_rows).copy_(gradient)

    def all(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """All of them, multiplied, in the types of inputs and parameters; None: not reached."""
        if factor is not None:
            for each in self._sums:
                each.mul_(factor)
        return [
            each.to(dtype) if is_reached or self._is_empty else None
            for each, dtype, is_reached in zip(
                self._sums, self._types, self._is_reached, strict=True
            )
        ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients add up in, so that they are rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def with_inputs(batch: Any, inputs: Mapping[str, Tensor]) -> Any:
    """The same batch, with other tensors at these paths."""
    by_id = {id(leaf): inputs[path] for path, leaf in tensor_leaves(batch) if path in inputs}
    return map_tensors(batch, lambda leaf: by_id.get(id(leaf), leaf))


def marked(batch: Any, paths: Sequence[str]) -> tuple[Any, list[Tensor]]:
    """A slice whose tensors at these paths need a gradient, and these tensors."""
    leaves = {path: leaf.detach().requires_grad_() for path, leaf in _at(batch, paths).items()}
    return with_inputs(batch, leaves), list(leaves.values())


def _at(batch: Any, paths: Sequence[str]) -> dict[str, Tensor]:
    found = dict(tensor_leaves(batch))
    return {path: found[path] for path in paths}


def aliases_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Leaves with the values of others: hooks of these do not run for each slice."""
    return [each.detach().requires_grad_() for each in tensors]


def refuse_twice() -> None:
    """Refuse a backward that is to have a backward itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a part with a size of its own has no second derivative (create_graph=True); take its "
            "size away with .remove(), or compute that gradient without the part"
        )


class _Tail(torch.autograd.Function):
    """The loss of all slices; gradients are taken slice by slice in the forward."""

    @staticmethod
    def forward(ctx: Any, call: Call, paths: Sequence[str], *tensors: Tensor) -> Tensor:
        inputs = dict(zip(paths, tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        sums = Gradients(inputs, call.parameters, call.layout.row_dims(batch))
        aliases = aliases_of(call.parameters)
        walk = Walk(call, batch, call.earlier)

        def loss_and_gradients(each: Slice) -> tuple[Tensor, Sequence[Tensor | None]]:
            with torch.enable_grad(), uncheckpointed():
                rows, leaves = marked(each.batch, paths)
                loss = call.compute(rows, aliases)
                weighted, _ = walk.weights.apply(each.index, loss, {})
                if walk.weights.is_nothing[each.index]:
                    return weighted.detach(), ()
                return weighted.detach(), _gradients(weighted, [*leaves, *aliases])

        total: tuple[Tensor, torch.dtype] | None = None
        for each, (loss, gradients) in run_slices(call, walk, loss_and_gradients, call.ran):
            sums.add(each, gradients)
            del gradients
            total = _added(total, loss)
        ctx.sums = sums
        return _narrow(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_twice()
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "the gradients of a part with a size of its own were used by an earlier backward; "
                "call backward once (retain_graph=True does not keep them), or compute it again"
            )
        return None, None, *sums.all(gradient)


def keep_for_backward(
    ctx: Any, call: Call, paths: Sequence[str], tensors: Sequence[Tensor]
) -> None:
    """Keep what a part is computed again from.

    Args:
        ctx: of the operation.
        call: of the part.
        paths: of the inputs that need a gradient.
        tensors: these inputs, then the parameters.
    """
    # Autograd keeps tensors, and sees when they change; who watches it may keep them elsewhere.
    leaves = dict(tensor_leaves(call.batch))
    ctx.others = [path for path in leaves if path not in paths]
    ctx.num_tensors = len(tensors)
    ctx.save_for_backward(*tensors, *(leaves[path] for path in ctx.others))
    template = with_inputs(call.batch, {path: torch.empty(0) for path in leaves})
    ctx.call, ctx.paths = replace(call, batch=template, parameters=()), paths
    ctx.autocast = Autocast(call.device)
    ctx.set_materialize_grads(False)


def kept_for_backward(ctx: Any) -> tuple[Any, dict[str, Tensor], Sequence[Tensor]]:
    """The batch again, with leaves in the place of inputs; these inputs, and the parameters."""
    saved = ctx.saved_tensors  # once: what is computed again refuses to give them twice
    tensors, others = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
    inputs = dict(zip(ctx.paths, tensors, strict=False))
    leaves = {path: each.detach() for path, each in inputs.items()}
    batch = with_inputs(ctx.call.batch, leaves | dict(zip(ctx.others, others, strict=True)))
    return batch, inputs, tensors[len(inputs) :]


def outputs_to_autograd(ctx: Any, joined: Joined) -> tuple[Tensor, ...]:
    """All outputs, of which whole numbers have no gradient."""
    numbers = [
        each for each in joined.tensors if not (each.is_floating_point() or each.is_complex())
    ]
    ctx.mark_non_differentiable(*numbers)
    return tuple(joined.tensors)


class _Recomputed(torch.autograd.Function):
    """Outputs of all slices, or their loss; computed again in the backward, for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, paths: Sequence[str], joined: Joined | None, *tensors: Tensor
    ) -> Any:
        inputs = dict(zip(paths, tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        ctx.standing = Standing(call)
        walk = Walk(call, batch, call.earlier)
        ran: list[Earlier] = [] if call.ran is None else call.ran
        total: tuple[Tensor, torch.dtype] | None = None

        def compute(each: Slice) -> Any:
            return call.compute(each.batch, ())

        for each, found in run_slices(call, walk, compute, ran):
            if joined is not None:
                joined.put(each, found)
            else:
                total = _added(total, walk.weights.apply(each.index, found, {})[0])
            del found
        ctx.standing.settle()
        keep_for_backward(ctx, call, paths, tensors)
        ctx.slices = ran
        ctx.is_tail = joined is None
        return _narrow(total) if joined is None else outputs_to_autograd(ctx, joined)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        refuse_twice()
        call, paths = ctx.call, ctx.paths
        batch, inputs, parameters = kept_for_backward(ctx)
        sums = Gradients(inputs, parameters, call.layout.row_dims(batch))
        aliases = aliases_of(parameters)
        walk = Walk(call, batch, ctx.slices)

        def gradients_of(each: Slice) -> Sequence[Tensor | None]:
            if ctx.is_tail and walk.weights.is_nothing[each.index]:
                return ()
            again = contextlib.nullcontext() if each.random is None else each.random.replaying()
            with again, torch.enable_grad(), ctx.autocast.again():
                rows, leaves = marked(each.batch, paths)
                output = call.compute(rows, aliases)
            wanted = [*leaves, *aliases]
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

        # The first time has changed the buffers already.
        with call.leaving_no_trace(), ctx.standing.again():
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
    tensors = [*inputs.values(), *call.parameters]
    if recompute:
        return cast(Tensor, _apply(_Recomputed, call, list(inputs), None, *tensors))
    return cast(Tensor, _apply(_Tail, call, list(inputs), *tensors))


def split_outputs(call: Call) -> Any:
    """The outputs of a part for all rows, slice by slice."""
    inputs = call.inputs()
    if not torch.is_grad_enabled() or not (inputs or call.parameters):
        return outputs_of(call, call.batch)
    joined = Joined(call.layout.num_rows(call.batch))
    tensors = [*inputs.values(), *call.parameters]
    found = _apply(_Recomputed, call, list(inputs), joined, *tensors)
    return joined.whole(found)
