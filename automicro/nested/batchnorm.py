"""BatchNorm in parts that run in slices: each row is normalized with the statistics of all rows."""

# All slices pass one stage before any of them enters the next, so the means and variances of the
# BatchNorms are those of all rows. Between stages, the values of every slice wait on the host; the
# device holds one slice of one stage. Each slice of a stage is checkpointed, with the waiting
# values as its inputs. So the forward of a row is computed twice, as with any checkpointing.
#
# The statistics of a stage's BatchNorms are known by then, and are inputs of its slices: each slice
# is normalized with them, and the layer itself, in evaluation mode, only scales and shifts. So the
# gradients of mean and variance add up over all slices, and flow on to the previous stage, which
# computed these.
#
# The operations between two BatchNorms are read from a symbolic trace of the model (``torch.fx``),
# a list of operations with their inputs. A stage holds all operations that can run once some
# BatchNorms have the statistics of all rows, and before the next BatchNorms do. BatchNorms at equal
# depth in parallel branches share a stage. Models that cannot be traced, or that stages would
# compute differently, are refused with the reason.

import contextlib
import copy
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from automicro.batch.tensors import tensor_leaves
from automicro.batchnorm import sees_the_batch
from automicro.errors import UnsplittableModelError, text_of
from automicro.memory.budget import active_budget
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
    to_host,
    tolerance_of,
)
from automicro.state.capture import capture
from automicro.state.part import Replay
from automicro.torch_private import BUFFERS, AnyBatchNorm, all_versions, buffer_table, call_hooks
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
        self._refuse_inside()
        self._graph = self._trace(arguments)
        nodes = list(self._graph.nodes)
        # BatchNorms that use statistics of the batch, by the node that calls them, in order.
        self.norms = {node: layer for node in nodes if (layer := self._norm(node)) is not None}
        self._refuse_read_statistics(nodes)
        self._output = nodes[-1]
        self._code = fx.Interpreter(module, graph=self._graph)
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
                    # Computations that do not depend on the input run during the trace.
                    raise
                lines = text_of(error).splitlines() or [""]
                self.refuse(f"torch.fx cannot trace it ({type(error).__name__}: {lines[0][:160]})")

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undo changes of the trace, which computes values that do not depend on the input."""
        before = capture({"": self._module})
        names = {name for name, _ in self._module.named_buffers()}
        random = RandomState([])
        random.begin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
                # If the forward replaces a buffer, the trace leaves a proxy in its place.
                replaced = [path for path in before.changed() if path in names]
                has_drawn = random.has_moved
            finally:
                before.put_back()
                random.roll_back()
        if replaced:
            self.refuse(f"its forward changes the buffer {replaced[0]!r}")
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
        return Stage(own, list(inputs), outputs, ahead)

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
        """Compute one stage, and return its values by node."""
        code = copy.copy(self._code)
        code.env = dict(given)
        for node in self.stages[number].nodes:
            read = [each for each in node.all_input_nodes if isinstance(code.env[each], Tensor)]
            tensors = [code.env[each] for each in read]
            versions = all_versions(tensors)
            if node in self.norms:
                code.env[node] = normalise(node, *tensors)
            else:
                code.env[node] = code.run_node(node)
            for each, version, before in zip(read, all_versions(tensors), versions, strict=True):
                if version != before:
                    self._check_writes(node, each)
        return code.env

    def output(self, values: Mapping[fx.Node, Any]) -> Any:
        """Return the output of the module, from the values of the last stage."""
        return fx.node.map_arg(self._output.args[0], values.__getitem__)

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


def _normalised(layer: Any, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the output of a BatchNorm for some rows, with the statistics of all rows."""
    shape = [-1, *[1] * (x.dim() - 2)]
    deviation = (variance + layer.eps).sqrt().view(shape)
    normal = ((x.to(mean.dtype) - mean.view(shape)) / deviation).to(x.dtype)
    # A layer in evaluation mode treats its statistics as constants. These leave all as it is.
    zeros = torch.zeros_like(mean.detach())
    own = {"running_mean": zeros, "running_var": zeros + (1 - layer.eps)}
    if len(x) > 1:
        return cast(Tensor, _twin(layer, own, training=False)(normal))
    # Torch's CPU kernel (2.13) has a wrong backward for a single row whose gradient is in
    # channels-last order in memory, with a meaningless stride of rows.
    output = cast(Tensor, _twin(layer, own, training=False)(normal.contiguous()))
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return output


def _twin(layer: nn.Module, buffers: Mapping[str, Tensor], *, training: bool) -> nn.Module:
    """Return a layer with the same parameters and other buffers."""
    twin = copy.copy(layer)
    vars(twin).update({BUFFERS: {**buffer_table(layer), **buffers}, "training": training})
    return twin


def _commit(layer: Any, count: int, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as with one batch of all rows."""
    if not layer.training or layer.running_mean is None:
        return
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:
        momentum = 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    # Running variances are unbiased, as in torch.
    variance = variance * (count / (count - 1))
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


@torch.no_grad()
def _require_usual(name: str, layer: Any, x: Tensor) -> None:
    """Refuse a subclass that uses its statistics for anything but normalization."""
    if type(layer) in PLAIN or x.numel() <= x.shape[1]:
        return
    buffers = {name: each.clone() for name, each in layer.named_buffers(recurse=False)}
    random = RandomState([x.device])
    random.begin()
    # If a layer draws random numbers, both calls must draw the same.
    with random.replaying():
        trained = _twin(layer, buffers, training=True)(x)
    with random.replaying():
        found = _normalised(layer, x, *_moments(x))
    coarse = tolerance_of(x)
    if not torch.allclose(trained, found, rtol=coarse, atol=coarse):
        kind = type(layer).__name__
        refuse_exact(name, f"{kind} does more with the statistics than normalise")


def to_device(held: Tensor, device: torch.device) -> Tensor:
    """Copy a waiting tensor to a device."""
    if device.type != "cpu":
        return held.to(device, non_blocking=True)
    budget = active_budget()
    return held.clone() if budget is None else budget.transfer(held)


class _Moved(torch.autograd.Function):
    """A copy of a value between device and host; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, move: Callable[[Tensor], Tensor], back: Any) -> Tensor:
        ctx.back = back
        return move(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_twice()
        return ctx.back(gradients[0]), None, None


def split_at_norms(call: Call, stages: Stages) -> Any:
    """Return the outputs of a part with BatchNorm for all rows, computed slice by slice."""
    sizes = call.sizes()
    with naming(call.sizer, max(sizes)), torch.set_grad_enabled(call.is_differentiated):
        outputs = _through_stages(call, stages, sizes)
    call.sizer.end(sizes)
    return outputs


def _through_stages(call: Call, stages: Stages, sizes: Sequence[int]) -> Any:
    cut, versions = call.cut(call.batch, sizes), stages.versions()
    parameters = summed(call) if call.is_differentiated else tuple
    waiting = [{**stages.constants, **each} for each in cut.microbatches]
    devices: dict[fx.Node, torch.device] = {}
    statistics: dict[fx.Node, tuple[int, Tensor, Tensor]] = {}
    outputs = []
    for number, spec in enumerate(stages.stages):
        compute = _stage(stages, number, call.holding, devices)
        known = {node: statistics[node][1:] for node in spec.nodes if node in stages.norms}
        needed = {_key(node) for later in stages.stages[number + 1 :] for node in later.inputs}
        moments: list[Sequence[tuple[int, Tensor, Tensor]]] = []
        for size, values in zip(cut.sizes, waiting, strict=True):
            tensors = parameters()
            with call.holding(tensors):
                given = [stages.value_of(node, values) for node in spec.inputs]
            if torch.is_grad_enabled():
                stood = Standing(call, size, stages.replay(number))
                found = computed_again(compute, (given, known, tensors), {}, stood)
            else:
                found = compute(given, known, tensors)
            values.update(zip(spec.outputs, found[0], strict=True))
            for key in values.keys() - needed:
                # A value that no later stage needs would otherwise wait on the host until the end.
                del values[key]
            moments.append(found[1])
            outputs.append(found[2])
            del given, found  # otherwise they stay in memory during the next slice
        for node, of_slices in zip(spec.ahead, zip(*moments, strict=True), strict=True):
            statistics[node] = _combined(str(node.target), of_slices)
    if versions != stages.versions():
        stages.refuse("its forward changes other buffers, too")
    # Only after all stages have run, so that an error leaves running statistics unchanged.
    with torch.no_grad():
        for node, (count, *of_all) in statistics.items():
            _commit(stages.norms[node], count, *of_all)
    return joined(outputs[-len(cut.sizes) :], cut.sizes, call.num_rows)


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
) -> Callable[..., Any]:
    """Return the function that computes one stage of a slice, in forward and backward."""
    spec, is_first = stages.stages[number], True  # whether no slice has run yet

    def put(node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            devices[node] = value.device
            return apply(_Moved, value, to_host, _to(value.device))
        if tensor_leaves({"": value}):
            kind = type(value).__name__
            stages.refuse(f"{node.name} is a {kind} of tensors, but only a tensor can wait")
        return value

    def run(
        given: Sequence[Any],
        known: Mapping[fx.Node, tuple[Tensor, Tensor]],
        tensors: Sequence[Tensor],
    ) -> tuple[list[Any], list[tuple[int, Tensor, Tensor]], Any]:
        """Return values that wait, moments for the BatchNorms ahead, and the final outputs."""
        nonlocal is_first
        values = {
            node: apply(_Moved, each, _to(devices[node]), _back_to_host)
            if node in devices
            else each
            for node, each in zip(spec.inputs, given, strict=True)
        }
        with holding(tensors):
            made = stages.run(
                number, values, lambda at, x: _normalised(stages.norms[at], x, *known[at])
            )
        outputs = stages.output(made) if spec is stages.stages[-1] else None
        moments = []
        for node in spec.ahead:
            x = made[node.all_input_nodes[0]]
            # A few rows show how a layer uses its statistics.
            if is_first:
                _require_usual(str(node.target), stages.norms[node], x.detach()[:4])
            moments.append((x.numel() // x.shape[1], *_moments(x)))
        is_first = False
        # Last, so that a recomputation, which stops once the backward has all it needs, skips it.
        return [put(node, made[node]) for node in spec.outputs], moments, outputs

    return run


def _back_to_host(gradient: Tensor) -> Tensor:
    return to_host(gradient, waits=True)


def _to(device: torch.device) -> Callable[[Tensor], Tensor]:
    return functools.partial(to_device, device=device)


def _key(node: fx.Node) -> Any:
    """Return the key of a waiting value: the name of an argument, or else its node."""
    return node.target if node.op == "placeholder" else node
