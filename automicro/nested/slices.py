"""One call of a part, computed slice by slice, with its gradients."""

# Only the activations of one slice are alive at a time. There are two ways to compute a part:
#
# A *tail* returns a loss. The gradients of each slice are computed at once, in the forward, so
# nothing is computed twice. Only gradients wait for the backward; they are as large as the inputs
# and parameters. Fused kernels of linear cross-entropy do this for one tail (Hsu et al. 2024, Liger
# Kernel).
#
# A *middle* part returns outputs for each row. Each slice is checkpointed (Chen et al. 2016); its
# recomputation in the backward finds all state as it was in the forward.
#
# If memory runs out in a slice, the attempt ends, and the part has smaller slices in the next one.

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro.batch.layout import BatchLayout, balanced_sizes
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, UnsplittableModelError
from automicro.loss.averages import Average, BatchWeights, CutBatch
from automicro.memory.oom import Failure, classify
from automicro.state.part import Replay
from automicro.torch_private import FakeTensor, all_versions
from automicro.torch_private_execution import saving, uncheckpointed
from automicro.transaction.rng import RandomState
from automicro.values import same_values

T = TypeVar("T")


class AsItStood(contextlib.AbstractContextManager[None]):
    """A snapshot of the state around a computation, which is restored inside the context.

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
        """Wrap the first run."""
        yield
        self._has_drawn = self._random.has_moved
        if not self._has_drawn:
            self._random.commit()  # releases some kilobytes for each of many slices

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Wrap each run after the first."""
        moved: set[int | None] = set()
        with contextlib.ExitStack() as stack:
            # Only if necessary: reading and setting all generators for each slice takes time.
            if self._has_drawn:
                stack.enter_context(self._random.replaying())
            for replay, before in zip(self._replays, self.before, strict=True):
                changed = before.changed_tensors(by_content=False)
                moved |= {storage_of(each) for each in before.tensors if id(each) in changed}
                stack.enter_context(replay.as_it_stood(before))
            if moved:
                # Saved as copies, because the backward reads them after the context has ended, when
                # the originals have their current values again.
                stack.enter_context(
                    saving(lambda each: each.clone() if storage_of(each) in moved else each)
                )
            yield

    # Torch enters the same object before each run after the first, and there can be several.
    def __enter__(self) -> None:
        context = self.again()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def written(self) -> list[Tensor]:
        """Return large tensors and frozen parameters that were changed and cannot be restored."""
        return [tensor for before in self.before for tensor in before.written()]


def storage_of(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's memory, valid while the tensor lives; None if it has none.

    >>> import torch
    >>> tensor = torch.ones(2)
    >>> storage_of(tensor) == storage_of(tensor[1:])
    True
    """
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return id(tensor.untyped_storage())
    return None


@contextlib.contextmanager
def replaced_forward(
    module: nn.Module, forward: Callable[..., Any], name: str = "forward"
) -> Iterator[None]:
    """Replace a module's own forward inside the context.

    >>> layer = nn.Linear(2, 2)
    >>> with replaced_forward(layer, lambda x: 3):
    ...     layer(None)
    3
    >>> "forward" in vars(layer)
    False
    """
    # Past __setattr__, which would register a module as a submodule of this name.
    table = vars(module)
    before = {name: table[name]} if name in table else {}
    table[name] = forward
    try:
        yield
    finally:
        del table[name]
        table.update(before)


_ABSENT = torch.empty(0)  # stands for any tensor in the structure of arguments or outputs


@dataclass(frozen=True)
class _Place:
    """The position of a tensor among the arguments."""

    index: int


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same tuples, lists and dictionaries with each element changed.

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
    """Call a function so that only its arguments are kept, and call it again in the backward."""
    # Tensors among the arguments go to autograd, which keeps them and notices when they change.
    tensors: list[Tensor] = []

    def take_out(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Place(len(tensors) - 1)

    structure = changed((args, kwargs), take_out)
    # The first run gets the original lists, so the caller sees changes to them.
    waiting = [(args, kwargs)]
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
        # `stood` restores more generators than torch would: those of Python, NumPy and the caller.
        preserve_rng_state=False,
        context_fn=lambda: (stood.first(), stood),
    )


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 3e-2
_OF_DRY = 2  # slices of tensors without data: the first, and one more while its gradients exist


def tolerance_of(value: Tensor) -> float:
    """Return the relative difference that two ways of computing a value can have.

    >>> tolerance_of(torch.ones(1)), tolerance_of(torch.ones(1, dtype=torch.bfloat16))
    (0.0001, 0.03)
    """
    return _TOLERANCES.get(value.dtype, _COARSE)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call of a part, and the functions that compute a slice of it."""

    batch: Mapping[str, Any]  # the arguments by name, as a batch
    layout: BatchLayout  # layout of that batch
    # Returns the output for a slice. The second argument replaces the parameters, in their order;
    # an empty sequence or None leaves them in place, and with None the output is not checked.
    compute: Callable[[Mapping[str, Any], Sequence[Tensor] | None], Any]
    # Replaces the parameters inside a context, in the same way.
    holding: Callable[[Sequence[Tensor] | None], contextlib.AbstractContextManager[None]]
    parameters: Sequence[Tensor]  # parameters that need a gradient
    sizer: Any  # proposes the rows of a slice (`begin`), and is notified of success and failure
    device: torch.device  # the device that computes
    standing: Replay  # all state that the part reaches, without copies of large tensors
    random: Callable[[], RandomState]  # returns a new record of the generators' states
    min_rows: int = 1  # the fewest rows of a slice, if the batch has as many
    is_dry: bool = False  # whether tensors hold no data; then two slices represent all

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows(self.batch)

    @property
    def is_differentiated(self) -> bool:
        """Whether the call needs a backward."""
        return torch.is_grad_enabled() and bool(self.parameters or self.inputs())

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors of the batch that need a gradient, by path."""
        return {path: leaf for path, leaf in tensor_leaves(self.batch) if leaf.requires_grad}

    def check_inputs(self) -> None:
        """Refuse gradients of tensors in a list of rows, because slices lack some of them."""
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
                    f"a part with its own size got {path!r}, which needs a gradient, in a list of "
                    "rows. Pass one padded tensor and the lengths"
                )

    def sizes(self) -> list[int]:
        """Return the rows of each slice."""
        return balanced_sizes(self.num_rows, self.sizer.begin(), min_rows=self.min_rows)

    def cut(self, batch: Any, sizes: Sequence[int]) -> CutBatch:
        """Cut the batch of the call, or a similar one, into the slices to compute."""
        pieces = list(sizes)
        if self.is_dry:
            few = pieces[:_OF_DRY]
            pieces = [*few, self.num_rows - sum(few)] if len(few) < len(pieces) else few
        slices = self.layout.split(batch, pieces)[: _OF_DRY if self.is_dry else None]
        return CutBatch(batch=batch, microbatches=slices, sizes=pieces[: len(slices)])

    def run(self, cut: CutBatch, compute: Callable[[int, Any], T]) -> Iterator[T]:
        """Compute the slices in order, each from its index and its rows."""
        for index, (size, rows) in enumerate(zip(cut.sizes, cut.microbatches, strict=True)):
            with naming(self.sizer, size):
                found = compute(index, rows)
            yield found
            # Otherwise it stays in memory during the next slice.
            del found
        self.sizer.end(cut.sizes)


@contextlib.contextmanager
def naming(sizer: Any, size: int) -> Iterator[None]:
    """Name the part in an error if memory runs out inside the context, and notify its sizer."""
    try:
        yield
    except Exception as error:
        if classify(error) is Failure.RETRYABLE:
            sizer.failed(size, error)
        raise


class Standing(AsItStood):
    """The state of a slice that is recomputed in the backward."""

    def __init__(self, call: Call, size: int, replay: Replay | None = None) -> None:
        # Without a reference to the call, which holds the batch.
        self._naming = functools.partial(naming, call.sizer, size)
        self._parameters, self._versions = call.parameters, all_versions(call.parameters)
        self._own: frozenset[int] = frozenset()
        super().__init__([replay or call.standing], call.random())

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with super().first():
            yield
        # The part itself might have written into these during its first run.
        self._own = frozenset(map(id, self.written()))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        self._check()
        with self._naming(), super().again():
            yield

    def _check(self) -> None:
        """Refuse the recomputation if values that the part reads have changed."""
        now = all_versions(self._parameters)
        versions = zip(self._parameters, now, self._versions, strict=True)
        written = [each for each, version, before in versions if version != before]
        written += [e for e in self.written() if id(e) not in self._own and e.is_floating_point()]
        for each in written:
            path, _ = self.before[0].names().get(id(each), ("?", ""))
            raise UnsplittableModelError(
                f"{path.partition('.')[2]!r} of a part with its own size was changed between its "
                "forward and its backward, which recomputes it. Call backward first"
            )


class _StandIn(torch.autograd.Function):
    """Another tensor in place of a parameter, whose gradient goes to that parameter."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, other: Tensor) -> Tensor:
        ctx.dtype = original.dtype
        # Zeros in place of a missing gradient would take memory, and would count as a gradient.
        ctx.set_materialize_grads(False)
        return other.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = gradients
        return None if gradient is None else gradient.to(ctx.dtype), None


def summed(call: Call) -> Callable[[], Sequence[Tensor]]:
    """Return a function for the parameters of a slice: none if the parameters can stay in place."""
    parameters = call.parameters  # without a reference to the call, which holds the whole batch
    # The gradients of half precision parameters add up in float32, in tensors whose values are
    # never read: these need no memory.
    sums = {
        id(each): apply(_StandIn, each, each.new_empty((), dtype=wide).expand(each.shape))
        for each in parameters
        if (wide := _wide(each.dtype)) is not each.dtype
    }
    if not sums:
        return tuple

    def of_slice() -> Sequence[Tensor]:
        return [
            apply(_StandIn, sums[id(each)], each) if id(each) in sums else each
            for each in parameters
        ]

    return of_slice


def _added(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses, rounded once."""
    wide = _wide(losses[0].dtype)
    return functools.reduce(torch.add, [each.to(wide) for each in losses]).to(losses[-1].dtype)


def _weighted(weights: BatchWeights, index: int, loss: Tensor) -> Tensor:
    """Return the share of a slice in the loss. It has no gradient if no target counts."""
    # A mean over no targets is NaN, and a weight of zero does not remove that from gradients.
    weighted = weights.apply(index, loss, {})[0]
    return weighted.detach() if weights.is_nothing[index] else weighted


def rows_of(output: Any, num_rows: int) -> list[Tensor]:
    """Return the tensors of an output, and refuse outputs that lack rows in dimension 0."""
    leaves = tensor_leaves(output)
    if not leaves:
        refuse_outputs("", f"no tensor but {type(output).__name__}")
    for path, leaf in leaves:
        if path == "0" and not leaf.dim():
            raise UnsplittableModelError(
                f"a part with its own size returns a number beside other values, as {path!r}. Let "
                "it return the loss alone, and divide a sum by its count outside"
            )
        if leaf.shape[:1] != (num_rows,):
            refuse_outputs(path, f"a tensor of shape {tuple(leaf.shape)} for {num_rows} rows")
    return [leaf for _, leaf in leaves]


def joined(outputs: Sequence[Any], sizes: Sequence[int], num_rows: int) -> Any:
    """Return the outputs of all rows, in the structure of the outputs of one slice."""
    slices = [rows_of(output, size) for output, size in zip(outputs, sizes, strict=True)]
    shown = [map_tensors(output, lambda _: _ABSENT) for output in outputs]
    # Tensors without data have no values to compare.
    has_data = not isinstance(slices[0][0], FakeTensor)
    if has_data and not all(same_values(shown[0], each) for each in shown[1:]):
        what = "something that differs between slices (a number, a text, a None)"
        refuse_outputs("", f"beside tensors {what}")
    pairs = (pair for leaves in slices for pair in zip(slices[0], leaves, strict=True))
    for first, leaf in pairs:
        if first.shape[1:] != leaf.shape[1:]:
            raise BatchError(
                f"slices of a part return shapes {tuple(first.shape[1:])} and "
                f"{tuple(leaf.shape[1:])} after the rows. Pad to the length of the whole batch"
            )
    if missing := num_rows - sum(sizes):  # tensors without data: a few slices represent all
        slices.append([leaf.new_empty((missing, *leaf.shape[1:])) for leaf in slices[0]])
    found = map(torch.cat, zip(*slices, strict=True))
    return map_tensors(shown[0], lambda _: next(found))


def refuse_outputs(path: str, what: str) -> NoReturn:
    """Refuse the outputs of a part."""
    named = f" {path!r}" if path else ""
    raise UnsplittableModelError(
        f"a part with its own size returns{named} {what}, so it computes something over rows and "
        "cannot be cut. Give a size to a part that computes each row independently and returns "
        "rows in dimension 0 (not the states of an LSTM). Put layers that read what they change, "
        "such as spectral norm, into evaluation mode (.eval())"
    )


class Gradients:
    """Sums of gradients: row by row for inputs; over slices for parameters and shared inputs."""

    # Allocated before the first slice, which would otherwise have more memory than the others.
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
        """Add the gradients of the next slice; an empty sequence if none of its targets counts."""
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
        """Return all sums, scaled, in the types of inputs and parameters; None for unused ones."""
        if factor is not None:
            for each in self._sums:
                each.mul_(factor)
        return [
            # If no target of any slice counts, gradients are zeros, as for the whole.
            each.to(dtype) if is_reached or self._is_empty else None
            for each, dtype, is_reached in zip(
                self._sums, self._types, self._is_reached, strict=True
            )
        ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients are added, so that they are rounded only once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def marked(batch: Any, paths: Sequence[str]) -> tuple[Any, list[Tensor]]:
    """Return a slice whose tensors at these paths need a gradient, and these tensors."""
    given = dict(tensor_leaves(batch))
    leaves = [given[path].detach().requires_grad_() for path in paths]
    # If a tensor appears at several paths, the last one gets the whole gradient.
    by_id = {id(given[path]): leaf for path, leaf in zip(paths, leaves, strict=True)}
    return map_tensors(batch, lambda leaf: by_id.get(id(leaf), leaf)), leaves


def aliases_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return leaves with the same values, so that hooks of the originals run only once."""
    return [each.detach().requires_grad_() for each in tensors]


def refuse_twice() -> None:
    """Refuse a backward that must itself be differentiable."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a part with its own size has no second derivative (create_graph=True). Remove its "
            "size with .remove()"
        )


class _Tail(torch.autograd.Function):
    """The loss of all slices, with gradients computed slice by slice in the forward."""

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
            # Gradients are off in the forward of a Function, but each slice needs a backward here.
            with torch.enable_grad(), uncheckpointed():
                rows, leaves = marked(rows, paths)
                weighted = _weighted(weights, index, call.compute(rows, aliases))
                if weights.is_nothing[index]:
                    return weighted, ()
                return weighted.detach(), _gradients(weighted, [*leaves, *aliases])

        losses: list[Tensor] = []
        for loss, gradients in call.run(cut, loss_and_gradients):
            sums.add(cut.sizes[len(losses)], gradients)
            # Otherwise they stay in memory during the next slice.
            del gradients
            losses.append(loss)
        ctx.sums = sums
        return _added(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_twice()
        # Scaled in place, so a second backward would get wrong values.
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "an earlier backward has used the gradients of a part with its own size. Call "
                "backward once, or compute the part again"
            )
        return None, None, None, None, *sums.all(gradient)


def _gradients(loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def apply(operation: Any, *given: Any) -> Any:
    """Call an ``autograd.Function``, whose ``apply`` is untyped."""
    return operation.apply(*given)


def split_loss(call: Call, averages: Mapping[str, Average], *, recompute: bool) -> Tensor:
    """Return the loss of a tail, computed slice by slice."""
    cut = call.cut(call.batch, call.sizes())
    weights = BatchWeights(averages, [cut])
    if call.is_differentiated and not (recompute and not all(weights.is_nothing)):
        inputs = call.inputs()
        tensors = [*inputs.values(), *call.parameters]
        return cast(Tensor, apply(_Tail, call, cut, weights, inputs, *tensors))
    losses = enumerate(call.run(cut, _how(call)))
    return _added([_weighted(weights, index, loss) for index, loss in losses])


def split_outputs(call: Call) -> Any:
    """Return the outputs of a part for all rows, computed slice by slice."""
    cut = call.cut(call.batch, call.sizes())
    return joined(list(call.run(cut, _how(call))), cut.sizes, call.num_rows)


def _how(call: Call) -> Callable[[int, Any], Any]:
    """Return the function that computes a slice, and recomputes it in a backward."""
    if not call.is_differentiated:
        return lambda _, rows: call.compute(rows, ())
    parameters, compute, sizes = summed(call), call.compute, call.sizes()

    def twice(index: int, rows: Any) -> Any:
        stood = Standing(call, sizes[index])
        # Without a reference to the call, which holds the whole batch.
        return computed_again(compute, (rows, parameters()), {}, stood)

    return twice


class NothingDrawn(RandomState):
    """The state for tensors without data, for which no generator draws.

    >>> state = NothingDrawn([])
    >>> state.begin()
    >>> state.has_moved
    False
    """

    def begin(self) -> None:
        self._state = ()

    def put_back(self) -> None:
        """Do nothing."""

    @property
    def has_moved(self) -> bool:
        """Always False."""
        return False

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Do nothing."""
        yield
