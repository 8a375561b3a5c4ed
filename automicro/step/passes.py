"""Forward and backward of one microbatch."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.tensors import map_tensors
from automicro.errors import BatchError, LossAverageWarning, LossError, MetricWarning, warn
from automicro.loss.averages import BatchWeights, CutBatch
from automicro.loss.conventions import Output
from automicro.loss.passes import Computation
from automicro.memory.oom import once_more
from automicro.modules import evaluation_mode
from automicro.options import check_loss
from automicro.ranks.interface import OneRank, Ranks
from automicro.step.feature import NO_FEATURES, Features, MicrobatchRun
from automicro.step.plan import Cut, ReadBatch
from automicro.torch_private import compiler_is_loaded
from automicro.transaction.gradients import Gradients

T = TypeVar("T")
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
Losses = tuple[Tensor, dict[str, Tensor]]


def like(losses: Losses, values: Tensor) -> Losses:
    """Return other values, in a row, for a loss and its parts, in their dtypes."""
    loss, parts = losses
    every = zip((loss, *parts.values()), values.unbind(), strict=True)
    loss, *others = (value.to(each.dtype) for each, value in every)
    return loss, dict(zip(parts, others, strict=True))


class Passes:
    """Forward and backward of microbatches."""

    def __init__(
        self,
        computation: Computation,
        *,
        autocast_dtype: torch.dtype | None,
        run_backward: Callable[[Tensor], Any],
        ranks: Ranks | None = None,
        scales_for_ranks: bool = True,
    ) -> None:
        self._modules = computation.modules
        self._convention = computation.convention
        self._averages = computation.averages
        self.layout = computation.layout
        self.device = computation.device
        self._autocast_dtype = autocast_dtype
        self._run_backward = run_backward
        self._ranks = ranks or OneRank()
        self._is_alone = self._ranks.is_alone
        # Whether a backward can start from the weight instead of 1, which saves weighting the loss.
        # A backward of the caller accepts only a loss, and no initial gradient.
        self.can_begin = self._is_alone and run_backward is Tensor.backward
        self.scales_for_ranks = scales_for_ranks
        self._scale = self._ranks.world_size if scales_for_ranks else 1
        self._has_warned_of_nothing = False
        self._has_looked_at_parts = False
        self._captures = False
        if compiler_is_loaded():
            from automicro.compilation import captures_cuda_graphs

            self._captures = captures_cuda_graphs(computation.modules)
        # If only rows count, equal cuts have equal weights, which can be reused.
        self._counts_rows = all(each.counts_rows for each in self._averages.values())
        self._last_weights: tuple[list[Sequence[int]], BatchWeights] | None = None

    def check_form(self, batches: Sequence[ReadBatch]) -> None:
        """Refuse a list of rows if the loss function needs a pair of inputs and targets."""
        # A list of two rows would be taken for inputs and targets. `holds_rows` is known only after
        # the batches were read.
        if self._convention.needs_pairs and self.layout.holds_rows:
            raise BatchError(
                "loss_fn needs a pair (inputs, targets), but this batch "
                f"({type(batches[-1].batch).__name__}) is read as {batches[-1].num_rows} rows, "
                "one in each element. Collate the rows into a pair, declare batch_layout={'': "
                "'fields'} if it is one, or pass forward=… that takes (model, microbatch)"
            )

    def cut(self, batches: Sequence[Any], cuts: Sequence[Cut]) -> list[CutBatch]:
        """Cut each batch into microbatches: views on the device of the batch."""
        if not any(cut.is_split for cut in cuts):
            return list(map(self._cut_one, batches, cuts))
        with on_host():
            return once_more(
                lambda: [self._cut_one(*each) for each in zip(batches, cuts, strict=True)],
                self.device,
                doing="cutting the batch into microbatches",
            )

    def _cut_one(self, batch: Any, cut: Cut) -> CutBatch:
        microbatches = self.layout.split(batch, cut.sizes) if cut.is_split else [batch]
        if cut.packing is not None:
            microbatches = cut.packing.cut(microbatches, cut.sizes)
        return CutBatch(batch=batch, microbatches=microbatches, sizes=cut.sizes)

    def weights(
        self, cuts: Sequence[CutBatch], totals: Mapping[str, float] | None = None
    ) -> BatchWeights:
        """Return the weight of each microbatch's loss in the loss of all batches together."""
        if not self.scales_for_ranks:
            totals = None
        if totals is None and self._counts_rows:
            sizes = [cut.sizes for cut in cuts]
            if self._last_weights is None or self._last_weights[0] != sizes:
                self._last_weights = sizes, BatchWeights(self._averages, cuts)
            return self._last_weights[1]
        with on_host():
            return BatchWeights(
                self._averages,
                cuts,
                totals=totals,
                copies=1 if totals is None else self._ranks.copies,
            )

    def denominators(self, batches: Sequence[ReadBatch]) -> dict[str, float]:
        """Return the divisors of the losses of whole batches, by name, except for sums."""
        # Without scaling, each rank divides by its own denominators, and ranks exchange none. With
        # it, reading a count of targets on a device waits for the device.
        if not self.scales_for_ranks:
            return {}
        cuts = [CutBatch.whole(each.batch, each.num_rows) for each in batches]
        totals = self.weights(cuts).totals
        return {name: float(total) for name, total in totals.items() if total is not None}

    def check_counts(self, weights: BatchWeights, whole: Mapping[str, float]) -> None:
        """Refuse a count of a batch that differs from the sum of the counts of its microbatches."""
        for name, total in weights.totals.items():
            if isinstance(total, Tensor) or total is None:
                continue
            # Counts may be sums of weights, which round differently slice by slice.
            if not math.isclose(total, whole[name], rel_tol=1e-6):
                raise LossError(
                    f"loss_average counts {whole[name]} in a whole batch, but {total} in its "
                    "microbatches together. Several ranks agree on the divisor of the loss before "
                    "they cut, so both numbers must be equal. Count each row independently of the "
                    "other rows of the batch"
                )

    def warn_of_nothing(self, weights: BatchWeights) -> None:
        """Warn, the first time, of a training batch in which no target counts."""
        if self._ranks.rank or self._has_warned_of_nothing:
            return
        if weights.all_are_nothing:
            warn(
                "no target of this batch counts: all are ignored or have a weight of zero, so the "
                "loss and its gradient are zero. Check the labels, the collate function and "
                "ignore_index, and skip such batches if they are intended; said once",
                LossAverageWarning,
            )
            self._has_warned_of_nothing = True

    def train(
        self,
        run: MicrobatchRun,
        weights: BatchWeights,
        gradients: Gradients,
        features: Features = NO_FEATURES,
    ) -> Losses:
        """Run forward and backward of one microbatch; return its losses, detached."""
        # Except for what features keep, the outputs of the model are freed when this returns,
        # before the next forward begins. The losses returned are weighted, unless the backward
        # starts from the weight.
        index, inputs = run.index, run.inputs
        is_nothing = weights.is_nothing[index]
        if is_nothing:
            # The mean over no target is NaN, and so is the gradient of an input that collects one.
            inputs = map_tensors(inputs, _cut_off)
        if not gradients.is_steady:
            gradients.before_forward()
        convention, model, dtype = self._convention, self._modules[0], self._autocast_dtype
        # Without a dtype of ours, an autocast that the caller entered stays in effect.
        with _NOTHING if dtype is None else torch.autocast(self.device.type, dtype):
            given = convention.call(model, inputs)
            _call(features.forwarded, run)
            output = convention.loss_of(given, model, inputs)
        del given
        if self._captures:
            output = _with_own_losses(output)
        if output.losses and not output.has_total and not self._has_looked_at_parts:
            self._warn_of_metrics_among(output.losses)
        loss = check_loss(output.loss, may_be_zero=True)
        weight: Any = weights.of_all[index]
        parts = output.losses
        start: tuple[Tensor, ...] = ()
        if self.can_begin and weights.are_plain:
            # A new tensor for each backward: if a leaf is a view of the loss, autograd makes it the
            # leaf's gradient, to which later backwards add.
            start = (torch.full_like(loss, weight),)
        else:
            loss, parts = weights.apply(index, loss, parts, has_total=output.has_total)
        if not gradients.is_steady:
            gradients.after_forward()
        if features.before_backward or features.computed or features.after:
            # Only hooks read it, and with small microbatches every operation costs time.
            run.loss = loss.detach() * weight if start else loss.detach()
            _call(features.before_backward, run)
        if loss.requires_grad and not self._is_alone:
            with self.zeroing_gradients() if is_nothing else _NOTHING:
                # Wrappers average gradients over ranks: scaling the loss turns that into a sum.
                gradients.run(self._run_backward, loss * self._scale if self._scale > 1 else loss)
        elif loss.requires_grad and is_nothing:
            gradients.run_for_nothing(self._run_backward, loss)
        elif loss.requires_grad:
            gradients.run(self._run_backward, loss, *start)
        if features.computed:
            self._show(run, output, features)
        return weights.report(loss, parts)

    def _show(self, run: MicrobatchRun, output: Output, features: Features) -> None:
        """Let features read an output, and keep no reference to it."""
        run.output = output
        try:
            _call(features.computed, run)
        # Otherwise the run keeps the output alive while the next microbatch is computed.
        finally:
            run.output = None

    def seen_by_metrics(self, run: MicrobatchRun) -> Any:
        """Return the outputs of a microbatch that metrics are updated with."""
        assert run.output is not None
        if run.loss is None:  # in evaluation
            return run.output.outputs
        outputs = map_tensors(run.output.outputs, Tensor.detach)
        if not self._convention.has_eval_forward:
            return outputs
        with evaluation_mode(self._modules), torch.no_grad():
            return self._forward(
                lambda _, inputs: self._convention.eval_forward(inputs, outputs), run.inputs
            )

    def _warn_of_metrics_among(self, losses: Mapping[str, Tensor]) -> None:
        """Warn, the first time, of a part of the losses that cannot be trained on."""
        self._has_looked_at_parts = True
        # A constant zero, such as a disabled loss, does not change the total.
        names = [name for name, part in losses.items() if not part.requires_grad and bool(part)]
        if not names or len(names) == len(losses):
            return
        listed = ", ".join(map(repr, names))
        warn(
            f"the forward returned {', '.join(map(repr, losses))} as losses, which are added up. "
            f"But {listed} needs no gradient: it changes the reported loss and trains nothing. If "
            "it is not a loss, name the total yourself, {'loss': total, " + f"{names[0]!r}: …"
            "}; StepResult.losses has both",
            MetricWarning,
        )

    def fill(self, microbatch: Any) -> Losses:
        """Run forward and backward with zero gradients, only for the collectives of other ranks."""
        output = self._forward(self._convention.train, map_tensors(microbatch, _cut_off))
        loss = check_loss(output.loss, may_be_zero=True)
        if loss.requires_grad:
            with self.zeroing_gradients():
                # The loss of a filler may be NaN or infinite, and 0 · NaN is NaN.
                self._run_backward(loss.nan_to_num(0.0, 0.0, 0.0) * 0.0)
        return torch.zeros_like(loss), {n: torch.zeros_like(p) for n, p in output.losses.items()}

    @contextlib.contextmanager
    def zeroing_gradients(self) -> Iterator[None]:
        """Set every gradient to zero, even one computed as NaN, before a wrapper reads it."""
        parameters = {id(p): p for module in self._modules for p in module.parameters()}
        handles = [
            parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
            for parameter in parameters.values()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def evaluate(self, run: MicrobatchRun, features: Features = NO_FEATURES) -> Output:
        """Run the forward of one microbatch for evaluation."""
        output = self._forward(self._convention.evaluate, run.inputs)
        _call(features.forwarded, run)
        self._show(run, output, features)
        return output

    def predict(self, run: MicrobatchRun, features: Features = NO_FEATURES) -> Output:
        """Run the forward of one microbatch for its outputs only."""
        predict = functools.partial(self._convention.predict, holds_rows=self.layout.holds_rows)
        output = Output(None, {}, self._forward(predict, run.inputs))
        _call(features.forwarded, run)
        self._show(run, output, features)
        return output

    def _forward(self, forward: Callable[..., T], inputs: Any) -> T:
        dtype = self._autocast_dtype
        with _NOTHING if dtype is None else torch.autocast(self.device.type, dtype):
            found = forward(self._modules[0], inputs)
        return _with_own_losses(found) if self._captures else found


def _with_own_losses(output: T) -> T:
    """Copy losses that the next replay of a CUDA graph would overwrite."""
    if not isinstance(output, Output):
        return output
    losses = {name: _own(part) for name, part in output.losses.items()}
    return dataclasses.replace(output, loss=_own(output.loss), losses=losses)


def _own(loss: Any) -> Any:
    return loss.clone() if isinstance(loss, Tensor) else loss


def _call(hooks: Sequence[Callable[[MicrobatchRun], None]], run: MicrobatchRun) -> None:
    for hook in hooks:
        hook(run)


def _cut_off(tensor: Tensor) -> Tensor:
    """Detach an input, so that its gradient, which may be NaN, goes no further."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
