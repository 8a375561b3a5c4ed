"""All microbatches of a step, one after the other: gradients add up, losses and outputs too."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.checks import refuse_constant
from automicro.filling import Fillers
from automicro.forward import outputs_with_rows
from automicro.inputs import InputWatch
from automicro.observer import Narrator
from automicro.passes import Losses, Passes
from automicro.ranks import Ranks
from automicro.slicing import concat_rows
from automicro.transaction import Gradients
from automicro.transfer import on_device, on_host
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
        if is_alone:
            losses.append(passes.train(microbatch, weights, index, metrics, gradients, tell))
        else:
            with ranks.microbatch(index, weightless=weights.is_nothing(index)):
                losses.append(passes.train(microbatch, weights, index, metrics, gradients, tell))
        if watch.compares:
            watch.compare(passes.tensors(microbatches[index]), used)
        if tell is not None:
            tell("microbatch_end")
    if num_real and not gradients.is_reached:
        refuse_constant()
    gradients.require_untouched()
    passes.warn_of_nothing(weights)
    return add_up(losses)


def accumulate_outputs(
    passes: Passes,
    cuts: Sequence[CutBatch],
    *,
    watch: InputWatch,
    device: torch.device,
    metrics: Any,
    keep_outputs: bool,
    ranks: Ranks,
    fillers: Fillers | None = None,
    predicts: bool = False,
    narrator: Narrator | None = None,
) -> tuple[Tensor | None, dict[str, Tensor], Any, dict[str, Weight | None]]:
    """Forward of every microbatch of one batch, for evaluation, or for its outputs alone.

    Returns the loss, its parts by name, the outputs of all rows where they are kept, and what
    the losses were divided by: of this rank's rows. ``cuts`` are none where it has none.
    """
    run = passes.predict if predicts else passes.evaluate
    weights: BatchWeights | None = None
    losses, outputs = [], []
    microbatches = [each for cut in cuts for each in cut.microbatches]
    num_real = len(microbatches)
    if fillers is not None:
        microbatches += fillers.microbatches()
    tensors = [tensor for cut in cuts for tensor in passes.tensors(cut.batch)]
    home = next((tensor.device for tensor in tensors), device)
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
        if keep_outputs:
            outputs.append(passes.bring_home(outputs_with_rows(output.outputs), home))
        del output  # before the next forward
        if tell is not None:
            tell("microbatch_end")
    loss, parts = add_up(losses) if losses else (None, {})
    with on_host() if home.type == "cpu" else contextlib.nullcontext():
        rows = concat_rows(outputs) if outputs else None
    return loss, parts, rows, weights.totals if weights is not None else {}
