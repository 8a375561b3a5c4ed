"""One call of a part, computed slice by slice, with its gradients.

Only one slice's activations are alive at a time. Two ways do it:

- A *tail* gives a loss. The gradient of each slice is taken at once, in the forward, so nothing is
  computed twice; what waits for the backward are gradients, as large as inputs and parameters. This
  is what fused linear cross-entropy kernels do (Hsu et al. 2024, Liger Kernel), for any tail.
- A *middle* part gives outputs for each row. Each slice is checkpointed (Chen et al. 2016), and
  finds everything as it stood when it is computed again in the backward.

Where memory runs out in a slice, the attempt ends, and the part's slices are smaller in the next.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, UnsplittableModelError
from automicro.loss.averages import Average, CutBatch
from automicro.loss.weights import BatchWeights
from automicro.memory.oom import Failure, classify
from automicro.state.part import Replay
from automicro.torch_private import FakeTensor, all_versions, saving, uncheckpointed
from automicro.transaction.rng import RandomState
from automicro.values import same_values

T = TypeVar("T")


class AsItStood(contextlib.AbstractContextManager[None]):
    """The surroundings of a computation as they are now. Entered, they are restored.

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
            # Reading and setting all generators takes time, for each slice.
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
        # `stood` puts more generators back than torch would: Python's, NumPy's and the caller's.
        preserve_rng_state=False,
        context_fn=lambda: (stood.first(), stood),
    )


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 3e-2
_OF_DRY = 2  # slices of tensors without data: the first, and one while its gradients are there


def tolerance_of(value: Tensor) -> float:
    """How far two ways of computing a value may be apart.

    >>> tolerance_of(torch.ones(1)), tolerance_of(torch.ones(1, dtype=torch.bfloat16))
    (0.0001, 0.03)
    """
    return _TOLERANCES.get(value.dtype, _COARSE)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a part's call, and how a slice of it is computed.

    Attributes:
        batch: the arguments by name: a batch of its own.
        layout: of the batch.
        compute: the output for a slice of the batch, with other tensors in place of parameters:
            as many, in their order, or none; None: all is left as it is.
        holding: other tensors in place of parameters meanwhile, likewise.
        parameters: those that need a gradient.
        sizer: says how many rows a slice has (`begin`), and learns what became of it.
        device: that it computes on.
        standing: all that the part reaches, for its backward: copies of nothing that is large.
        random: gives what remembers where random numbers stand.
        min_rows: that a slice needs, where there are as many.
        is_dry: whether tensors are without data. Then two slices stand for all.
    """

    batch: Mapping[str, Any]
    layout: BatchLayout
    compute: Callable[[Mapping[str, Any], Sequence[Tensor] | None], Any]
    holding: Callable[[Sequence[Tensor] | None], contextlib.AbstractContextManager[None]]
    parameters: Sequence[Tensor]
    sizer: Any
    device: torch.device
    standing: Replay
    random: Callable[[], RandomState]
    min_rows: int = 1
    is_dry: bool = False

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows(self.batch)

    @property
    def is_differentiated(self) -> bool:
        """Whether anything needs a gradient of it."""
        return torch.is_grad_enabled() and bool(self.parameters or self.inputs())

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
                    "a list of rows; give it one padded tensor, and the lengths"
                )

    def sizes(self) -> list[int]:
        """Rows of all slices."""
        return balanced_sizes(self.num_rows, self.sizer.begin(), min_rows=self.min_rows)

    def cut(self, batch: Any, sizes: Sequence[int]) -> CutBatch:
        """The batch of the call, or one like it, in slices: those that are computed."""
        pieces = list(sizes)
        if self.is_dry:
            few = pieces[:_OF_DRY]
            pieces = [*few, self.num_rows - sum(few)] if len(few) < len(pieces) else few
        slices = self.layout.split(batch, pieces)[: _OF_DRY if self.is_dry else None]
        return CutBatch(batch=batch, microbatches=slices, sizes=pieces[: len(slices)])

    def run(self, cut: CutBatch, compute: Callable[[int, Any], T]) -> Iterator[T]:
        """Compute slice after slice, from its number and its rows."""
        for index, (size, rows) in enumerate(zip(cut.sizes, cut.microbatches, strict=True)):
            with naming(self.sizer, size):
                found = compute(index, rows)
            yield found
            # Else it lies beside the next slice.
            del found
        self.sizer.end(cut.sizes)


@contextlib.contextmanager
def naming(sizer: Any, size: int) -> Iterator[None]:
    """Around what may run out of memory for so many rows: then the error names the part."""
    try:
        yield
    except Exception as error:
        if classify(error) is Failure.RETRYABLE:
            sizer.failed(size, error)
        raise


class Standing(AsItStood):
    """A slice that is computed again in the backward."""

    def __init__(self, call: Call, size: int, replay: Replay | None = None) -> None:
        self._naming = functools.partial(naming, call.sizer, size)  # the call holds the batch
        self._parameters, self._versions = call.parameters, all_versions(call.parameters)
        self._own: frozenset[int] = frozenset()
        super().__init__([replay or call.standing], call.random())

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with super().first():
            yield
        # The part itself may have changed what is another than at first.
        self._own = frozenset(map(id, self.written()))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        self._check()
        with self._naming(), super().again():
            yield

    def _check(self) -> None:
        """Refuse other values of what the part computes with."""
        now = all_versions(self._parameters)
        versions = zip(self._parameters, now, self._versions, strict=True)
        written = [each for each, version, before in versions if version != before]
        written += [e for e in self.written() if id(e) not in self._own and e.is_floating_point()]
        for each in written:
            path, _ = self.before[0].names().get(id(each), ("?", ""))
            raise UnsplittableModelError(
                f"{path.partition('.')[2]!r} of a part with a size of its own was written into "
                "between its forward and its backward, which computes it again; call backward first"
            )


class _Sums(torch.autograd.Function):
    """Stand-ins for half precision parameters, at which gradients of slices add up in float32."""

    @staticmethod
    def forward(ctx: Any, *halves: Tensor) -> tuple[Tensor, ...]:
        ctx.types = [each.dtype for each in halves]
        # Zeros in the place of missing gradients would take memory, and look like gradients.
        ctx.set_materialize_grads(False)
        # They are added to, and never read: so they need no memory.
        return tuple(e.new_empty((), dtype=_wide(e.dtype)).expand(e.shape) for e in halves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return tuple(
            None if each is None else each.to(dtype)
            for each, dtype in zip(gradients, ctx.types, strict=True)
        )


class _OfSlice(torch.autograd.Function):
    """The same parameters for one slice."""

    @staticmethod
    def forward(ctx: Any, halves: Sequence[Tensor], *sums: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in halves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *(None if each is None else each.to(_wide(each.dtype)) for each in gradients)


def summed(call: Call) -> Callable[[], Sequence[Tensor]]:
    """Gives the parameters for each slice; none where they can stay as they are."""
    parameters = call.parameters  # a call holds the whole batch
    halves = [each for each in parameters if _wide(each.dtype) is not each.dtype]
    if not halves:
        return tuple
    sums = apply(_Sums, *halves)

    def of_slice() -> Sequence[Tensor]:
        found = dict(zip(map(id, halves), apply(_OfSlice, halves, *sums), strict=True))
        return [found.get(id(each), each) for each in parameters]

    return of_slice


def _added(losses: Sequence[Tensor]) -> Tensor:
    """The sum of losses, rounded once."""
    wide = _wide(losses[0].dtype)
    return functools.reduce(torch.add, [each.to(wide) for each in losses]).to(losses[-1].dtype)


def _weighted(weights: BatchWeights, index: int, loss: Tensor) -> Tensor:
    """The share of a slice in the loss. It has no gradient where no target counts."""
    # A mean over no target is NaN, which no weight of zero takes away from its gradients.
    weighted = weights.apply(index, loss, {})[0]
    return weighted.detach() if weights.is_nothing[index] else weighted


def rows_of(output: Any, num_rows: int) -> list[Tensor]:
    """The tensors of an output.

    Raises:
        UnsplittableModelError: they have no rows in dimension 0, so that none can be joined.
    """
    leaves = tensor_leaves(output)
    if not leaves:
        refuse_outputs("", f"no tensor but {type(output).__name__}")
    for path, leaf in leaves:
        if leaf.shape[:1] != (num_rows,):
            refuse_outputs(path, f"a tensor of shape {tuple(leaf.shape)} for {num_rows} rows")
    return [leaf for _, leaf in leaves]


class Joined:
    """The outputs of slices, put together as those of all rows."""

    def __init__(self, num_rows: int) -> None:
        self._missing = num_rows
        self._shown: Any = None
        self._slices: list[list[Tensor]] = []

    def put(self, output: Any, size: int) -> None:
        """Take the output of the next slice.

        Raises:
            BatchError: it has other shapes than that of the first.
            UnsplittableModelError: it cannot be put together with that.
        """
        leaves = rows_of(output, size)
        if not self._slices:
            # Without their memory, for they only show where tensors belong.
            self._shown = map_tensors(output, lambda leaf: leaf.new_empty(0))
        known = iter([leaf for _, leaf in tensor_leaves(self._shown)])  # compared by identity
        rest = map_tensors(output, lambda leaf: next(known, leaf))
        # Without data there is nothing to compare.
        if not (isinstance(leaves[0], FakeTensor) or same_values(self._shown, rest)):
            what = "something that is another one for each slice (a number, a text, a None)"
            refuse_outputs("", f"beside tensors {what}")
        for first, leaf in zip(self._slices[0] if self._slices else (), leaves, strict=False):
            if first.shape[1:] != leaf.shape[1:]:
                raise BatchError(
                    f"slices of a part give shapes {tuple(first.shape[1:])} and "
                    f"{tuple(leaf.shape[1:])} behind the rows; pad to the whole batch's length"
                )
        self._slices.append(leaves)
        self._missing -= size

    def outputs(self) -> Any:
        """The outputs of all rows, in the structure of one slice's."""
        if self._missing:  # tensors without data: a few slices stand for all
            rest = [leaf.new_empty((self._missing, *leaf.shape[1:])) for leaf in self._slices[0]]
            self._slices.append(rest)
        found = map(torch.cat, zip(*self._slices, strict=True))
        return map_tensors(self._shown, lambda _: next(found))


def refuse_outputs(path: str, what: str) -> NoReturn:
    """Refuse what a part gives.

    Raises:
        UnsplittableModelError: always.
    """
    named = f" {path!r}" if path else ""
    raise UnsplittableModelError(
        f"a part with a size of its own gives{named} {what}, so it computes something over "
        "rows and cannot be cut; give a size to a part that computes each row by itself and "
        "gives rows in dimension 0 (not the states of an LSTM), and put layers that read what "
        "they change, such as spectral norm, into evaluation mode (.eval())"
    )


class Gradients:
    """Sums of gradients: of inputs row by row, of parameters and shared inputs over slices.

    They lie there before the first slice: else that one would have more room than all others.
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
        self._is_empty, self._start = True, 0
        self._dims += [None] * (len(tensors) - len(inputs))
        self._sums = [
            torch.zeros_like(each, dtype=each.dtype if dim is not None else _wide(each.dtype))
            for each, dim in zip(tensors, self._dims, strict=True)
        ]

    def add(self, num_rows: int, gradients: Sequence[Tensor | None]) -> None:
        """Those of the next slice, in this order; none where no target of it counts."""
        start, self._start = self._start, self._start + num_rows
        self._is_empty &= not gradients
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            whole, dim = self._sums[index], self._dims[index]
            is_first = not self._is_reached[index]
            self._is_reached[index] = True
            if dim is not None:
                whole.narrow(dim, start, num_rows).copy_(gradient)
            elif is_first and gradient.is_sparse:
                self._sums[index] = gradient.to(whole.dtype)
            elif whole.is_sparse:
                total = gradient.to(whole.dtype) + whole
                self._sums[index] = total.coalesce() if total.is_sparse else total
            else:
                whole += gradient

    def all(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """All of them, multiplied, in the types of inputs and parameters; None: not reached."""
        if factor is not None:
            for each in self._sums:
                each.mul_(factor)
        return [
            # Where no target of any slice counts, gradients are zeros, as of the whole.
            each.to(dtype) if is_reached or self._is_empty else None
            for each, dtype, is_reached in zip(
                self._sums, self._types, self._is_reached, strict=True
            )
        ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients add up, so that they are rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def marked(batch: Any, paths: Sequence[str]) -> tuple[Any, list[Tensor]]:
    """A slice whose tensors at these paths need a gradient, and these tensors."""
    given = dict(tensor_leaves(batch))
    leaves = [given[path].detach().requires_grad_() for path in paths]
    # Of one that stands at several paths, the last has all of its gradient.
    by_id = {id(given[path]): leaf for path, leaf in zip(paths, leaves, strict=True)}
    return map_tensors(batch, lambda leaf: by_id.get(id(leaf), leaf)), leaves


def aliases_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Leaves with the values of others: hooks of these do not run for each slice."""
    return [each.detach().requires_grad_() for each in tensors]


def refuse_twice() -> None:
    """Refuse a backward that is to have a backward itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a part with a size of its own has no second derivative (create_graph=True); take its "
            "size away with .remove()"
        )


class _Tail(torch.autograd.Function):
    """The loss of all slices; gradients are taken slice by slice in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        cut: CutBatch,
        weights: BatchWeights,
        inputs: Mapping[str, Tensor],
        *_: Tensor,
    ) -> Tensor:
        paths = list(inputs)
        sums = Gradients(inputs, call.parameters, call.layout.row_dims(call.batch))
        aliases = aliases_of(call.parameters)

        def loss_and_gradients(index: int, rows: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
            # A Function's forward runs without gradients; each slice goes backward inside of it.
            with torch.enable_grad(), uncheckpointed():
                rows, leaves = marked(rows, paths)
                weighted = _weighted(weights, index, call.compute(rows, aliases))
                if weights.is_nothing[index]:
                    return weighted, ()
                return weighted.detach(), _gradients(weighted, [*leaves, *aliases])

        losses: list[Tensor] = []
        for loss, gradients in call.run(cut, loss_and_gradients):
            sums.add(cut.sizes[len(losses)], gradients)
            # Else they lie beside those of the next slice.
            del gradients
            losses.append(loss)
        ctx.sums = sums
        return _added(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_twice()
        # Multiplied in place, so that a second backward would find other numbers.
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "an earlier backward has used the gradients of a part with a size of its own; call "
                "backward once, or compute the part again"
            )
        return None, None, None, None, *sums.all(gradient)


def _gradients(loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def apply(operation: Any, *given: Any) -> Any:
    """Call an ``autograd.Function``, whose ``apply`` has no types."""
    return operation.apply(*given)


def split_loss(call: Call, averages: Mapping[str, Average], *, recompute: bool) -> Tensor:
    """The loss of a tail, slice by slice."""
    cut = call.cut(call.batch, call.sizes())
    weights = BatchWeights(averages, [cut])
    if call.is_differentiated and not (recompute and not all(weights.is_nothing)):
        inputs = call.inputs()
        tensors = [*inputs.values(), *call.parameters]
        return cast(Tensor, apply(_Tail, call, cut, weights, inputs, *tensors))
    losses = enumerate(call.run(cut, _how(call)))
    return _added([_weighted(weights, index, loss) for index, loss in losses])


def split_outputs(call: Call) -> Any:
    """The outputs of a part for all rows, slice by slice."""
    cut, joined = call.cut(call.batch, call.sizes()), Joined(call.num_rows)
    sizes = iter(cut.sizes)
    for output in call.run(cut, _how(call)):
        joined.put(output, next(sizes))
        # Else it lies beside the next slice.
        del output
    return joined.outputs()


def _how(call: Call) -> Callable[[int, Any], Any]:
    """Computes a slice, and again in the backward, where there is one."""
    if not call.is_differentiated:
        return lambda _, rows: call.compute(rows, ())
    parameters, compute, sizes = summed(call), call.compute, call.sizes()

    def twice(index: int, rows: Any) -> Any:
        stood = Standing(call, sizes[index])
        # A call holds the whole batch.
        return computed_again(compute, (rows, parameters()), {}, stood)

    return twice
