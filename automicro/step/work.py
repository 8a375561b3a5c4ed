"""The work of a step: all its microbatches, one after the other, and what they may change."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.batch.device import on_device
from automicro.checking.check import Checks
from automicro.loss.averages import CutBatch, Weight
from automicro.loss.passes import Mode
from automicro.loss.weights import BatchWeights, add_up
from automicro.memory.residents import OccupiedDevice, ResidentMemory
from automicro.modules import ModuleIndex
from automicro.optimizer.reservation import OptimizerReservation
from automicro.options import check_history, refuse_constant
from automicro.step.events import Tell
from automicro.step.fillers import SpareRows
from automicro.step.metrics import MetricGuard, Metrics
from automicro.step.outputs import Kept
from automicro.step.passes import Keep, Losses, Passes
from automicro.step.phase import Phase
from automicro.step.plan import Cut, Plan, Step
from automicro.step.split_guard import SplitGuard
from automicro.step.unit import ROWS, order_of
from automicro.transaction.gradients import GradientHistory, Gradients
from automicro.transaction.parameters import Parameters
from automicro.transaction.transaction import Part
from automicro.values import read_scalars, stack_scalars

logger = logging.getLogger(__name__)


def read_losses(losses: Losses) -> Losses:
    """The loss and its parts on the host. Waits for the device once, however many parts there are.

    >>> read_losses((torch.tensor(3.0), {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}))
    (tensor(3.), {'a': tensor(1.), 'b': tensor(2.)})
    """
    loss, parts = losses
    every = [loss, *parts.values()]
    if all(each.device.type == "cpu" for each in every):
        return losses
    return _like(losses, stack_scalars(every).to("cpu").unbind())


def _like(losses: Losses, values: Iterable[Tensor]) -> Losses:
    """Other values for a loss and its parts, in their types."""
    loss, parts = losses
    loss, *others = (
        value.to(each.dtype) for each, value in zip((loss, *parts.values()), values, strict=True)
    )
    return loss, dict(zip(parts, others, strict=True))


class GlobalLoss:
    """Adds up the losses of all ranks, each of which has divided its own by what all count.

    On the host the vote to commit carries them. On an accelerator reading them would make the host
    wait for the device, so there they are added up by one collective of its own, after the vote,
    unless somebody has to look at the loss before the commit.

    Args:
        device: where the model computes.
        at_once: whether the loss is looked at before the commit.
        num_means: of how many ranks' means the loss is the mean; 1 where it is a sum of shares.
    """

    def __init__(self, device: torch.device, *, at_once: bool, num_means: int = 1) -> None:
        self._device = device
        self._num_means = num_means
        self._votes = at_once or device.type == "cpu"
        self._own: Tensor | None = None  # on an accelerator

    def numbers(self, result: Losses) -> Sequence[float]:
        """The loss and its parts, where the vote carries them."""
        loss, parts = result
        if self._votes:
            return read_scalars([loss, *parts.values()])
        # Before the vote: after it, running out of memory here would leave the others alone.
        self._own = stack_scalars([loss, *parts.values()]).to(self._device)
        return ()

    def together(self, result: Losses, sums: Sequence[float]) -> Losses:
        """The loss of all ranks and its parts."""
        stacked, self._own = self._own, None
        if stacked is None:
            summed = torch.tensor(sums, dtype=torch.float64, device="cpu")
            return _like(result, (summed / self._num_means).unbind())
        from automicro.ranks.guards.collectives import own_collectives

        with own_collectives():  # the vote to commit has just come before
            dist.all_reduce(stacked)
        return _like(result, (stacked / self._num_means).unbind())


Accept = Callable[[Tensor], bool]
Evaluated = tuple[Tensor | None, dict[str, Tensor], dict[str, Weight | None]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a Microbatcher was made with, and has learned; the work of each step uses it.

    Attributes:
        index: of all parameters and buffers that take part.
        passes: run one microbatch.
        spare: rows for microbatches that count for nothing.
        split_guard: warns where splitting changes the model.
        metric_guard: warns where it changes a metric.
        checks: compare rows together and apart.
        gradients: what is known of them.
        memory: the device, and what lies on it.
        reservation: for the optimizer's first step.
    """

    index: ModuleIndex
    passes: Passes
    spare: SpareRows
    split_guard: SplitGuard
    metric_guard: MetricGuard
    checks: Checks
    gradients: GradientHistory
    memory: OccupiedDevice
    reservation: OptimizerReservation


class _Each(NamedTuple):
    """One microbatch, on the device.

    Attributes:
        number: among those of this rank, from 0.
        rows: of it.
        is_filler: whether it counts for nothing.
        tell: of its events; None where nobody listens.
        keep: of its output what is asked for; None for nothing.
    """

    number: int
    rows: Any
    is_filler: bool = False
    tell: Tell | None = None
    keep: Keep | None = None


class _Work:
    """What training and evaluation have in common.

    Args:
        setup: that the Microbatcher was made with.
        phase: that the step belongs to.
        step: what it brings.
        metrics: updated with every row; None for none.
        kept: what the caller asked for of each forward.

    Attributes:
        narrator: tells of every microbatch; None where nobody listens.
    """

    _mode: Mode = "train"

    def __init__(self, setup: Setup, phase: Phase, step: Step, metrics: Any, kept: Kept) -> None:
        self._setup, self._phase, self._step = setup, phase, step
        self._passes = setup.passes
        self._ranks = phase.ranks
        self._metrics, self._kept = metrics, kept
        self._counted = None if metrics is None else phase.metrics(metrics)
        self._state = phase.state(metrics)
        self._updated: list[Part] = [] if self._counted is None else [self._counted]
        self._updated += phase.own_parts()
        self._cuts: Sequence[Cut] = ()
        self._keeps = [] if kept.is_nothing else [kept]
        self._watch = phase.watch([each.contents for each in step.batches])
        self.narrator = phase.narrator()
        self._gives_outputs = kept.has_outputs
        self._has_looked = self._has_looked_at_outputs = False

    def check(self, plan: Plan) -> None:
        checks, kept, mode = self._setup.checks, self._kept, self._mode
        of_outputs = checks.compares_outputs and mode != "train" and self._gives_outputs
        of_outputs = of_outputs and not self._has_looked_at_outputs
        of_loss = not self._has_looked and checks.compares(mode)
        if not (of_outputs or of_loss):
            return
        every = zip(self._step.raw, self._step.rows, plan.cuts, strict=True)
        split = next((each for each in every if each[2].is_split), None)
        if split is None:  # the others are fillers
            return
        batch, num_rows, cut = split
        with self._ranks.looking_alone():
            if of_outputs:
                self._has_looked_at_outputs = True
                known = checks.outputs(batch, num_rows, mode)
                if kept.has_outputs:
                    kept.know(known)
            if of_loss:
                self._has_looked = True
                gives_outputs = mode != "train" and self._gives_outputs
                checks.whole(batch, cut.sizes, mode, gives_outputs=gives_outputs)

    @property
    def _sorted_metrics(self) -> Metrics | None:
        """The metrics, where rows reach them in another order than the batch's."""
        return None if self._phase.rule.unit == ROWS else self._counted

    def _cut(self, plan: Plan) -> list[CutBatch]:
        self._cuts = plan.cuts
        if self._metrics is not None:
            self._setup.metric_guard.expect(self._metrics, plan.cuts)
        return self._passes.cut(self._step.raw, plan.cuts, sizes_change=self._phase.policy.adapts)

    def _spares(self, cuts: Sequence[CutBatch]) -> list[Any]:
        """Batches to take the rows of fillers from: where they are sorted, the shortest."""
        if self._phase.rule.unit == ROWS:
            return self._step.raw
        return [cuts[0].microbatches[-1]] if cuts else []

    def _shared_inputs(self) -> list[Tensor]:
        """What lies on the device with every microbatch: of several batches, the most of one."""
        each: list[list[Tensor]] = []
        with contextlib.suppress(Exception):  # it is for words, where memory has run out
            each = [self._passes.layout.shared(batch) for batch in self._step.raw]
        return max(each, key=lambda tensors: sum(tensor.nbytes for tensor in tensors), default=[])

    def _each(self, cuts: Sequence[CutBatch], fillers: Sequence[Any]) -> Iterator[_Each]:
        """Every microbatch of this rank, with what comes before and after it.

        What runs one stands in the loop of the caller and not in a function that is handed over:
        after an error its frame would keep the function, and that all tensors that it refers to.
        """
        passes, watch, narrator = self._passes, self._watch, self.narrator
        microbatches = [each for cut in cuts for each in cut.microbatches]
        num_real = len(microbatches)
        keeping = self._keeping(cuts)
        moved = on_device([*microbatches, *fillers], passes.device, isolate=watch.isolate)
        for index, microbatch in enumerate(moved):
            if index >= num_real:
                yield _Each(index, microbatch, is_filler=True)
                continue
            tell = None if narrator is None else narrator.microbatch(index, microbatch)
            if tell is not None:
                tell("microbatch_start")
            used = passes.tensors(microbatch) if watch.compares else ()
            keep = None if keeping is None else keeping(index)
            yield _Each(index, microbatch, tell=tell, keep=keep)
            if watch.compares:
                watch.compare(passes.tensors(microbatches[index]), used)
            if tell is not None:
                tell("microbatch_end")
        if self._keeps:
            self._kept.join(self._cuts, is_training=self._mode == "train")
        if (counted := self._sorted_metrics) is not None:
            counted.sort([(cut.sizes, order_of([cut]) or ()) for cut in self._cuts])

    def _keeping(self, cuts: Sequence[CutBatch]) -> Callable[[int], Keep] | None:
        """What keeps the output of a microbatch, by its index; None where nothing is kept."""
        if not self._keeps:
            return None
        batch = [tensor for cut in cuts for tensor in self._passes.tensors(cut.batch)]
        sizes = [size for cut in cuts for size in cut.sizes]
        return lambda index: functools.partial(self._kept.add, batch=batch, num_rows=sizes[index])


class TrainingWork(_Work):
    """Forward and backward of all batches: their gradients add up, and their losses.

    Args:
        setup: that the Microbatcher was made with.
        phase: of training.
        step: what it brings.
        metrics: updated with every row; None for none.
        kept: what the caller asked for of each forward.
        accept: given the loss, says whether to keep the step; None for yes.
    """

    def __init__(
        self,
        setup: Setup,
        phase: Phase,
        step: Step,
        metrics: Any,
        kept: Kept,
        accept: Accept | None = None,
    ) -> None:
        super().__init__(setup, phase, step, metrics, kept)
        self._accept = accept
        self._gradients = Gradients(
            setup.index.known, setup.gradients, inputs=self._watch.requiring_grad
        )
        self._shared: GlobalLoss | None = None
        if not phase.ranks.is_alone:
            self._shared = GlobalLoss(
                phase.device,
                at_once=accept is not None,
                num_means=1 if setup.passes.scales_for_ranks else phase.ranks.world_size,
            )
        self._own: tuple[Losses, BatchWeights, Mapping[str, float]] | None = None
        self._parameters: Parameters | None = None

    def accept_writes(self) -> None:
        """Take parameters for what they are now: somebody who may has written to them."""
        if self._parameters is not None:
            self._parameters.begin()

    def parts(self) -> list[Part]:
        index = self._setup.index
        self._parameters = Parameters(index.parameters, index.names_of)
        return [
            self._parameters,
            self._watch,
            *([self._setup.reservation] if self._setup.reservation.is_used else ()),
            *self._keeps,
            self._phase.random_state(),
            self._state,
            self._gradients,  # hooks at its commit may change all others before it
            *self._updated,
        ]

    def run(self, plan: Plan) -> Losses:
        passes, ranks, gradients = self._passes, self._ranks, self._gradients
        if plan.num_microbatches > len(plan.cuts):
            for batch, cut in zip(self._step.raw, plan.cuts, strict=True):
                if cut.is_split:
                    check_history(passes.layout.leaves(batch))
        cuts = self._cut(plan)
        weights = passes.weights(cuts, plan.totals)
        gradients.expect(plan.num_microbatches)
        losses: list[Losses] = []
        is_alone = ranks.is_alone  # one process pays for nothing that several need
        listens = self.narrator is not None or self._keeps or self._watch.compares
        listens = listens or self._sorted_metrics is not None
        if is_alone and not listens:  # the usual case, with nothing around a microbatch
            every = [each for cut in cuts for each in cut.microbatches]
            moved = on_device(every, passes.device, isolate=self._watch.isolate)
            for index, rows in enumerate(moved):
                losses.append(passes.train(rows, weights, index, self._metrics, gradients))
                del rows
            return self._summed(losses, weights, plan)
        if plan.totals:
            passes.check_counts(weights, self._step.denominators)
        fillers = self._setup.spare.fillers(plan, self._spares(cuts), self._phase)
        for index, rows, is_filler, tell, keep in self._each(cuts, fillers.rows):
            if is_filler:
                with fillers.undone(), ranks.microbatch(index, weightless=True):
                    losses.append(passes.fill(rows))
                continue
            given = rows, weights, index, self._metrics, gradients, tell, keep
            if is_alone:
                losses.append(passes.train(*given))
            else:
                with ranks.microbatch(index, weightless=weights.is_nothing[index]):
                    losses.append(passes.train(*given))
            del given
        return self._summed(losses, weights, plan)

    def _summed(self, losses: Sequence[Losses], weights: BatchWeights, plan: Plan) -> Losses:
        """The losses of all microbatches together, once nothing speaks against them."""
        if plan.cuts and not self._gradients.is_reached:
            refuse_constant()
        self._gradients.require_untouched()
        self._passes.warn_of_nothing(weights)
        self._warn_of_splitting(plan)
        begun = self._passes.begins_with(weights)
        summed = add_up(losses, weights.of_all if begun else None)
        if not self._ranks.is_alone:
            self._own = summed, weights, plan.totals or {}
        return summed if self._accept is None else read_losses(summed)

    def _warn_of_splitting(self, plan: Plan) -> None:
        if plan.num_microbatches <= len(plan.cuts) or self._ranks.rank:
            return
        most = max(plan.cuts, key=lambda cut: len(cut.sizes), default=None)
        if most is not None and most.is_split:
            counting = self._setup.checks.counting
            self._setup.split_guard.warn(most.sizes, self._state, counting)

    @property
    def rank_loss(self) -> Tensor | None:
        """The loss of this rank's rows, divided by what they count; None where it is alone."""
        if self._own is None:
            return None
        (loss, parts), weights, of_all = self._own
        if not of_all or not self._passes.scales_for_ranks:
            return loss

        def own(share: Tensor, name: str) -> Tensor:
            total = weights.totals.get(name)
            return share if total is None or not total else share * (of_all[name] / total)

        if "" in weights.totals:
            return own(loss, "")
        return torch.stack([own(part, name) for name, part in parts.items()]).sum()

    def numbers(self, result: Losses) -> Sequence[float]:
        return () if self._shared is None else self._shared.numbers(result)

    def combined(self, result: Losses, sums: Sequence[float]) -> Losses:
        return result if self._shared is None else self._shared.together(result, sums)

    def accepts(self, result: Losses) -> bool:
        if self._phase.is_rehearsing:
            return False
        return self._accept is None or self._accept(result[0])

    def residents(self) -> ResidentMemory | None:
        return self._setup.memory.measure(
            training=True,
            upcoming_bytes=self._setup.reservation.upcoming_bytes,
            shared_inputs=self._shared_inputs(),
        )


class EvaluationWork(_Work):
    """Forward of one batch: its loss, and what it was divided by. Of this rank's rows alone.

    Args:
        setup: that the Microbatcher was made with.
        phase: of evaluation.
        step: what it brings.
        metrics: updated with every row; None for none.
        kept: what the caller asked for of each forward.
        predicts: whether only outputs are asked for.
        compares_outputs: whether outputs are compared although nobody asked for them.
    """

    def __init__(
        self,
        setup: Setup,
        phase: Phase,
        step: Step,
        metrics: Any,
        kept: Kept,
        *,
        predicts: bool = False,
        compares_outputs: bool = False,
    ) -> None:
        super().__init__(setup, phase, step, metrics, kept)
        self._gives_outputs |= compares_outputs
        self._predicts = predicts
        self._mode = "predict" if predicts else "eval"
        self._has_looked = predicts  # without a loss there is nothing to see

    def parts(self) -> list[Part]:
        return [
            self._watch,
            *self._keeps,
            self._phase.random_state(),
            self._state,
            *self._updated,
        ]

    def run(self, plan: Plan) -> Evaluated:
        passes, ranks = self._passes, self._ranks
        forward = passes.predict if self._predicts else passes.evaluate
        cuts = self._cut(plan)
        fillers = self._setup.spare.fillers(plan, self._spares(cuts), self._phase)
        weights: BatchWeights | None = None
        losses: list[Losses] = []
        for index, rows, is_filler, tell, keep in self._each(cuts, fillers.rows):
            if is_filler:
                with fillers.undone(), ranks.microbatch(index):
                    forward(rows, None)
                continue
            with ranks.microbatch(index):
                output = forward(rows, self._metrics, tell)
            if output.loss is not None:
                weights = weights or passes.eval_weights(cuts)
                loss = weights.apply(index, output.loss, output.losses, has_total=output.has_total)
                losses.append(weights.report(*loss))
                del loss
            if keep is not None:
                keep(output)
            del output  # before the next forward
        for cut in plan.cuts:
            if cut.is_split:
                self._setup.split_guard.warn_of_evaluation(cut.sizes, self._state)
        total, parts = add_up(losses) if losses else (None, {})
        return total, parts, {} if weights is None else weights.totals

    def numbers(self, result: Evaluated) -> Sequence[float]:
        return ()

    def combined(self, result: Evaluated, sums: Sequence[float]) -> Evaluated:
        return result

    def accepts(self, result: Evaluated) -> bool:
        return not self._phase.is_rehearsing

    def residents(self) -> ResidentMemory | None:
        return self._setup.memory.measure(training=False, shared_inputs=self._shared_inputs())
