"""The work of a step: all its microbatches, one after the other, and what they may change."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.batch.device import InputWatch, on_device
from automicro.batch.layout import BatchLayout
from automicro.loss.averages import CutBatch, Weight
from automicro.loss.conventions import Output
from automicro.loss.passes import Computation, Mode
from automicro.loss.weights import BatchWeights, add_up
from automicro.memory.residents import OccupiedDevice, ResidentMemory
from automicro.modules import ModuleIndex
from automicro.options import check_history, refuse_constant
from automicro.ranks.interface import announcing_failure
from automicro.step.feature import NO_FEATURES, Feature, Features, MicrobatchRun
from automicro.step.fillers import SpareRows
from automicro.step.passes import Losses, Passes
from automicro.step.phase import Phase
from automicro.step.plan import ROWS, Plan, Step
from automicro.step.results import Where
from automicro.step.split_guard import SplitGuard
from automicro.transaction.gradients import GradientHistory, Gradients
from automicro.transaction.parameters import Parameters
from automicro.transaction.transaction import Part
from automicro.values import read_scalars, stack_scalars

if TYPE_CHECKING:  # each stands beside the path of a batch, and is loaded where it is used
    from automicro.checking.check import Checks
    from automicro.optimizer.reservation import OptimizerReservation
    from automicro.step.metrics import MetricGuard
    from automicro.step.outputs import Keeper, Kept

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _read_losses(losses: Losses) -> Losses:
    """The loss and its parts on the host. Waits for the device once, however many parts there are.

    >>> _read_losses((torch.tensor(3.0), {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}))
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


class _GlobalLoss:
    """Adds up the losses of all ranks, each of which has divided its own by what all count."""

    def __init__(self, device: torch.device, *, at_once: bool, num_means: int = 1) -> None:
        self._device = device
        self._num_means = num_means
        # A vote carries a few numbers for nothing, but reading them from a device would wait for
        # it.
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
class Engine:
    """The shared machinery of a Microbatcher's steps.

    Attributes:
        index: of all parameters and buffers that take part.
        passes: run one microbatch.
        spare: rows for microbatches that count for nothing.
        split_guard: warns where splitting changes the model.
        computation: that is checked.
        checking: options of `Checks`.
        update_metric: feeds one metric with outputs and microbatch.
        updates_by_caller: whether that is the caller's.
        random_state: gives what undoes what an update may draw.
        gradients: what is known of them.
        memory: the device, and what lies on it.
        reservation: for the optimizer's first step; None where there is no optimizer.
        features: of the caller.
        carry_layout: of state for the next batch; None where there is none.
    """

    index: ModuleIndex
    passes: Passes
    spare: SpareRows
    split_guard: SplitGuard
    computation: Computation
    checking: Mapping[str, bool]
    update_metric: Callable[..., None]
    updates_by_caller: bool
    random_state: Callable[[], Part]
    gradients: GradientHistory
    memory: OccupiedDevice
    reservation: "OptimizerReservation | None" = None
    features: Sequence[Feature] = ()
    carry_layout: BatchLayout | None = None

    @functools.cached_property
    def checks(self) -> "Checks":
        """The checks, which compare rows together and apart."""
        from automicro.checking.check import Checks

        return Checks(self.computation, **self.checking)

    @functools.cached_property
    def metric_guard(self) -> "MetricGuard":
        """The guard that warns where splitting changes a metric."""
        from automicro.step.metrics import MetricGuard, naming_metrics

        return MetricGuard(
            naming_metrics(self.update_metric),
            self.passes.layout,
            self.random_state,
            is_callers=self.updates_by_caller,
        )

    @functools.cached_property
    def keeper(self) -> "Keeper":
        """The keeper of outputs and of state for the next batch, where they are asked for."""
        from automicro.step.outputs import Keeper

        return Keeper(self.passes.device, self.carry_layout)

    @property
    def upcoming_bytes(self) -> Sequence[int]:
        """Of each tensor of state that the optimizer has yet to build, as far as known."""
        return () if self.reservation is None else self.reservation.upcoming_bytes


class _Watching(Feature):
    """Notes whether the forward writes into copies of the batch, while that is not known."""

    def __init__(self, watch: InputWatch, tensors: Callable[[Any], list[Tensor]]) -> None:
        self._watch, self._tensors = watch, tensors
        self.used: list[Tensor] = []

    def before(self, run: MicrobatchRun) -> None:
        self.used = self._tensors(run.inputs)

    def after(self, run: MicrobatchRun) -> None:
        used, self.used = self.used, []
        self._watch.compare(self._tensors(run.given), used)


class _Work(Generic[T]):
    """The shared work of training and evaluation."""

    _mode: Mode = "train"

    def __init__(
        self, engine: Engine, phase: Phase, step: Step, metrics: Any, where: Where
    ) -> None:
        self._engine, self._phase, self._step = engine, phase, step
        self._passes, self._ranks = engine.passes, phase.ranks
        is_kept = where is not False or engine.carry_layout is not None
        self._kept: Kept | None = engine.keeper.keep(where) if is_kept else None
        counted: Sequence[Any] = ()
        if metrics is not None:
            from automicro.step.metrics import Metrics, MetricUpdates, flatten_metrics

            with announcing_failure(phase.ranks):
                counted = flatten_metrics(metrics)
        # One for the phase and not for each step: a walk over all that is reached costs more than a
        # step.
        self._state = phase.state(counted)
        self._watch = watch = phase.watch([each.contents for each in step.batches])
        # The usual step has none of these, and then no hook is looked for.
        self._watching = [_Watching(watch, self._passes.tensors)] if watch.compares else []
        features: list[Feature] = [*self._watching]
        # A rehearsal leaves no trace, so that features of the caller's do not hear of it.
        if not phase.is_rehearsing:
            features += engine.features
        if metrics is not None:
            updates = MetricUpdates(
                metrics,
                engine.metric_guard,
                Metrics(counted),
                self._passes.seen_by_metrics,
                sorts=phase.rule.unit != ROWS,
            )
            features.append(updates)
        if self._kept is not None:
            features.append(self._kept)
        self._features = NO_FEATURES
        if features:
            has_metrics = metrics is not None
            self._features = Features(features, given=engine.features, has_metrics=has_metrics)
        self._gives_outputs = where is not False
        self._has_checked = self._has_checked_outputs = False
        self._number = 0  # of attempts
        self._let_go()

    @property
    def outputs(self) -> Any:
        """Of all rows, where they were asked for."""
        return None if self._kept is None else self._kept.outputs

    @property
    def carry(self) -> Any:
        """State for the next batch, where there is any."""
        return None if self._kept is None else self._kept.carry

    def check(self, plan: Plan) -> None:
        checks, kept, mode = self._engine.checks, self._kept, self._mode
        of_outputs = checks.compares_outputs and mode != "train" and self._gives_outputs
        of_outputs = of_outputs and not self._has_checked_outputs
        of_loss = not self._has_checked and checks.compares
        if not (of_outputs or of_loss):
            return
        every = zip(self._step.raw, self._step.rows, plan.cuts, strict=True)
        # One batch is enough: others of the step are cut by the same rule.
        split = next((each for each in every if each[2].is_split), None)
        if split is None:  # the others are fillers
            return
        batch, num_rows, cut = split
        # The checks run forwards on this rank alone: a collective there raises in place of hanging.
        with self._ranks.looking_alone():
            if of_outputs:
                # Set before the look: however that ends, no later attempt at this step repeats it.
                self._has_checked_outputs = True
                known = checks.outputs(batch, num_rows, mode)
                if kept is not None:
                    kept.know(known)
            if of_loss:
                self._has_checked = True
                gives_outputs = mode != "train" and self._gives_outputs
                checks.whole(batch, cut.sizes, mode, gives_outputs=gives_outputs)

    def run(self, plan: Plan) -> T:
        """All microbatches, one after the other: this is the path that features stand beside."""
        features = self._features
        self._number += 1
        features.begin(self._phase.name, self._number, plan)
        sizes_change = self._phase.policy.adapts
        cuts = self._passes.cut(self._step.raw, plan.cuts, sizes_change=sizes_change)
        try:
            self._begin(plan, cuts)
            self._run_all(plan, cuts)
            result = self._total(plan)
        finally:
            self._let_go()  # an error that is kept holds this frame, and by it this object
        features.end()
        return result

    def _run_all(self, plan: Plan, cuts: Sequence[CutBatch]) -> None:
        features, ranks = self._features, self._ranks
        microbatches = [each for cut in cuts for each in cut.microbatches]
        sizes = [size for cut in cuts for size in cut.sizes]
        every = microbatches
        if num_fillers := plan.num_microbatches - len(sizes):
            spare, min_rows = self._engine.spare, self._phase.rule.min_rows
            every = [*every, *[spare.filler(self._spares(cuts), min_rows)] * num_fillers]
        moved = on_device(every, self._passes.device, isolate=self._watch.isolate)
        # This rank's own microbatches come first and its fillers last, so that ranks run as many.
        for index, inputs in enumerate(moved):
            # A filler runs for the collectives of other ranks alone: no feature and no metric sees
            # it, and its buffers and random numbers are put back.
            if index >= len(sizes):
                with self._phase.undone(), ranks.microbatch(index, weightless=True):
                    self._fill(MicrobatchRun(index, 0, inputs, inputs))
                continue
            run = MicrobatchRun(index, sizes[index], microbatches[index], inputs)
            # Only the hooks that a feature overrides are in here.
            for hook in features.before:
                hook(run)
            with ranks.microbatch(index, weightless=self._is_nothing(index)):
                self._compute(run)
            for hook in features.after:
                hook(run)
            del run, inputs  # before the next one comes

    def failed(self, message: str, peak_bytes: int | None) -> Sequence[str]:
        return self._features.failed(message, peak_bytes)

    def _begin(self, plan: Plan, cuts: Sequence[CutBatch]) -> None:
        raise NotImplementedError

    def _is_nothing(self, index: int) -> bool:
        """Whether a microbatch counts for nothing."""
        return False

    def _compute(self, run: MicrobatchRun) -> None:
        """Forward and, in training, backward of one microbatch."""
        raise NotImplementedError

    def _fill(self, run: MicrobatchRun) -> None:
        """The same for the sake of other ranks' collectives alone."""
        raise NotImplementedError

    def _total(self, plan: Plan) -> T:
        """The total of all microbatches."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Hold nothing of an attempt that is over."""
        # A failed attempt's losses would keep its graphs, and so its memory, through the next one.
        self._losses: list[Losses] = []
        self._weights: BatchWeights | None = None
        self._cuts: Sequence[CutBatch] = ()
        for each in self._watching:
            each.used = []

    def _spares(self, cuts: Sequence[CutBatch]) -> list[Any]:
        """Batches to take the rows of fillers from: where they are sorted, the shortest."""
        if self._phase.rule.unit == ROWS:
            return self._step.raw
        return [cuts[0].microbatches[-1]] if cuts else []

    def _shared_inputs(self) -> list[Tensor]:
        """Bytes of inputs that every microbatch shares: of several batches, the most of one."""
        each: list[list[Tensor]] = []
        with contextlib.suppress(Exception):  # it is for words, where memory has run out
            each = [self._passes.layout.shared(batch) for batch in self._step.raw]
        # Batches of a step are computed one after the other.
        return max(each, key=lambda tensors: sum(tensor.nbytes for tensor in tensors), default=[])


class TrainingWork(_Work[Losses]):
    """Forward and backward of all batches: their gradients add up, and their losses."""

    def __init__(
        self,
        engine: Engine,
        phase: Phase,
        step: Step,
        metrics: Any,
        where: Where,
        accept: Accept | None = None,
    ) -> None:
        super().__init__(engine, phase, step, metrics, where)
        self._accept = accept
        self._gradients = Gradients(
            engine.index.known, engine.gradients, inputs=self._watch.requiring_grad
        )
        self._global_loss: _GlobalLoss | None = None
        if not phase.ranks.is_alone:
            self._global_loss = _GlobalLoss(
                phase.device,
                at_once=accept is not None,
                num_means=1 if engine.passes.scales_for_ranks else phase.ranks.world_size,
            )
        self._own: tuple[Losses, BatchWeights, Mapping[str, float]] | None = None

    def parts(self) -> list[Part]:
        index, reservation = self._engine.index, self._engine.reservation
        return [
            Parameters(index.parameters, index.names_of),
            self._watch,
            # Early, so that what an attempt finds free is what it has beside the optimizer's state.
            *([] if reservation is None else [reservation]),
            self._phase.random,
            self._state,
            self._gradients,  # behind what the caller's hooks may change when it prepares
            *self._features.parts(),
            *self._phase.own_parts,
        ]

    def _begin(self, plan: Plan, cuts: Sequence[CutBatch]) -> None:
        passes = self._passes
        if plan.num_microbatches > len(plan.cuts):
            for batch, cut in zip(self._step.raw, plan.cuts, strict=True):
                if cut.is_split:
                    # The first microbatch's backward would free the graph behind such inputs.
                    check_history(passes.layout.leaves(batch))
        self._weights = passes.weights(cuts, totals := plan.totals)
        if totals:
            passes.check_counts(self._weights, self._step.denominators)
        # With one microbatch gradients need no sum of their own.
        self._gradients.expect(plan.num_microbatches)

    def _is_nothing(self, index: int) -> bool:
        return self._weights is not None and self._weights.is_nothing[index]

    def _compute(self, run: MicrobatchRun) -> None:
        assert self._weights is not None
        losses = self._passes.train(run, self._weights, self._gradients, self._features)
        self._losses.append(losses)

    def _fill(self, run: MicrobatchRun) -> None:
        self._losses.append(self._passes.fill(run.inputs))

    def _total(self, plan: Plan) -> Losses:
        losses, weights = self._losses, self._weights
        assert weights is not None
        # No loss had a graph: the step would go through and train nothing.
        if plan.cuts and not self._gradients.is_reached:
            refuse_constant()
        # Before anything is told: a forward that cleared gradients has spoiled the whole attempt.
        self._gradients.require_untouched()
        self._passes.warn_of_nothing(weights)
        self._warn_of_splitting(plan)
        are_unweighted = self._passes.can_begin and weights.are_plain
        summed = add_up(losses, weights.of_all if are_unweighted else None)
        # `rank_loss` reads it after the step, when `run` has let go of the weights.
        if not self._ranks.is_alone:
            self._own = summed, weights, plan.totals or {}
        # Reading waits for the device, so that only `accept`, which needs a number, makes it wait.
        return summed if self._accept is None else _read_losses(summed)

    def _warn_of_splitting(self, plan: Plan) -> None:
        # All ranks would say the same: the first one speaks for them.
        if plan.num_microbatches <= len(plan.cuts) or self._ranks.rank:
            return
        most = max(plan.cuts, key=lambda cut: len(cut.sizes), default=None)
        if most is not None and most.is_split:
            counting = self._engine.checks.counting
            self._engine.split_guard.warn(most.sizes, self._state, counting)

    @property
    def rank_loss(self) -> Tensor | None:
        """The loss of this rank's rows, divided by what they count; None where it is alone."""
        if self._own is None:
            return None
        (loss, parts), weights, denominators = self._own
        if not denominators or not self._passes.scales_for_ranks:
            return loss

        def own(share: Tensor, name: str) -> Tensor:
            total = weights.totals.get(name)
            return share if total is None or not total else share * (denominators[name] / total)

        if "" in weights.totals:
            return own(loss, "")
        # Without an average of the total each part has its own, and is scaled before they add up.
        return torch.stack([own(part, name) for name, part in parts.items()]).sum()

    def numbers(self, result: Losses) -> Sequence[float]:
        return () if self._global_loss is None else self._global_loss.numbers(result)

    def combined(self, result: Losses, sums: Sequence[float]) -> Losses:
        return result if self._global_loss is None else self._global_loss.together(result, sums)

    def accepts(self, result: Losses) -> bool:
        # What a rehearsal runs is measured, and then rolled back like a step that is not accepted.
        if self._phase.is_rehearsing:
            return False
        return self._accept is None or self._accept(result[0])

    def residents(self) -> ResidentMemory | None:
        return self._engine.memory.measure(
            training=True,
            upcoming_bytes=self._engine.upcoming_bytes,
            shared_inputs=self._shared_inputs(),
        )


class EvaluationWork(_Work[Evaluated]):
    """Forward of one batch: its loss, and what it was divided by. Of this rank's rows alone."""

    def __init__(
        self,
        engine: Engine,
        phase: Phase,
        step: Step,
        metrics: Any,
        where: Where,
        *,
        predicts: bool = False,
        compares_outputs: bool = False,
    ) -> None:
        super().__init__(engine, phase, step, metrics, where)
        self._gives_outputs |= compares_outputs
        self._predicts = predicts
        self._mode = "predict" if predicts else "eval"
        self._has_checked = predicts  # without a loss there is nothing to see

    def parts(self) -> list[Part]:
        return [
            self._watch,
            self._phase.random,
            self._state,
            *self._features.parts(),
            *self._phase.own_parts,
        ]

    def _begin(self, plan: Plan, cuts: Sequence[CutBatch]) -> None:
        self._cuts = cuts

    def _compute(self, run: MicrobatchRun) -> None:
        output = self._forward(run, self._features)
        if output.loss is None:
            return
        # Not before a loss is there: a forward that gives none need not tell what it averages over.
        weights = self._weights = self._weights or self._passes.eval_weights(self._cuts)
        loss = weights.apply(run.index, output.loss, output.losses, has_total=output.has_total)
        self._losses.append(weights.report(*loss))

    def _fill(self, run: MicrobatchRun) -> None:
        self._forward(run)

    @property
    def _forward(self) -> Callable[..., Output]:
        return self._passes.predict if self._predicts else self._passes.evaluate

    def _total(self, plan: Plan) -> Evaluated:
        for cut in plan.cuts:
            if cut.is_split:
                self._engine.split_guard.warn_of_evaluation(cut.sizes, self._state)
        total, parts = add_up(self._losses) if self._losses else (None, {})
        return total, parts, {} if self._weights is None else self._weights.totals

    def numbers(self, result: Evaluated) -> Sequence[float]:
        return ()

    def combined(self, result: Evaluated, sums: Sequence[float]) -> Evaluated:
        return result

    def accepts(self, result: Evaluated) -> bool:
        return not self._phase.is_rehearsing

    def residents(self) -> ResidentMemory | None:
        return self._engine.memory.measure(training=False, shared_inputs=self._shared_inputs())
