"""One optimization batch: its gradient, and one step of the optimizer."""

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.errors import NonFiniteLossError
from automicro.gradient_clipping import clip_gradients
from automicro.microbatcher import Microbatcher
from automicro.optimizer_step import step_optimizer
from automicro.policy import Policy
from automicro.results import EvalResult, StepResult
from automicro.trainer.lines import count_of, recovery_line
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.progress import Progress
from automicro.trainer.state import Cut, LoopState


class TrainingStep:
    """Gradient, clip, optimizer step, clear the gradients, scheduler step.

    Args:
        microbatcher: gives the gradient.
        policy: the one that it asks for sizes.
        metrics: updated with every row.
        modules: whose gradients are cleared.
        optimizer: steps once per batch.
        scheduler: steps once per optimizer step; None for none.
        grad_clip_norm: the largest norm of the gradient; None for any.
        device: where it all happens.
    """

    def __init__(
        self,
        microbatcher: Microbatcher,
        *,
        policy: Policy,
        metrics: MetricSet,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        grad_clip_norm: float | None,
        device: torch.device,
    ) -> None:
        self._microbatcher = microbatcher
        self._policy = policy
        self._metrics = metrics
        self._modules = modules
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._grad_clip_norm = grad_clip_norm
        self._device = device

    def run(self, batch: Any, state: LoopState, progress: Progress) -> Cut:
        """Train on a batch, write down what came of it, and return how it was cut.

        Raises:
            NonFiniteLossError: before the optimizer steps.
        """
        start = time.perf_counter()
        known = self._policy.state_dict()
        result = self._microbatcher.backward(batch, self._metrics.metrics)
        state.train.count(result)
        show_recovery(result, "train", self._policy, known, progress)
        norm = self._clip()
        state.loss = _finite_loss(result, norm, state)
        step_optimizer(self._optimizer, self._device)
        self.clear_gradients()
        if self._scheduler is not None:
            self._scheduler.step()
        state.batch += 1
        state.epoch_batch += 1
        state.samples += result.num_samples
        state.train.seconds += time.perf_counter() - start
        return Cut.of(result)

    @property
    def learning_rate(self) -> float | None:
        """What the next step takes, if that is one value for all parameters."""
        rates = {float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group}
        return rates.pop() if len(rates) == 1 else None

    def clear_gradients(self) -> None:
        """Forget gradients, also those of parameters that the optimizer does not have.

        Nobody else would clear those, and they would pile up.
        """
        self._optimizer.zero_grad(set_to_none=True)
        for module in self._modules:
            module.zero_grad(set_to_none=True)

    def _clip(self) -> Tensor | None:
        if self._grad_clip_norm is None:
            return None
        return clip_gradients(self._optimizer, self._grad_clip_norm, self._device)


def show_recovery(
    result: StepResult | EvalResult,
    phase: str,
    policy: Policy,
    known: dict[str, Any],
    progress: Progress,
) -> None:
    """Say from which size to which a batch shrank, if it did.

    Args:
        result: of the batch.
        phase: ``"train"`` or ``"eval"``.
        policy: what proposed the sizes.
        known: its state before the batch.
        progress: where to say it.
    """
    if result.ooms:
        earlier = copy.deepcopy(policy)
        earlier.load_state_dict(known)
        before = earlier.propose(result.num_samples)
        progress.line(recovery_line(phase, before=before, cut=Cut.of(result), ooms=result.ooms))


def _finite_loss(result: StepResult, norm: Tensor | None, state: LoopState) -> float:
    """Read the loss, the one time per batch that the host waits for the device."""
    if norm is None:
        loss, length = result.loss.item(), 0.0
    else:
        dtype = torch.promote_types(result.loss.dtype, norm.dtype)
        loss, length = torch.stack([result.loss.to(dtype), norm.to(dtype)]).tolist()
    if math.isfinite(loss) and math.isfinite(length):
        return loss
    what = f"the loss is {loss}"
    if math.isfinite(loss):
        what = f"the loss is {loss:.6g}, but the norm of its gradient is {length}"
    raise NonFiniteLossError(
        f"{what} in epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
        f"({count_of(state.batch, 'batch')} done); the optimizer did not step. Lower the learning "
        "rate, warm it up, clip gradients (grad_clip_norm=1.0), or look for NaN and infinite "
        "values in this batch"
    )
