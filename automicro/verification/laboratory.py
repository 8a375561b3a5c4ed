"""Running a model on a batch, whole or split, under controlled conditions.

Every run starts from the same state, random generators included, and leaves no trace.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.batchnorm import find_batchnorm
from automicro.checking.reading import Compared
from automicro.checking.state import MISSING
from automicro.errors import text_of
from automicro.loss.averages import Average
from automicro.loss.conventions import Convention, choose_convention
from automicro.loss.passes import check_own_graph
from automicro.memory.oom import ignoring_errors
from automicro.microbatcher import Microbatcher
from automicro.modules import ModuleIndex
from automicro.options import check_loss
from automicro.reach import captured_modules
from automicro.state.capture import capture
from automicro.torch_private import buffer_table, forward_of_class, num_nodes_made
from automicro.transaction.gradients import Gradients
from automicro.transaction.rng import RandomState, devices_of
from automicro.transaction.transaction import Part, Transaction
from automicro.values import is_generator
from automicro.verification.causes import Rows, measure_rows, weights_by
from automicro.verification.informative_rows import Choice, choose_rows
from automicro.verification.silence import Silence


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A model, and what computes its loss."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    loss_fn: Callable[..., Any] | None
    forward: Callable[[Any, Any], Any] | None

    @property
    def roots(self) -> dict[str, nn.Module]:
        """Every module that takes part, by the prefix of its names."""
        roots = {"": self.model}
        roots |= {f"modules[{index}].": module for index, module in enumerate(self.modules)}
        if isinstance(self.loss_fn, nn.Module) and self.loss_fn not in roots.values():
            roots["loss_fn."] = self.loss_fn
        return roots

    @property
    def tops(self) -> dict[str, nn.Module]:
        """The same by what paths begin with."""
        return {prefix.rstrip("."): root for prefix, root in self.roots.items()}

    def functions(self) -> dict[str, Any]:
        """What is called: of the caller, and of the classes of modules."""
        named = named_modules(self.roots)
        found = {f"{name}.forward": forward_of_class(module) for name, module in named}
        return {**found, "forward": self.forward, "loss_fn": self.loss_fn}

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        roots = self.roots.values()
        return [each for root in roots for each in (*root.parameters(), *root.buffers())]

    @property
    def loss_name(self) -> str:
        """What computes the loss, by a name that its author knows."""
        function = self.forward or self.loss_fn
        while isinstance(function, functools.partial):
            function = function.func
        if function is None:
            return f"{type(self.model).__name__}'s own loss"
        name = str(getattr(function, "__name__", type(function).__name__))
        return "the loss" if name == "<lambda>" else name

    def why_not_copied(self) -> str:
        """Why a copy cannot stand for the originals; empty where it can."""
        for name, function in (("forward", self.forward), ("loss_fn", self.loss_fn)):
            captured = [] if isinstance(function, nn.Module) else captured_modules(function)
            if captured:
                return f"{name} uses a {type(captured[0]).__name__} past its arguments"
        try:
            self.copy()
        except Exception as error:
            first = text_of(error).partition(". ")[0].partition("\n")[0]
            return f"the model cannot be copied ({type(error).__name__}: {first.rstrip('.')})"
        return ""

    def copy(self, dtype: torch.dtype | None = None) -> "Examined":
        """A deep copy, without gradients, its floating point tensors of this type if given."""
        model, modules, loss_fn, forward = copy.deepcopy(
            (self.model, self.modules, self.loss_fn, self.forward)
        )
        if dtype is not None:
            loss_fn, forward = _converted(loss_fn, dtype), _converted(forward, dtype)
        twin = Examined(model=model, modules=modules, loss_fn=loss_fn, forward=forward)
        for root in twin.roots.values():
            if dtype is not None:
                _convert(root, dtype)
            for parameter in root.parameters():
                parameter.grad = None
        return twin

    def captured(self) -> list[nn.Module]:
        """Modules that only the functions know of."""
        known = {id(module) for root in self.roots.values() for module in root.modules()}
        functions = (self.forward, self.loss_fn)
        found = [m for f in functions if not isinstance(f, nn.Module) for m in captured_modules(f)]
        return [module for module in found if id(module) not in known]

    def lowest_dtype(self) -> torch.dtype:
        """The least precise floating point type of its parameters and buffers."""
        found = {each.dtype for each in self.tensors() if each.dtype.is_floating_point}
        return min(found, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A batch, or anything with tensors in it, with its floating point tensors of this type."""

    def converted(each: Tensor) -> Tensor:
        if not each.is_floating_point():
            return each
        new = each.detach().to(dtype)  # a leaf stays one: what hangs on a graph cannot be split
        return new.requires_grad_() if each.requires_grad else new

    return map_tensors(value, converted)


def _convert(root: nn.Module, dtype: torch.dtype) -> None:
    root.to(dtype)
    for module in root.modules():
        _convert_attributes(module, dtype)


def _convert_attributes(owner: Any, dtype: torch.dtype) -> None:
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            vars(owner)[name] = cast(value, dtype)


def _converted(function: Any, dtype: torch.dtype) -> Any:
    if isinstance(function, functools.partial):
        keywords: Mapping[str, Any] = cast(dict(function.keywords), dtype)
        return functools.partial(function.func, *cast(function.args, dtype), **keywords)
    is_function = function is None or hasattr(function, "__code__")
    if not is_function and not isinstance(function, nn.Module) and hasattr(function, "__dict__"):
        _convert_attributes(function, dtype)
    return function


def named_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module in these, each once, by its name behind the root's prefix."""
    memo: set[nn.Module] = set()
    for prefix, root in roots.items():
        for name, module in root.named_modules(memo):
            yield f"{prefix}{name}".rstrip("."), module


def own_generators(roots: Mapping[str, nn.Module]) -> list[tuple[str, Any]]:
    """Generators that modules keep as attributes, by their paths."""
    return [
        (f"{owner}.{name}".lstrip("."), value)
        for owner, module in named_modules(roots)
        for name, value in vars(module).items()
        if is_generator(value)
    ]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is held still during a run, to see whether it is the cause of a difference.

    Attributes:
        loss_average: as in `Microbatcher`.
        batchnorm: let no layer normalise over the rows.
        buffers: let every forward begin with the same buffers.
        attributes: with which every forward begins anew: paths of plain attributes, and variables
            of functions, behind an arrow, which are held all together.
    """

    loss_average: Any = "auto"
    batchnorm: bool = False
    buffers: bool = False
    attributes: tuple[str, ...] = ()

    def but(self, **changes: Any) -> "Conditions":
        """The same with something changed."""
        return replace(self, **changes)


@dataclass(kw_only=True)
class Stage:
    """A model set up for one run.

    Attributes:
        subject: a copy of the caller's, or the caller's own.
        forward: the caller's, where there is one.
        silence: what the run drew, and its precision.
        begin_forward: called before each forward.
    """

    subject: Examined
    forward: Callable[[Any, Any], Any] | None
    silence: Silence
    begin_forward: list[Callable[[], None]]

    @property
    def roots(self) -> dict[str, nn.Module]:
        """Every module that takes part, by the prefix of its names."""
        return self.subject.roots

    def gradients(self) -> dict[str, Tensor | None]:
        """By parameter, on the host and in double precision."""
        found: dict[str, Tensor | None] = {}
        for prefix, root in self.roots.items():
            for name, parameter in root.named_parameters():
                gradient = parameter.grad
                if gradient is not None:
                    gradient = _dense(gradient).to("cpu", torch.float64, copy=True)
                found[f"{prefix}{name}"] = gradient
        return found


class Laboratory:
    """A model and a batch.

    Args:
        subject: the caller's model and loss.
        batch: the caller's batch.
        batch_layout: where its rows lie; see `split_batch`.
        device: where the model computes.
        dtype: the precision of copies; None for the model's own.
    """

    def __init__(
        self,
        subject: Examined,
        batch: Any,
        batch_layout: int | Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.subject = subject
        self.layout = BatchLayout(batch_layout)
        self._batch_layout = batch_layout
        self.why_in_place = subject.why_not_copied()
        self.dtype = None if self.why_in_place else dtype
        self._batch = batch
        self._device = device
        if ModuleIndex(subject.roots.values()).is_lazy:
            self._materialize()

    @property
    def is_accelerated(self) -> bool:
        """Whether the model computes elsewhere than on a CPU."""
        return self._device.type != "cpu"

    def in_own_precision(self) -> "Laboratory":
        """The same, nothing converted."""
        return Laboratory(self.subject, self._batch, self._batch_layout, self._device, None)

    def batch(self, rows: Sequence[int] | None = None) -> Any:
        """A copy of the batch, or of some of its rows, in the precision of the runs."""
        batch = self._batch if rows is None else self.layout.take_rows(self._batch, rows)
        try:
            batch = copy.deepcopy(batch)
        except Exception:  # tensors inside a graph, opaque objects: only tensors are copied then
            batch = map_tensors(batch, _clone, isolate=True)
        return batch if self.dtype is None else cast(batch, self.dtype)

    def on_device(self, batch: Any) -> Any:
        """A batch where the model computes."""
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def whole(self, conditions: Conditions, rows: Sequence[int] | None = None) -> Compared:
        """One plain forward and backward of the whole batch: what splitting has to give."""
        with self.stage(conditions) as stage:
            return self.run_whole(stage, self.on_device(self.batch(rows)))

    def run_whole(self, stage: Stage, batch: Any) -> Compared:
        """The same on a stage and a batch that the caller wants to look at afterwards."""
        convention = choose_convention(
            stage.subject.model, forward=stage.forward, loss_fn=stage.subject.loss_fn
        )
        first_node = num_nodes_made()
        output = convention.train(stage.subject.model, batch)
        loss = check_loss(output.loss)
        check_own_graph(loss, first_node)
        # What splits add up may have been given as parts only.
        losses = {name: float(part.detach()) for name, part in output.losses.items()}
        torch.autograd.backward(loss)
        return Compared(loss=float(loss.detach()), losses=losses, gradients=stage.gradients())

    def draws_repeat(self, stage: Stage, batch: Any) -> bool:
        """Whether parts of a batch that has run on this stage draw what the first rows did."""
        half = self.layout.num_rows(batch) // 2
        convention = choose_convention(
            stage.subject.model, forward=stage.forward, loss_fn=stage.subject.loss_fn
        )
        with ignoring_errors():  # that a part cannot run is told where sizes are compared
            for rows in (range(half), range(half, self.layout.num_rows(batch))):
                convention.train(stage.subject.model, self.layout.take_rows(batch, rows))
            return stage.silence.seeds.repeat
        return False

    def split(
        self, conditions: Conditions, size: int, rows: Sequence[int] | None = None
    ) -> Compared:
        """The whole batch in microbatches of at most so many rows, by a `Microbatcher`."""
        with self.stage(conditions) as stage:
            subject = stage.subject
            result = Microbatcher(
                subject.model,
                loss_fn=subject.loss_fn,
                forward=stage.forward,
                modules=subject.modules,
                microbatch_size=size,
                loss_average=conditions.loss_average,
                batchnorm="ignore",
                batch_layout=self._batch_layout,
                device=self._device,
                probe=False,
            ).backward(self.batch(rows))
            losses = {name: float(part) for name, part in result.losses.items()}
            return Compared(loss=float(result.loss), losses=losses, gradients=stage.gradients())

    @contextlib.contextmanager
    def stage(self, conditions: Conditions) -> Iterator[Stage]:
        """The model in its first state, conditions applied; undone at the end."""
        default = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.callback(torch.set_default_dtype, default)
            subject = self.subject if self.why_in_place else self.subject.copy(self.dtype)
            drawing = devices_of(subject.roots.values(), self._device)
            own = () if self.why_in_place else subject.tensors()  # of a copy, they may change
            captured = capture({**subject.tops, **subject.functions()}, skip=own)
            stack.callback(captured.put_back)
            undo = Transaction([RandomState(drawing), *self._gradients_in_place()])
            stack.callback(undo.roll_back)
            undo.begin()
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            if conditions.batchnorm:
                _hold_batchnorm(subject.roots.values())
            stage = Stage(
                subject=subject,
                forward=None,
                silence=Silence(),
                begin_forward=self._resets(subject, conditions),
            )
            stage.begin_forward.append(
                lambda: stage.silence.seeds.begin(each for _, each in own_generators(stage.roots))
            )
            stage.forward = _announced(stage, stack)
            stack.enter_context(stage.silence)
            yield stage

    def _gradients_in_place(self) -> list[Part]:
        """What puts back the gradients of the caller's own modules."""
        if not self.why_in_place:
            return []
        roots = [*self.subject.roots.values(), *self.subject.captured()]
        return [Gradients({id(p): p for root in roots for p in root.parameters()}.values())]

    def _resets(self, subject: Examined, conditions: Conditions) -> list[Callable[[], None]]:
        """What puts back, before each forward, what the one before it changed."""
        roots = subject.roots
        random_state = RandomState(devices_of(roots.values(), self._device))
        random_state.begin()
        resets = [random_state.roll_back, random_state.begin]
        modules = dict(named_modules(roots))
        held = dict(own_generators(roots))
        if conditions.buffers:
            held |= {f"{name}._buffers": buffer_table(each) for name, each in modules.items()}
        places = []
        variables = [path for path in conditions.attributes if path.startswith("→")]
        held |= subject.functions() if variables else {}
        for path in sorted({*conditions.attributes} - {*variables}):
            owner, _, name = path.rpartition(".")
            table = vars(modules[owner])
            held[path] = table.get(name, MISSING)
            places.append((table, name, held[path]))
        captured = capture(held, skip=roots.values())

        def put_back() -> None:
            captured.put_back()
            for table, name, value in places:
                if value is MISSING:
                    table.pop(name, None)
                else:
                    table[name] = value

        return [*resets, put_back]

    def _materialize(self) -> None:
        """Let a copy's lazy modules take their shapes, and examine that copy from now on."""
        if self.why_in_place:
            raise ValueError(
                f"the model has lazy modules without a shape yet, and {self.why_in_place}; run one "
                "forward first"
            )
        random_state = RandomState(devices_of(self.subject.roots.values(), self._device))
        random_state.begin()
        try:
            self.subject = subject = self.subject.copy()
            convention = choose_convention(
                subject.model, forward=subject.forward, loss_fn=subject.loss_fn
            )
            batch = map_tensors(self._batch, lambda tensor: tensor.detach().clone(), isolate=True)
            with torch.no_grad():
                convention.train(subject.model, self.on_device(batch))
        finally:
            random_state.roll_back()


def _dense(gradient: Tensor) -> Tensor:
    """Numbers of a gradient that is sparse or complex, too: real ones, two for a complex one."""
    values = gradient.detach()
    values = values if values.layout is torch.strided else values.to_dense()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _announced(stage: Stage, stack: contextlib.ExitStack) -> Callable[[Any, Any], Any] | None:
    """Let the stage know of each forward, whichever way the loss is computed."""

    def begin(*ignored: Any) -> None:
        for reset in stage.begin_forward:
            reset()

    own = stage.subject.forward
    if own is None:
        handle = stage.subject.model.register_forward_pre_hook(begin)
        stack.callback(handle.remove)
        return None

    def forward(model: Any, microbatch: Any) -> Any:
        begin()
        return own(model, microbatch)

    return forward


def _hold_batchnorm(roots: Any) -> None:
    for root in roots:
        names = set(find_batchnorm(root))
        layers = [m for n, m in root.named_modules() if (n or type(m).__name__) in names]
        for layer in layers:
            layer.eval()
        for layer in layers:
            if find_batchnorm(layer):  # without running statistics there are no others to use
                layer.forward = nn.Identity().forward


_MAX_ROWS = 12


def measure(laboratory: Laboratory, conditions: Conditions, indices: Sequence[int]) -> Rows | str:
    """The rows together and in parts, or why neither one nor two alone can be run."""
    return measure_rows(lambda rows: laboratory.whole(conditions, rows), indices)


def choose(laboratory: Laboratory) -> Choice:
    """Rows that can tell one average from another: of other classes, sizes, ignored targets."""
    batch = laboratory.batch()
    layout = laboratory.layout
    return choose_rows(layout, batch, layout.num_rows(batch), most=_MAX_ROWS)


def can_tell(laboratory: Laboratory, convention: Convention) -> bool:
    """Whether rows differ in how many targets, or how much weight, a loss may count."""
    batch = laboratory.batch()
    try:
        targets = convention.targets(batch)
    except (ValueError, IndexError):
        targets = None
    paths = {path for path, leaf in tensor_leaves(batch) if leaf is targets}
    return not any(
        kind in ("weight", "size") or (kind == "valid" and path in paths)
        for path, kind in choose(laboratory).pending
    )


def labels(rows: Sequence[Any], convention: Convention) -> list[int]:
    """The class of each row, where a row has one target that is an integer; else nothing."""
    try:
        targets = [convention.targets(row) for row in rows]
    except (ValueError, IndexError):
        return []
    if not all(isinstance(each, Tensor) and each.numel() == 1 for each in targets):
        return []
    if targets[0].is_floating_point():
        return []
    return [int(each) for each in targets]


def weights_in(average: Average, laboratory: Laboratory, rows: Rows) -> list[float] | None:
    """The weights that an average gives to these parts; None where it cannot count them."""
    batch = laboratory.batch([row for part in rows.parts for row in part])
    sizes = [len(part) for part in rows.parts]
    return weights_by(average, batch, laboratory.layout.split(batch, sizes), sizes)
