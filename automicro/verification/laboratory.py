"""Running a model on a batch, whole or split, under controlled conditions.

Every run starts from the same state, random generators included, and leaves no trace.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batchnorm import find_batchnorm
from automicro.checks import check_loss
from automicro.forward import choose_convention
from automicro.microbatcher import Microbatcher
from automicro.module_index import ModuleIndex
from automicro.probe.measured import Measured
from automicro.probe.silence import Silence
from automicro.slicing import BatchLayout, map_tensors
from automicro.transaction import (
    BufferMemory,
    Buffers,
    Gradients,
    OwnGenerators,
    Part,
    RandomState,
    Transaction,
    devices_of,
)
from automicro.transaction.surroundings import Surroundings
from automicro.verification.state import named_modules, own_generators
from automicro.verification.subject import Subject, cast


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is held still during a run, to see whether it is the cause of a difference.

    Attributes:
        loss_average: as in `Microbatcher`.
        batchnorm: let no layer normalise over the rows.
        buffers: let every forward begin with the same buffers.
        attributes: plain attributes, by module and name, with which every forward begins anew.
    """

    loss_average: Any = "auto"
    batchnorm: bool = False
    buffers: bool = False
    attributes: tuple[tuple[str, str], ...] = ()

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

    subject: Subject
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
                    gradient = gradient.detach().to_dense().to("cpu", torch.float64, copy=True)
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
        subject: Subject,
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

    def whole(self, conditions: Conditions, rows: Sequence[int] | None = None) -> Measured:
        """One plain forward and backward of the whole batch: what splitting has to give."""
        with self.stage(conditions) as stage:
            return self.run_whole(stage, self.on_device(self.batch(rows)))

    def run_whole(self, stage: Stage, batch: Any) -> Measured:
        """The same on a stage and a batch that the caller wants to look at afterwards."""
        convention = choose_convention(
            stage.subject.model, forward=stage.forward, loss_fn=stage.subject.loss_fn
        )
        output = convention.train(stage.subject.model, batch)
        loss = check_loss(output.loss)
        # What splits add up may have been given as parts only.
        losses = {name: float(part.detach()) for name, part in output.losses.items()}
        torch.autograd.backward(loss)
        return Measured(loss=float(loss.detach()), losses=losses, gradients=stage.gradients())

    def split(
        self, conditions: Conditions, size: int, rows: Sequence[int] | None = None
    ) -> Measured:
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
            return Measured(loss=float(result.loss), losses=losses, gradients=stage.gradients())

    @contextlib.contextmanager
    def stage(self, conditions: Conditions) -> Iterator[Stage]:
        """The model in its first state, conditions applied; undone at the end."""
        default = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.callback(torch.set_default_dtype, default)
            subject = self.subject if self.why_in_place else self.subject.copy(self.dtype)
            drawing = devices_of(subject.roots.values(), self._device)
            undo = Transaction([RandomState(drawing), *self._parts_in_place()])
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
            stage.forward = _announced(stage, stack)
            stack.enter_context(stage.silence)
            yield stage

    def _parts_in_place(self) -> list[Part]:
        """What puts the caller's own modules back."""
        if not self.why_in_place:
            return []
        modules = [module for _, module in named_modules(self.subject.roots)]
        modules += [each for root in self.subject.captured() for each in root.modules()]
        return [
            Gradients(p for module in modules for p in module.parameters(recurse=False)),
            Buffers(BufferMemory(ModuleIndex(modules))),
            Surroundings(modules),
            OwnGenerators([each for _, each in own_generators(self.subject.roots)]),
        ]

    def _resets(self, subject: Subject, conditions: Conditions) -> list[Callable[[], None]]:
        """What puts back, before each forward, what the one before it changed."""
        roots = subject.roots
        random_state = RandomState(devices_of(roots.values(), self._device))
        random_state.begin()
        resets = [random_state.roll_back, random_state.begin]
        generators = OwnGenerators([each for _, each in own_generators(roots)])
        generators.begin()
        resets += [generators.roll_back, generators.begin]
        if conditions.buffers:
            buffers = Buffers(BufferMemory(ModuleIndex(roots.values())))
            buffers.begin()
            resets += [buffers.roll_back, buffers.begin]
        if conditions.attributes:
            resets.append(_attributes_reset(roots, conditions.attributes))
        return resets

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


def _attributes_reset(
    roots: dict[str, nn.Module], attributes: Sequence[tuple[str, str]]
) -> Callable[[], None]:
    modules = dict(named_modules(roots))
    kept = {}
    for owner, name in attributes:
        table = vars(modules[owner])
        with contextlib.suppress(Exception):  # what cannot be copied stays as it is
            kept[owner, name] = (name in table, copy.deepcopy(table.get(name)))

    def reset() -> None:
        for (owner, name), (was_there, value) in kept.items():
            if was_there:
                vars(modules[owner])[name] = copy.deepcopy(value)
            else:
                vars(modules[owner]).pop(name, None)

    return reset
