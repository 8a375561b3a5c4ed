"""A part with BatchNorm in slices: normalised with the statistics of all its rows.

All slices pass a stage before any begins the next, so that the means and variances
of its BatchNorms are those of all rows. Between stages values wait on the host, those of every
slice; on the device is one slice of one stage. In the backward each stage is computed again from
what waits there, the last one first. So a row is computed forward twice, as with checkpointing.

A stage is one node of autograd, given values on the host, and scale and shift of its BatchNorms,
which run in evaluation mode: their statistics are known by then. Scale and shift are the layer's
own in value, and functions of mean and variance, too. So their gradients (the sums of ``dy`` and of
``dy · x̂`` over all slices) go on to mean and variance, and to the stage before, which gave these.

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
)
from automicro.state.capture import capture
from automicro.torch_private import AnyBatchNorm, all_versions, call_hooks
from automicro.transaction.rng import RandomState

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""BatchNorms that normalise, scale and shift, and do nothing else."""

_REMEDY = (
    "use GroupNorm there, or freeze these layers with .eval(), or leave out this part's size (with "
    "batchnorm='disable' batches stay whole)"
)

# fx's names for what is computed; others are what is given, held and given back.
_CALLS = ("call_module", "call_function", "call_method")
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}


def refuse_exact(name: str, why: str) -> NoReturn:
    """Refuse a part whose BatchNorms cannot see all rows, while it runs in slices.

    Raises:
        UnsplittableModelError: always.
    """
    raise UnsplittableModelError(
        f"{name} has BatchNorm, so that in slices all its rows have to arrive at each before any "
        f"go on, and where they wait cannot be told: {why}; {_REMEDY}"
    )


class Stage(NamedTuple):
    """The computation between two BatchNorms, its own ones first.

    Attributes:
        nodes: in order.
        inputs: made by earlier stages, or given to the model.
        outputs: that later stages need.
        ahead: BatchNorms that wait for all rows of this stage.
        dead: of each node, what nothing after it in the stage needs.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    ahead: Sequence[fx.Node]
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

    def refuse(self, why: str) -> NoReturn:
        refuse_exact(type(self._module).__name__, why)

    def _refuse_hooks(self) -> None:
        for name, module in self._module.named_modules():
            if module is not self._module and call_hooks(module):
                self.refuse(f"{name!r} has hooks, which a trace does not hold")

    def _refuse_parts(self) -> None:
        for name, module in self._module.named_modules():
            if module is self._module or not self._is_part(module):
                continue
            if any(map(sees_the_batch, module.modules())):
                self.refuse(
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
                self.refuse(f"its forward reads {read!r}, which BatchNorm changes")

    def _trace(self, arguments: Mapping[str, Any]) -> fx.Graph:
        given = dict(list(inspect.signature(type(self._module).forward).parameters.items())[1:])
        for name, value in arguments.items():
            if name not in given:
                self.refuse(f"its forward takes {name!r} among any number of arguments")
            if not isinstance(value, Tensor) and tensor_leaves(value):
                kind = type(value).__name__
                self.refuse(f"its forward takes tensors inside of a {kind}, as {name!r}")
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
                self.refuse(f"torch.fx cannot trace it ({type(error).__name__}: {lines[0][:160]})")

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Values that do not depend on the input are computed once, while it is traced."""
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
            self.refuse(f"its forward changes the buffer {replaced[0]!r}")
        if has_drawn:
            self.refuse("its forward draws random numbers that do not go by its input")
        if draws_foreign:
            self.refuse(
                "its forward draws random numbers of Python's or NumPy's, as for layers that are "
                "left out at random; draw them outside of it, and hand them in as a tensor"
            )

    def _norm(self, node: fx.Node) -> nn.Module | None:
        """The BatchNorm that a node calls, where that sees the batch."""
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            self.refuse(f"{node.name} is BatchNorm as a function and no layer")
        if node.op != "call_module":
            return None
        layer = self.layer(node)
        if not sees_the_batch(layer):
            return None
        if isinstance(layer, nn.SyncBatchNorm):
            self.refuse(f"{node.target} is a SyncBatchNorm, and each rank computes in its own time")
        if len(node.args) + len(node.kwargs) != 1 or len(node.all_input_nodes) != 1:
            self.refuse(f"{node.target}, a {type(layer).__name__}, takes more than one input")
        return layer

    def layer(self, node: fx.Node) -> nn.Module:
        return self._module.get_submodule(str(node.target))

    def _find_levels(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The stage of each node: as early as what it needs allows."""
        levels: dict[fx.Node, int] = {}
        for node in nodes:
            levels[node] = max((levels[each] for each in node.all_input_nodes), default=0)
            levels[node] += node in self.norms
        # Only the last stage gives outputs, although some may be there before.
        levels[self._output] = max(levels.values())
        return levels

    def _stage(self, nodes: Sequence[fx.Node], number: int) -> Stage:
        level = self._levels
        own = [node for node in nodes if node.op in _CALLS and level[node] == number]
        is_last = number == level[self._output]
        ahead = [node for node in self.norms if level[node] == number + 1]
        users = [*own, *ahead, *([self._output] if is_last else ())]
        inputs = dict.fromkeys(
            each
            for node in users
            for each in node.all_input_nodes
            if each.op == "placeholder" or (each.op in _CALLS and level[each] < number)
        )
        outputs = [node for node in own if any(level[user] > number for user in node.users)]
        kept = {*outputs, *(each for node in users[len(own) :] for each in node.all_input_nodes)}
        last: dict[fx.Node, fx.Node] = {}
        for node in own:
            last.update(dict.fromkeys([*node.all_input_nodes, node], node))
        dead = [
            [each for each, at in last.items() if at is node and each not in kept] for node in own
        ]
        return Stage(own, list(inputs), outputs, ahead, dead)

    def _written(self, node: fx.Node) -> fx.Node | None:
        """The value that a node writes into: its first argument, or none."""
        if node.op not in _CALLS or not node.all_input_nodes:
            return None
        name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
        writes = (
            bool(node.kwargs.get("inplace"))
            or node.target in _IN_PLACE
            or (node.op == "call_module" and bool(getattr(self.layer(node), "inplace", False)))
            or (node.op != "call_module" and name.endswith("_") and not name.endswith("__"))
            # As in `F.relu(x, True)`; a flag that means something else is refused to be safe.
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
                readers = ", ".join(others) or "the code that gave it"
                self.refuse(f"{node.name} writes into {written.name}, which {readers} reads, too")
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
                self.refuse(f"{node.name} writes into what it is given")
            # Else what was given to this operation lies beside the next one.
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
        """The output of the module, from the values of the last stage."""
        return fx.node.map_arg(self._output.args[0], lambda node: values[node])

    def parameters(self, number: int) -> set[int]:
        """Ids of the parameters that a stage computes with, and of other things."""
        found: list[Any] = []
        for node in self.stages[number].nodes:
            reads = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
            found += [operator.attrgetter(each)(self._module) for each in reads]
            if node.op == "call_module":
                found += self.layer(node).parameters()
        return set(map(id, found))

    def versions(self) -> list[int]:
        """Of the module's buffers."""
        return all_versions(list(self._module.buffers()))


class _Tracer(fx.Tracer):
    """Looks into modules of the user's, and into no layer of torch's, no BatchNorm and no part."""

    proxy_buffer_attributes = True  # what is computed of them goes by what they hold at each call

    def __init__(self, is_part: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_part = is_part

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf: bool = super().is_leaf_module(m, module_qualified_name)
        return is_leaf or isinstance(m, AnyBatchNorm) or self._is_part(m)


def _moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """How many values each channel of (rows, channels, …) has, their means and variances."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    # In float32 at least: sums of squares leave the range of fp16, and the digits of bf16.
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    variance, mean = torch.var_mean(x.float() if is_half else x, dims, correction=0)
    return x.numel() // x.shape[1], mean, variance


class _Norm:
    """One use of a BatchNorm, with the statistics of all rows."""

    def __init__(
        self, name: str, layer: Any, moments: Sequence[tuple[int, Tensor, Tensor]]
    ) -> None:
        self._layer = layer
        counts, means, variances = zip(*moments, strict=True)
        self._count = sum(counts)
        # Torch refuses it, too: the variance of one value is zero.
        if self._count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, and {name} got one"
            )
        shares = means[0].new_tensor(counts)[:, None] / self._count
        apart = torch.stack(means) - means[0]  # differences keep the digits of large means
        mean = (shares * apart).sum(0)
        self.mean = mean + means[0]
        self.variance = (shares * (torch.stack(variances) + (apart - mean).square())).sum(0)

    def affine(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift, through which gradients go on to the statistics."""
        # A layer in evaluation mode takes statistics for constants. So scale and shift depend on
        # them, without another value: their gradients are the two sums that the input's needs.
        weight, bias = _affine(self._layer, mean)
        eps, deviation = self._layer.eps, (variance + self._layer.eps).sqrt()
        scale = weight * ((self.variance + eps).sqrt() / deviation)
        return scale, bias + (self.mean - mean) * (weight / deviation)

    def through_statistics(
        self, x: Tensor, of_mean: Tensor | None, of_variance: Tensor | None
    ) -> Tensor | None:
        """The part of the gradient of an input that comes through mean and variance."""
        if of_mean is None or of_variance is None:
            return None
        slope = of_variance * (2 / self._count)
        offset = of_mean / self._count - slope * self.mean
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = x.detach().to(slope.dtype)
        return torch.addcmul(offset.view(shape), wide, slope.view(shape)).to(x.dtype)

    def normalised(self, x: Tensor, affine: Sequence[Tensor]) -> Tensor:
        """The output for a slice."""
        if len(x) > 1:
            return _normalised(self._layer, x, self.mean, self.variance, affine)
        # The backward of torch's kernel for CPUs is wrong (2.13) for a single row whose gradient
        # lies in memory as if channels were last, with a meaningless stride of rows.
        output = _normalised(self._layer, x.contiguous(), self.mean, self.variance, affine)
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return output

    def commit(self) -> None:
        """Count the rows in the running statistics, as one batch."""
        layer = self._layer
        if not layer.training or layer.running_mean is None:
            return
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
        layer.running_mean.lerp_(self.mean.to(layer.running_mean.dtype), momentum)
        # Running variances are those of a sample, as torch has it.
        variance = self.variance * (self._count / (self._count - 1))
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


def _affine(layer: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    if layer.weight is None:
        return torch.ones_like(like), torch.zeros_like(like)
    bias = torch.zeros_like(like) if layer.bias is None else layer.bias
    return layer.weight.to(like.dtype), bias.to(like.dtype)


def _normalised(
    layer: Any, x: Tensor, mean: Tensor, variance: Tensor, affine: Sequence[Tensor]
) -> Tensor:
    scale, shift = affine
    if type(layer) in PLAIN:
        return F.batch_norm(x, mean, variance, scale, shift, training=False, eps=layer.eps)
    own = {"running_mean": mean, "running_var": variance}
    if layer.weight is None:  # it neither scales nor shifts by itself
        shape = [-1, *[1] * (x.dim() - 2)]
        offset = mean - mean * scale + shift * (variance + layer.eps).sqrt()
        x = torch.addcmul(offset.view(shape), x.to(scale.dtype), scale.view(shape)).to(x.dtype)
    else:
        own |= {"weight": scale} if layer.bias is None else {"weight": scale, "bias": shift}
    training, layer.training = layer.training, False
    try:
        return cast(Tensor, torch.func.functional_call(layer, own, (x,)))
    finally:
        layer.training = training


def _require_usual(name: str, layer: Any, x: Tensor) -> None:
    """Refuse a derived class that does something else with statistics than to normalise."""
    if type(layer) in PLAIN or x.numel() <= x.shape[1]:
        return
    buffers = {name: each.clone() for name, each in layer.named_buffers(recurse=False)}
    _, mean, variance = _moments(x)
    random = RandomState([x.device])
    random.begin()
    # The two draw the same numbers, where a layer draws any.
    with random.replaying():
        trained = torch.func.functional_call(layer, buffers, (x,))
    with random.replaying():
        found = _normalised(layer, x, mean, variance, _affine(layer, mean))
    coarse = tolerance_of(x)
    if not torch.allclose(trained, found, rtol=coarse, atol=coarse):
        kind = type(layer).__name__
        refuse_exact(name, f"{kind} does something else with the statistics than to normalise")


def to_host(value: Tensor, *, waits: bool = False) -> Tensor:
    """A copy that waits on the host, in pinned memory where the device is another.

    Args:
        value: on the device.
        waits: whether it is there before this returns, for autograd to add it up.
    """
    with on_host():
        pinned = value.device.type == "cuda"
        held = torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=pinned)
        return held.copy_(value.detach(), non_blocking=pinned and not waits)


def to_device(held: Tensor, device: torch.device) -> Tensor:
    """A copy of what waits."""
    if device.type != "cpu":
        return held.to(device, non_blocking=True)
    budget = active_budget()
    return held.clone() if budget is None else budget.transfer(held)


class _Pass:
    """Shared state of the stages of one call.

    Attributes:
        spans: the first row of each slice, and that after its last.
        norms: those whose rows have all been seen.
        devices: of what waits on the host.
    """

    def __init__(self, call: Call, stages: Stages, slices: Sequence[Slice]) -> None:
        self.stages, self.holding, self.parameters = stages, call.holding, call.parameters
        self.spans = [(each.start, each.stop) for each in slices]
        self.norms: dict[fx.Node, _Norm] = {}
        self.devices: dict[fx.Node, torch.device] = {}
        self.stood = Standing(call, max(each.num_rows for each in slices))
        # For the backward, which runs outside of the caller's autocast and computes again.
        kinds = filter(torch.amp.is_autocast_available, {call.device.type, "cpu"})
        self._autocast = [
            torch.autocast(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each))
            for each in kinds
        ]

    @contextlib.contextmanager
    def again(self, random: RandomState) -> Iterator[None]:
        """All as it stood, and random numbers as of a stage."""
        with self.stood.again(), random.replaying(), contextlib.ExitStack() as stack:
            for each in self._autocast:
                stack.enter_context(each)
            yield


class _Stage:
    """A stage of all slices, one after the other: in the forward, and again in the backward.

    It is given the inputs of each slice, then parameters, then scales and shifts. It gives what
    later stages need of each slice, then mean and variance for each BatchNorm ahead; the last one
    gives the outputs of all rows.
    """

    def __init__(self, done: _Pass, number: int, random: RandomState) -> None:
        self._pass, self._number, self._random = done, number, random
        self.spec = done.stages.stages[number]
        self._is_last = number == len(done.stages.stages) - 1
        self.norms = [node for node in self.spec.nodes if node in done.stages.norms]
        own = done.stages.parameters(number)
        self._own = [at for at, each in enumerate(done.parameters) if id(each) in own]
        random.begin()

    @property
    def parameters(self) -> list[Tensor]:
        """That it computes with."""
        return [self._pass.parameters[at] for at in self._own]

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Around the backward."""
        return self._pass.again(self._random)

    def waits(self) -> list[bool]:
        """Which inputs of slices wait on the host."""
        return [node in self._pass.devices for node in self.spec.inputs] * len(self._pass.spans)

    def of_slices(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> list[Sequence[Any]]:
        """As many of each slice as there are nodes; behind them the rest."""
        starts = [len(nodes) * at for at in range(len(self._pass.spans))]
        rest = values[len(nodes) * len(starts) :]
        return [*(values[at : at + len(nodes)] for at in starts), rest]

    def _brought(self, given: Sequence[Any]) -> list[Any]:
        """The inputs of a slice, on the device."""
        devices = self._pass.devices
        pairs = zip(self.spec.inputs, given, strict=True)
        return [to_device(e, devices[node]) if node in devices else e for node, e in pairs]

    def _compute(
        self, given: Sequence[Any], tensors: Sequence[Tensor], affine: Sequence[Tensor]
    ) -> tuple[dict[fx.Node, Any], Any]:
        """Of a slice: the values that are left, and its outputs."""
        stages, norms = self._pass.stages, self._pass.norms
        pairs = dict(zip(self.norms, zip(affine[::2], affine[1::2], strict=True), strict=True))

        def normalise(node: fx.Node, x: Tensor) -> Tensor:
            return norms[node].normalised(x, pairs[node])

        with self._pass.holding(tensors):
            started = dict(zip(self.spec.inputs, given, strict=True))
            values = stages.run(self._number, started, normalise)
        return values, stages.output(values) if self._is_last else ()

    def forward(self, joined: Joined, values: Sequence[Any]) -> list[Any]:
        *of_slices, shared = self.of_slices(self.spec.inputs, values)
        layers, found = self._pass.stages.norms, list[Any]()
        moments: dict[fx.Node, list[Any]] = {node: [] for node in self.spec.ahead}
        for given, (start, stop) in zip(of_slices, self._pass.spans, strict=True):
            made, outputs = self._compute(self._brought(given), (), shared[len(self._own) :])
            for node in self.spec.ahead:
                source = node.all_input_nodes[0]
                # A few rows show what a layer does with its statistics.
                if start == 0:
                    _require_usual(str(node.target), layers[node], made[source].detach()[:4])
                moments[node].append(_moments(made[source].detach()))
            found += [self._put(node, made[node]) for node in self.spec.outputs]
            if self._is_last:
                joined.put(Slice(0, start, stop, None), outputs)
            del made, outputs  # else they lie beside the next slice
        for node in self.spec.ahead:
            norm = self._pass.norms[node] = _Norm(str(node.target), layers[node], moments[node])
            # Clones, because autograd gives what is returned a graph; the norm's own are constants.
            found += norm.mean.clone(), norm.variance.clone()
        return [*found, *joined.tensors]

    def _put(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._pass.devices[node] = value.device
            return to_host(value)
        if tensor_leaves({"": value}):
            kind = type(value).__name__
            self._pass.stages.refuse(
                f"{node.name}, a {kind}, holds tensors, and would have to wait"
            )
        return value

    def backward(
        self, values: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of what it is given, from those of what it gives."""
        *of_slices, shared = self.of_slices(self.spec.inputs, values)
        *arrived, rest = self.of_slices(self.spec.outputs, gradients)
        sums, aliases, found = Gradients({}, shared, {}), aliases_of(shared), list[Any]()
        for given, span, own in zip(of_slices, self._pass.spans, arrived, strict=True):
            of_inputs, of_shared = self._of_slice(span, given, aliases, [*own, *rest])
            found += of_inputs
            sums.add(Slice(0, *span, None), of_shared)
            del of_shared  # else it lies beside the next slice
        return [*found, *sums.all()]

    def _of_slice(
        self,
        span: tuple[int, int],
        given: Sequence[Any],
        aliases: Sequence[Tensor],
        arrived: Sequence[Tensor | None],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of a slice's inputs, and what it adds to those of what slices share."""
        num_waiting, tensors = len(self.spec.outputs), list(self._pass.parameters)
        for at, alias in zip(self._own, aliases, strict=False):
            tensors[at] = alias
        # Leaves of this slice alone: its graph ends here, and is gone before the next one.
        leaves = [
            each.detach().requires_grad_() if _needs(like) else each
            for each, like in zip(self._brought(given), given, strict=True)
        ]
        with torch.enable_grad():  # hooks may be put on what is no leaf
            started = [each.view_as(each) if _needs(each) else each for each in leaves]
            made, outputs = self._compute(started, tensors, aliases[len(self._own) :])
        pairs = self._arrived(made, arrived[:num_waiting], arrived[num_waiting:])
        pairs += [
            (leaf, each[slice(*span)])
            for (_, leaf), each in zip(tensor_leaves(outputs), arrived[num_waiting:], strict=False)
            if each is not None and leaf.requires_grad
        ]
        del started, made, outputs
        taken: list[Tensor | None] = [None] * (sum(map(_needs, leaves)) + len(aliases))
        if pairs:
            roots, gradients = zip(*pairs, strict=True)
            wanted = [*filter(_needs, leaves), *aliases]
            taken[:] = torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
        found = [taken.pop(0) if _needs(each) else None for each in leaves]
        return [*map(self._left, self.spec.inputs, found)], taken

    def _left(self, node: fx.Node, gradient: Tensor | None) -> Tensor | None:
        """The gradient of an input, on the host if that waits there."""
        if gradient is None or node not in self._pass.devices:
            return gradient
        return to_host(gradient, waits=True)

    def _arrived(
        self,
        made: Mapping[fx.Node, Any],
        waiting: Sequence[Tensor | None],
        of_statistics: Sequence[Tensor | None],
    ) -> list[tuple[Tensor, Tensor]]:
        """The values that leave a slice, with their gradients."""
        found = {
            node: to_device(each, self._pass.devices[node])
            for node, each in zip(self.spec.outputs, waiting, strict=True)
            if each is not None
        }
        for node, *each in zip(
            self.spec.ahead, of_statistics[::2], of_statistics[1::2], strict=False
        ):
            source = node.all_input_nodes[0]
            more = self._pass.norms[node].through_statistics(made[source], *each)
            if more is not None:
                found[source] = more.add_(found[source]) if source in found else more
        return [(made[node], each) for node, each in found.items() if _needs(made[node])]


def _needs(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _InStages(torch.autograd.Function):
    """A stage of all slices, computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, stage: _Stage, joined: Joined, *values: Any) -> tuple[Any, ...]:
        ctx.stage = stage
        ctx.set_materialize_grads(False)
        # Autograd keeps tensors, and sees when they change; other hooks may keep them elsewhere.
        kept = [isinstance(each, Tensor) for each in values]
        for at, is_waiting in enumerate(stage.waits()):
            kept[at] &= not is_waiting
        pairs = list(zip(values, kept, strict=True))
        ctx.save_for_backward(*(each if is_kept else None for each, is_kept in pairs))
        ctx.others = [None if is_kept else each for each, is_kept in pairs]
        return tuple(stage.forward(joined, values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_twice()
        # Not kept for a second backward: it is as large as all that the stages have made.
        others, ctx.others = ctx.others, None
        if others is None:
            raise RuntimeError(
                "what waited for the backward of a part with BatchNorm was used by an earlier one; "
                "call backward once (retain_graph=True does not keep it), or compute it again"
            )
        pairs = zip(ctx.saved_tensors, others, strict=True)
        values = [other if saved is None else saved for saved, other in pairs]
        with ctx.stage.again():
            return None, None, *ctx.stage.backward(values, gradients)


def split_at_norms(call: Call, stages: Stages) -> Any:
    """The outputs of a part with BatchNorm for all rows, slice by slice."""
    sizes = call.sizes()
    with naming(call.sizer, max(sizes)), torch.set_grad_enabled(call.is_differentiated):
        outputs = _through_stages(call, stages, sizes)
    call.sizer.end(sizes)
    return outputs


def _through_stages(call: Call, stages: Stages, sizes: Sequence[int]) -> Any:
    slices, joined = Cut(call, call.batch, sizes).slices, Joined(sum(sizes))
    versions, done = stages.versions(), _Pass(call, stages, slices)
    rest: Sequence[Any] = ()
    waiting: list[dict[Any, Any]] = [{**stages.constants, **each.batch} for each in slices]
    affine: dict[fx.Node, tuple[Tensor, Tensor]] = {}
    with done.stood.first():
        # A stage of all slices gives the statistics of the BatchNorms ahead, and these the scales
        # and shifts that the next stage is given.
        for number, spec in enumerate(stages.stages):
            stage = _Stage(done, number, call.random())
            found = [each[_key(node)] for each in waiting for node in spec.inputs]
            found += [*stage.parameters, *(e for node in stage.norms for e in affine[node])]
            if torch.is_grad_enabled():
                operation: Any = _InStages
                found = list(operation.apply(stage, joined, *found))
            else:
                found = stage.forward(joined, found)
            needed = {_key(node) for later in stages.stages[number + 1 :] for node in later.inputs}
            *of_slices, rest = stage.of_slices(spec.outputs, found)
            for each, values in zip(waiting, of_slices, strict=True):
                each.update(zip(spec.outputs, values, strict=True))
                for key in each.keys() - needed:
                    # What no later stage needs would wait on the host to the end.
                    del each[key]
            for node, *statistics in zip(spec.ahead, rest[::2], rest[1::2], strict=False):
                affine[node] = done.norms[node].affine(*statistics)
        if versions != stages.versions():
            stages.refuse("its forward changes other buffers, too")
        # Not before all stages went through: an error leaves running statistics as they were.
        with torch.no_grad():
            for norm in done.norms.values():
                norm.commit()
    return joined.whole(rest)


def _key(node: fx.Node) -> Any:
    """The key of a waiting value: an argument by its name."""
    return node.target if node.op == "placeholder" else node
