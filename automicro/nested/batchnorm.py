"""BatchNorm in parts that run in slices: each row is normalized with the statistics of all rows."""

# All slices pass one stage before any of them enters the next, so the means and variances of the
# BatchNorms are those of all rows. Between stages, the values of every slice wait on the host; the
# device holds one slice of one stage. Each slice of a stage is checkpointed, with the waiting
# values as its inputs. So the forward of a row is computed twice, as with any checkpointing.
#
# The BatchNorms of a stage run in evaluation mode, because their statistics are known by then, and
# take scale and shift as inputs. Scale and shift have the values of the layer, but are functions of
# mean and variance, too. So their gradients (the sums of ``dy`` and ``dy · x̂`` over all slices)
# flow on to mean and variance, and to the previous stage, which computed these.
#
# The operations between two BatchNorms are read from a symbolic trace of the model (``torch.fx``),
# a list of operations with their inputs. A stage holds all operations that can run once some
# BatchNorms have the statistics of all rows, and before the next BatchNorms do. BatchNorms at equal
# depth in parallel branches share a stage. Models that cannot be traced, or that stages would
# compute differently, are refused with the reason.

import collections
import contextlib
import functools
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
from automicro.memory.device import active_budget
from automicro.memory.oom import Failure, classify
from automicro.nested.slices import (
    Call,
    Standing,
    apply,
    computed_again,
    joined,
    naming,
    refuse_twice,
    summed,
)
from automicro.state.capture import capture
from automicro.state.part import Replay
from automicro.torch_private import AnyBatchNorm, all_versions, call_hooks
from automicro.transaction.rng import RandomState

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""BatchNorms that normalise, scale and shift, and do nothing else."""

_REMEDY = (
    "use GroupNorm there, freeze these layers with .eval(), or leave out the size of this part "
    "(with batchnorm='disable' batches stay whole)"
)

# Names in torch.fx for operations; all other nodes are inputs, attributes and outputs.
_CALLS = ("call_module", "call_function", "call_method")


def refuse_exact(name: str, why: str) -> NoReturn:
    """Refuse a part whose BatchNorms cannot get the statistics of all rows in slices."""
    raise UnsplittableModelError(
        f"{name} has BatchNorm, so all rows must reach each BatchNorm before any slice continues, "
        f"but automicro cannot find the points to wait at: {why}; {_REMEDY}"
    )


class Stage(NamedTuple):
    """The operations from one BatchNorm, inclusive, to the next."""

    nodes: Sequence[fx.Node]  # in order
    inputs: Sequence[fx.Node]  # from earlier stages, or arguments and attributes of the model
    outputs: Sequence[fx.Node]  # results that later stages need
    ahead: Sequence[fx.Node]  # BatchNorms that wait for all rows of this stage
    dead: Sequence[Sequence[fx.Node]]  # for each node, values that no later node of the stage needs


class Stages:
    """The stages of a module that is called with arguments of this form.

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
        self.is_checked = False  # whether they were compared with the module's forward
        self._refuse_inside()
        self._graph = self._trace(arguments)
        nodes = list(self._graph.nodes)
        # BatchNorms that use statistics of the batch, by the node that calls them, in order.
        self.norms = {node: layer for node in nodes if (layer := self._norm(node)) is not None}
        self._output = nodes[-1]
        self._levels = self._find_levels(nodes)
        self._replays: dict[int, Replay] = {}
        self.stages = [self._stage(nodes, at) for at in range(self._levels[self._output] + 1)]

    def refuse(self, why: str) -> NoReturn:
        refuse_exact(type(self._module).__name__, why)

    def _refuse_inside(self) -> None:
        inside = [each for each in self._module.named_modules() if each[0]]
        for name, module in inside:
            if call_hooks(module):
                self.refuse(f"{name!r} has hooks, which a trace does not include")
            if self._is_part(module) and any(map(sees_the_batch, module.modules())):
                self.refuse(
                    f"{name!r} has its own size and contains BatchNorm, which would see only its "
                    "slices. Leave that size out: the part around it is cut at each BatchNorm "
                    "anyway"
                )

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
                    # Computations that do not depend on the input run during the trace.
                    raise
                lines = text_of(error).splitlines() or [""]
                self.refuse(f"torch.fx cannot trace it ({type(error).__name__}: {lines[0][:160]})")

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undo changes of the trace, which might leave its proxies in attributes."""
        before = capture({"": self._module})
        random = RandomState([])
        random.begin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
                has_drawn = random.has_moved
            finally:
                before.put_back()
                random.roll_back()
        if has_drawn:
            self.refuse(
                "its forward draws random numbers that do not depend on its input (from torch, "
                "Python or NumPy), such as to skip layers at random. Draw them outside it, and "
                "pass them as a tensor"
            )

    def _norm(self, node: fx.Node) -> nn.Module | None:
        """Return the BatchNorm that a node calls, if it uses statistics of the batch."""
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            self.refuse(f"{node.name} calls BatchNorm as a function, not as a layer")
        if node.op != "call_module":
            return None
        layer = self.layer(node)
        if not sees_the_batch(layer):
            return None
        if isinstance(layer, nn.SyncBatchNorm):
            self.refuse(f"{node.target} is a SyncBatchNorm, but ranks do not run in step")
        if len(node.args) + len(node.kwargs) != 1 or len(node.all_input_nodes) != 1:
            self.refuse(f"{node.target}, a {type(layer).__name__}, takes more than one input")
        return layer

    def layer(self, node: fx.Node) -> nn.Module:
        return self._module.get_submodule(str(node.target))

    def _find_levels(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Return the number of the stage of each node: the earliest that its inputs allow."""
        levels: dict[fx.Node, int] = {}
        for node in nodes:
            levels[node] = max((levels[each] for each in node.all_input_nodes), default=0)
            levels[node] += node in self.norms
        # Only the last stage returns outputs, although some might be known earlier.
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
            if each.op not in _CALLS or level[each] < number
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

    def _check_writes(self, node: fx.Node, written: fx.Node) -> None:
        """Refuse a write into a value that other nodes read, because stages reorder nodes."""
        others = [user.name for user in written.users if user is not node]
        if others or written.op not in _CALLS:
            readers = ", ".join(others) or "the code that provided it"
            self.refuse(f"{node.name} writes into {written.name}, which {readers} also reads")

    def run(
        self,
        number: int,
        given: Mapping[fx.Node, Any],
        normalise: Callable[[fx.Node, Tensor], Tensor],
    ) -> dict[fx.Node, Any]:
        """Compute one stage and return the values that are still needed."""
        stage, values = self.stages[number], dict(given)
        for node, dead in zip(stage.nodes, stage.dead, strict=True):
            inputs = {each: values[each] for each in node.all_input_nodes}
            tensors = {key: each for key, each in inputs.items() if isinstance(each, Tensor)}
            versions = all_versions(tensors.values())
            if node in self.norms:
                values[node] = normalise(node, *tensors.values())
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._call(node, args, kwargs)
            now = all_versions(tensors.values())
            for key, version, before in zip(tensors, now, versions, strict=True):
                if version != before:
                    self._check_writes(node, key)
            # Otherwise the inputs of this operation stay in memory during the next one.
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
        """Return the output of the module, from the values of the last stage."""
        return fx.node.map_arg(self._output.args[0], lambda node: values[node])

    def value_of(self, node: fx.Node, arguments: Mapping[Any, Any]) -> Any:
        """Return the value of an input: an attribute of the module, or a waiting value."""
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._module)
        return arguments[_key(node)]

    def replay(self, number: int) -> Replay:
        """Return the state that the layers of a stage read in addition to their inputs."""
        found: dict[str, Any] = {}
        for node in self.stages[number].nodes:
            if node in self.norms:  # its statistics are inputs
                inside = self.norms[node].named_children()
                found |= {f"part.{node.target}.{name}": each for name, each in inside}
            elif node.op == "call_module":
                found[f"part.{node.target}"] = self.layer(node)
        known = self._replays.get(number)
        if known is None or known.roots != found:
            known = self._replays[number] = Replay(found, large={})
        return known

    def versions(self) -> list[int]:
        """Return the version counters of the module's buffers."""
        return all_versions(list(self._module.buffers()))


class _Tracer(fx.Tracer):
    """A tracer whose leaves are layers of torch, BatchNorms, and parts with their own size."""

    # Results that depend on buffers use the buffers' values at each call.
    proxy_buffer_attributes = True

    def __init__(self, is_part: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_part = is_part

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf: bool = super().is_leaf_module(m, module_qualified_name)
        return is_leaf or isinstance(m, AnyBatchNorm) or self._is_part(m)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of the channels of a tensor (rows, channels, …)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    # In float32 at least: sums of squares exceed the range of fp16 and the precision of bf16.
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    variance, mean = torch.var_mean(x.float() if is_half else x, dims, correction=0)
    return mean, variance


class _Moments(torch.autograd.Function):
    """Means and variances, with a backward that keeps only the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, known: dict[str, Sequence[Tensor]]) -> tuple[Tensor, ...]:
        # The first run of a slice has stored them; a recomputed slice has the same.
        known[""] = known.get("") or _moments(x)
        ctx.known = known
        ctx.save_for_backward(x)
        return tuple(each.clone() for each in known[""])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_twice()
        (x,), mean, (of_mean, of_variance) = ctx.saved_tensors, ctx.known[""][0], gradients
        count = x.numel() // x.shape[1]
        slope = of_variance * (2 / count)
        offset = of_mean / count - slope * mean
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = x.to(slope.dtype)
        return torch.addcmul(offset.view(shape), wide, slope.view(shape)).to(x.dtype), None


class _Norm:
    """One call of a BatchNorm, with the statistics of all rows."""

    def __init__(self, layer: Any, count: int, mean: Tensor, variance: Tensor) -> None:
        # Detached, because a graph keeps the stages alive, and these keep this object.
        self._layer, self._count = layer, count
        self.mean, self.variance = mean.detach(), variance.detach()

    def affine(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift, which pass gradients on to the statistics."""
        # A layer in evaluation mode treats statistics as constants. So scale and shift are made to
        # depend on them without a change of value: their gradients are the two sums that the
        # gradient of the input needs.
        weight, bias = _affine(self._layer, mean)
        eps, deviation = self._layer.eps, (variance + self._layer.eps).sqrt()
        scale = weight * ((self.variance + eps).sqrt() / deviation)
        return scale, bias + (self.mean - mean) * (weight / deviation)

    def normalised(self, x: Tensor, affine: Sequence[Tensor]) -> Tensor:
        """Return the output for one slice, with the given scale and shift."""
        if len(x) > 1:
            return _normalised(self._layer, x, self.mean, self.variance, affine)
        # Torch's CPU kernel (2.13) has a wrong backward for a single row whose gradient is in
        # channels-last order in memory, with a meaningless stride of rows.
        output = _normalised(self._layer, x.contiguous(), self.mean, self.variance, affine)
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return output

    def commit(self) -> None:
        """Update the running statistics as with one batch of all rows."""
        layer = self._layer
        if not layer.training or layer.running_mean is None:
            return
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
        layer.running_mean.lerp_(self.mean.to(layer.running_mean.dtype), momentum)
        # Running variances are unbiased, as in torch.
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
    if layer.weight is None:  # the layer itself neither scales nor shifts
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


def to_host(value: Tensor, *, waits: bool = False) -> Tensor:
    """Copy a tensor to the host, into pinned memory if it comes from a CUDA device."""
    with on_host():
        pinned = value.device.type == "cuda"
        held = torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=pinned)
        return held.copy_(value.detach(), non_blocking=pinned and not waits)


def to_device(held: Tensor, device: torch.device) -> Tensor:
    """Copy a waiting tensor to a device."""
    if device.type != "cpu":
        return held.to(device, non_blocking=True)
    budget = active_budget()
    return held.clone() if budget is None else budget.transfer(held)


class _ToHost(torch.autograd.Function):
    """Copy a value to the host; its gradient is copied back to the device."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.device = value.device
        return to_host(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_twice()
        return to_device(gradients[0], ctx.device)


class _ToDevice(torch.autograd.Function):
    """Copy a waiting value to the device; its gradient is copied to the host."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, device: torch.device) -> Tensor:
        return to_device(held, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_twice()
        return to_host(gradients[0], waits=True), None


def split_at_norms(call: Call, stages: Stages) -> Any:
    """Return the outputs of a part with BatchNorm for all rows, computed slice by slice."""
    sizes = call.sizes()
    with naming(call.sizer, max(sizes)), torch.set_grad_enabled(call.is_differentiated):
        outputs = through_stages(call, stages, sizes)
    call.sizer.end(sizes)
    return outputs


def through_stages(call: Call, stages: Stages, sizes: Sequence[int]) -> Any:
    """Return the outputs of slices of these sizes, joined."""
    cut, versions = call.cut(call.batch, sizes), stages.versions()
    outputs: list[Any] = []
    parameters = summed(call) if call.is_differentiated else tuple
    waiting = [{**stages.constants, **each} for each in cut.microbatches]
    devices: dict[fx.Node, torch.device] = {}
    norms: dict[fx.Node, _Norm] = {}
    affine: dict[fx.Node, tuple[Tensor, Tensor]] = {}
    for number, spec in enumerate(stages.stages):
        stage = _stage(stages, number, call.holding, devices, norms)
        scaled = {node: affine[node] for node in spec.nodes if node in norms}
        needed = {_key(node) for later in stages.stages[number + 1 :] for node in later.inputs}
        moments: list[Sequence[tuple[int, Tensor, Tensor]]] = []
        for size, values in zip(cut.sizes, waiting, strict=True):
            tensors = parameters()
            with call.holding(tensors):
                given = [stages.value_of(node, values) for node in spec.inputs]
            compute = functools.partial(stage, collections.defaultdict(dict))
            if torch.is_grad_enabled():
                stood = Standing(call, size, stages.replay(number))
                found = computed_again(compute, (given, scaled, tensors), {}, stood)
            else:
                found = compute(given, scaled, tensors)
            values.update(zip(spec.outputs, found[0], strict=True))
            for key in values.keys() - needed:
                # A value that no later stage needs would otherwise wait on the host until the end.
                del values[key]
            moments.append(found[1])
            if spec is stages.stages[-1]:
                outputs.append(found[2])
            del given, found  # otherwise they stay in memory during the next slice
        for node, of_slices in zip(spec.ahead, zip(*moments, strict=True), strict=True):
            layer, statistics = stages.norms[node], _combined(str(node.target), of_slices)
            norms[node] = _Norm(layer, *statistics)
            affine[node] = norms[node].affine(*statistics[1:])
    if versions != stages.versions():
        stages.refuse("its forward changes other buffers, too")
    # Only after all stages have run, so that an error leaves running statistics unchanged.
    with torch.no_grad():
        for norm in norms.values():
            norm.commit()
    return joined(outputs, cut.sizes, call.num_rows)


def _combined(
    name: str, of_slices: Sequence[tuple[int, Tensor, Tensor]]
) -> tuple[int, Tensor, Tensor]:
    """Combine counts, means and variances of slices into those of all rows."""
    counts, *others = zip(*of_slices, strict=True)
    means, variances = map(torch.stack, others)
    count, first = sum(counts), means[0].detach()
    # Torch refuses this as well: the variance of one value is zero.
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, but {name} got one"
        )
    shares = first.new_tensor(counts)[:, None] / count
    apart = means - first  # differences keep the precision of large means
    mean = (shares * apart).sum(0)
    return count, mean + first, (shares * (variances + (apart - mean).square())).sum(0)


def _stage(
    stages: Stages,
    number: int,
    holding: Callable[..., contextlib.AbstractContextManager[None]],
    devices: dict[fx.Node, torch.device],
    norms: Mapping[fx.Node, _Norm],
) -> Callable[..., Any]:
    """Return the function that computes one stage of a slice, in forward and backward."""
    spec = stages.stages[number]

    def put(node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            devices[node] = value.device
            return apply(_ToHost, value)
        if tensor_leaves({"": value}):
            kind = type(value).__name__
            stages.refuse(f"{node.name} is a {kind} of tensors, but only a tensor can wait")
        return value

    def run(
        known: Mapping[fx.Node, dict[str, Sequence[Tensor]]],
        given: Sequence[Any],
        affine: Mapping[fx.Node, tuple[Tensor, Tensor]],
        tensors: Sequence[Tensor],
    ) -> tuple[list[Any], list[tuple[int, Tensor, Tensor]], Any]:
        """Return values that wait, moments for the BatchNorms ahead, and the final outputs."""
        # ``known`` keeps the moments of the first run.
        values = {
            node: apply(_ToDevice, each, devices[node]) if node in devices else each
            for node, each in zip(spec.inputs, given, strict=True)
        }
        with holding(tensors):
            made = stages.run(number, values, lambda at, x: norms[at].normalised(x, affine[at]))
        outputs = stages.output(made) if spec is stages.stages[-1] else None
        moments = []
        for node in spec.ahead:
            x = made[node.all_input_nodes[0]]
            moments.append((x.numel() // x.shape[1], *apply(_Moments, x, known[node])))
        # Last, so that a recomputation, which stops once the backward has all it needs, skips it.
        return [put(node, made[node]) for node in spec.outputs], moments, outputs

    return run


def _key(node: fx.Node) -> Any:
    """Return the key of a waiting value: the name of an argument, or else its node."""
    return node.target if node.op == "placeholder" else node
