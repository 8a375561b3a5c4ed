"""The loop over epochs and batches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from automicro.events import Callbacks, Cut, LoopState, Run
from automicro.results import StepResult
from automicro.trainer.checkpointing import Checkpointer
from automicro.trainer.evaluation import Evaluation
from automicro.trainer.feed import Feed
from automicro.trainer.lines import batch_line, count_of, position
from automicro.trainer.loading import grouped
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.progress import Progress
from automicro.trainer.recording import Recorder
from automicro.trainer.speed import RecentSpeed, Speed
from automicro.trainer.step import TrainedBatch, TrainingStep


class FitLoop:
    """Trains batch after batch until a duration is reached, and evaluates and saves in between.

    Args:
        step: trains on one optimization batch.
        feed: gives the batches, pass after pass.
        count_batches: how many it gives in a pass, where that is known.
        accumulate_batches: how many of the feed's make up an optimization batch.
        evaluations: what to evaluate on.
        metrics: of training, reset with every epoch.
        state: where training stands; written here.
        callbacks: told of every event.
        run: as they see it; knows when to end.
        recorder: logs the numbers.
        checkpointer: saves; None for no checkpoints.
    """

    def __init__(
        self,
        step: TrainingStep,
        feed: Feed,
        *,
        count_batches: Callable[[], int | None],
        accumulate_batches: int,
        evaluations: Sequence[Evaluation],
        metrics: MetricSet,
        state: LoopState,
        callbacks: Callbacks,
        run: Run,
        recorder: Recorder,
        checkpointer: Checkpointer | None,
    ) -> None:
        self._step = step
        self._feed = feed
        self._count_batches = count_batches
        self._is_taken_up = False
        self._accumulate_batches = accumulate_batches
        self._evaluations = evaluations
        self._metrics = metrics
        self._state = state
        self._callbacks = callbacks
        self._run = run
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._recent = RecentSpeed()

    def run(self, progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Train until the duration is reached, or until something asks to stop.

        Args:
            progress: where to say how it goes.
            is_stopped: asked after each batch.
        """

        def is_over() -> bool:
            return self.is_finished or is_stopped()

        # As after each evaluation, so that a run that was taken up again has as much memory.
        for evaluation in self._evaluations:
            _release(evaluation)
        self._tell("fit_start")
        while not is_over():
            self._begin_epoch()
            batches = self._feed.batches(self._state.epoch)
            is_complete = True
            for group in grouped(batches, self._accumulate_batches):
                self._train(group, progress)
                self._evaluate_if_due(progress)
                is_last = self._state.epoch_batch == self.num_batches
                if is_over():
                    is_complete = is_last
                    break
                # What is logged at a step comes before its checkpoint, or a resume would log it
                # twice. So a checkpoint of the last batch waits for the end of the epoch.
                if not is_last:
                    self._save_if_due(progress)
            self._end_epoch(progress, is_complete=is_complete)
            if not is_over():
                self._save_if_due(progress)
        if self.is_finished:
            self._evaluate_at_end(progress)
        if self._checkpointer is not None:
            self._checkpointer.save(self._state, progress)
        self._tell("fit_end")

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
    def num_batches(self) -> int | None:
        """Optimization batches of an epoch, where the loader knows."""
        loaded = self._count_batches()
        return None if loaded is None else -(-loaded // self._accumulate_batches)

    def catch_up(self) -> None:
        """Take what is done for handled, in a run that is taken up again."""
        self._is_taken_up = self._state.epoch_batch > 0
        for evaluation in self._evaluations:
            evaluation.interval.catch_up(self._state)

    def where(self) -> str:
        """Where training stands, for errors."""
        state = self._state
        return (
            f"in training, epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
            f"({count_of(state.batch, 'batch')} done)"
        )

    def _begin_epoch(self) -> None:
        """Begin a pass, or go on in the middle of one that was saved."""
        if not self._is_taken_up:
            self._state.epoch_batch = 0
            self._metrics.reset()
        self._is_taken_up = False
        self._tell("epoch_start")

    def _train(self, loaded: Sequence[Any], progress: Progress) -> None:
        """Train on one optimization batch, and tell of it."""
        batches = [self._callbacks.transform(self._run, batch) for batch in loaded]
        self._tell("batch_start", batches if self._accumulate_batches > 1 else batches[0])
        ready = self._tell_ready if self._callbacks.listens("gradients_ready") else None
        trained = self._step.run(batches, self._state, progress, ready)
        speed = self._recent.now(self._state)
        self._recorder.batch(trained, speed=speed, device=self._run.device)
        self._tell("batch_end", trained.result)
        self._recorder.flush()
        progress.status(partial(self._describe, trained, speed))

    def _tell_ready(self, result: StepResult) -> None:
        self._tell("gradients_ready", result)

    def _end_epoch(self, progress: Progress, *, is_complete: bool) -> None:
        """Sum a pass up; one that ends early counts as no epoch."""
        state = self._state
        state.train.metrics = self._metrics.compute()
        if not is_complete:
            return
        state.epoch += 1
        state.epoch_batch = 0
        self._recorder.epoch(state.train.metrics)
        self._tell("epoch_end")
        self._recorder.flush()
        self._evaluate_if_due(progress)

    def _evaluate_if_due(self, progress: Progress) -> None:
        for evaluation in self._evaluations:
            if evaluation.interval.is_due(self._state):
                self._evaluate(evaluation, progress)

    def _evaluate_at_end(self, progress: Progress) -> None:
        for evaluation in self._evaluations:
            if evaluation.happens_at_end:
                self._evaluate(evaluation, progress)

    def _evaluate(self, evaluation: Evaluation, progress: Progress) -> None:
        """Evaluate in the middle of training, unless that was done for this very batch."""
        state = self._state
        if state.evaluated_at.get(evaluation.name) == state.batch:
            return
        evaluation.run(
            state.eval,
            progress,
            callbacks=self._callbacks,
            recorder=self._recorder,
            run=self._run,
            where=position(state, self._run.max_duration),
        )
        _release(evaluation)
        state.evaluated_at[evaluation.name] = state.batch
        self._recorder.flush()

    def _save_if_due(self, progress: Progress) -> None:
        if self._checkpointer is not None:
            self._checkpointer.save_if_due(self._state, progress)

    def _describe(self, trained: TrainedBatch, speed: Speed) -> str:
        rates = set(trained.learning_rates)
        return batch_line(
            self._state,
            Cut.of(trained.result),
            max_duration=self._run.max_duration,
            num_batches=self.num_batches,
            device=self._run.device,
            speed=speed,
            learning_rate=rates.pop() if len(rates) == 1 else None,
        )


def _release(evaluation: Evaluation) -> None:
    """Let go of what an evaluation counted, which would take memory from training."""
    evaluation._metrics.reset()
