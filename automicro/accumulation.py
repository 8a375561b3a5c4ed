"""All microbatches of a step, one after the other: gradients add up, losses and outputs too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.checks import refuse_constant
from automicro.filling import Fillers
from automicro.inputs import InputWatch
from automicro.kept import Kept
from automicro.observer import Narrator
from automicro.passes import Keep, Losses, Passes
from automicro.ranks import Ranks
from automicro.transaction import Gradients
from automicro.transfer import on_device
from automicro.weighting import BatchWeights, CutBatch, Weight, add_up


def accumulate_gradients(
    passes: Passes,
    cuts: Sequence[CutBatch],
    *,
    watch: InputWatch,
    device: torch.device,
    metrics: Any,
    weights: BatchWeights,
    ranks: Ranks,
    gradients: Gradients,
    kept: Kept,
    fillers: Fillers | None = None,
    narrator: Narrator | None = None,
) -> Losses:
    """Forward and backward of every microbatch; the loss of all together, and its parts.

    Args:
        passes: runs one microbatch.
        cuts: one batch or several, whose losses have one denominator.
        watch: notes whether the model writes into its input.
        device: where the model computes.
        metrics: updated with every row; None for none.
        weights: of the microbatches.
        ranks: that run as many.
        gradients: that add up.
        kept: what the caller asked for of each forward.
        fillers: for those that this rank has no rows for; None for none.
        narrator: tells of every microbatch.

    Raises:
        LossError: no microbatch has a loss that can be differentiated.
        TouchedGradientsError: the same again, please.

    Warns:
        LossAverageWarning: no target counts.
    """
    microbatches = [each for cut in cuts for each in cut.microbatches]
    num_real = len(microbatches)
    if fillers is not None:
        microbatches += fillers.microbatches()
    gradients.expect(len(microbatches))
    losses = []
    keeping = _keeping(passes, cuts, kept)
    is_alone = ranks.is_alone  # one process pays for nothing that several need
    for index, microbatch in enumerate(on_device(microbatches, device, isolate=watch.isolate)):
        if index >= num_real:
            assert fillers is not None
            with fillers.undone(), ranks.microbatch(index, weightless=True):
                losses.append(passes.fill(microbatch))
            continue
        tell = None if narrator is None else narrator.microbatch(index, microbatch)
        if tell is not None:
            tell("microbatch_start")
        used = passes.tensors(microbatch) if watch.compares else ()
        keep = None if keeping is None else keeping(index)
        given = microbatch, weights, index, metrics, gradients, tell, keep
        if is_alone:
            losses.append(passes.train(*given))
        else:
            with ranks.microbatch(index, weightless=weights.is_nothing(index)):
                losses.append(passes.train(*given))
        if watch.compares:
            watch.compare(passes.tensors(microbatches[index]), used)
        if tell is not None:
            tell("microbatch_end")
    if num_real and not gradients.is_reached:
        refuse_constant()
    gradients.require_untouched()
    passes.warn_of_nothing(weights)
    kept.join()
    return add_up(losses)


def accumulate_outputs(
    passes: Passes,
    cuts: Sequence[CutBatch],
    *,
    watch: InputWatch,
    device: torch.device,
    metrics: Any,
    kept: Kept,
    ranks: Ranks,
    fillers: Fillers | None = None,
    predicts: bool = False,
    narrator: Narrator | None = None,
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Weight | None]]:
    """Forward of every microbatch of one batch, for evaluation, or for its outputs alone.

    Returns the loss, its parts by name, and what the losses were divided by: of this rank's rows.
    ``cuts`` are none where it has none.
    """
    run = passes.predict if predicts else passes.evaluate
    weights: BatchWeights | None = None
    losses = []
    microbatches = [each for cut in cuts for each in cut.microbatches]
    num_real = len(microbatches)
    if fillers is not None:
        microbatches += fillers.microbatches()
    keeping = _keeping(passes, cuts, kept)
    for index, microbatch in enumerate(on_device(microbatches, device, isolate=watch.isolate)):
        if index >= num_real:
            assert fillers is not None
            with fillers.undone(), ranks.microbatch(index):
                run(microbatch, None)
            continue
        tell = None if narrator is None else narrator.microbatch(index, microbatch)
        if tell is not None:
            tell("microbatch_start")
        used = passes.tensors(microbatch) if watch.compares else ()
        with ranks.microbatch(index):
            output = run(microbatch, metrics, tell)
        if output.loss is not None:
            weights = weights or passes.weights(cuts)
            losses.append(
                weights.apply(index, output.loss, output.losses, has_total=output.has_total)
            )
        if watch.compares:
            watch.compare(passes.tensors(microbatches[index]), used)
        if keeping is not None:
            keeping(index)(output)
        del output  # before the next forward
        if tell is not None:
            tell("microbatch_end")
    loss, parts = add_up(losses) if losses else (None, {})
    kept.join()
    return loss, parts, weights.totals if weights is not None else {}


def _keeping(passes: Passes, cuts: Sequence[CutBatch], kept: Kept) -> Callable[[int], Keep] | None:
    """What keeps the output of a microbatch, by its index; None where nothing is kept."""
    if kept.is_nothing:
        return None
    batch = [tensor for cut in cuts for tensor in passes.tensors(cut.batch)]
    sizes = [size for cut in cuts for size in cut.sizes]
    return lambda index: functools.partial(kept.add, batch=batch, num_rows=sizes[index])
