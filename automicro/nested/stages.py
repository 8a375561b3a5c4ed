"""A model cut at its BatchNorms, so that all rows can arrive at one before any go on.

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
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from automicro.batch.tensors import tensor_leaves
from automicro.batchnorm import sees_the_batch
from automicro.errors import UnsplittableModelError, text_of
from automicro.memory.oom import Failure, classify
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
        """Stages change the order, so nobody else may read what a node writes into."""
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
