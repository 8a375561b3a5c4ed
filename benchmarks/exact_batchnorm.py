"""BatchNorm with the statistics of the whole batch, in microbatches: a prototype, and its price.

    python -m benchmarks.exact_batchnorm [resnet18 resnet50] [--image 64] [--json FILE]

A model is cut at each BatchNorm into stages, from what ``torch.fx`` traces. All microbatches pass a
stage before any begins the next, so that means and variances are those of all rows. Between stages
values wait on the host. In the backward each stage is computed again, from what waits there:

- A stage begins with its BatchNorms in evaluation mode, for their statistics are known by then.
  The gradients of their weight and bias, added up over all microbatches, are the two sums that
  the gradient of a BatchNorm's input needs: of ``dy`` and of ``dy * xhat``.
- The stage before takes them: what came back through evaluation mode, less
  ``scale / N * (sum(dy) + xhat * sum(dy * xhat))``.

So every row is computed forward twice, as with checkpointing, and each BatchNorm's input goes to
the host and back. With ``keep_every=s`` only every s-th boundary waits for the backward, and what
lies between is computed once more. Needs torchvision; with timm, more models are tried.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import json
import operator
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from automicro import MemoryBudget, Microbatcher
from automicro.step.split_guard import sees_the_batch
from automicro.torch_private import AnyBatchNorm
from automicro.units import format_bytes
from benchmarks.sizes_of_peers import repair_torchvision

Loss = Callable[[Tensor, Tensor], Tensor]

KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}


class UncuttableModelError(ValueError):
    """A model's stages between BatchNorms cannot be told, or computing them would not be exact."""


# Statistics


@dataclass(frozen=True)
class Moments:
    """How many values, their means, and the sums of their squared distances, per channel.

    >>> x = torch.arange(8.0).reshape(4, 2)
    >>> both = Moments.of(x[:1]) + Moments.of(x[1:])
    >>> both.mean, both.variance(), both.variance(correction=1)
    (tensor([3., 4.]), tensor([5., 5.]), tensor([6.6667, 6.6667]))
    """

    count: int
    mean: Tensor
    distance: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Moments":
        """Of an input (rows, channels, …), in float32 at least."""
        count = x.numel() // x.shape[1]
        wide = x.to(_sums_dtype(x.dtype))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(wide, dims, correction=0)
        return cls(count, mean, variance * count)

    def __add__(self, other: "Moments") -> "Moments":
        """Of the values of both; Chan's rule, which loses no digits where means are large."""
        count = self.count + other.count
        apart = other.mean - self.mean
        between = apart.square() * (self.count * other.count / count)
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.distance + other.distance + between,
        )

    def variance(self, correction: int = 0) -> Tensor:
        return self.distance / (self.count - correction)


def _sums_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Norm:
    """One use of a BatchNorm within a step: its statistics, and the gradients that they need.

    Attributes:
        moments: of all rows, once all have arrived.
        weight: scale, a leaf of its own; ones where the layer has none.
        bias: shift, likewise.
    """

    def __init__(self, name: str, layer: Any) -> None:
        self._name, self._layer = name, layer
        self.moments: Moments | None = None
        self._sums: tuple[Tensor, Tensor] | None = None

    def see(self, x: Tensor) -> None:
        """Count the rows of a microbatch."""
        if x.shape[1] != self._layer.num_features:
            raise ValueError(
                f"{self._name} expects {self._layer.num_features} channels, got {x.shape[1]}"
            )
        seen = Moments.of(x)
        self.moments = seen if self.moments is None else self.moments + seen

    def begin(self) -> None:
        """All rows have arrived: take scale and shift for leaves, and the statistics as they are.

        Raises:
            ValueError: one value per channel, as torch refuses it.
        """
        assert self.moments is not None
        if self.moments.count == 1:
            raise ValueError(
                f"{self._name} expects more than 1 value per channel when training, and the whole "
                f"batch has 1"
            )
        mean = self.moments.mean
        layer = self._layer
        ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
        self.variance = self.moments.variance()
        self.weight = (ones if layer.weight is None else layer.weight.detach().to(mean.dtype)).view(
            -1
        )
        self.bias = (zeros if layer.bias is None else layer.bias.detach().to(mean.dtype)).view(-1)
        self.weight.requires_grad_()
        self.bias.requires_grad_()

    def __call__(self, x: Tensor) -> Tensor:
        assert self.moments is not None
        given = self.moments.mean, self.variance, self.weight, self.bias
        return F.batch_norm(x, *given, training=False, eps=self._layer.eps)

    def add(self, of_weight: Tensor | None, of_bias: Tensor | None) -> None:
        """Count what one microbatch gives to the gradients of scale and shift."""
        if of_weight is None or of_bias is None:
            return
        if self._sums is None:
            self._sums = of_weight, of_bias
        else:
            self._sums = self._sums[0] + of_weight, self._sums[1] + of_bias

    def through_statistics(self, x: Tensor) -> Tensor | None:
        """The part of the gradient of an input that comes through mean and variance."""
        assert self.moments is not None
        if self._sums is None:
            return None
        deviation = (self.variance + self._layer.eps).rsqrt()
        of_weight, of_bias = self._sums
        factor = self.weight.detach() * deviation / -self.moments.count
        slope = factor * of_weight * deviation
        offset = factor * of_bias - slope * self.moments.mean
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = x.to(slope.dtype)
        return torch.addcmul(offset.view(shape), wide, slope.view(shape)).to(x.dtype)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of the layer's own parameters."""
        for own, found in zip(
            (self._layer.weight, self._layer.bias), self._sums or (), strict=False
        ):
            if own is not None and own.requires_grad:
                yield own, found.to(own.dtype)

    def commit(self) -> None:
        """Count the batch in the running statistics, once."""
        layer, moments = self._layer, self.moments
        assert moments is not None
        if not layer.training or layer.running_mean is None:
            return
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
        layer.running_mean.lerp_(moments.mean.to(layer.running_mean.dtype), momentum)
        variance = moments.variance(correction=1)
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


# What waits


class Host:
    """Where values wait between stages: on the host, or where they are.

    Attributes:
        peak_bytes: the most that waited at once.
        moved_bytes: to the host and back.
    """

    def __init__(self, budget: MemoryBudget | None = None, *, moves: bool = True) -> None:
        self._budget = budget or MemoryBudget(None)
        self._moves = moves
        self._values: dict[Any, tuple[Any, Any]] = {}
        self._bytes = self.peak_bytes = self.moved_bytes = 0

    def put(self, key: Any, value: Any) -> None:
        self.drop(key)
        if not isinstance(value, Tensor):
            self._values[key] = value, None
            return
        held = value.detach()
        if self._moves:
            with self._budget.host():
                held = held.to("cpu", copy=True)
            self.moved_bytes += held.nbytes
        self._values[key] = held, value.device
        self._bytes += held.nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def get(self, key: Any) -> Any:
        held, device = self._values[key]
        if device is None or not self._moves:
            return held
        self.moved_bytes += held.nbytes
        return held.to(device) if device.type != "cpu" else self._budget.transfer(held)

    def drop(self, key: Any) -> None:
        held, device = self._values.pop(key, (None, None))
        if device is not None:
            self._bytes -= held.nbytes

    def __contains__(self, key: Any) -> bool:
        return key in self._values


# Stages


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, AnyBatchNorm) or super().is_leaf_module(m, module_qualified_name)


class Stage(NamedTuple):
    """What is computed between two BatchNorms.

    Attributes:
        nodes: in order.
        inputs: made by earlier stages.
        outputs: that later ones need.
        parameters: that nodes use.
        dead: of each node, what no later node of the stage needs.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    parameters: Sequence[nn.Parameter]
    dead: Sequence[Sequence[fx.Node]]


class StagedModel:
    """A model that takes a tensor of rows, cut into stages at its BatchNorms.

    Args:
        model: in the mode in which it is trained; layers in evaluation mode stay as they are.

    Raises:
        UncuttableModelError: it cannot be traced, or a stage would not compute what it does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        tracer = _Tracer()
        try:
            self._graph = tracer.trace(model)
        except Exception as error:
            raise UncuttableModelError(
                f"{type(model).__name__} cannot be traced, so its stages cannot be told: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. "
                "Use GroupNorm, or whole batches"
            ) from error
        self._modules = dict(model.named_modules())
        self._refuse_hooks()
        nodes = list(self._graph.nodes)
        self.norms = [node for node in nodes if self._is_norm(node)]
        self._level = self._levels(nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self._output = next(node for node in nodes if node.op == "output")
        self.stages = self._cut(nodes)
        for node in nodes:
            self._check_in_place(node)

    def _refuse_hooks(self) -> None:
        for name, module in self._modules.items():
            if any(
                getattr(module, each)
                for each in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
            ):
                raise UncuttableModelError(
                    f"{name or type(module).__name__} has hooks, which a traced model does not call"
                )

    def _is_norm(self, node: fx.Node) -> bool:
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            raise UncuttableModelError(f"{node.format_node()}: BatchNorm as a function")
        if node.op != "call_module":
            return False
        layer = self._modules[str(node.target)]
        if not sees_the_batch(layer):
            return False
        if type(layer) not in KNOWN:
            raise UncuttableModelError(
                f"{node.target} is a {type(layer).__name__}: only "
                f"{', '.join(each.__name__ for each in KNOWN)} are known to normalise and no more"
            )
        return True

    def _levels(self, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, int]:
        """The stage of each node: as early as what it needs allows."""
        levels: dict[fx.Node, int] = {}
        for node in nodes:
            needed = (levels[each] for each in node.all_input_nodes if each.op != "get_attr")
            levels[node] = max(needed, default=0) + (node in self.norms)
        levels[nodes[-1]] = max(levels.values())
        return levels

    def _cut(self, nodes: Sequence[fx.Node]) -> list[Stage]:
        level = self._level
        stages = []
        for number in range(max(level.values()) + 1):
            own = [
                node
                for node in nodes
                if level[node] == number
                and node.op in ("call_module", "call_function", "call_method")
            ]
            needed = dict.fromkeys(
                each
                for node in own + [self._output] * (level[self._output] == number)
                for each in node.all_input_nodes
                if each.op != "get_attr" and (level[each] < number or each.op == "placeholder")
            )
            outputs = [node for node in own if any(level[user] > number for user in node.users)]
            stages.append(
                Stage(own, list(needed), outputs, self._parameters(own), self._dead(own, outputs))
            )
        return stages

    def _parameters(self, nodes: Sequence[fx.Node]) -> list[nn.Parameter]:
        found: dict[nn.Parameter, None] = {}
        for node in nodes:
            if node.op == "call_module" and node not in self.norms:
                found.update(dict.fromkeys(self._modules[str(node.target)].parameters()))
            for each in node.all_input_nodes:
                if each.op == "get_attr":
                    value = operator.attrgetter(str(each.target))(self.model)
                    if isinstance(value, nn.Parameter):
                        found[value] = None
        return [each for each in found if each.requires_grad]

    def _dead(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[list[fx.Node]]:
        kept = {*outputs, *self._output.all_input_nodes}
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            last.update(dict.fromkeys([*node.all_input_nodes, node], node))
        return [
            [each for each, at in last.items() if at is node and each not in kept] for node in nodes
        ]

    def _written(self, node: fx.Node) -> fx.Node | None:
        """What a node writes into: its first argument, or nothing."""
        function = node.target
        is_method = node.op == "call_method"
        name = str(function) if is_method else getattr(function, "__name__", "")
        writes = (
            (node.op == "call_module" and getattr(self._modules[str(function)], "inplace", False))
            or function in IN_PLACE
            or bool(node.kwargs.get("inplace"))
            or (is_method and name.endswith("_") and not name.endswith("__"))
            or (node.op == "call_function" and name.endswith("_") and not name.endswith("__"))
            or (node.op == "call_function" and node.args[1:] == (True,))
        )
        given = node.args[0] if writes and node.args else None
        return given if isinstance(given, fx.Node) else None

    def _check_in_place(self, node: fx.Node) -> None:
        """Stages change the order of nodes, so nobody else may read what one writes into."""
        written = self._written(node)
        if written is None:
            return
        others = [user for user in written.users if user is not node]
        if others or written.op == "placeholder" or written.op == "get_attr":
            readers = ", ".join(map(str, others)) or "the caller"
            raise UncuttableModelError(f"{node} writes into {written}, which {readers} reads, too")

    def run(self, number: int, given: Mapping[fx.Node, Any], norms: Mapping[fx.Node, Norm]) -> Any:
        """Compute a stage, and return the values that are left, by node.

        Raises:
            UncuttableModelError: a node wrote where it was not known to.
        """
        stage = self.stages[number]
        values = dict(given)

        def value_of(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return operator.attrgetter(str(node.target))(self.model)
            return values[node]

        for node, dead in zip(stage.nodes, stage.dead, strict=True):
            written = self._written(node)
            if written in given and isinstance(values[written], Tensor):
                values[written] = values[written].clone()
            arguments = [value_of(each) for each in node.all_input_nodes]
            versions = [each._version for each in arguments if isinstance(each, Tensor)]
            if node in norms:
                values[node] = norms[node](arguments[0])
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
                values[node] = self._call(node, args, kwargs)
            if written is None and versions != [
                each._version for each in arguments if isinstance(each, Tensor)
            ]:
                raise UncuttableModelError(f"{node.format_node()} writes into its input")
            del arguments
            for each in dead:
                values.pop(each, None)
        return values

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self._modules[str(node.target)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def output(self, values: Mapping[fx.Node, Any]) -> Any:
        return fx.node.map_arg(self._output.args[0], lambda node: values[node])

    def level(self, node: fx.Node) -> int:
        return self._level[node]

    def first_use(self, node: fx.Node) -> int:
        return min(self._level[user] for user in node.users)

    def last_use(self, node: fx.Node) -> int:
        return max(self._level[user] for user in node.users)


class Result(NamedTuple):
    """What a step has found, before anything of the model has changed.

    Attributes:
        loss: of the whole batch.
        gradients: of the parameters.
        norms: that have seen the batch.
    """

    loss: Tensor
    gradients: Mapping[nn.Parameter, Tensor]
    norms: Sequence[Norm]

    def commit(self) -> None:
        """Add gradients to those of the parameters, and count the batch in running statistics."""
        for parameter, gradient in self.gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        with torch.no_grad():
            for norm in self.norms:
                norm.commit()


class ExactStep:
    """Forward and backward of a batch in microbatches, with statistics of all its rows.

    Nothing of the model changes before `Result.commit`: an error leaves all as it was.

    Args:
        model: see `StagedModel`.
        loss_fn: ``loss_fn(output, targets)``, a mean over rows.
        host: where values wait.
        keep_every: so many stages make a segment; only values that go from one to another wait for
            the backward, all others are made once more.
    """

    def __init__(
        self,
        model: nn.Module | StagedModel,
        loss_fn: Loss,
        host: Host | None = None,
        *,
        keep_every: int = 1,
    ) -> None:
        self.staged = model if isinstance(model, StagedModel) else StagedModel(model)
        self._loss_fn = loss_fn
        self._keep_every = keep_every
        self._new_host = host

    def __call__(self, x: Tensor, y: Tensor, microbatch_size: int) -> Result:
        """Compute, and give a result to commit.

        Args:
            x: rows, on the host or on the device.
            y: their targets.
            microbatch_size: rows of a microbatch; any number from 1.
        """
        buffers = [(each, each._version) for each in self.staged.model.buffers()]
        random = torch.get_rng_state()
        try:
            result = self._compute(x.split(microbatch_size), y.split(microbatch_size), len(x))
        except BaseException:
            torch.set_rng_state(random)
            raise
        if any(buffer._version != version for buffer, version in buffers):
            raise UncuttableModelError("the forward changes buffers beside those of BatchNorm")
        return result

    def _compute(self, xs: Sequence[Tensor], ys: Sequence[Tensor], rows: int) -> Result:
        self._xs, self._ys, self._rows = xs, ys, rows
        self._host = self._new_host or Host()
        self._random: dict[tuple[int, int], Tensor] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        staged = self.staged
        self._norms = {
            node: Norm(str(node.target), staged._modules[str(node.target)]) for node in staged.norms
        }
        last = len(staged.stages) - 1
        for number in range(last):
            self._forward(number, counts=True)
            for node in {each for stage in staged.stages[: number + 1] for each in stage.inputs}:
                if staged.last_use(node) == number and not self._waits(node, number, last):
                    self._drop(node)
        loss = self._last(last)
        for number in range(last - 1, -1, -1):
            if self._is_end(number, last):
                start = number // self._keep_every * self._keep_every
                for again in range(start, number):
                    self._forward(again, counts=False)
            self._backward(number)
        for norm in self._norms.values():
            for parameter, gradient in norm.gradients():
                self._add(parameter, gradient)
        return Result(loss, self._sums, list(self._norms.values()))

    def _waits(self, node: fx.Node, number: int, last: int) -> bool:
        """Whether a value that the forward needs no more waits for the backward."""
        staged, size = self.staged, self._keep_every
        made, used = staged.level(node), [staged.level(user) for user in node.users]
        is_of_last = made // size == last // size
        return is_of_last or any(each // size != made // size for each in used)

    def _is_end(self, number: int, last: int) -> bool:
        """Whether a stage is the last of a segment whose values were dropped."""
        size = self._keep_every
        return number // size != last // size and number % size == size - 1 and size > 1

    def _drop(self, node: fx.Node) -> None:
        for index in range(len(self._xs)):
            self._host.drop((node, index))

    def _given(self, number: int, index: int) -> dict[fx.Node, Any]:
        """What a stage needs of earlier ones, on the device; leaves where gradients are wanted."""
        given = {}
        for node in self.staged.stages[number].inputs:
            if node.op == "placeholder":
                is_first = node is self.staged.placeholders[0]
                given[node] = self._xs[index] if is_first else node.args[0]
                continue
            value = self._host.get((node, index))
            if isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled():
                value = value.detach().requires_grad_()
            given[node] = value
        return given

    @torch.no_grad()
    def _forward(self, number: int, *, counts: bool) -> None:
        """A stage of all microbatches; their values wait. ``counts`` the first time only."""
        stage = self.staged.stages[number]
        ahead = [norm for norm in self.staged.norms if self.staged.level(norm) == number + 1]
        for index in range(len(self._xs)):
            with self._drawing(number, index, again=not counts):
                values = self.staged.run(number, self._given(number, index), self._norms)
            if counts:
                for node in ahead:
                    source = node.all_input_nodes[0]
                    x = self._xs[index] if source.op == "placeholder" else values[source]
                    self._norms[node].see(x)
            for node in stage.outputs:
                value = values[node]
                if not isinstance(value, Tensor | int | float | torch.Size | None):
                    raise UncuttableModelError(
                        f"{node.format_node()}: a {type(value).__name__} goes over a BatchNorm"
                    )
                self._host.put((node, index), value)
            del values
        if counts:
            for node in ahead:
                self._norms[node].begin()

    @contextlib.contextmanager
    def _drawing(self, number: int, index: int, *, again: bool) -> Iterator[None]:
        """The same random numbers whenever a stage is computed again."""
        if not again:
            self._random[number, index] = torch.get_rng_state()
            yield
            return
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._random[number, index])
            yield

    def _last(self, number: int) -> Tensor:
        losses = []
        for index, y in enumerate(self._ys):
            given = self._given(number, index)
            values = self.staged.run(number, given, self._norms)
            output = self.staged.output(values)
            del values
            loss = self._loss_fn(output, y) * (len(y) / self._rows)
            del output
            losses.append(loss.detach())
            self._grad(number, index, given, [loss], [None])
            del given, loss
        self._drop_used(number)
        return torch.stack(losses).sum()

    def _backward(self, number: int) -> None:
        stage = self.staged.stages[number]
        for index in range(len(self._xs)):
            given = self._given(number, index)
            with self._drawing(number, index, again=True):
                values = self.staged.run(number, given, self._norms)
            made, gradients = [], []
            for node in stage.outputs:
                value, key = values[node], (node, index, "gradient")
                if not (isinstance(value, Tensor) and value.requires_grad):
                    continue
                gradient = self._host.get(key) if key in self._host else None
                self._host.drop(key)
                for user in node.users:
                    if user in self._norms:
                        more = self._norms[user].through_statistics(value.detach())
                        if more is not None:
                            gradient = more if gradient is None else more.add_(gradient)
                if gradient is not None:
                    made.append(value)
                    gradients.append(gradient)
                    del gradient
                del value
            del values
            if made:
                self._grad(number, index, given, made, gradients)
            del given, made, gradients
        self._drop_used(number)

    def _grad(
        self,
        number: int,
        index: int,
        given: Mapping[fx.Node, Any],
        made: list[Tensor],
        gradients: list[Any],
    ) -> None:
        """Gradients of what a stage was given wait; those of parameters and norms add up."""
        stage = self.staged.stages[number]
        norms = [self._norms[node] for node in stage.nodes if node in self._norms]
        leaves = [node for node, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
        wanted = [*(given[node] for node in leaves), *stage.parameters]
        for norm in norms:
            wanted += [norm.weight, norm.bias]
        if not wanted or not any(each.requires_grad for each in made):
            return
        found = torch.autograd.grad(made, wanted, gradients, allow_unused=True)
        for node, gradient in zip(leaves, found, strict=False):
            if gradient is None:
                continue
            key = node, index, "gradient"
            if key in self._host:
                gradient = gradient + self._host.get(key)
            self._host.put(key, gradient)
        rest = found[len(leaves) :]
        for parameter, gradient in zip(stage.parameters, rest, strict=False):
            if gradient is not None:
                self._add(parameter, gradient)
        of_norms = rest[len(stage.parameters) :]
        for at, norm in enumerate(norms):
            norm.add(of_norms[2 * at], of_norms[2 * at + 1])

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The first is kept as it is: nobody else has it."""
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient

    def _drop_used(self, number: int) -> None:
        """What this stage was the first to need, no stage before it needs."""
        for node in self.staged.stages[number].inputs:
            if self.staged.first_use(node) == number:
                self._drop(node)


def fitting_step(step: ExactStep, x: Tensor, y: Tensor, microbatch_size: int) -> int:
    """Halve microbatches until a step fits, commit it, and return their size."""
    while True:
        try:
            step(x, y, microbatch_size).commit()
        except torch.OutOfMemoryError:
            if microbatch_size == 1:
                raise
        else:
            return microbatch_size
        microbatch_size = -(-microbatch_size // 2)


# What it is compared with


@dataclass(frozen=True)
class Job:
    """A model, and one batch of it.

    Attributes:
        model: in training mode.
        x: images.
        y: classes.
        microbatch_size: of the ways that cut.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    microbatch_size: int

    @classmethod
    def of(
        cls, name: str, image: int, rows: int, microbatch_size: int, dtype: torch.dtype
    ) -> "Job":
        torch.manual_seed(0)
        model = make_model(name).to(dtype)
        x = torch.randn(rows, 3, image, image, dtype=dtype)
        return cls(model, x, torch.randint(10, (rows,)), microbatch_size)


def make_model(name: str) -> nn.Module:
    """One of torchvision's with random weights, without dropout, which no two cuts draw alike."""
    repair_torchvision()
    models = importlib.import_module("torchvision.models")
    options: dict[str, Any] = {"weights": None, "num_classes": 10}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    model: nn.Module = getattr(models, name)(**options).train()
    for layer in model.modules():
        if type(layer).__name__ == "StochasticDepth" or isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def whole(job: Job, host: Host) -> None:
    F.cross_entropy(job.model(job.x), job.y).backward()


def whole_offloaded(job: Job, host: Host) -> None:
    """What autograd saves waits on the host, each time that it is saved."""
    keys = iter(range(10**9))

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or tensor.nbytes < 4096:
            return tensor
        key = next(keys)
        host.put(key, tensor)
        return key

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor: Tensor = host.get(packed)
        host.drop(packed)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        whole(job, host)


class _Waiting(torch.autograd.Function):
    """A block that is computed again in the backward, from an input that waits on the host."""

    @staticmethod
    def forward(ctx: Any, block: Any, host: Host, x: Tensor, _: Tensor) -> Tensor:
        ctx.block, ctx.host, ctx.key = block, host, object()
        host.put(ctx.key, x)
        out: Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.host.get(ctx.key).detach().requires_grad_()
        ctx.host.drop(ctx.key)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, *gradients)
        return None, None, x.grad, None


@contextlib.contextmanager
def recomputing(model: nn.Module, host: Host | None = None) -> Iterator[None]:
    """Compute residual blocks again in the backward; with a host, their inputs wait there."""
    blocks = [
        each for each in model.modules() if type(each).__name__ in ("BasicBlock", "Bottleneck")
    ]
    wanted = torch.zeros((), requires_grad=True)
    for block in blocks:
        forward = block.forward
        if host is None:
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
        else:
            block.forward = functools.partial(_wait, forward, host, wanted)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _wait(forward: Any, host: Host, wanted: Tensor, x: Tensor) -> Any:
    return _Waiting.apply(forward, host, x, wanted)


def whole_recomputed(job: Job, host: Host) -> None:
    with recomputing(job.model):
        whole(job, host)


def whole_both(job: Job, host: Host) -> None:
    """Blocks are computed again, and their inputs wait on the host; the stem's tensors, too."""
    with recomputing(job.model, host):
        whole_offloaded(job, host)


def microbatched(job: Job, host: Host) -> None:
    """Ordinary BatchNorm: not exact."""
    Microbatcher(
        job.model,
        loss_fn=nn.CrossEntropyLoss(),
        microbatch_size=job.microbatch_size,
        batchnorm="ignore",
        probe=False,
        device="cpu",
    ).backward((job.x, job.y))


def microbatched_recomputed(job: Job, host: Host) -> None:
    with recomputing(job.model):
        microbatched(job, host)


def exact(job: Job, host: Host, keep_every: int = 1) -> None:
    step = ExactStep(job.model, F.cross_entropy, host, keep_every=keep_every)
    step(job.x, job.y, job.microbatch_size).commit()


Way = Callable[[Job, Host], None]
WAYS: dict[str, Way] = {
    "whole batch": whole,
    "whole, blocks recomputed": whole_recomputed,
    "whole, offloaded": whole_offloaded,
    "whole, recomputed + offloaded": whole_both,
    "microbatches": microbatched,
    "microbatches, recomputed": microbatched_recomputed,
    "exact": exact,
    "exact, every 4th kept": functools.partial(exact, keep_every=4),
}
CUTS = {name for name in WAYS if not name.startswith("whole")}
EXACT = [name for name in WAYS if not name.startswith("microbatches")]


# Figures


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def statistics_of(model: nn.Module) -> Tensor:
    return torch.cat([each.flatten().double() for each in model.buffers()])


def apart(found: Tensor, right: Tensor) -> float:
    """The distance of two vectors, as a share of the length of the right one."""
    return float((found - right).norm() / right.norm())


def measure_exactness(
    name: str, image: int, rows: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Loss, gradient and running statistics against the whole batch, in float64."""
    found = []
    right = Job.of(name, image, rows, rows, torch.float64)
    loss = F.cross_entropy(right.model(right.x), right.y)
    loss.backward()
    for size in sizes:
        job = Job.of(name, image, rows, size, torch.float64)
        result = ExactStep(job.model, F.cross_entropy)(job.x, job.y, size)
        result.commit()
        line = {
            "model": name,
            "rows": rows,
            "microbatch": size,
            "loss": abs(float(result.loss - loss)),
            "gradient": apart(gradient_of(job.model), gradient_of(right.model)),
            "statistics": apart(statistics_of(job.model), statistics_of(right.model)),
        }
        if size > 1:
            plain = Job.of(name, image, rows, size, torch.float64)
            microbatched(plain, Host())
            line["gradient of ordinary BatchNorm"] = apart(
                gradient_of(plain.model), gradient_of(right.model)
            )
            line["statistics of ordinary BatchNorm"] = apart(
                statistics_of(plain.model), statistics_of(right.model)
            )
        found.append(line)
    return found


def _flops(way: Way, job: Job) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        way(job, Host(moves=False))
    return counter.get_total_flops()


def measure_cost(
    name: str, image: int, rows: int, sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Peaks under a budget, forwards per row by multiplications, and seconds in turns."""
    cases = [(way, rows) for way in WAYS if way not in CUTS]
    cases += [(way, size) for size in sizes for way in WAYS if way in CUTS]
    right = Job.of(name, image, rows, rows, torch.float32)
    whole_flops = _flops(whole, right)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        right.model.eval()(right.x)
    forward_flops = counter.get_total_flops()
    lines = []
    for way, size in cases:
        job = Job.of(name, image, rows, size, torch.float32)
        flops = _flops(WAYS[way], job)
        job.model.zero_grad()
        budget = MemoryBudget(None)
        host = Host(budget)
        with budget, budget.host():
            x, y = job.x.clone(), job.y.clone()
        budget.track(job.model)
        moved = Job(job.model, x, y, size)
        with budget:
            WAYS[way](moved, host)
        lines.append(
            {
                "model": name,
                "image": image,
                "rows": rows,
                "way": way,
                "microbatch": size if way in CUTS else None,
                "peak_bytes": budget.peak_bytes,
                "host_bytes": host.peak_bytes,
                "moved_bytes_per_row": host.moved_bytes / rows,
                "forwards_per_row": 1 + (flops - whole_flops) / forward_flops,
                "seconds": [],
            }
        )
        del job, moved, x, y, host, budget
        gc.collect()
    jobs = [Job.of(name, image, rows, size, torch.float32) for _, size in cases]
    for turn in range(rounds + 1):
        for line, job in zip(lines, jobs, strict=True):
            job.model.zero_grad()
            start = time.process_time()
            WAYS[line["way"]](job, Host())
            if turn:
                line["seconds"].append(time.process_time() - start)
    for line in lines:
        line["times"] = statistics.median(
            mine / other for mine, other in zip(line["seconds"], lines[0]["seconds"], strict=True)
        )
    return lines


def measure_limit(
    name: str, image: int, limit: str, microbatch_size: int, most: int
) -> list[dict[str, Any]]:
    """The largest batch, by powers of two, of which a step fits into a limit."""
    found = []
    for way in EXACT:
        rows, fitted, host_bytes = microbatch_size, 0, 0
        while rows <= most:
            job = Job.of(name, image, 1, microbatch_size, torch.float32)
            budget = MemoryBudget(limit).track(job.model)
            host = Host(budget)
            with budget, budget.host():
                x, y = torch.randn(rows, 3, image, image), torch.randint(10, (rows,))
            try:
                with budget:
                    WAYS[way](Job(job.model, x, y, microbatch_size), host)
            except torch.OutOfMemoryError:
                break
            fitted, host_bytes = rows, host.peak_bytes
            rows *= 2
            del job, x, y, host
            gc.collect()
        found.append(
            {
                "model": name,
                "image": image,
                "limit": limit,
                "way": way,
                "microbatch": microbatch_size if way in CUTS else None,
                "rows": fitted,
                "is_more": fitted * 2 > most,
                "host_bytes": host_bytes,
            }
        )
    return found


TORCHVISION = (
    "resnet18 resnet50 resnext50_32x4d wide_resnet50_2 vgg11_bn densenet121 googlenet inception_v3 "
    "mobilenet_v2 mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 efficientnet_b0 "
    "efficientnet_v2_s regnet_y_400mf convnext_tiny vit_b_16 maxvit_t"
).split()
TIMM = (
    "resnet18 resnetv2_50 resnest14d efficientnet_b0 mobilenetv3_small_100 regnety_002 hrnet_w18 "
    "dpn68 cspresnet50 ghostnet_100 vovnet39a levit_128s"
).split()
OTHERS = {
    "torchvision.segmentation": ["deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"],
    "torchvision.detection": ["fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn"],
}


def try_cutting(source: str, name: str) -> dict[str, Any]:
    """Whether a model can be cut, into how many stages, and whether a small step is exact."""
    torch.manual_seed(0)
    line: dict[str, Any] = {"source": source, "model": name}
    with contextlib.redirect_stderr(None):
        if source == "timm":
            model = importlib.import_module("timm").create_model(name, num_classes=10)
        elif source == "torchvision":
            model = make_model(name)
        else:
            models = importlib.import_module(f"torchvision.models.{source.rpartition('.')[2]}")
            model = getattr(models, name)(weights=None, weights_backbone=None)
    model = model.double().train()
    line["batchnorms"] = sum(sees_the_batch(each) for each in model.modules())
    if not line["batchnorms"]:
        return {**line, "result": "has no BatchNorm"}
    try:
        staged = StagedModel(model)
        line["stages"] = len(staged.stages)
        image = {"inception_v3": 96, "levit_128s": 224, "maxvit_t": 224}.get(name, 64)
        x = torch.randn(4, 3, image, image, dtype=torch.float64)
        y = torch.randint(10, (4,))

        def loss_fn(output: Any, targets: Tensor) -> Tensor:
            rows = output["out"].mean((2, 3)) if isinstance(output, dict) else output
            return F.cross_entropy(rows, targets)

        state = {key: value.clone() for key, value in model.state_dict().items()}
        for layer in model.modules():
            if hasattr(layer, "drop_prob"):
                layer.drop_prob = 0.0
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        loss_fn(model(x), y).backward()
        right = gradient_of(model).clone()
        model.load_state_dict(state)
        model.zero_grad()
        ExactStep(staged, loss_fn)(x, y, 3).commit()
        line["gradient"] = apart(gradient_of(model), right)
        line["result"] = "exact" if line["gradient"] < 1e-9 else "differs"
    except UncuttableModelError as error:
        line["result"] = f"refused: {error}"
    except Exception as error:
        line["result"] = f"fails: {type(error).__name__}: {error}"
    return line


# Pages


def table(lines: Sequence[Mapping[str, Any]], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """As Markdown; a column's function gets a line."""
    rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    rows += ["| " + " | ".join(show(line) for show in columns.values()) + " |" for line in lines]
    return "\n".join(rows)


def _number(key: str, form: str) -> Callable[[Any], str]:
    return lambda line: format(line[key], form) if line.get(key) is not None else ""


def _text(key: str) -> Callable[[Any], str]:
    return lambda line: str(line.get(key) if line.get(key) is not None else "")


def _bytes(key: str) -> Callable[[Any], str]:
    return lambda line: format_bytes(int(line[key]))


EXACTNESS = {
    "Model": _text("model"),
    "Rows": _text("rows"),
    "Microbatch": _text("microbatch"),
    "Loss": _number("loss", ".0e"),
    "Gradient": _number("gradient", ".0e"),
    "Running statistics": _number("statistics", ".0e"),
    "Gradient, ordinary": _number("gradient of ordinary BatchNorm", ".0e"),
    "Statistics, ordinary": _number("statistics of ordinary BatchNorm", ".0e"),
}
COST = {
    "Model": _text("model"),
    "Rows": _text("rows"),
    "Way": _text("way"),
    "Microbatch": _text("microbatch"),
    "Peak, device": _bytes("peak_bytes"),
    "Peak, host": _bytes("host_bytes"),
    "Moved per row": _bytes("moved_bytes_per_row"),
    "Forwards per row": _number("forwards_per_row", ".2f"),
    "Time": _number("times", ".2f"),
}
LIMIT = {
    "Model": _text("model"),
    "Limit": _text("limit"),
    "Way": _text("way"),
    "Microbatch": _text("microbatch"),
    "Largest batch": lambda line: f"{line['rows']}{' or more' if line['is_more'] else ''}",
    "Host": _bytes("host_bytes"),
}
CUTTABLE = {
    "Source": _text("source"),
    "Model": _text("model"),
    "BatchNorms": _text("batchnorms"),
    "Stages": _text("stages"),
    "Result": _text("result"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--image", type=int, default=64, help="pixels of a side (64)")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32], help="batches (16 32)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 8], help="sizes (2 8)")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are timed (3)")
    parser.add_argument("--limit", default="128MiB", help="for the largest batch (128MiB)")
    parser.add_argument("--most", type=int, default=256, help="largest batch that is tried (256)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["exactness", "cost", "limit", "cuttable"],
        default=["exactness", "cost", "limit", "cuttable"],
        help="what to measure (all)",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write raw figures there")
    arguments = parser.parse_args()
    image, rows = arguments.image, arguments.rows
    repair_torchvision()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }

    def show(part: str, lines: list[dict[str, Any]], columns: Any) -> None:
        found[part] = lines
        print(f"\n## {part}\n\n{table(lines, columns)}", flush=True)

    if "exactness" in arguments.parts:
        lines = []
        for name in arguments.models:
            lines += measure_exactness(name, image, rows[0], [1, *arguments.microbatches])
        show("exactness", lines, EXACTNESS)
    if "cost" in arguments.parts:
        lines = []
        for name in arguments.models:
            for each in rows:
                lines += measure_cost(name, image, each, arguments.microbatches, arguments.rounds)
        show("cost", lines, COST)
    if "limit" in arguments.parts:
        lines = []
        for name in arguments.models:
            size = arguments.microbatches[0]
            lines += measure_limit(name, image, arguments.limit, size, arguments.most)
        show("limit", lines, LIMIT)
    if "cuttable" in arguments.parts:
        tried = [("torchvision", name) for name in TORCHVISION]
        tried += [(source, name) for source, names in OTHERS.items() for name in names]
        with contextlib.suppress(ImportError):
            importlib.import_module("timm")
            tried += [("timm", name) for name in TIMM]
        show("cuttable", [try_cutting(*each) for each in tried], CUTTABLE)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
