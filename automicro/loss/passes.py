"""Passes over a few rows that leave no trace."""

import contextlib
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from automicro.batch.device import on_device
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors
from automicro.compilation import uncompiled
from automicro.errors import LossError, RollbackError, StateWarning, warn
from automicro.loss.averages import Average
from automicro.loss.conventions import Convention, Output
from automicro.loss.silence import Silence
from automicro.loss.weights import BatchWeights
from automicro.memory.oom import Failure, classify
from automicro.modules import ModuleIndex
from automicro.options import ONE_GRAPH_EACH, check_loss
from automicro.reach import OF_EVERY_MODULE, Reach
from automicro.state.capture import Captured, capture
from automicro.torch_private import (
    AnyBatchNorm,
    buffer_table,
    is_older,
    num_nodes_made,
    with_hooks,
)
from automicro.transaction.leaves import HeldHooks, leaves_of, nodes_of
from automicro.transaction.parameters import ParameterWrites, refused_writes
from automicro.transaction.rng import RandomState, devices_of, foreign_states
from automicro.values import children, state_of, walk

Mode: TypeAlias = Literal["train", "eval", "predict"]
"""Which forward: with a loss, with one perhaps, without."""

_depth = 0
_writes: ParameterWrites | None = None  # of the extra pass that is running


def is_extra_pass() -> bool:
    """Whether the forward that is running is an extra one, which counts for nothing.

    There are two kinds: a look at a few rows, at the first batches that might be split, and one
    row through a model with lazy layers. State that automicro can find is put back after them
    (parameters, buffers, attributes of modules, variables that ``loss_fn`` and ``forward`` get
    at). What lies elsewhere, such as a file that a forward writes to, can ask here.

    Example:
        >>> from automicro import is_extra_pass
        >>> is_extra_pass()
        False
    """
    return _depth > 0


def accept_writes() -> None:
    """Let an extra pass that is running take what was written to parameters for allowed."""
    if _writes is not None:
        _writes.accept()


@contextlib.contextmanager
def extra_pass() -> Iterator[None]:
    """Let `is_extra_pass` say so meanwhile."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@dataclass(frozen=True, kw_only=True)
class Computation:
    """What is computed from a batch: a model, its loss, and how batches are read.

    Attributes:
        modules: the model, then further modules that take part.
        convention: from a batch of rows to a loss.
        averages: what each loss is taken for, by name.
        averages_of: reads what a caller may give as ``loss_average``.
        eval_averages: the same in evaluation.
        layout: of batches.
        device: where the model computes.
        roots: modules, functions and further values, by name, whose state a forward may change.
        reach: what modules and functions get at by themselves.
    """

    modules: Sequence[nn.Module]
    convention: Convention
    averages: Mapping[str, Average]
    averages_of: Callable[[Any], Mapping[str, Average]]
    eval_averages: Mapping[str, Average]
    layout: BatchLayout
    device: torch.device
    roots: Mapping[str, Any]
    reach: Reach

    @property
    def reached(self) -> list[nn.Module]:
        """The modules, and those that the caller's functions get at by themselves."""
        found = [*self.modules, *self.reach.modules().values()]
        return list({id(module): module for module in found}.values())

    def names(self) -> dict[int, str]:
        """A name for each parameter that a gradient may reach, by its id."""
        found: dict[int, str] = {}
        for root in self.reached:
            for name, parameter in root.named_parameters():
                if parameter.requires_grad:
                    found.setdefault(id(parameter), name)
        return found


MISSING = object()
"""Stands for an attribute that is not there."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value lies that forwards change: an attribute, or a variable of a function.

    Attributes:
        name: for people.
        owner: the module, object or function that has it.
        key: its name in there, as `children` has it.
    """

    name: str
    owner: Any
    key: str

    def read(self) -> Any:
        """The value; `MISSING` where there is none."""
        parts = _parts_of(self.owner)
        # A function may be named for a variable that others share with it.
        others = getattr(self.owner, "__globals__", {}).get(self.key, MISSING)
        return next((value for key, value in parts if key == self.key), others)

    @property
    def is_of_metric(self) -> bool:
        """Whether it is an attribute of a metric, which counts updates by itself."""
        return all(hasattr(self.owner, each) for each in ("update", "compute", "reset"))


def changed_places(roots: Mapping[str, Any], captured: Captured) -> list[Place]:
    """The attributes and variables in which something is not as it was captured.

    Args:
        roots: that were captured.
        captured: what they held.
    """
    known: dict[str, list[Place]] = {}
    for path, value in walk(roots):
        is_function = isinstance(value, types.FunctionType)
        is_module = isinstance(value, nn.Module)
        if not (is_function or is_module or path in roots):
            continue
        start = "" if is_function else path
        shown = start if path not in roots else "" if is_module else type(value).__name__
        for key, _ in _parts_of(value):
            if is_function or key[:1] in (".", "["):
                name = key if is_function else f"{shown}{key}".lstrip(".")
                place = Place(name=name, owner=value, key=key)
                known.setdefault(f"{start}{key}".lstrip("."), []).append(place)
    found: dict[tuple[int, str], Place] = {}
    for path in captured.changed():
        ends = [len(path), *(each.start() for each in re.finditer(r"[.\[]", path))]
        starts = (path[:end] for end in sorted(ends, reverse=True))
        for place in next((known[start] for start in starts if start in known), []):
            found.setdefault((id(place.owner), place.key), place)
    return [each for each in found.values() if each.key.lstrip(".") not in OF_EVERY_MODULE]


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    return itertools.chain(children(owner), children(type(owner)))


class ExtraPasses:
    """Forward and backward of a few rows, without a trace.

    A context: entered, it has captured all that the passes may change; left, it has put it back.

    Warns:
        StateWarning: something was changed that cannot be put back.
    """

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.silence = Silence(is_alone=True)
        self._stack = contextlib.ExitStack()
        self._leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._reached: list[set[int]] = []
        self._buffers: Captured | None = None
        self._watched: Captured | None = None
        self._foreign = self._foreign_states()
        modules = computation.reached
        self._modules = modules
        self._random = RandomState(
            devices_of(modules, computation.device), computation.reach.generators
        )
        every = {id(p): p for m in modules for p in m.parameters()}
        self._parameters = {key: p for key, p in every.items() if p.requires_grad}
        self._index = ModuleIndex(modules)
        self._writes = ParameterWrites(every.values())

    def __enter__(self) -> "ExtraPasses":
        with self._stack as stack:
            modules = self._modules
            stack.callback(_put_back, capture(self.computation.roots))
            stack.callback(self._random.roll_back)
            self._random.begin()
            self._buffers = capture(self._buffer_tables())
            stack.callback(self._writes.put_back)
            stack.callback(self._put_gradients_back)
            self._set_aside(self._parameters.values())
            for manager in (
                torch.enable_grad(),
                uncompiled(),
                # Each thread numbers its own nodes, so all have to be made by this one.
                torch.autograd.set_multithreading_enabled(False),
                extra_pass(),
                _few_rows_are_meant(),
            ):
                stack.enter_context(manager)
            stack.enter_context(_alone(self.computation.modules))
            stack.enter_context(_rows_apart(modules))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def losses(self, rows: Any, *, mode: Mode = "train") -> Output:
        """The losses of these rows, from the state that the first pass began with.

        Args:
            rows: a batch of them.
            mode: which forward it is.
        """
        assert self._buffers is not None
        self._buffers.put_back()
        self._random.roll_back()
        self._random.begin()
        self._foreign = self._foreign_states()
        self.begin_draws()
        apart = map_tensors(rows, _without_graph)
        moved = next(iter(on_device([apart], self.computation.device, isolate=True)))
        convention, model = self.computation.convention, self.computation.modules[0]
        with self.silence, self._watching_writes():
            if mode == "predict":
                holds_rows = self.computation.layout.holds_rows
                return Output(None, {}, convention.predict(model, moved, holds_rows=holds_rows))
            if mode == "eval":
                return convention.evaluate(model, moved)
            return convention.train(model, moved)

    def begin_draws(self) -> None:
        """Let `silence` know that another pass begins."""
        self.silence.seeds.begin(self.computation.reach.generators())

    @contextlib.contextmanager
    def _watching_writes(self) -> Iterator[None]:
        global _writes
        _writes = self._writes
        try:
            with self._writes:
                yield
        finally:
            _writes = None

    def run(
        self,
        rows: Any,
        weights: BatchWeights,
        index: int = 0,
        *,
        losses: dict[str, float] | None = None,
    ) -> float:
        """Forward and backward; the gradients are in ``.grad`` of `leaves`. The weighted loss.

        Args:
            rows: a batch of them.
            weights: of the parts of a batch.
            index: of this part.
            losses: takes the parts of the loss by name.

        Raises:
            LossError: there is no loss, or its graph goes on into one of the caller's.
        """
        first_node = num_nodes_made()
        output = self.losses(rows)
        with self.silence:
            given = output.loss
            if not (isinstance(given, Tensor) and not given.requires_grad):
                given = check_loss(given)
            loss, parts = weights.apply(index, given, output.losses, has_total=output.has_total)
        del output
        if losses is not None:
            losses.update({name: float(part.detach()) for name, part in parts.items()})
        del parts
        if loss.requires_grad and not weights.is_nothing[index]:
            check_own_graph(loss, first_node)
            found = leaves_of(loss)
            self._reached.append({id(leaf) for leaf in found})
            self._set_aside(found)
            with self.silence, HeldHooks(with_hooks(self.leaves)).held():
                loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @property
    def reached(self) -> list[bool]:
        """Of each leaf, whether a backward reached it."""
        some = set().union(*self._reached)
        return [id(leaf) in some for leaf in self.leaves]

    @property
    def lasting(self) -> list[bool]:
        """Of each leaf, whether it is more than one that a forward made for itself."""
        every = set.intersection(*self._reached) if self._reached else set()
        return [id(leaf) in self._parameters or id(leaf) in every for leaf in self.leaves]

    def watch(self) -> None:
        """Let `changed` tell of later calls. What the first makes for all others is no state."""
        tables = self._buffer_tables().values()
        buffers = (buffer for table in tables for buffer in table.values())
        self._watched = capture(self.computation.roots, skip=[*tables, *buffers])

    def changed(self) -> list[Place]:
        """Attributes and variables that calls have changed since `watch`."""
        assert self._watched is not None
        return changed_places(self.computation.roots, self._watched)

    def _buffer_tables(self) -> dict[str, MutableMapping[str, Tensor | None]]:
        every = {id(each): each for root in self._modules for each in root.modules()}
        return {str(number): buffer_table(each) for number, each in every.items()}

    def initialised(self) -> list[str]:
        """Parameters that one forward has set, as layers do that learn from their first batch.

        Raises:
            RollbackError: more than one forward changed parameters.
        """
        moving = self._writes.moving
        if moving:
            raise refused_writes(self._index.names_of(moving))
        return self._index.names_of(self._writes.set_once)

    def foreign_draws(self) -> tuple[str, ...]:
        """Which generators that are not torch's the last pass drew from."""
        now = self._foreign_states()
        return tuple(name for name, state in self._foreign.items() if now.get(name) != state)

    def _foreign_states(self) -> dict[str, Any]:
        """What draws beside torch is at: both global generators, and the caller's own."""
        own = [
            each
            for each in self.computation.reach.generators()
            if not isinstance(each, torch.Generator)
        ]
        python, numpy = foreign_states()
        return {
            "Python's random": python,
            "NumPy's random": numpy,
            "a generator of your own": [repr(state_of(each)) for each in own],
        }

    def take_gradients(self) -> list[Tensor | None]:
        """Those of all leaves, in the order of `leaves`, which have none afterwards."""
        taken = []
        for leaf in self.leaves:
            taken.append(leaf.grad)
            leaf.grad = None
        return taken

    @contextlib.contextmanager
    def shaken(self, bits: int) -> Iterator[None]:
        """Parameters in float32 are off by these last bits. No copy of them is made.

        What a gradient changes by it, rounding changes as well: where a ReLU, a maximum or a choice
        of experts stands on an edge.
        """
        values = [parameter.data for parameter in self._parameters.values()]
        shaken = [
            value.view(torch.int32)
            for value in values
            if value.dtype is torch.float32 and type(value) is Tensor
        ]
        for value in shaken:
            value.bitwise_xor_(bits)
        try:
            yield
        finally:
            for value in shaken:
                value.bitwise_xor_(bits)

    @property
    def leaves(self) -> list[Tensor]:
        """All that a gradient has reached or may reach."""
        return [leaf for leaf, _ in self._leaves.values()]

    def _set_aside(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._leaves:
                self._leaves[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def _put_gradients_back(self) -> None:
        for leaf, earlier in self._leaves.values():
            leaf.grad = earlier
        self._leaves.clear()


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def check_own_graph(loss: Tensor, first_node: int) -> None:
    """Refuse a backward through a graph that was there before the forward: it is the caller's.

    Raises:
        LossError: the loss hangs on nodes that are older than the first of the forward.
    """
    older = next((node for node in nodes_of(loss) if is_older(node, first_node)), None)
    if older is not None:
        raise LossError(
            f"the loss hangs on a graph that was made before the forward ({older.name()}), which "
            f"each microbatch would go backward through again; {ONE_GRAPH_EACH}"
        )


def keeping_nothing() -> contextlib.AbstractContextManager[None]:
    """Gradients as they are, by which forwards may go, but nothing is kept for a backward."""
    return saved_tensors_hooks(_keep_nothing, _refuse_backward)


def _keep_nothing(_: Tensor) -> None:
    return None


def _refuse_backward(_: None) -> Tensor:
    raise RuntimeError("a forward goes backward by itself, and nothing was kept for that")


def _put_back(captured: Captured) -> None:
    """Put the state back, in a second try if memory runs out in the first."""
    failure: Exception | None = None
    try:
        captured.put_back()
    except Exception as error:
        failure = error
    try:
        if isinstance(failure, RollbackError):
            warn(
                f"a look at a few rows has left traces ({failure}). Keep what a forward writes to "
                "in buffers, or pass probe=False",
                StateWarning,
            )
        elif failure is not None:
            captured.put_back()
            if classify(failure) is not Failure.RETRYABLE:
                raise failure
    finally:
        del failure  # it holds this frame: a cycle


@contextlib.contextmanager
def _few_rows_are_meant() -> Iterator[None]:
    """Say nothing of a deviation of one row, which none of the caller's batches may have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*degrees of freedom", category=UserWarning)
        yield


@contextlib.contextmanager
def _alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let wrappers of several ranks run on this one without the others: as what they wrap.

    They may lie inside of others, as Fabric's do.
    """
    every = {id(each): each for root in modules for each in root.modules()}.values()
    wrappers = [each for each in every if isinstance(each, DistributedDataParallel)]
    for each in wrappers:
        vars(each)["forward"] = each.module
    try:
        yield
    finally:
        for each in wrappers:
            del vars(each)["forward"]


@contextlib.contextmanager
def _rows_apart(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let BatchNorm use its running statistics, or where it has none, hand its input on.

    That it averages over rows is known, and warned of by itself.
    """
    layers = {
        id(layer): layer
        for root in modules
        for layer in root.modules()
        if isinstance(layer, AnyBatchNorm) and (layer.training or layer.running_mean is None)
    }
    with contextlib.ExitStack() as stack:
        for layer in layers.values():
            if layer.running_mean is None:
                vars(layer)["forward"] = nn.Identity().forward
                stack.callback(vars(layer).pop, "forward")
            else:
                layer.eval()
                stack.callback(layer.train)
        yield
