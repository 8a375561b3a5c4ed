"""A part with BatchNorm in slices: normalised with the statistics of all its rows.

All slices pass a stage (see `stages`) before any begins the next, so that the means and variances
of its BatchNorms are those of all rows. Between stages values wait on the host, those of every
slice; on the device is one slice of one stage. In the backward each stage is computed again from
what waits there, the last one first. So a row is computed forward twice, as with checkpointing.

A stage begins with its BatchNorms in evaluation mode, for their statistics are known by then. The
gradients of their weight and bias, added up over all slices, are the two sums that the gradient of
a BatchNorm's input needs: of ``dy`` and of ``dy · x̂``. The stage before it takes them: what came
back through evaluation mode, less ``weight / deviation / N · (Σ dy + x̂ · Σ dy · x̂)``.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from automicro.batch.device import on_host
from automicro.batch.tensors import tensor_leaves
from automicro.errors import UnsplittableModelError
from automicro.memory.budget import active_budget
from automicro.nested.slices import (
    Call,
    Cut,
    Gradients,
    Joined,
    Slice,
    Standing,
    aliases_of,
    refuse_twice,
    tolerance_of,
    with_inputs,
)
from automicro.nested.stages import PLAIN, SCALE_AND_SHIFT, Stages, in_evaluation
from automicro.torch_private import all_versions
from automicro.transaction.rng import RandomState


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
        with call.naming(max(self.sizes)):
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
    ctx.call, ctx.paths = replace(call, batch=template), paths
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
        inputs = dict(zip(paths, tensors, strict=False))
        batch = with_inputs(call.batch, {path: each.detach() for path, each in inputs.items()})
        ctx.standing = Standing(call, max(call.sizes()))
        with ctx.standing.first():
            done.joined = joined = done.forward(batch)
        keep_for_backward(ctx, call, paths, tensors)
        done.call = ctx.call
        ctx.done = done
        return outputs_to_autograd(ctx, joined)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        refuse_twice()
        call, done = ctx.call, ctx.done
        batch, inputs, parameters = kept_for_backward(ctx)
        if done is None:
            raise RuntimeError(
                "what waited for the backward of a part with BatchNorm was used by an earlier one; "
                "call backward once (retain_graph=True does not keep it), or compute it again"
            )
        ctx.done = None
        sums = Gradients(inputs, parameters, call.layout.row_dims(batch))
        with ctx.standing, ctx.autocast.again():
            done.backward(batch, ctx.paths, given, parameters, sums)
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
