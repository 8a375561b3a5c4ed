"""The primitive: a whole optimization batch in, its exact gradient out, however little memory.

``backward`` and ``evaluate`` share one shape: propose a size, cut the batch, attempt it inside a
transaction, commit or roll back, and try smaller slices after running out of memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.attempts import CutRule, run_attempts
from automicro.checks import (
    check_choice,
    check_history,
    check_model,
    check_optimizer,
    check_precision,
    resolve_device,
)
from automicro.forward import choose_convention, outputs_with_rows
from automicro.inputs import InputGuard, InputWatch
from automicro.memory import OccupiedDevice
from automicro.model_modes import evaluation_mode, is_lazy
from automicro.passes import Passes
from automicro.policy import Policy, make_policy
from automicro.probing import Prober
from automicro.reservation import OptimizerReservation
from automicro.results import EvalResult, StepResult
from automicro.slicing import BatchLayout, concat_rows
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
from automicro.transfer import on_device
from automicro.weighting import BatchWeights, LossAverage, add_up, read_average

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


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
        precision: ``"fp32"``, or ``"bf16"`` for autocast of the forward and the loss.
        batch_layout: which dimension holds the rows, and which parts are shared; see
            `split_batch`.
        update_metric: ``update_metric(metric, outputs, microbatch)`` in place of
            ``metric.update(outputs, targets)``, which does not shift a causal model's logits.
        probe: whether to compare, at the first batch that could be split, the loss of a few rows
            with those of their parts.

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
            autocast_dtype=PRECISIONS[check_precision(precision, PRECISIONS)],
            run_backward=Tensor.backward if backward is None else backward,
            update_metric=update_metric or convention.update_metric,
        )
        self._prober = Prober(averages, convention.targets) if probe else None
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
        missing = {"policy", "eval_policy", "min_rows"} - state.keys()
        if missing:
            raise ValueError(
                f"the state lacks {sorted(missing)}; pass what Microbatcher.state_dict() returned"
            )
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
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "backward was called where gradients are switched off; leave the no_grad or "
                "inference_mode block, or call evaluate"
            )
        with self._memory.limited():
            num_rows = self._layout.num_rows(batch)
            policy = self._split_guard.allowed_policy(self._policy)
            prober = self._prober if self._split_guard.could_split(policy, num_rows) else None
            if is_lazy(self._modules):
                self._passes.materialize(batch)
            parameters = [p for module in self._modules for p in module.parameters()]
            watch = self._inputs.watch(self._passes.tensors(batch), self._device)
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
            try:
                finished = run_attempts(
                    lambda sizes: self._train(batch, sizes, watch, buffers, metrics, prober),
                    num_rows=num_rows,
                    policy=policy,
                    rule=self._rule,
                    transaction=transaction,
                    device=self._device,
                    measure_residents=lambda: self._memory.measure(
                        training=True, upcoming_bytes=self._reservation.upcoming_bytes
                    ),
                )
            except torch.OutOfMemoryError as error:
                self._split_guard.explain_oom(error)
                raise
        self._size = finished.sizes[0]
        loss, losses = finished.result
        return StepResult(
            loss=loss,
            losses=losses,
            num_samples=num_rows,
            microbatch_size=finished.sizes[0],
            num_microbatches=len(finished.sizes),
            attempts=finished.attempts,
            ooms=finished.ooms,
        )

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
            finished = run_attempts(
                lambda sizes: self._evaluate(batch, sizes, watch, metrics, return_outputs),
                num_rows=num_rows,
                policy=self._eval_policy,
                rule=self._eval_rule,
                transaction=transaction,
                device=self._device,
                measure_residents=lambda: self._memory.measure(training=False),
            )
        self._eval_size = finished.sizes[0]
        loss, losses, outputs = finished.result
        return EvalResult(
            loss=loss,
            losses=losses,
            outputs=outputs,
            num_samples=num_rows,
            microbatch_size=finished.sizes[0],
            num_microbatches=len(finished.sizes),
            attempts=finished.attempts,
            ooms=finished.ooms,
        )

    def _train(
        self,
        batch: Any,
        sizes: Sequence[int],
        watch: InputWatch,
        buffers: Buffers,
        metrics: Any,
        prober: Prober | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One attempt at a batch. Everything that it changes is undone if it fails."""
        is_split = len(sizes) > 1
        if is_split:
            check_history(self._layout.leaves(batch))
        if prober is not None:
            self._probe(prober, batch, sum(sizes))
        passes = self._passes
        microbatches = passes.cut(batch, sizes)
        weights = passes.weights(batch, microbatches, sizes)
        losses = []
        arrivals = on_device(microbatches, self._device, isolate=watch.isolate)
        for index, microbatch in enumerate(arrivals):
            losses.append(passes.train(microbatch, weights, index, metrics))
            if watch.compares:
                watch.compare(passes.tensors(microbatches[index]), passes.tensors(microbatch))
        if is_split:
            self._split_guard.warn(sizes, buffers)
        passes.warn_of_nothing(weights)
        return add_up(losses)

    def _probe(self, prober: Prober, batch: Any, num_rows: int) -> None:
        undo = Transaction(
            [Buffers(BufferMemory(self._modules)), RandomState(self._device, self._generators)]
        )
        prober.look(batch, num_rows, self._layout, self._passes.losses_of_rows, undo, self._device)

    def _evaluate(
        self,
        batch: Any,
        sizes: Sequence[int],
        watch: InputWatch,
        metrics: Any,
        return_outputs: bool,
    ) -> tuple[Tensor | None, dict[str, Tensor], Any]:
        """One attempt at evaluating a batch."""
        passes = self._passes
        microbatches = passes.cut(batch, sizes)
        home = next((tensor.device for tensor in passes.tensors(batch)), self._device)
        weights: BatchWeights | None = None
        losses, outputs = [], []
        arrivals = on_device(microbatches, self._device, isolate=watch.isolate)
        for index, microbatch in enumerate(arrivals):
            output = passes.evaluate(microbatch, metrics)
            if output.loss is not None:
                weights = weights or passes.weights(batch, microbatches, sizes)
                weighted = weights.apply(
                    index, output.loss, output.losses, has_total=output.has_total
                )
                losses.append(weighted)
            if watch.compares:
                watch.compare(passes.tensors(microbatches[index]), passes.tensors(microbatch))
            if return_outputs:
                outputs.append(passes.bring_home(outputs_with_rows(output.outputs), home))
            del output  # before the next forward
        loss, parts = add_up(losses) if losses else (None, {})
        return loss, parts, concat_rows(outputs) if return_outputs else None
