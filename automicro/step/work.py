"""The work of a step: all its microbatches, one after the other, and the parts they change."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from automicro.batch.device import InputWatch, on_device
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import tensor_leaves
from automicro.loss.averages import BatchWeights, CutBatch, Weight, add_up
from automicro.loss.conventions import Output
from automicro.loss.passes import Computation, Mode
from automicro.memory.device import OccupiedDevice
from automicro.modules import ModuleIndex
from automicro.options import check_history, refuse_constant
from automicro.ranks.interface import announcing_failure
from automicro.step.feature import NO_FEATURES, Feature, Features, MicrobatchRun
from automicro.step.fillers import SpareRows
from automicro.step.passes import Losses, Passes, like
from automicro.step.phase import Phase
from automicro.step.plan import ROWS, Plan, Step
from automicro.step.results import Where
from automicro.step.split_guard import SplitGuard
from automicro.transaction.gradients import GradientHistory, Gradients
from automicro.transaction.parameters import Parameters
from automicro.transaction.transaction import Part
from automicro.values import stack_scalars

if TYPE_CHECKING:  # not on the path of every batch, so each is imported on first use
    from automicro.checking.check import Checks
    from automicro.memory.residents import ResidentMemory
    from automicro.optimizer.reservation import OptimizerReservation
    from automicro.step.agreement import GlobalLoss
    from automicro.step.metrics import MetricGuard
    from automicro.step.outputs import Kept

T = TypeVar("T")


def _read_losses(losses: Losses) -> Losses:
    """Copy the loss and its parts to the host, waiting for the device only once.

    >>> _read_losses((torch.tensor(3.0), {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}))
    (tensor(3.), {'a': tensor(1.), 'b': tensor(2.)})
    """
    loss, parts = losses
    every = [loss, *parts.values()]
    if all(each.device.type == "cpu" for each in every):
        return losses
    return like(losses, stack_scalars(every).to("cpu"))


Accept = Callable[[Tensor], bool]
Compute = Callable[[MicrobatchRun], Losses | None]
Evaluated = tuple[Tensor | None, dict[str, Tensor], dict[str, Weight | None]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The machinery that all steps of a Microbatcher share."""

    index: ModuleIndex
    passes: Passes
    spare: SpareRows
    split_guard: SplitGuard
    computation: Computation
    checking: Mapping[str, Any]  # options of `Checks`
    update_metric: Callable[..., None]
    updates_by_caller: bool
    random_state: Callable[[], Part]  # makes the part that undoes the draws of a metric's update
    gradients: GradientHistory
    memory: OccupiedDevice
    reservation: "OptimizerReservation | None" = None
    features: Sequence[Feature] = ()
    carry_layout: BatchLayout | None = None
    joined: set[str] = field(default_factory=set)  # outputs whose joining was checked or warned of

    @functools.cached_property
    def checks(self) -> "Checks":
        """The checks, which compare rows computed together with rows computed in parts."""
        from automicro.checking.check import Checks

        return Checks(self.computation, **self.checking)

    @functools.cached_property
    def metric_guard(self) -> "MetricGuard":
        """The guard that warns if splitting changes a metric."""
        from automicro.step.metrics import MetricGuard

        return MetricGuard(
            self.update_metric,
            self.passes.layout,
            self.random_state,
            is_callers=self.updates_by_caller,
        )

    @property
    def upcoming_bytes(self) -> Sequence[int]:
        """Bytes of each state tensor that the optimizer has yet to create, as far as known."""
        return () if self.reservation is None else self.reservation.upcoming_bytes


class _Watching(Feature):
    """A detector of forwards that write into copies of the batch, until that is known."""

    def __init__(self, watch: InputWatch) -> None:
        self._watch, self.used = watch, list[Tensor]()

    def before(self, run: MicrobatchRun) -> None:
        self.used = [tensor for _, tensor in tensor_leaves(run.inputs)]

    def after(self, run: MicrobatchRun) -> None:
        used, self.used = self.used, []
        self._watch.compare([tensor for _, tensor in tensor_leaves(run.given)], used)


class _Work(Generic[T]):
    """The work that training and evaluation share."""

    _mode: Mode = "train"
    _kept: "Kept | None" = None  # if outputs or a state are requested

    def __init__(
        self, engine: Engine, phase: Phase, step: Step, metrics: Any, where: Where
    ) -> None:
        self._engine, self._phase, self._step = engine, phase, step
        self._passes, self._ranks = engine.passes, phase.ranks
        if where is not False or engine.carry_layout is not None:
            from automicro.step.outputs import Kept

            self._kept = Kept(where, engine.passes.device, engine.carry_layout, engine.joined)
        counted: Sequence[Any] = ()
        if metrics is not None:
            from automicro.step.metrics import Metrics, MetricUpdates, flatten_metrics

            with announcing_failure(phase.ranks):
                counted = flatten_metrics(metrics)
        # The phase owns it and not each step: walking over all that is reached costs more than a
        # step.
        self._state = phase.state(counted)
        self._watch = watch = phase.watch([each.contents for each in step.batches])
        # The usual step has no features, and then no hook is looked up.
        self._watching = [_Watching(watch)] if watch.compares else []
        features: list[Feature] = [*self._watching]
        # A rehearsal leaves no trace, so the caller's features are not notified of it.
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
            self._features = Features(features, given=engine.features)
        self._gives_outputs = where is not False
        self._has_checked = self._has_checked_outputs = False
        self._number = 0  # of attempts
        self._let_go()

    @property
    def outputs(self) -> Any:
        """The outputs of all rows, or None if they were not requested."""
        return None if self._kept is None else self._kept.outputs

    @property
    def carry(self) -> Any:
        """The state for the next batch, if any."""
        return None if self._kept is None else self._kept.carry

    def check(self, plan: Plan) -> None:
        checks, kept, mode = self._engine.checks, self._kept, self._mode
        of_outputs = checks.compares_outputs and mode != "train" and self._gives_outputs
        of_outputs = of_outputs and not self._has_checked_outputs
        of_loss = not self._has_checked and checks.compares
        if not (of_outputs or of_loss):
            return
        every = zip(self._step.raw, self._step.rows, plan.cuts, strict=True)
        # One batch is enough: the others of the step are cut by the same rule.
        split = next((each for each in every if each[2].is_split), None)
        if split is None:  # the additional microbatches are fillers
            return
        batch, num_rows, cut = split
        # The checks run forwards on this rank only: a collective in them raises instead of hanging.
        with self._ranks.looking_alone():
            if of_outputs:
                # Set before the check: however it ends, no later attempt at this step repeats it.
                self._has_checked_outputs = True
                known = checks.outputs(batch, num_rows, mode)
                if kept is not None:
                    kept.know(known)
            if of_loss:
                self._has_checked = True
                gives_outputs = mode != "train" and self._gives_outputs
                checks.whole(batch, cut.sizes, mode, gives_outputs=gives_outputs)

    def run(self, plan: Plan) -> T:
        """Compute all microbatches, one after the other: this is the path that features add to."""
        features, ranks = self._features, self._ranks
        self._number += 1
        features.begin(self._phase.name, self._number, plan)
        cuts = self._passes.cut(self._step.raw, plan.cuts)
        microbatches = [each for cut in cuts for each in cut.microbatches]
        sizes = [size for cut in cuts for size in cut.sizes]
        every = microbatches
        if num_fillers := plan.num_microbatches - len(sizes):
            spare, min_rows = self._engine.spare, self._phase.rule.min_rows
            every = [*every, *[spare.filler(self._spares(cuts), min_rows)] * num_fillers]
        try:
            compute = self._computing(plan, cuts)
            moved = on_device(every, self._passes.device, isolate=self._watch.isolate)
            # Own microbatches come first, then fillers, so that all ranks run the same number.
            for index, inputs in enumerate(moved):
                # A filler only serves the collectives of other ranks: features and metrics skip it,
                # and its buffers and random numbers are rolled back.
                if index >= len(sizes):
                    with self._phase.undone(), ranks.microbatch(index, weightless=True):
                        self._fill(MicrobatchRun(index, 0, inputs, inputs))
                    continue
                run = MicrobatchRun(index, sizes[index], microbatches[index], inputs)
                # The list holds only hooks that a feature overrides.
                for hook in features.before:
                    hook(run)
                with ranks.microbatch(index, weightless=self._is_nothing(index)):
                    losses = compute(run)
                if losses is not None:
                    self._losses.append(losses)
                for hook in features.after:
                    hook(run)
                del run, inputs  # free this microbatch before the next one is moved
            result = self._total(plan)
        finally:
            self._let_go()  # a stored error keeps this frame alive, and through it this object
        features.end()
        return result

    def failed(self, message: str, peak_bytes: int | None) -> Sequence[str]:
        return self._features.failed(message, peak_bytes)

    def numbers(self, result: T) -> Sequence[float]:
        return ()

    def combined(self, result: T, sums: Sequence[float]) -> T:
        return result

    def accepts(self, result: T) -> bool:
        # A rehearsal is measured, and then rolled back like a step that is not accepted.
        return not self._phase.is_rehearsing

    def _computing(self, plan: Plan, cuts: Sequence[CutBatch]) -> Compute:
        """Return the function that computes forward and, in training, backward of a microbatch."""
        raise NotImplementedError

    def _is_nothing(self, index: int) -> bool:
        """Whether no target of a microbatch counts."""
        return False

    def _fill(self, run: MicrobatchRun) -> None:
        """Run forward and backward only for the collectives of other ranks."""
        raise NotImplementedError

    def _total(self, plan: Plan) -> T:
        """Return the total of all microbatches."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Release everything that belongs to a finished attempt."""
        # Losses of a failed attempt would keep its graphs, and so its memory, during the next one.
        self._losses: list[Losses] = []
        self._weights: BatchWeights | None = None
        self._cuts: Sequence[CutBatch] = ()
        for each in self._watching:
            each.used = []

    def _spares(self, cuts: Sequence[CutBatch]) -> list[Any]:
        """Return batches to take filler rows from; if rows are sorted by length, the shortest."""
        if self._phase.rule.unit == ROWS:
            return self._step.raw
        return [cuts[0].microbatches[-1]] if cuts else []

    def residents(self) -> "ResidentMemory | None":
        from automicro.memory.residents import measure

        each: list[list[Tensor]] = []
        with contextlib.suppress(Exception):  # it only improves an out-of-memory message
            each = [self._passes.layout.shared(batch) for batch in self._step.raw]
        # Batches of a step are computed one after the other, so only the most bytes count.
        most = max(each, key=lambda tensors: sum(tensor.nbytes for tensor in tensors), default=[])
        is_training = self._mode == "train"
        return measure(
            self._engine.memory,
            training=is_training,
            upcoming_bytes=self._engine.upcoming_bytes if is_training else (),
            shared_inputs=most,
        )


class TrainingWork(_Work[Losses]):
    """Forward and backward of all batches: their gradients and losses add up."""

    _global_loss: "GlobalLoss | None" = None  # on several ranks

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
        if not phase.ranks.is_alone:
            from automicro.step.agreement import GlobalLoss

            self._global_loss = GlobalLoss(
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
            # Early, so that the optimizer's state does not count as free memory of an attempt.
            *([] if reservation is None else [reservation]),
            self._phase.random,
            self._gradients,  # before the state, which gives a leaf its shape back first
            self._state,
            *self._features.parts(),
            *self._phase.own_parts,
        ]

    def _computing(self, plan: Plan, cuts: Sequence[CutBatch]) -> Compute:
        passes = self._passes
        if plan.num_microbatches > len(plan.cuts):
            for batch, cut in zip(self._step.raw, plan.cuts, strict=True):
                if cut.is_split:
                    # The backward of the first microbatch would free the graph behind these inputs.
                    check_history(tensor_leaves(batch))
        self._weights = passes.weights(cuts, totals := plan.totals)
        if totals:
            passes.check_counts(self._weights, self._step.denominators)
        # A single microbatch needs no separate sum of gradients.
        self._gradients.expect(plan.num_microbatches)
        return functools.partial(
            passes.train, weights=self._weights, gradients=self._gradients, features=self._features
        )

    def _is_nothing(self, index: int) -> bool:
        return self._weights is not None and self._weights.is_nothing[index]

    def _fill(self, run: MicrobatchRun) -> None:
        self._losses.append(self._passes.fill(run.inputs))

    def _total(self, plan: Plan) -> Losses:
        losses, weights = self._losses, self._weights
        assert weights is not None
        # If no loss had a graph, the step would succeed and train nothing.
        if plan.cuts and not self._gradients.is_reached:
            refuse_constant()
        # Before any warning: a forward that cleared gradients invalidates the whole attempt.
        self._gradients.require_untouched()
        self._passes.warn_of_nothing(weights)
        self._warn_of_splitting(plan)
        are_unweighted = self._passes.can_begin and weights.are_plain
        summed = add_up(losses, weights.of_all if are_unweighted else None)
        # `rank_loss` reads it after the step, when `run` has released the weights.
        if not self._ranks.is_alone:
            self._own = summed, weights, plan.totals or {}
        # Reading waits for the device, so do it only for `accept`, which needs a number.
        return summed if self._accept is None else _read_losses(summed)

    def _warn_of_splitting(self, plan: Plan) -> None:
        # All ranks would give the same warning, so only the first one does.
        if plan.num_microbatches <= len(plan.cuts) or self._ranks.rank:
            return
        most = max(plan.cuts, key=lambda cut: len(cut.sizes), default=None)
        if most is not None and most.is_split:
            self._engine.split_guard.warn(most.sizes, self._state, self._engine.checks)

    @property
    def rank_loss(self) -> Tensor | None:
        """The mean loss over this rank's own rows; None on a single rank."""
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
        # If the total has no average, each part has its own and is scaled before they are summed.
        return torch.stack([own(part, name) for name, part in parts.items()]).sum()

    def numbers(self, result: Losses) -> Sequence[float]:
        return () if self._global_loss is None else self._global_loss.numbers(result)

    def combined(self, result: Losses, sums: Sequence[float]) -> Losses:
        return result if self._global_loss is None else self._global_loss.together(result, sums)

    def accepts(self, result: Losses) -> bool:
        return super().accepts(result) and (self._accept is None or self._accept(result[0]))


class EvaluationWork(_Work[Evaluated]):
    """Forward of one batch: its loss and the divisor of it, over this rank's rows only."""

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
        self._has_checked = predicts  # a prediction has no loss to check

    def parts(self) -> list[Part]:
        return [
            self._watch,
            self._phase.random,
            self._state,
            *self._features.parts(),
            *self._phase.own_parts,
        ]

    def _computing(self, plan: Plan, cuts: Sequence[CutBatch]) -> Compute:
        self._cuts = cuts
        return self._compute

    def _compute(self, run: MicrobatchRun) -> Losses | None:
        output = self._forward(run, self._features)
        if output.loss is None:
            return None
        # Only once a loss exists: a forward without a loss does not have to declare its average.
        weights = self._weights = self._weights or self._passes.weights(self._cuts)
        loss = weights.apply(run.index, output.loss, output.losses, has_total=output.has_total)
        return weights.report(*loss)

    def _fill(self, run: MicrobatchRun) -> None:
        self._forward(run)

    @property
    def _forward(self) -> Callable[..., Output]:
        return self._passes.predict if self._predicts else self._passes.evaluate

    def _total(self, plan: Plan) -> Evaluated:
        for cut in plan.cuts:
            if cut.is_split:
                self._engine.split_guard.warn(cut.sizes, self._state, evaluates=True)
        total, parts = add_up(self._losses) if self._losses else (None, {})
        return total, parts, {} if self._weights is None else self._weights.totals
