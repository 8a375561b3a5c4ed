"""The loop over epochs and batches."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from automicro.events import Callbacks, Cut, LoopState, Run
from automicro.ranks import Ranks
from automicro.results import StepResult
from automicro.trainer.checkpointing import Checkpointer
from automicro.trainer.evaluation_plan import EvaluationPlan
from automicro.trainer.feed import Feed
from automicro.trainer.lines import batch_status, count_of
from automicro.trainer.loading import grouped
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.progress import Progress
from automicro.trainer.recording import Recorder
from automicro.trainer.speed import RecentSpeed, Speed
from automicro.trainer.status import Status, TimeLeft
from automicro.trainer.step import TrainedBatch, TrainingStep
from automicro.trainer.together import Stop, any_rank


class FitLoop:
    """Trains batch after batch until a duration is reached, and evaluates and saves in between.

    Args:
        step: trains on one optimization batch.
        feed: gives the batches, pass after pass.
        count_batches: how many optimization batches a pass has, where that is known.
        accumulate_batches: how many of the feed's make up an optimization batch.
        evaluations: in between.
        metrics: of training, reset with every epoch.
        state: where training stands; written here.
        callbacks: told of every event.
        run: as they see it; knows when to end.
        recorder: logs the numbers.
        ranks: all that train the model.
        checkpointer: saves; None for no checkpoints.
        best_metric: what the best checkpoints are kept by, so that one is saved after each
            evaluation that has it; None where none is kept for that.
    """

    def __init__(
        self,
        step: TrainingStep,
        feed: Feed,
        *,
        count_batches: Callable[[], int | None],
        accumulate_batches: int,
        evaluations: EvaluationPlan,
        metrics: MetricSet,
        state: LoopState,
        callbacks: Callbacks,
        run: Run,
        recorder: Recorder,
        ranks: Ranks,
        checkpointer: Checkpointer | None,
        best_metric: str | None,
    ) -> None:
        self._step = step
        self._feed = feed
        self._count_batches = count_batches
        self._is_taken_up = False
        self._has_begun = False
        self._left: Iterator[list[Any]] | None = None  # the rest of a pass, after an orderly stop
        self._accumulate_batches = accumulate_batches
        self._evaluations = evaluations
        self._metrics = metrics
        self._state = state
        self._callbacks = callbacks
        self._run = run
        self._recorder = recorder
        self._ranks = ranks
        self._has_peers = ranks.world_size > 1
        self._agreed_batches: int | None = None  # of this epoch, where there are peers
        self._checkpointer = checkpointer
        self._best_metric = best_metric
        self._recent, self._time_left = RecentSpeed(), TimeLeft()

    def run(self, progress: Progress, wants_to_stop: Callable[[], bool]) -> None:
        """Train until the duration is reached, or until something asks to stop.

        Args:
            progress: where to say how it goes.
            wants_to_stop: asked after each batch, in training and in evaluations.
        """
        stop = Stop(self._ranks, wants_to_stop)
        # As after each evaluation, so that a run that was taken up again has as much memory.
        for evaluation in self._evaluations:
            evaluation.release()
        self._tell("fit_start")
        if self._checkpointer is not None and self._state.batch == 0:
            self._checkpointer.rehearse()
        self._evaluations.run_due(progress, stop.ask)  # what was broken off
        self._agree(stop)
        while not (self.is_finished or stop.is_agreed):
            self._train_epoch(progress, stop)
        if self.is_finished:
            self._evaluations.run_at_end(progress, stop.ask)
        if self._checkpointer is not None:
            self._checkpointer.save(self._state, progress, metrics=self._measured())
        self._tell("fit_end")

    def _train_epoch(self, progress: Progress, stop: Stop) -> None:
        """Train on a pass, or on what is left of it, until its end or that of training."""
        if not self._has_begun:
            progress.doing("waiting for the first batch of data")
        groups = self._begin_epoch()
        for number, group in enumerate(self._timed(groups)):
            if number == 0:
                self._feed.require_same_order(self._ranks)
            if not self._train(group, progress):
                if self._state.epoch_batch == 0:
                    raise self._feed.emptiness()
                break  # no rank has rows left
            # What is logged at a step comes before its checkpoint, or a resume would log it
            # twice. So the last batch is evaluated and saved at the end of the epoch.
            is_last = self._state.epoch_batch == self._batches_of_all()
            if not is_last:
                self._evaluations.run_due(progress, stop.ask)
            self._agree(stop)
            if self.is_finished or stop.is_agreed:
                if is_last:
                    break
                self._left = groups
                self._sum_up_first_epoch()
                return
            if not is_last:
                self._save_if_due(progress)
        # Where nobody knew that it was the last one, it was saved before the end of the epoch.
        was_saved = self._is_saved()
        self._end_epoch()
        self._evaluations.run_due(progress, stop.ask)
        self._agree(stop)
        if not (self.is_finished or stop.is_agreed):
            self._save_if_due(progress, is_due=was_saved)

    def _timed(self, groups: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """The same, with the wait for data counted as time of training."""
        while True:
            start = time.perf_counter()
            group = next(groups, None)
            self._state.train.seconds += time.perf_counter() - start
            if group is None:
                return
            yield group

    def _agree(self, stop: Stop) -> None:
        """Let all ranks do what any of them, or a callback there, asked for."""
        if not self._has_peers:
            return
        run = self._run
        has_reason = run.stop_reason is not None
        wants_checkpoint = run.take_checkpoint_request()
        wishes = any_rank(self._ranks, stop.is_wanted, has_reason, wants_checkpoint)
        stop.take_up(wishes[0])
        if wishes[1] and not has_reason:
            run.stop("another rank asked for it")
        if wishes[2]:
            run.save_checkpoint()

    def _tell(self, event: str, *subject: Any) -> None:
        self._callbacks.fire(event, self._run, *subject)

    @property
    def is_finished(self) -> bool:
        """Whether the duration is reached, or a callback asked to stop."""
        return self.has_reached_duration or self._run.stop_reason is not None

    @property
    def has_reached_duration(self) -> bool:
        """Whether all is trained."""
        return self._state.done(self._run.max_duration.unit) >= self._run.max_duration.value

    @property
    def is_complete(self) -> bool:
        """Whether all is trained and evaluated, or a callback asked to stop before."""
        return self.is_finished and self._evaluations.is_complete_at_end

    @property
    def num_batches(self) -> int | None:
        """Optimization batches of an epoch, where the loader knows."""
        return self._count_batches()

    def _batches_of_all(self) -> int | None:
        """Optimization batches of this epoch, the same number on all ranks."""
        return self._agreed_batches if self._has_peers else self.num_batches

    def catch_up(self) -> None:
        """Take what is done for handled, in a run that is taken up again."""
        self._is_taken_up = self._state.epoch_batch > 0
        self._evaluations.catch_up()

    def where(self) -> str:
        """Where training stands, for errors."""
        state = self._state
        return (
            f"in training, epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
            f"({count_of(state.batch, 'batch')} done)"
        )

    def _begin_epoch(self) -> Iterator[list[Any]]:
        """Begin a pass, or go on in the middle of one that was left or saved."""
        groups, self._left = self._left, None
        if groups is None:
            if not self._is_taken_up:
                self._state.epoch_batch = 0
                self._metrics.reset()
            groups = grouped(self._feed.batches(self._state.epoch), self._accumulate_batches)
            if self._has_peers:  # who has no rows left takes part until nobody has
                groups = itertools.chain(groups, itertools.repeat([]))
        if self._has_peers:
            most = self._ranks.most(float(self.num_batches or 0))
            self._agreed_batches = int(most) or None
        self._is_taken_up = False
        self._tell("epoch_start")
        return groups

    def _train(self, loaded: Sequence[Any], progress: Progress) -> bool:
        """Train on one optimization batch, and tell of it; whether any rank had rows for it."""
        if not self._has_begun:
            progress.doing("the first batch: looking at a few rows, then finding what fits")
        self._has_begun = True
        batches = [self._callbacks.transform(self._run, batch) for batch in loaded]
        if batches:
            self._tell("batch_start", batches if self._accumulate_batches > 1 else batches[0])
        ready = self._tell_ready if self._callbacks.listens("gradients_ready") else None
        trained = self._step.run(batches, self._state, progress, ready)
        if trained is None:
            return False
        speed = self._recent.now(self._state)
        self._recorder.batch(trained, speed=speed, device=self._run.device)
        self._tell("batch_end", trained.result)
        self._recorder.flush()
        progress.status(partial(self._describe, trained, speed))
        return True

    def _tell_ready(self, result: StepResult) -> None:
        self._tell("gradients_ready", result)

    def _end_epoch(self) -> None:
        """Sum a complete pass up."""
        state = self._state
        self._ranks.ready("computing the metrics of an epoch")
        state.train.metrics = self._metrics.compute()
        self._step.end_epoch()
        state.epoch += 1
        state.epoch_batch = 0
        self._recorder.epoch(state.train.metrics)
        self._tell("epoch_end")
        self._recorder.flush()

    def _sum_up_first_epoch(self) -> None:
        """Give metrics of a part of it, where training stops in its middle."""
        if self._state.epoch == 0:
            self._ranks.ready("computing the metrics of a part of an epoch")
            self._state.train.metrics = self._metrics.compute()

    def _save_if_due(self, progress: Progress, *, is_due: bool = False) -> None:
        if self._checkpointer is None:
            return
        values = self._measured()
        if is_due or self._best_metric in values:
            self._run.save_checkpoint()
        self._checkpointer.save_if_due(self._state, progress, metrics=values)

    def _measured(self) -> dict[str, float]:
        """What was found for the model as it is."""
        best = self._best_metric
        # Where it is another evaluation's turn to give it, its absence is no mistake to warn of.
        return {} if best and self._evaluations.is_awaited(best) else self._evaluations.values()

    def _is_saved(self) -> bool:
        """Whether there is a checkpoint of this very batch."""
        saver = self._checkpointer
        return saver is not None and saver.saved_in(self._state) is not None

    def _describe(self, trained: TrainedBatch, speed: Speed) -> Status:
        rates = set(trained.learning_rates)
        return batch_status(
            self._state,
            Cut.of(trained.result),
            max_duration=self._run.max_duration,
            num_batches=self.num_batches,
            device=self._run.device,
            speed=speed,
            learning_rate=rates.pop() if len(rates) == 1 else None,
            num_devices=self._ranks.world_size,
            is_measuring=trained.result.is_measuring,
            time_left=self._time_left,
        )
