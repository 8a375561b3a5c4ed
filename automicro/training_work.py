"""The work of one attempt at a training step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from automicro.accumulation import accumulate_gradients
from automicro.attempts import Phase, Plan
from automicro.checks import check_history
from automicro.filling import SpareRows
from automicro.inputs import InputWatch
from automicro.observer import Narrator
from automicro.passes import Losses, Passes
from automicro.probing import Prober
from automicro.ranks import Ranks
from automicro.slicing import BatchLayout
from automicro.splitting import SplitGuard
from automicro.transaction import (
    BufferMemory,
    Buffers,
    RandomState,
    Transaction,
    find_generators,
)


class TrainingWork:
    """Cuts, probes, accumulates and warns. Everything that it changes is undone if it fails.

    Args:
        passes: runs one microbatch.
        layout: where a batch has its rows.
        phase: of training.
        device: where the model computes.
        modules: everything that takes part.
        prober: looks at the first batches; None for none.
        split_guard: warns where splitting changes the model.
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
        modules: Sequence[nn.Module],
        prober: Prober | None,
        split_guard: SplitGuard,
        ranks: Ranks,
        spare: SpareRows,
    ) -> None:
        self._passes = passes
        self._layout = layout
        self._phase = phase
        self._device = device
        self._modules = modules
        # Where forwards communicate, ranks would have to probe as often as one another.
        probes = ranks.rank == 0 and not ranks.communicates_in_forward
        self._prober = prober if probes else None
        self._split_guard = split_guard
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
        metrics: Any,
        probes: bool,
        narrator: Narrator | None,
    ) -> Losses:
        """Forward and backward of all batches, cut as planned; their loss and its parts.

        Args:
            batches: of this rank.
            plan: how they are cut.
            denominators: of the whole batches, where ranks have agreed on them.
            watch: guards the batches.
            buffers: as they were before.
            metrics: updated with every row.
            probes: whether to look at the batch, because it could be split.
            narrator: tells of every microbatch.
        """
        for batch, sizes in zip(batches, plan.cuts, strict=True):
            if len(sizes) > 1:
                check_history(self._layout.leaves(batch))
        if self._prober is not None and probes and not self._prober.is_done:
            self._probe(self._prober, batches[0], sum(plan.cuts[0]))
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
            fillers=self._spare.fillers(plan, batches, self._phase),
            narrator=narrator,
        )
        split = max(plan.cuts, key=len, default=[])
        if len(split) > 1 and self._ranks.rank == 0:
            self._split_guard.warn(split, buffers)
        return result

    def _probe(self, prober: Prober, batch: Any, num_rows: int) -> None:
        undo = Transaction(
            [
                Buffers(BufferMemory(self._modules)),
                RandomState(self._device, find_generators(self._modules)),
            ]
        )
        with self._ranks.looking_alone():
            prober.look(
                batch, num_rows, self._layout, self._passes.losses_of_rows, undo, self._device
            )
