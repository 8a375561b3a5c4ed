"""The work of one attempt at a training step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from automicro.accumulation import accumulate_gradients
from automicro.attempts import Phase, Plan
from automicro.checks import check_history
from automicro.filling import SpareRows
from automicro.inputs import InputWatch
from automicro.kept import Kept
from automicro.metric_guard import MetricGuard
from automicro.observer import Narrator
from automicro.passes import Losses, Passes
from automicro.ranks import Ranks
from automicro.sharing import read_losses
from automicro.slicing import BatchLayout
from automicro.splitting import SplitGuard
from automicro.transaction import Buffers, Gradients


class TrainingWork:
    """Cuts, accumulates and warns. Everything that it changes is undone if it fails.

    Args:
        passes: runs one microbatch.
        layout: where a batch has its rows.
        phase: of training.
        device: where the model computes.
        split_guard: warns where splitting changes the model.
        metric_guard: warns where it changes a metric.
        ranks: that run as many microbatches.
        spare: rows for fillers.
    """

    def __init__(
        self,
        passes: Passes,
        layout: BatchLayout,
        phase: Phase,
        *,
        device: torch.device,
        split_guard: SplitGuard,
        metric_guard: MetricGuard,
        ranks: Ranks,
        spare: SpareRows,
    ) -> None:
        self._passes = passes
        self._layout = layout
        self._phase = phase
        self._device = device
        self._split_guard = split_guard
        self._metric_guard = metric_guard
        self._ranks = ranks
        self._spare = spare

    def attempt(
        self,
        batches: Sequence[Any],
        plan: Plan,
        denominators: Mapping[str, float],
        *,
        watch: InputWatch,
        buffers: Buffers,
        gradients: Gradients,
        metrics: Any,
        kept: Kept,
        narrator: Narrator | None,
        reads: bool,
    ) -> Losses:
        """Forward and backward of all batches, cut as planned; their loss and its parts.

        Args:
            batches: of this rank.
            plan: how they are cut.
            denominators: of the whole batches, where ranks have agreed on them.
            watch: guards the batches.
            buffers: as they were before.
            gradients: that add up.
            metrics: updated with every row.
            kept: what the caller asked for of each forward.
            narrator: tells of every microbatch.
            reads: whether the losses come to the host, because somebody decides by them.
        """
        for batch, sizes in zip(batches, plan.cuts, strict=True):
            if len(sizes) > 1:
                check_history(self._layout.leaves(batch))
        self._metric_guard.expect(metrics, plan.cuts)
        cut = self._passes.cut(batches, plan.cuts, sizes_change=self._phase.adapts)
        weights = self._passes.weights(cut, plan.totals)
        if plan.totals is not None:
            self._passes.check_counts(weights, denominators)
        result = accumulate_gradients(
            self._passes,
            cut,
            watch=watch,
            device=self._device,
            metrics=metrics,
            weights=weights,
            ranks=self._ranks,
            gradients=gradients,
            kept=kept,
            fillers=self._spare.fillers(plan, batches, self._phase),
            narrator=narrator,
        )
        split = max(plan.cuts, key=len, default=[])
        if len(split) > 1 and self._ranks.rank == 0:
            self._split_guard.warn(split, buffers)
        return read_losses(result) if reads else result
