"""A part with BatchNorm in slices: normalised with the statistics of all its rows.

All slices pass a stage (see `stages`) before any begins the next, so that the means and variances
of its BatchNorms are those of all rows. Between stages values wait on the host, those of every
slice; on the device is one slice of one stage. In the backward each stage is computed again from
what waits there, the last one first. So a row is computed forward twice, as with checkpointing.

A stage begins with its BatchNorms in evaluation mode, for their statistics are known by then. The
gradients of their weight and bias, added up over all slices, are the two sums that the gradient of
a BatchNorm's input needs: of ``dy`` and of ``dy · x̂``. The stage before it takes them: what came
back through evaluation mode, less ``weight / deviation / N · (Σ dy + x̂ · Σ dy · x̂)``.

What comes between two BatchNorms is read from a symbolic trace of the model (``torch.fx``): a list
of operations, each with what it needs. A stage is all that can be computed once some BatchNorms
have seen the whole batch, and before the next ones have. Several in branches of one depth share a
stage. What a trace cannot tell, or what stages would compute otherwise, is refused by name.
"""

import contextlib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from automicro.batch.device import on_host
from automicro.batch.tensors import tensor_leaves
from automicro.batchnorm import sees_the_batch
from automicro.errors import UnsplittableModelError, text_of
from automicro.memory.budget import active_budget
from automicro.memory.oom import Failure, classify
from automicro.nested.slices import (
    Call,
    Cut,
    Gradients,
    Joined,
    Slice,
    Standing,
    aliases_of,
    naming,
    refuse_twice,
    tolerance_of,
    with_inputs,
)
from automicro.state.capture import capture
from automicro.torch_private import AnyBatchNorm, all_versions, call_hooks
from automicro.transaction.rng import RandomState

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""BatchNorms that normalise, scale and shift, and do nothing else."""

SCALE_AND_SHIFT = ("weight", "bias")

_REMEDY = (
    "use GroupNorm there, or freeze these layers with .eval(), or leave out this part's size (with "
    "batchnorm='disable' batches stay whole)"
)

# fx's names for what is computed; others are what is given, held and given back.
_CALLS = ("call_module", "call_function", "call_method")
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}


class Stage(NamedTuple):
    """What is computed between two BatchNorms, its own ones first.

    Attributes:
        nodes: in order.
        inputs: made by earlier stages, or given to the model.
        outputs: that later stages need.
        dead: of each node, what nothing after it in the stage needs.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    dead: Sequence[Sequence[fx.Node]]


class Stages:
    """The stages of a module, as it is called with arguments like these.

    Args:
        module: in the mode in which it is called.
        arguments: by name. Tensors may be others later; anything else has to be the same.
        is_part: whether a module inside has a size of its own, so that it is called as it is.

    Raises:
        UnsplittableModelError: they cannot be told, or would compute something else.

    Attributes:
        norms: BatchNorms that see the batch, in order; the layer by its call.
        stages: in order.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))
    >>> for stage in Stages(model, {"input": torch.ones(4, 2)}).stages:
    ...     print(*stage.nodes, "→", *stage.outputs)
    _0 → _0
    _1 _2 _3 →
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Mapping[str, Any],
        is_part: Callable[[nn.Module], bool] = lambda module: False,
    ) -> None:
        self._module, self._is_part = module, is_part
        self._name = type(module).__name__
        self._refuse_hooks()
        self._refuse_parts()
        self._graph = self._trace(arguments)
        nodes = list(self._graph.nodes)
        self.norms = {node: layer for node in nodes if (layer := self._norm(node)) is not None}
        self._refuse_read_statistics(nodes)
        self._output = nodes[-1]
        self._levels = self._find_levels(nodes)
        self._check_writes(nodes)
        self.stages = [self._stage(nodes, at) for at in range(self._levels[self._output] + 1)]

    def _refuse(self, why: str) -> NoReturn:
        raise UnsplittableModelError(
            f"{self._name} has BatchNorm, so that all its rows have to arrive at each before any "
            f"go on, and where they wait cannot be told: {why}; {_REMEDY}"
        )

    def _refuse_hooks(self) -> None:
        for name, module in self._module.named_modules():
            if module is not self._module and call_hooks(module):
                self._refuse(f"{name!r} has hooks, which a trace does not hold")

    def _refuse_parts(self) -> None:
        for name, module in self._module.named_modules():
            if module is self._module or not self._is_part(module):
                continue
            if any(map(sees_the_batch, module.modules())):
                self._refuse(
                    f"{name!r} has a size of its own, and BatchNorm inside, which would see its "
                    "slices alone; leave that size out, for what is around it is cut at each "
                    "BatchNorm anyway"
                )

    def _refuse_read_statistics(self, nodes: Sequence[fx.Node]) -> None:
        changing = {
            id(each)
            for layer in self.norms.values()
            if layer.training
            for each in layer.buffers(recurse=False)
        }
        for node in nodes:
            read = str(node.target)
            if node.op == "get_attr" and id(operator.attrgetter(read)(self._module)) in changing:
                self._refuse(f"its forward reads {read!r}, which BatchNorm changes")

    def _trace(self, arguments: Mapping[str, Any]) -> fx.Graph:
        given = dict(list(inspect.signature(type(self._module).forward).parameters.items())[1:])
        for name, value in arguments.items():
            if name not in given:
                self._refuse(f"its forward takes {name!r} among any number of arguments")
            if not isinstance(value, Tensor) and tensor_leaves(value):
                kind = type(value).__name__
                self._refuse(f"its forward takes tensors inside of a {kind}, as {name!r}")
        constants = {
            name: arguments.get(name, parameter.default)
            for name, parameter in given.items()
            if not isinstance(arguments.get(name), Tensor)
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        self.constants = constants
        with self._unchanged():
            try:
                return _Tracer(self._is_part).trace(self._module, constants)
            except Exception as error:
                if classify(error) is not Failure.UNRELATED:
                    raise  # what does not go by the input is computed, and takes memory
                lines = text_of(error).splitlines() or [""]
                self._refuse(f"torch.fx cannot trace it ({type(error).__name__}: {lines[0][:160]})")

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """What does not go by the input is computed while it is traced, and never again."""
        before = capture({"": self._module})
        names = {name for name, _ in self._module.named_buffers()}
        drawn, random = torch.get_rng_state(), RandomState([])
        random.begin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
                # The trace puts what stands for a tensor where a forward replaces a buffer.
                replaced = [path for path in before.changed() if path in names]
                has_drawn = not torch.equal(drawn, torch.get_rng_state())
                draws_foreign = random.has_moved
            finally:
                before.put_back()
                random.roll_back()
        if replaced:
            self._refuse(f"its forward changes the buffer {replaced[0]!r}")
        if has_drawn:
            self._refuse("its forward draws random numbers that do not go by its input")
        if draws_foreign:
            self._refuse(
                "its forward draws random numbers of Python's or NumPy's, as for layers that are "
                "left out at random; draw them outside of it, and hand them in as a tensor"
            )

    def _norm(self, node: fx.Node) -> nn.Module | None:
        """The BatchNorm that a node calls, where that sees the batch."""
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            self._refuse(f"{node.name} is BatchNorm as a function and no layer")
        if node.op != "call_module":
            return None
        layer = self.layer(node)
        if not sees_the_batch(layer):
            return None
        if isinstance(layer, nn.SyncBatchNorm):
            self._refuse(
                f"{node.target} is a SyncBatchNorm, and each rank computes in its own time"
            )
        if len(node.args) + len(node.kwargs) != 1 or len(node.all_input_nodes) != 1:
            self._refuse(f"{node.target}, a {type(layer).__name__}, takes more than one input")
        return layer

    def layer(self, node: fx.Node) -> nn.Module:
        return self._module.get_submodule(str(node.target))

    def _find_levels(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The stage of each node: as early as what it needs allows."""
        levels: dict[fx.Node, int] = {}
        for node in nodes:
            levels[node] = max((levels[each] for each in node.all_input_nodes), default=0)
            levels[node] += node in self.norms
        levels[self._output] = max(levels.values())
        return levels

    def _stage(self, nodes: Sequence[fx.Node], number: int) -> Stage:
        level = self._levels
        own = [node for node in nodes if node.op in _CALLS and level[node] == number]
        is_last = number == level[self._output]
        users = [*own, self._output] if is_last else own
        inputs = dict.fromkeys(
            each
            for node in users
            for each in node.all_input_nodes
            if each.op == "placeholder" or (each.op in _CALLS and level[each] < number)
        )
        outputs = [node for node in own if any(level[user] > number for user in node.users)]
        kept = {*outputs, *(self._output.all_input_nodes if is_last else ())}
        last: dict[fx.Node, fx.Node] = {}
        for node in own:
            last.update(dict.fromkeys([*node.all_input_nodes, node], node))
        dead = [
            [each for each, at in last.items() if at is node and each not in kept] for node in own
        ]
        return Stage(own, list(inputs), outputs, dead)

    def _written(self, node: fx.Node) -> fx.Node | None:
        """What a node writes into: its first argument, or nothing."""
        if node.op not in _CALLS or not node.all_input_nodes:
            return None
        name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
        writes = (
            bool(node.kwargs.get("inplace"))
            or node.target in _IN_PLACE
            or (node.op == "call_module" and bool(getattr(self.layer(node), "inplace", False)))
            or (node.op != "call_module" and name.endswith("_") and not name.endswith("__"))
            or (node.op == "call_function" and any(each is True for each in node.args[1:]))
        )
        first = node.args[0] if node.args else node.all_input_nodes[0]
        return first if writes and isinstance(first, fx.Node) else None

    def _check_writes(self, nodes: Sequence[fx.Node]) -> None:
        """Stages change the order, so no other node may read what one writes into."""
        self._writes: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            written = self._written(node)
            if written is None:
                continue
            others = [user.name for user in written.users if user is not node]
            if others or written.op not in _CALLS:
                readers = ", ".join(others) or "whoever gave it"
                self._refuse(f"{node.name} writes into {written.name}, which {readers} reads, too")
            self._writes[node] = written

    def run(
        self,
        number: int,
        given: Mapping[fx.Node, Any],
        normalise: Callable[[fx.Node, Tensor], Tensor],
    ) -> dict[fx.Node, Any]:
        """Compute a stage, and return the values that are left.

        Args:
            number: of the stage.
            given: values of its inputs.
            normalise: computes its BatchNorms.

        Raises:
            UnsplittableModelError: an operation wrote where it was not expected to.
        """
        stage, values = self.stages[number], dict(given)

        def value_of(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return operator.attrgetter(str(node.target))(self._module)
            return values[node]

        for node, dead in zip(stage.nodes, stage.dead, strict=True):
            written = self._writes.get(node)
            if written is not None and written in given:
                values[written] = values[written].clone()  # it waits there for others
            inputs = [value_of(each) for each in node.all_input_nodes]
            tensors = [each for each in inputs if isinstance(each, Tensor)]
            versions = all_versions(tensors)
            if node in self.norms:
                values[node] = normalise(node, inputs[0])
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
                values[node] = self._call(node, args, kwargs)
            if written is None and versions != all_versions(tensors):
                self._refuse(f"{node.name} writes into what it is given")
            del inputs, tensors
            for each in dead:
                values.pop(each, None)
        return values

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self.layer(node)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def output(self, values: Mapping[fx.Node, Any]) -> Any:
        """What the module gives, from the values of the last stage."""
        return fx.node.map_arg(self._output.args[0], lambda node: values[node])

    def level(self, node: fx.Node) -> int:
        """The stage that computes a node."""
        return self._levels[node]

    def ahead(self, number: int) -> list[fx.Node]:
        """The BatchNorms that wait for all rows of a stage."""
        return [node for node in self.norms if self._levels[node] == number + 1]

    def parameters(self, number: int) -> list[nn.Parameter]:
        """What a stage computes with, but for scale and shift of its BatchNorms."""
        found: dict[nn.Parameter, None] = {}
        for node in self.stages[number].nodes:
            for each in node.all_input_nodes:
                if each.op == "get_attr":
                    value = operator.attrgetter(str(each.target))(self._module)
                    if isinstance(value, nn.Parameter):
                        found[value] = None
            if node.op == "call_module":
                own = self.layer(node).named_parameters()
                is_norm = node in self.norms
                found.update(
                    (each, None) for name, each in own if not (is_norm and name in SCALE_AND_SHIFT)
                )
        return list(found)

    def buffers(self) -> list[Tensor]:
        """Of the module."""
        return list(self._module.buffers())

    def first_use(self, node: fx.Node) -> int:
        """The first stage that needs a value, besides that which computes it."""
        later = (self._levels[user] for user in node.users)
        return min(each for each in later if each > self._levels[node])


class _Tracer(fx.Tracer):
    """Looks into modules of the user's, and into no layer of torch's, no BatchNorm and no part."""

    proxy_buffer_attributes = True  # what is computed of them goes by what they hold at each call

    def __init__(self, is_part: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_part = is_part

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf: bool = super().is_leaf_module(m, module_qualified_name)
        return is_leaf or isinstance(m, AnyBatchNorm) or self._is_part(m)


@contextlib.contextmanager
def in_evaluation(layer: nn.Module) -> Iterator[None]:
    """A layer in evaluation mode, and what it holds in its own."""
    before = layer.training
    layer.training = False
    try:
        yield
    finally:
        layer.training = before


@dataclass(frozen=True)
class Moments:
    """How many values, their means, and the sums of their squared distances from these.

    >>> x = torch.arange(8.0).reshape(4, 2)
    >>> both = Moments.of(x[:1]) + Moments.of(x[1:])
    >>> both.count, both.mean, both.variance(), both.variance(correction=1)
    (4, tensor([3., 4.]), tensor([5., 5.]), tensor([6.6667, 6.6667]))
    """

    count: int
    mean: Tensor
    distance: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Moments":
        """For each channel of an input (rows, channels, …); in float32 at least."""
        count = x.numel() // x.shape[1]
        half = x.dtype in (torch.float16, torch.bfloat16)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.float() if half else x, dims, correction=0)
        return cls(count, mean, variance * count)

    def __add__(self, other: "Moments") -> "Moments":
        """Of the values of both, by the rule of Chan, Golub and LeVeque (1983)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        between = apart.square() * (self.count * other.count / count)
        mean = self.mean + apart * (other.count / count)
        return Moments(count, mean, self.distance + other.distance + between)

    def variance(self, correction: int = 0) -> Tensor:
        return self.distance / (self.count - correction)


class _Norm:
    """One use of a BatchNorm: statistics of all rows, and the gradients that these need.

    Attributes:
        leaves: scale and shift, of its own; of one and zero where the layer has none.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        self._name = name
        self._layer: Any = layer
        self._moments: Moments | None = None
        self._sums: list[Tensor] | None = None

    def see(self, x: Tensor) -> None:
        """Count the rows of a slice."""
        if self._moments is None and type(self._layer) not in PLAIN:
            self._require_usual(x.detach()[:4])
        found = Moments.of(x)
        self._moments = found if self._moments is None else self._moments + found

    def begin(self) -> None:
        """All rows have been seen.

        Raises:
            ValueError: that was one value per channel, which torch refuses, too.
        """
        self._statistics = moments = self._require_moments()
        if moments.count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, and {self._name} got one"
            )
        self._variance = moments.variance()
        ones, zeros = torch.ones_like(moments.mean), torch.zeros_like(moments.mean)
        self.leaves = [
            (other if own is None else own.detach().to(other.dtype, copy=True)).requires_grad_()
            for own, other in ((self._layer.weight, ones), (self._layer.bias, zeros))
        ]

    def _require_moments(self) -> Moments:
        assert self._moments is not None
        return self._moments

    def normalise(self, x: Tensor) -> Tensor:
        """The output for a slice."""
        given = self._statistics.mean, self._variance, self.leaves
        if len(x) > 1:
            return self._apply(x, *given)
        # The backward of torch's kernel for CPUs is wrong (2.13) for a single row whose gradient
        # lies in memory as if channels were last, with a stride of rows that is none.
        output = self._apply(x.contiguous(), *given)
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return output

    def _apply(self, x: Tensor, mean: Tensor, variance: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        layer = self._layer
        if type(layer) in PLAIN:
            scale, shift = leaves
            return F.batch_norm(x, mean, variance, scale, shift, training=False, eps=layer.eps)
        own: dict[str, Tensor] = {"running_mean": mean, "running_var": variance}
        for name, leaf in zip(SCALE_AND_SHIFT, leaves, strict=True):
            if getattr(layer, name) is not None:
                own[name] = leaf
        with in_evaluation(layer):
            return cast(Tensor, torch.func.functional_call(layer, own, (x,)))

    def _require_usual(self, x: Tensor) -> None:
        """Refuse a derived class that does something else with statistics than to normalise."""
        layer = self._layer
        if x.numel() <= x.shape[1]:
            return
        buffers = {name: each.clone() for name, each in layer.named_buffers(recurse=False)}
        moments = Moments.of(x)
        affine = [layer.weight, layer.bias]
        random = RandomState([x.device] if x.device.type != "cpu" else [])
        random.begin()
        trained = torch.func.functional_call(layer, buffers, (x,))
        random.roll_back()
        random.begin()
        found = self._apply(x, moments.mean, moments.variance(), affine)
        random.roll_back()
        coarse = tolerance_of(x)
        if not torch.allclose(trained, found, rtol=coarse, atol=coarse):
            raise UnsplittableModelError(
                f"{self._name}, a {type(layer).__name__}, does something else with the statistics "
                "of its rows than to normalise with them, so it cannot be computed in slices; use "
                "nn.BatchNorm there, or leave out this part's size"
            )

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Count what a slice gives to the gradients of scale and shift."""
        found = [each for each in gradients if each is not None]
        if len(found) == 2:
            self._sums = found if self._sums is None else [*map(torch.add, self._sums, found)]

    def through_statistics(self, x: Tensor) -> Tensor | None:
        """The part of the gradient of an input that comes through mean and variance."""
        if self._sums is None:
            return None
        of_scale, of_shift = self._sums
        deviation = (self._variance + self._layer.eps).rsqrt()
        factor = self.leaves[0].detach() * deviation / -self._statistics.count
        slope = factor * deviation * of_scale
        offset = factor * of_shift - slope * self._statistics.mean
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = x.to(slope.dtype)
        return torch.addcmul(offset.view(shape), wide, slope.view(shape)).to(x.dtype)

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Of the layer's own scale and shift, where it has them."""
        own = [self._layer.weight, self._layer.bias]
        pairs = zip(own, self._sums or [], strict=False)
        return [(parameter, found) for parameter, found in pairs if parameter is not None]

    def commit(self) -> None:
        """Count the rows in the running statistics, as one batch."""
        layer, moments = self._layer, self._statistics
        if not layer.training or layer.running_mean is None:
            return
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
        layer.running_mean.lerp_(moments.mean.to(layer.running_mean.dtype), momentum)
        variance = moments.variance(correction=1)
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


class Host:
    """Values that wait on the host, in pinned memory where the device is another."""

    def __init__(self) -> None:
        self._values: dict[Any, tuple[Any, torch.device | None]] = {}

    def put(self, key: Any, value: Any) -> None:
        if not isinstance(value, Tensor):
            self._values[key] = value, None
            return
        with on_host():
            pinned = value.device.type == "cuda"
            held = torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=pinned)
            held.copy_(value.detach(), non_blocking=pinned)
        self._values[key] = held, value.device

    def get(self, key: Any) -> Any:
        """A copy, on the device that the value came from."""
        held, device = self._values[key]
        budget = active_budget()
        if device is None:
            return held
        if device.type == "cpu":
            return held.clone() if budget is None else budget.transfer(held)
        return held.to(device, non_blocking=True)

    def pop(self, key: Any) -> Any:
        """A copy; nothing waits any longer. None where nothing did."""
        if key not in self._values:
            return None
        value = self.get(key)
        del self._values[key]
        return value

    def drop(self, key: Any) -> None:
        self._values.pop(key, None)


class _Pass:
    """All slices through all stages, forth and back.

    Args:
        call: of the part.
        stages: of it.
    """

    def __init__(self, call: Call, stages: Stages) -> None:
        self.call, self._stages = call, stages
        self._places = {id(each): at for at, each in enumerate(call.parameters)}
        self._own = [
            [
                at
                for each in stages.parameters(number)
                if (at := self._places.get(id(each))) is not None
            ]
            for number in range(len(stages.stages))
        ]
        self.joined: Joined | None = None

    def forward(self, batch: Any) -> Joined:
        """The outputs of all rows."""
        call = self.call
        self.sizes = call.sizes()
        with naming(call.sizer, max(self.sizes)):
            joined = self._through_stages(batch)
        call.sizer.end(self.sizes)
        return joined

    def _through_stages(self, batch: Any) -> Joined:
        self._host = Host()
        self._random: dict[tuple[int, int], RandomState] = {}
        stages = self._stages
        self._norms = {node: _Norm(str(node.target), layer) for node, layer in stages.norms.items()}
        buffers = self._stages.buffers()
        versions = all_versions(buffers)
        slices = Cut(self.call, batch, self.sizes).slices
        joined = Joined(sum(self.sizes))
        last = len(stages.stages) - 1
        with torch.no_grad():
            for number, stage in enumerate(stages.stages):
                for each in slices:
                    before = self.call.random()
                    before.begin()
                    values = self._run(number, self._given(number, each), ())
                    if before.has_moved:
                        self._random[number, each.index] = before
                    for node in stages.ahead(number):
                        self._norms[node].see(self._input_of(node, values, each))
                    for node in stage.outputs:
                        self._host.put((node, each.index), _waiting(node, values[node]))
                    if number == last:
                        joined.put(each, stages.output(values))
                    del values
                for node in stages.ahead(number):
                    self._norms[node].begin()
            if versions != all_versions(buffers):
                raise UnsplittableModelError(
                    "the forward of a part with BatchNorm changes other buffers, too, and it runs "
                    "in slices; update them outside of it, or leave out this part's size"
                )
            for norm in self._norms.values():
                norm.commit()
        return joined

    def _input_of(self, node: fx.Node, values: Mapping[fx.Node, Any], each: Slice) -> Tensor:
        source = node.all_input_nodes[0]
        found = each.batch[source.target] if source.op == "placeholder" else values[source]
        return cast(Tensor, found)

    def _given(self, number: int, each: Slice) -> dict[fx.Node, Any]:
        """What a stage needs of earlier ones, on the device."""
        given: dict[fx.Node, Any] = {}
        for node in self._stages.stages[number].inputs:
            if node.op != "placeholder":
                given[node] = self._host.get((node, each.index))
            elif node.target in each.batch:
                given[node] = each.batch[node.target]
            else:
                given[node] = self._stages.constants.get(str(node.target))
        return given

    def _run(
        self, number: int, given: Mapping[fx.Node, Any], tensors: Sequence[Tensor]
    ) -> dict[fx.Node, Any]:
        def normalise(node: fx.Node, x: Tensor) -> Tensor:
            return self._norms[node].normalise(x)

        with self.call.holding(tensors):
            return self._stages.run(number, given, normalise)

    def backward(
        self,
        batch: Any,
        paths: Sequence[str],
        given: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        sums: Gradients,
    ) -> None:
        """Add the gradients of inputs and parameters, stage by stage from the last."""
        aliases = aliases_of(parameters)
        slices = Cut(self.call, batch, self.sizes).slices
        stages = self._stages.stages
        for number in reversed(range(len(stages))):
            for each in slices:
                self._backward(number, each, paths, given, aliases, sums)
            for node in stages[number].inputs:
                if node.op != "placeholder" and self._stages.first_use(node) == number:
                    for each in slices:
                        self._host.drop((node, each.index))
        for each in slices:
            sums.add(each, self._of_inputs(each, paths) + [None] * len(aliases))
        everything = Slice(0, 0, sum(self.sizes), batch)
        for norm in self._norms.values():
            of_parameters: list[Tensor | None] = [None] * len(aliases)
            for parameter, gradient in norm.gradients():
                if id(parameter) in self._places:
                    of_parameters[self._places[id(parameter)]] = gradient
            sums.add(everything, [None] * len(paths) + of_parameters)

    def _of_inputs(self, each: Slice, paths: Sequence[str]) -> list[Tensor | None]:
        """The gradients of what a slice was given, BatchNorms of the input itself included."""
        found = {path: self._host.pop((path, each.index)) for path in paths}
        for node, norm in self._norms.items():
            path = str(node.all_input_nodes[0].target)
            if node.all_input_nodes[0].op == "placeholder" and path in found:
                more = norm.through_statistics(each.batch[path].detach())
                if more is not None:
                    found[path] = more if found[path] is None else more.add_(found[path])
        return list(found.values())

    def _backward(
        self,
        number: int,
        each: Slice,
        paths: Sequence[str],
        given: Sequence[Tensor | None],
        aliases: Sequence[Tensor],
        sums: Gradients,
    ) -> None:
        stage = self._stages.stages[number]
        leaves: dict[Any, Tensor] = {}
        started: dict[fx.Node, Any] = {}
        for node, value in self._given(number, each).items():
            is_given = node.op == "placeholder"
            key = str(node.target) if is_given else node
            needs = key in paths or not is_given
            if needs and isinstance(value, Tensor) and value.is_floating_point():
                leaves[key] = leaf = value.detach().requires_grad_()
                with torch.enable_grad():
                    value = leaf.view_as(leaf)  # hooks may be put on what is no leaf
            started[node] = value
        random = self._random.get((number, each.index))
        again = contextlib.nullcontext() if random is None else random.replaying()
        own = self._own[number]
        with again, torch.enable_grad():
            values = self._run(number, started, aliases)
        del started
        made, gradients = [], []
        if number == len(self._stages.stages) - 1:
            outputs = tensor_leaves(self._stages.output(values))
            for (_, leaf), gradient in zip(outputs, given, strict=True):
                if gradient is not None and leaf.requires_grad:
                    made.append(leaf)
                    gradients.append(gradient[each.start : each.stop])
        for node in stage.outputs:
            value, found = values[node], self._host.pop((node, each.index, "gradient"))
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            for user in node.users:
                if user in self._norms:
                    more = self._norms[user].through_statistics(value.detach())
                    if more is not None:
                        found = more if found is None else more.add_(found)
            if found is not None:
                made.append(value)
                gradients.append(found)
        del values
        if not made:
            return
        norms = [self._norms[node] for node in stage.nodes if node in self._norms]
        wanted = [*leaves.values(), *(aliases[at] for at in own)]
        for norm in norms:
            wanted += norm.leaves
        everything = iter(torch.autograd.grad(made, wanted, gradients, allow_unused=True))
        for key in leaves:
            gradient = next(everything)
            if gradient is not None:
                place = (key, each.index) if isinstance(key, str) else (key, each.index, "gradient")
                earlier = self._host.pop(place)
                self._host.put(place, gradient if earlier is None else gradient + earlier)
        of_parameters: list[Tensor | None] = [None] * len(aliases)
        for at in own:
            of_parameters[at] = next(everything)
        sums.add(each, [None] * len(paths) + of_parameters)
        for norm in norms:
            norm.add([next(everything) for _ in norm.leaves])


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


def _waiting(node: fx.Node, value: Any) -> Any:
    if isinstance(value, Tensor) or not tensor_leaves({"": value}):
        return value
    raise UnsplittableModelError(
        f"{node.name}, a {type(value).__name__}, would wait for all rows to arrive at a BatchNorm, "
        "and what holds tensors cannot; take them out of it before that layer"
    )


class _InStages(torch.autograd.Function):
    """Outputs of all slices, stage by stage; computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, done: _Pass, call: Call, paths: Sequence[str], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        leaves = dict(tensor_leaves(call.batch))
        inputs = dict(zip(paths, tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        ctx.standing = Standing(call, max(call.sizes()))
        with ctx.standing.first():
            done.joined = joined = done.forward(batch)
        # Autograd keeps tensors, and sees when they change; other hooks may keep them elsewhere.
        ctx.paths = [*paths, *(path for path in leaves if path not in inputs)]
        ctx.save_for_backward(*tensors, *(leaves[path] for path in ctx.paths[len(paths) :]))
        empty = {path: torch.empty(0) for path in leaves}
        done.call = replace(call, batch=with_inputs(call.batch, empty))
        ctx.done, ctx.num_inputs, ctx.autocast = done, len(paths), Autocast(call.device)
        ctx.set_materialize_grads(False)
        real = (each.is_floating_point() or each.is_complex() for each in joined.tensors)
        ctx.mark_non_differentiable(*compress(joined.tensors, map(not_, real)))
        return tuple(joined.tensors)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        refuse_twice()
        saved = ctx.saved_tensors  # once: what is computed again refuses to give them twice
        done, ctx.done = ctx.done, None
        if done is None:
            raise RuntimeError(
                "what waited for the backward of a part with BatchNorm was used by an earlier one; "
                "call backward once (retain_graph=True does not keep it), or compute it again"
            )
        others = len(done.call.parameters) + ctx.num_inputs
        paths, parameters = ctx.paths[: ctx.num_inputs], saved[ctx.num_inputs : others]
        given_again = [*saved[: ctx.num_inputs], *saved[others:]]
        values = {p: each.detach() for p, each in zip(ctx.paths, given_again, strict=True)}
        batch = with_inputs(done.call.batch, values)
        inputs = {path: values[path] for path in paths}
        sums = Gradients(inputs, parameters, done.call.layout.row_dims(batch))
        with ctx.standing, ctx.autocast.again():
            done.backward(batch, paths, given, parameters, sums)
        return None, None, None, *sums.all()


def split_at_norms(call: Call, stages: Stages) -> Any:
    """The outputs of a part with BatchNorm for all rows, slice by slice."""
    inputs = call.inputs()
    done = _Pass(call, stages)
    if not call.is_differentiated:
        return done.forward(call.batch).whole()
    tensors = [*inputs.values(), *call.parameters]
    operation: Any = _InStages
    found = operation.apply(done, call, list(inputs), *tensors)
    joined, done.joined = done.joined, None
    assert joined is not None
    return joined.whole(found)
