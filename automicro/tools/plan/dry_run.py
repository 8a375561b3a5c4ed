"""A step of a `Microbatcher`, run on tensors without data.

The step runs on a copy of the model, so the model itself does not change. It can be on the meta
device, or be given as a function that builds it. The copy has fake tensors with shapes but no data.
All operations of torch run on them (forward, backward and recomputation) without allocating
memory. Memory that a `Microbatcher` holds in addition is counted as well: gradients between
microbatches, copies of buffers, the optimizer's state, and the microbatch on the device.
"""

import contextlib
import copy
import functools
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError, LossError, UntraceableModelError, describe_error
from automicro.loss.conventions import choose_convention
from automicro.loss.passes import extra_pass
from automicro.memory.timeline import BATCH, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, Owner, Trace
from automicro.modules import evaluation_mode
from automicro.nested.parts import Nested
from automicro.nested.slices import NothingDrawn
from automicro.optimizer.reservation import StepMemory, predict_step_memory, undisturbed
from automicro.options import PRECISIONS, check_loss
from automicro.reach import captured_modules
from automicro.savers.levels import Level, NestedTail, Saver, Savers, make_levels
from automicro.savers.offload import Offload
from automicro.savers.recompute import Recompute
from automicro.state.tensors import LARGE_BYTES
from automicro.step.parts import SizedParts
from automicro.tools.plan.kernels import STEP, TAIL, StepRecorder
from automicro.torch_private import is_uninitialized, is_wrapper
from automicro.torch_private_execution import FakeTensorMode
from automicro.transaction.gradients import NARROW


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a step; ``precision`` and ``gradient_sums`` are those of `Microbatcher`."""

    precision: str = "fp32"
    gradient_sums: str = "fp32"
    train: bool = True  # forward and backward; otherwise the forward of an evaluation
    savers: tuple[str, ...] = ()  # active memory savers, named as in when_too_large
    finer: int = 1  # number of pieces for each slice of an adapting part with its own size


@dataclass(kw_only=True)
class DryRun:
    """Runs steps of a job on a copy of its model.

    Example:
        >>> model, batch = nn.Linear(256, 4), (torch.zeros(8, 256), torch.zeros(8, 4))
        >>> dry_run = DryRun(
        ...     model=model, batch=batch, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD
        ... )
        >>> dry_run.step(8, splits=False).peak_bytes
        20480
    """

    model: Any  # a module, or a function that builds one; replaced by the copy
    batch: Any  # with any number of rows
    layout: BatchLayout = field(default_factory=BatchLayout)
    loss_fn: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None
    modules: Sequence[nn.Module] = ()
    # An optimizer of the model's parameters, or a function (a class) from parameters to one.
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None
    on_accelerator: bool = True
    before_ampere: bool = False
    when_too_large: Savers = "error"
    nested: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        # A model's code might hold real tensors outside its tables: in lists, or as globals.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = self.model if isinstance(self.model, nn.Module) else self._made(self.model)
        roots = [model, *self.modules]
        if isinstance(self.loss_fn, nn.Module):
            roots.append(self.loss_fn)
        _refuse_others(roots, {"forward": self.forward, "loss_fn": self.loss_fn})
        self._modules, loss_fn, forward = self._copied(roots, self.loss_fn, self.forward)
        self.model: nn.Module = self._modules[0]
        found = {id(p): p for module in self._modules for p in module.parameters()}
        self.parameters: list[nn.Parameter] = list(found.values())
        self._convention = choose_convention(self.model, forward=forward, loss_fn=loss_fn)
        self.num_rows = self.layout.num_rows(self.batch)
        self._nested = Nested(self.nested).attach_to(self.model, SizedParts(self._modules))
        self.assumptions: set[str] = set()
        self._without_gradient: set[int] | None = None
        # By rows, whether they are part of a larger batch, and conditions: the step and the sizes
        # of its largest slices.
        self._steps: dict[tuple[int, bool, Conditions], tuple[Trace, dict[str, int]]] = {}
        self._savers: dict[str, Saver] = {}
        self.levels = self._levels_of(self.when_too_large)

    def _levels_of(self, when_too_large: Savers) -> list[Level]:
        levels = make_levels(when_too_large, self._modules, torch.device("cpu"))
        for saver in levels[-1].savers:  # the last level has all of them
            if isinstance(saver, Recompute):
                # Tensors without data draw no random numbers, so recomputation has no state to
                # restore.
                saver.random = functools.partial(NothingDrawn, ())
            if isinstance(saver, NestedTail):
                self._nested.give(saver.tail.name, saver.tail.split)
            self._savers[saver.name] = saver
        return levels

    def saver(self, name: str) -> "Saver | None":
        """Return the named memory saver, or None if it does not apply to this model."""
        if name not in self._savers:
            with contextlib.suppress(ValueError):  # no repeated blocks, no language model
                self._levels_of(name)
        return self._savers.get(name)

    @property
    def has_adapting_parts(self) -> bool:
        """Whether any part has its own size that can change."""
        return any(each.adapts for each in self._nested.all())

    def slices(self, rows: int, *, splits: bool, conditions: Conditions) -> dict[str, int]:
        """Return the rows of the largest slice of each part with its own size, by name."""
        self.step(rows, splits=splits, conditions=conditions)
        return self._steps[rows, splits, conditions][1]

    def _made(self, make: Callable[[], Any]) -> nn.Module:
        with undisturbed():
            try:
                with torch.device("meta"):
                    model = make()
            except Exception:
                model = make()  # some models read values while they are built
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the function that makes the model returned {model!r} of type "
                f"{type(model).__name__}; return a torch.nn.Module"
            )
        return model

    def _copied(self, roots: Sequence[nn.Module], *functions: Any) -> Any:
        # deepcopy() takes tensors in its memo as already copied. Each tensor is replaced by its
        # stand-in wherever it is held, shared tensors stay shared, and no data are copied.
        memo: dict[int, Any] = {}
        for root in roots:
            for name, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    raise UntraceableModelError(
                        f"{name or 'the model'} is scripted or traced, so it runs only on data. "
                        "Pass the model with the original module"
                    )
                tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                tensors += [each for each in vars(module).values() if isinstance(each, Tensor)]
                for tensor in tensors:
                    if id(tensor) not in memo:
                        memo[id(tensor)] = self._stand_in(tensor)
        try:
            return copy.deepcopy((list(roots), *functions), memo)
        except Exception as error:
            raise UntraceableModelError(
                f"the model cannot be copied ({describe_error(error)}), but a plan runs only "
                "copies. Pass a function that makes the model: plan(lambda: Model(…), …)"
            ) from error

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if is_uninitialized(tensor):
            raise UntraceableModelError(
                "the model has lazy layers, whose parameters have no shape yet. Run one batch "
                "through the model first, or give the layers their sizes"
            )
        if is_wrapper(type(tensor)) or tensor.layout is not torch.strided:
            raise UntraceableModelError(
                f"the model holds a {type(tensor).__name__} of layout {tensor.layout}, which a "
                "plan cannot simulate. Pass the model before it is sharded or quantized, and "
                "the number of shards as ranks=…"
            )
        with self._mode:
            # With its strides, which determine the memory format of results computed from it.
            value = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value

    @functools.cached_property
    def step_memory(self) -> StepMemory:
        """The memory that the first step of the optimizer allocates."""
        given = self.optimizer
        if given is None:
            return StepMemory()
        parameters = [p for p in self.parameters if p.requires_grad]
        if isinstance(given, torch.optim.Optimizer):
            # It has the caller's parameters, not those of the copy.
            parameters = [p for group in given.param_groups for p in group["params"]]
            parameters = [p for p in parameters if p.requires_grad]
            optimizer = given
        else:
            optimizer = given(parameters)
        return predict_step_memory(
            optimizer, parameters, on_accelerator=self.on_accelerator or None
        )

    # One step

    def step(self, rows: int, *, splits: bool, conditions: Conditions | None = None) -> Trace:
        """Return the memory of a step whose largest microbatch has this many rows, run once."""
        asked = (rows, splits, conditions or Conditions())
        if asked not in self._steps:
            self._steps[asked] = self._run(*asked)
        return self._steps[asked][0]

    def _run(self, rows: int, splits: bool, conditions: Conditions) -> tuple[Trace, dict[str, int]]:
        if splits and self._without_gradient is None:
            self.step(1, splits=False, conditions=conditions)  # shows which parameters get one
        microbatch = self._rows(rows)
        # Computed before the recorder is entered, which would count the optimizer's dry run, too.
        _ = self.step_memory
        for part in self._nested.all():
            part.sizes = []
            if part.adapts:
                # Otherwise the part would continue with the sizes of an earlier step.
                part.load_state_dict({})
                part.finer = conditions.finer
        recorder = StepRecorder(
            on_accelerator=self.on_accelerator, before_ampere=self.before_ampere
        )
        with contextlib.ExitStack() as stack:
            for manager in (
                extra_pass(),
                undisturbed(),
                self._mode,
                recorder,
                recorder.watching(self._modules),
                recorder.choosing_kernels(),
            ):
                stack.enter_context(manager)
            try:
                self._step(recorder, microbatch, splits, conditions)
            except Exception as error:
                self._clear()
                if isinstance(error, BatchError | LossError):
                    raise
                raise UntraceableModelError(
                    f"the forward needs real data: {describe_error(error).splitlines()[0]}, "
                    f"{_where(error)}. Skip that code if automicro.is_extra_pass() is true, or "
                    "run one batch in a MemoryBudget and read its peak_bytes"
                ) from error
        self.assumptions |= recorder.assumptions
        parts = self._nested.by_name().items()
        return recorder.trace(), {name: max(part.sizes) for name, part in parts if part.sizes}

    def _rows(self, rows: int) -> Any:
        if rows == self.num_rows:
            return self.batch
        if rows < self.num_rows:
            return self.layout.split(self.batch, [rows, self.num_rows - rows])[0]
        return self.layout.take_rows(self.batch, [index % self.num_rows for index in range(rows)])

    def _step(
        self, recorder: StepRecorder, microbatch: Any, splits: bool, conditions: Conditions
    ) -> None:
        recorder.parameters = frozenset(map(id, self.parameters))
        with recorder.owning(PARAMETERS):
            recorder.ledger.see(self.parameters, [])
        buffers = {id(b): b for module in self._modules for b in module.buffers()}
        with recorder.owning(BUFFERS):
            recorder.ledger.see(buffers.values(), [])
        for buffer in buffers.values():
            if buffer.nbytes <= LARGE_BYTES:  # larger ones are copied to the host
                recorder.hold(buffer.nbytes, Owner(BUFFERS))
        for num_bytes in self.step_memory.state_bytes:
            recorder.hold(num_bytes, Owner(OPTIMIZER))
        with recorder.owning(BATCH):
            rows = map_tensors(microbatch, functools.partial(self._moved, recorder), isolate=True)
        if not conditions.train:
            with evaluation_mode(self._modules), torch.no_grad():
                self._forward(recorder, rows, conditions)
            return
        try:
            with torch.enable_grad(), self._at_level(recorder, conditions):
                self._train(recorder, rows, splits, conditions)
        finally:
            del rows
        recorder.take(self.step_memory.temporary_bytes, Owner(STEP))
        self._clear()

    def _train(
        self, recorder: StepRecorder, rows: Any, splits: bool, conditions: Conditions
    ) -> None:
        wanting = [p for p in self.parameters if p.requires_grad]
        narrow = [
            p
            for p in wanting
            if splits and conditions.gradient_sums == "fp32" and p.dtype in NARROW
        ]
        for parameter in narrow:
            parameter.grad_dtype = torch.float32
        if splits:
            assert self._without_gradient is not None
            with recorder.owning(GRADIENTS):
                for index, parameter in enumerate(wanting):
                    if index not in self._without_gradient:
                        dtype = parameter.grad_dtype or parameter.dtype
                        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        output, loss = self._forward(recorder, rows, conditions)
        with recorder.owning(TAIL):
            # backward() would create it itself, as a temporary of the backward.
            first = torch.ones_like(loss)
        loss.backward(first)  # type: ignore[no-untyped-call]
        del output, loss, first
        if self._without_gradient is None:
            self._without_gradient = {
                index for index, parameter in enumerate(wanting) if parameter.grad is None
            }
        for parameter in narrow:
            total, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            if total is not None:
                with recorder.owning(GRADIENTS):
                    parameter.grad = total.to(parameter.dtype)

    def _forward(
        self, recorder: StepRecorder, rows: Any, conditions: Conditions
    ) -> tuple[Any, Tensor]:
        dtype = PRECISIONS[conditions.precision]
        with contextlib.ExitStack() as stack:
            if dtype is not None:
                # Stand-ins are on the CPU, whatever the planned device is.
                stack.enter_context(torch.autocast("cpu", dtype))
            if conditions.train:
                output = self._convention.train(self.model, rows)
                loss = check_loss(output.loss)
            else:
                output = self._convention.evaluate(self.model, rows)
                loss = torch.empty(()) if output.loss is None else output.loss
            # A Microbatcher weights each loss, which creates one more tensor.
            loss = loss * 1.0
        found = [tensor for _, tensor in tensor_leaves(output.outputs)]
        recorder.forward_ended([*found, *output.losses.values()])
        return output, loss

    @contextlib.contextmanager
    def _at_level(self, recorder: StepRecorder, conditions: Conditions) -> Iterator[None]:
        """Activate memory savers during forward and backward."""
        with contextlib.ExitStack() as stack:
            for name in conditions.savers:
                saver = self.saver(name)
                if isinstance(saver, Offload):
                    stack.callback(setattr, self._mode, "cache_enabled", self._mode.cache_enabled)
                    self._mode.cache_enabled = False  # it keeps storages of tensors.set_()
                    saver.host = functools.partial(recorder.ledger.placing, on_host=True)
                if saver is not None:
                    stack.enter_context(saver.applied())
            yield

    def _moved(self, recorder: StepRecorder, tensor: Tensor) -> Tensor:
        if is_wrapper(type(tensor)) or tensor.layout is not torch.strided:
            raise UntraceableModelError(
                f"the batch holds a {type(tensor).__name__} of layout {tensor.layout}, which "
                "cannot be simulated without data"
            )
        # The given batch is not counted: during a run, only one microbatch of it is on the device.
        recorder.ledger.place(tensor, [], on_host=True)
        with recorder.ledger.placing(on_host=True):
            like = torch.empty_like(tensor, device="meta")
        moved = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        return moved.requires_grad_() if tensor.requires_grad else moved

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
            if parameter.grad_dtype is not parameter.dtype:
                parameter.grad_dtype = parameter.dtype


def _refuse_others(roots: Sequence[nn.Module], functions: Mapping[str, Any]) -> None:
    """Refuse functions that refer to a module by their own name."""
    own = {
        f"{type(module).__name__}.{name}": value
        for root in roots
        for module in root.modules()
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType)
    }
    for name, function in {**functions, **own}.items():
        if function is None or isinstance(function, nn.Module):
            continue
        if captured_modules(function):
            kind = type(captured_modules(function)[0]).__name__
            raise UntraceableModelError(
                f"{name} refers to a {kind} from outside, so a plan cannot replace it by a "
                "copy. Let forward use the model that it receives, and let modules refer to "
                "their submodules through self"
            )


_OURS, _TORCHS = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_DEMOS = str(Path(__file__).parents[2] / "demo")


def _where(error: BaseException) -> str:
    """Return the innermost line of an error that belongs to neither torch nor automicro."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # The demos contain models.
        is_demo = frame.filename.startswith(_DEMOS)
        if is_demo or not frame.filename.startswith((_OURS, _TORCHS, "<")):
            return f"in {frame.name} at {frame.filename}:{frame.lineno}: {frame.line}"
    return "in an unknown line"
