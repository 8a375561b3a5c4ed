"""The primitive: a whole optimization batch in, its exact gradient out, however little memory.

``backward`` and ``evaluate`` share one shape: propose a size, cut the batch, attempt it inside a
transaction, commit or roll back, and try smaller slices after running out of memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.accumulation import accumulate_gradients, accumulate_outputs
from automicro.attempts import CutRule, run_attempts
from automicro.checks import (
    PRECISIONS,
    check_choice,
    check_history,
    check_model,
    check_optimizer,
    check_precision,
    check_state,
    check_step,
    resolve_device,
)
from automicro.compilation import refuse_cuda_graphs
from automicro.forward import choose_convention
from automicro.inputs import InputGuard, InputWatch
from automicro.memory import OccupiedDevice
from automicro.model_modes import evaluation_mode, is_lazy
from automicro.observer import Narrator, Observer
from automicro.optimization import OptimizerReservation
from automicro.passes import Losses, Passes
from automicro.policy import Fixed, Policy, make_policy
from automicro.probing import Prober
from automicro.results import EvalResult, StepResult
from automicro.slicing import BatchLayout
from automicro.splitting import BATCHNORM_MODES, SplitGuard
from automicro.transaction import (
    BufferMemory,
    Buffers,
    Gradients,
    Metrics,
    Parameters,
    RandomState,
    Transaction,
    find_generators,
    flatten_metrics,
)
from automicro.weighting import LossAverage, read_average


class Microbatcher:
    """Runs forward and backward of whole batches on a device too small for them.

    Example:
        >>> import torch
        >>> from automicro import Microbatcher
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> microbatcher = Microbatcher(
        ...     model, loss_fn=torch.nn.CrossEntropyLoss(), optimizer=optimizer
        ... )
        >>> for batch in [(torch.randn(32, 8), torch.randint(2, (32,)))]:
        ...     result = microbatcher.backward(batch)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> result.num_samples, result.microbatch_size, result.num_microbatches
        (32, 32, 1)

    Args:
        model: the model; not wrapped for several devices.
        loss_fn: ``loss_fn(model(inputs), targets)`` on batches of ``(inputs, targets)``.
        forward: ``forward(model, microbatch)`` returning the loss, ``(loss, outputs)`` or a
            mapping with ``"loss"``. Without ``loss_fn`` and ``forward``, the model has Composer's
            interface or is called as ``model(**batch).loss``.
        backward: replaces ``loss.backward()``, for loss scalers and other trainers.
        microbatch_size: rows: an int, ``"auto"``, None (the whole batch), or a policy.
        eval_microbatch_size: the same for `evaluate`.
        loss_average: what the loss is a mean over: ``"samples"``, ``"tokens"``, ``"none"`` (a
            sum), a callable from a microbatch to what its loss was divided by, a mapping of these
            by the name of the loss, ``{"language": "tokens", "balance": "samples"}``, or
            ``"auto"`` to read it off the loss or the model.
        batchnorm: what to do when a batch is split although layers average over it: ``"warn"``,
            ``"error"``, ``"disable"`` (train on whole batches), ``"ignore"``.
        optimizer: memory for its state is reserved while sizes are found.
        modules: further modules that take part, whose gradients and buffers change.
        device: where the model computes; its parameters' device unless given.
        memory_limit: bytes or text such as ``"24MiB"``: a `MemoryBudget` on a CPU, the process's
            share of the device on CUDA.
        strict_divisible: refuse a batch that is not a multiple of the microbatch size.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast of the forward and the
            loss. ``"fp16"`` needs a ``backward`` that scales the loss.
        batch_layout: which dimension holds the rows, and which parts are shared; see
            `split_batch`.
        update_metric: ``update_metric(metric, outputs, microbatch)`` in place of
            ``metric.update(outputs, targets)``, which does not shift a causal model's logits.
        probe: whether to compare, at the first batch that could be split, the loss of a few rows
            with those of their parts.
        observer: ``observer(event, subject)`` is told of every attempt and every microbatch.

    Raises:
        TypeError, ValueError: arguments that make no sense, each with its remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: Callable[..., Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        backward: Callable[[Tensor], Any] | None = None,
        microbatch_size: int | str | Policy | None = "auto",
        eval_microbatch_size: int | str | Policy | None = "auto",
        loss_average: LossAverage = "auto",
        batchnorm: str = "warn",
        optimizer: torch.optim.Optimizer | None = None,
        modules: Iterable[nn.Module] = (),
        device: torch.device | str | None = None,
        memory_limit: str | int | None = None,
        strict_divisible: bool = False,
        precision: str = "fp32",
        batch_layout: int | Mapping[str, Any] = 0,
        update_metric: Callable[[Any, Any, Any], None] | None = None,
        probe: bool = True,
        observer: Observer | None = None,
    ) -> None:
        check_model(model)
        self._model = model
        self._modules = [model, *modules]
        if isinstance(loss_fn, nn.Module) and loss_fn not in self._modules:
            self._modules.append(loss_fn)  # it may hold parameters and buffers of its own
        check_optimizer(optimizer, self._modules)
        self._device = resolve_device(device, model)
        self._policy = make_policy(microbatch_size)
        self._eval_policy = make_policy(eval_microbatch_size, name="eval_microbatch_size")
        self._adapts = not isinstance(self._policy, Fixed)
        self._eval_adapts = not isinstance(self._eval_policy, Fixed)
        refuse_cuda_graphs(self._modules, sizes_change=self._adapts or self._eval_adapts)
        self._split_guard = SplitGuard(
            self._modules, check_choice("batchnorm", batchnorm, BATCHNORM_MODES)
        )
        convention = choose_convention(model, forward=forward, loss_fn=loss_fn)
        averages = read_average(
            loss_average,
            loss_fn=loss_fn,
            model=model,
            targets=convention.targets,
            reads_model=convention.computes_loss_in_model,
        )
        self._layout = BatchLayout(batch_layout)
        self._passes = Passes(
            self._modules,
            convention,
            averages,
            self._layout,
            device=self._device,
            autocast_dtype=PRECISIONS[check_precision(precision, backward)],
            run_backward=Tensor.backward if backward is None else backward,
            update_metric=update_metric or convention.update_metric,
        )
        self._prober = Prober(averages, convention.targets) if probe else None
        self._observer = observer
        self._rule = CutRule(strict_divisible=strict_divisible)
        self._eval_rule = CutRule()
        self._memory = OccupiedDevice(self._device, self._modules, optimizer, memory_limit)
        self._buffers = BufferMemory(self._modules)
        self._eval_buffers = BufferMemory(self._modules)
        self._generators = find_generators(self._modules)
        self._inputs = InputGuard()
        self._eval_inputs = InputGuard()
        self._reservation = OptimizerReservation(optimizer)
        self._size: int | None = None
        self._eval_size: int | None = None

    @property
    def microbatch_size(self) -> int | None:
        """Rows of the largest microbatch of the last training batch; None before the first."""
        return self._size

    @property
    def eval_microbatch_size(self) -> int | None:
        """The same of the last evaluated batch."""
        return self._eval_size

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found, as plain values."""
        return {
            "policy": self._policy.state_dict(),
            "eval_policy": self._eval_policy.state_dict(),
            "min_rows": self._rule.min_rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with sizes that were found earlier.

        Raises:
            ValueError: a state of other policies than these.
        """
        check_state(state, self.state_dict())
        self._policy.load_state_dict(state["policy"])
        self._eval_policy.load_state_dict(state["eval_policy"])
        self._rule.min_rows = state["min_rows"]

    def backward(self, batch: Any, metrics: Any = None) -> StepResult:
        """Forward and backward of a whole batch: its exact gradient is added to ``.grad``.

        Args:
            batch: the full optimization batch, on the host or on the device.
            metrics: torchmetrics to update, each row once.

        Raises:
            SampleTooLargeError: the smallest microbatch does not fit.
            BatchError: the batch cannot be cut.
            LossError: the forward gives no usable loss.

        After any exception the state is as it was before the call.
        """
        return self.accumulate([batch], metrics)

    def accumulate(self, batches: Sequence[Any], metrics: Any = None) -> StepResult:
        """Forward and backward of several batches as if they were one.

        Their loss has one denominator, so the gradient is that of all their rows in one batch,
        however many of them (or of their tokens) each batch has. They are one transaction.

        Args:
            batches: what a data loader gave, one after the other; at least one.
            metrics: torchmetrics to update, each row once.

        Raises:
            ValueError: no batch. Else as `backward`, and after any exception the state is as it
                was before the call.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> batches = [(torch.randn(n, 8), torch.randint(2, (n,))) for n in (4, 4, 3)]
            >>> microbatcher.accumulate(batches).num_samples
            11
        """
        check_step(batches)
        with self._memory.limited():
            rows = [self._layout.num_rows(batch) for batch in batches]
            policy = self._split_guard.allowed_policy(self._policy)
            could_split = len(rows) > 1 or self._split_guard.could_split(policy, rows[0])
            prober = self._prober if could_split else None
            if is_lazy(self._modules):
                self._passes.materialize(batches[0])
            parameters = [p for module in self._modules for p in module.parameters()]
            tensors = [tensor for batch in batches for tensor in self._passes.tensors(batch)]
            watch = self._inputs.watch(tensors, self._device)
            buffers = Buffers(self._buffers)
            transaction = Transaction(
                [
                    Gradients([*parameters, *watch.requiring_grad]),
                    Parameters(parameters),
                    watch,
                    self._reservation,
                    buffers,
                    RandomState(self._device, self._generators),
                    Metrics(flatten_metrics(metrics)),
                ]
            )
            narrator = self._narrator("train")
            try:
                finished = run_attempts(
                    lambda cuts: self._train(
                        batches, cuts, watch, buffers, metrics, prober, narrator
                    ),
                    rows=rows,
                    policy=policy,
                    rule=self._rule,
                    transaction=transaction,
                    device=self._device,
                    measure_residents=lambda: self._memory.measure(
                        training=True, upcoming_bytes=self._reservation.upcoming_bytes
                    ),
                    narrator=narrator,
                )
            except torch.OutOfMemoryError as error:
                self._split_guard.explain_oom(error)
                raise
        self._size = finished.microbatch_size
        loss, losses = finished.result
        return StepResult(loss=loss, losses=losses, **finished.counts)

    def evaluate(self, batch: Any, metrics: Any = None, return_outputs: bool = False) -> EvalResult:
        """Forward of a whole batch in evaluation mode, without gradients.

        Its size is found apart from training's. Training mode is put back afterwards.

        Args:
            batch: the full batch, on the host or on the device.
            metrics: torchmetrics to update, each row once.
            return_outputs: whether to give the outputs of all rows, in order.

        Raises:
            SampleTooLargeError: the smallest microbatch does not fit.
            BatchError: the batch cannot be cut.

        After any exception the state is as it was before the call.
        """
        return self._without_gradients(batch, metrics, keep_outputs=return_outputs)

    def predict(self, batch: Any) -> Any:
        """The model's outputs for all rows of a batch, in order; its targets may be missing.

        As `evaluate`, which it shares the size with. With ``loss_fn``, a pair is read as inputs
        and targets, and anything else as inputs.

        Example:
            >>> microbatcher = Microbatcher(nn.Linear(8, 2), loss_fn=nn.CrossEntropyLoss())
            >>> microbatcher.predict(torch.randn(5, 8)).shape
            torch.Size([5, 2])
        """
        return self._without_gradients(batch, None, keep_outputs=True, predicts=True).outputs

    def _without_gradients(
        self, batch: Any, metrics: Any, *, keep_outputs: bool, predicts: bool = False
    ) -> EvalResult:
        with self._memory.limited(), evaluation_mode(self._modules), torch.no_grad():
            num_rows = self._layout.num_rows(batch)
            if is_lazy(self._modules):
                self._passes.materialize(batch)
            watch = self._eval_inputs.watch(self._passes.tensors(batch), self._device)
            transaction = Transaction(
                [
                    watch,
                    Buffers(self._eval_buffers),
                    RandomState(self._device, self._generators),
                    Metrics(flatten_metrics(metrics)),
                ]
            )
            narrator = self._narrator("eval")
            finished = run_attempts(
                lambda cuts: accumulate_outputs(
                    self._passes,
                    *self._passes.cut([batch], cuts, sizes_change=self._eval_adapts),
                    watch=watch,
                    device=self._device,
                    metrics=metrics,
                    keep_outputs=keep_outputs,
                    predicts=predicts,
                    narrator=narrator,
                ),
                rows=[num_rows],
                policy=self._eval_policy,
                rule=self._eval_rule,
                transaction=transaction,
                device=self._device,
                measure_residents=lambda: self._memory.measure(training=False),
                narrator=narrator,
            )
        self._eval_size = finished.microbatch_size
        loss, losses, outputs, denominators = finished.result
        return EvalResult(
            loss=loss,
            losses=losses,
            outputs=outputs,
            denominators=denominators,
            **finished.counts,
        )

    def _train(
        self,
        batches: Sequence[Any],
        cuts: Sequence[Sequence[int]],
        watch: InputWatch,
        buffers: Buffers,
        metrics: Any,
        prober: Prober | None,
        narrator: Narrator | None,
    ) -> Losses:
        """One attempt at a step. Everything that it changes is undone if it fails."""
        for batch, sizes in zip(batches, cuts, strict=True):
            if len(sizes) > 1:
                check_history(self._layout.leaves(batch))
        if prober is not None:
            self._probe(prober, batches[0], sum(cuts[0]))
        result = accumulate_gradients(
            self._passes,
            self._passes.cut(batches, cuts, sizes_change=self._adapts),
            watch=watch,
            device=self._device,
            metrics=metrics,
            narrator=narrator,
        )
        split = max(cuts, key=len)
        if len(split) > 1:
            self._split_guard.warn(split, buffers)
        return result

    def _narrator(self, phase: str) -> Narrator | None:
        return None if self._observer is None else Narrator(self._observer, phase)

    def _probe(self, prober: Prober, batch: Any, num_rows: int) -> None:
        undo = Transaction(
            [Buffers(BufferMemory(self._modules)), RandomState(self._device, self._generators)]
        )
        prober.look(batch, num_rows, self._layout, self._passes.losses_of_rows, undo, self._device)
