"""One call of `Trainer.fit`: going on from a checkpoint, the loop, and a proper end."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from automicro.errors import add_note, warn
from automicro.memory.device import peak_bytes, reset_peak
from automicro.step.results import StepResult
from automicro.trainer.context import RunContext
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.loading import count_steps, grouped
from automicro.trainer.evaluation import EvaluationPlan
from automicro.trainer.metrics import MetricSet
from automicro.trainer.progress import (
    Progress,
    RecentSpeed,
    RunSettings,
    Speed,
    StatusLine,
    TimeLeft,
    batch_status,
    count_of,
)
from automicro.trainer.rehearsal import Rehearsal
from automicro.trainer.report import TIME_IS_OVER, FitSummary, summarize
from automicro.trainer.resume.checkpointer import Checkpointer
from automicro.trainer.resume.snapshot import restore_random_numbers
from automicro.trainer.same_on_all_ranks import Stop, any_rank
from automicro.trainer.signals import Interruption, catching_signals, is_end_told, say_on_stderr
from automicro.trainer.step import TrainedBatch, TrainingStep
from automicro.units import Duration, TimeLimit


class FitLoop:
    """Trains batch after batch until a duration is reached, and evaluates and saves in between.

    Args:
        step: trains on one optimization batch.
        feed: gives the batches, pass after pass.
        context: of the run; its state is written here.
        accumulate_batches: how many of the feed's make up an optimization batch.
        evaluations: in between.
        metrics: of training, reset with every epoch.
        checkpointer: saves; None for no checkpoints.
        rehearsal: of the costliest batches, before the first step; None for none.
    """

    def __init__(
        self,
        step: TrainingStep,
        feed: Feed,
        context: RunContext,
        *,
        accumulate_batches: int,
        evaluations: EvaluationPlan,
        metrics: MetricSet,
        checkpointer: Checkpointer | None,
        rehearsal: Rehearsal | None,
    ) -> None:
        self.step = step
        self.rehearsal = rehearsal
        self.context = context
        self.checkpointer = checkpointer
        self._feed = feed
        self._is_taken_up = False
        self._has_begun = False
        self._warns_of_state = checkpointer is not None  # once, after the first batch
        self._left: Iterator[list[Any]] | None = None  # the rest of a pass, after an orderly stop
        self._accumulate_batches = accumulate_batches
        self._evaluations = evaluations
        self._metrics = metrics
        self._state = context.state
        self._run = context.run
        self._agreed_batches: int | None = None  # of this epoch, where there are peers
        self._recent, self._time_left = RecentSpeed(), TimeLeft()

    def run(self, progress: Progress, wants_to_stop: Callable[[], bool]) -> None:
        """Train until the duration is reached, or until something asks to stop.

        Args:
            progress: where to say how it goes.
            wants_to_stop: asked after each batch, in training and in evaluations.
        """
        stop = Stop(self.context.ranks, wants_to_stop)
        # As after each evaluation, so that a run that was taken up again has as much memory.
        for evaluation in self._evaluations:
            evaluation.release()
        self.context.tell("fit_start")
        self._evaluations.refuse_empty()
        if self.checkpointer is not None and self._state.batch == 0:
            self.checkpointer.rehearse()
        if self.rehearsal is not None and self._state.batch == 0:
            self.rehearsal.run(self._state, progress)
            self.step.update.clear()
        self._evaluations.run_due(progress, stop.ask)  # what was broken off
        self._agree(stop)
        while not (self.is_finished or stop.is_agreed):
            self._train_epoch(progress, stop)
        if self.is_finished:
            self._evaluations.run_at_end(progress, stop.ask)
        if self.checkpointer is not None:
            self.checkpointer.save(self._state, progress, metrics=self._measured())
        self.context.mode.eval()
        self.context.tell("fit_end")

    def _train_epoch(self, progress: Progress, stop: Stop) -> None:
        """Train on a pass, or on what is left of it, until its end or that of training."""
        if not self._has_begun:
            progress.doing("waiting for the first batch of data")
        groups = self._begin_epoch()
        listens = self.context.callbacks.listens("gradients_ready")
        gradients_ready = self._tell_ready if listens else None
        for number, group in enumerate(self._timed(groups)):
            if number == 0:
                self._feed.require_same_order(self.context.ranks)
            batches = self._prepare(group, progress)
            trained = self.step.run(
                batches,
                self._state,
                progress,
                gradients_ready,
                known_seconds=self._feed.take_seconds(),
            )
            if trained is None:
                if self._state.epoch_batch == 0:
                    raise self._feed.emptiness()
                break  # no rank has rows left
            if self._warns_of_state and batches:
                self._warns_of_state = False
                self.step.warn_of_unsaved_state(batches[0])
            self._conclude(trained, progress)
            del batches, trained  # before the next are fetched
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
        # If the last batch was not known to be it, it was saved before the end of the epoch.
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
        if not self.context.has_peers:
            return
        run = self._run
        has_reason = run.stop_reason is not None
        wants_checkpoint = run.requests.take("wants_checkpoint")
        wishes = any_rank(self.context.ranks, stop.is_wanted, has_reason, wants_checkpoint)
        stop.take_up(wishes[0])
        if wishes[1] and not has_reason:
            run.stop("another rank asked for it")
        if wishes[2]:
            run.save_checkpoint()

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
        loaded = self._feed.num_batches(self._state.epoch)
        return count_steps(loaded, self._accumulate_batches)

    def _batches_of_all(self) -> int | None:
        """Optimization batches of this epoch, the same number on all ranks."""
        return self._agreed_batches if self.context.has_peers else self.num_batches

    def catch_up(self) -> None:
        """Take what is done for handled, in a run that is taken up again."""
        self._is_taken_up = self._state.epoch_batch > 0
        self._evaluations.catch_up()

    def where(self) -> str:
        """Where training stands, for errors."""
        state = self._state
        if self.rehearsal is not None and (where := self.rehearsal.where()) is not None:
            return where
        return (
            f"in training, epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
            f"({count_of(state.batch, 'batch')} done)"
        )

    def _begin_epoch(self) -> Iterator[list[Any]]:
        """Begin a pass, or go on in the middle of one that was left or saved."""
        groups, self._left = self._left, None
        if groups is None:
            if not self._is_taken_up:
                if self._state.epoch_batch:
                    self._warn_of_beginning_again()
                self._state.epoch_batch = 0
                self._metrics.reset()
            groups = grouped(self._feed.batches(self._state.epoch), self._accumulate_batches)
            if self.context.has_peers:  # a rank without rows takes part until all have none
                groups = itertools.chain(groups, itertools.repeat([]))
        if self.context.has_peers:
            most = self.context.ranks.most(float(self.num_batches or 0))
            self._agreed_batches = int(most) or None
        self._is_taken_up = False
        self.context.tell("epoch_start")
        return groups

    def _warn_of_beginning_again(self) -> None:
        done = count_of(self._state.epoch_batch, "batch")
        warn(
            f"an earlier fit() ended with an error in epoch {self._state.epoch + 1}, which begins "
            f"again: {done} of it that it trained on come once more. To go on where training "
            "stood, give the Trainer a checkpoint with an interval in batches, and make a new one "
            "after an error",
            UserWarning,
        )

    def _prepare(self, loaded: Sequence[Any], progress: Progress) -> list[Any]:
        """An optimization batch as callbacks want it."""
        if not self._has_begun:
            progress.doing("the first batch: looking at a few rows, then finding what fits")
        self._has_begun = True
        batches = [self.context.callbacks.transform(self._run, batch) for batch in loaded]
        if batches:
            subject = batches if self._accumulate_batches > 1 else batches[0]
            self.context.tell("batch_start", subject)
        return batches

    def _conclude(self, trained: TrainedBatch, progress: Progress) -> None:
        """Tell of a batch that was trained on."""
        speed = self._recent.now(self._state)
        self.context.recorder.batch(trained, speed=speed, device=self._run.device)
        self.context.tell("batch_end", trained.result)
        self.context.recorder.flush()
        progress.status(partial(self._describe, trained, speed))

    def _tell_ready(self, result: StepResult) -> None:
        self.context.tell("gradients_ready", result)

    def _end_epoch(self) -> None:
        """Sum a complete pass up."""
        state = self._state
        self.context.ranks.ready("computing the metrics of an epoch")
        state.train.metrics = self._metrics.compute()
        self.step.update.end("epoch")
        state.epoch += 1
        state.epoch_batch = 0
        self.context.recorder.epoch(state.train.metrics)
        self.context.tell("epoch_end")
        self.context.recorder.flush()

    def _sum_up_first_epoch(self) -> None:
        """Give metrics of a part of it, where training stops in its middle."""
        if self._state.epoch == 0:
            self.context.ranks.ready("computing the metrics of a part of an epoch")
            self._state.train.metrics = self._metrics.compute()

    def _save_if_due(self, progress: Progress, *, is_due: bool = False) -> None:
        if self.checkpointer is None:
            return
        values = self._measured()
        if is_due or self.checkpointer.best_metric in values:
            self._run.save_checkpoint()
        self.checkpointer.save_if_due(self._state, progress, metrics=values)

    def _measured(self) -> dict[str, float]:
        """The values for the model as it is."""
        best = self.checkpointer.best_metric if self.checkpointer is not None else None
        # Where it is another evaluation's turn to give it, its absence is no mistake to warn of.
        return {} if best and self._evaluations.is_awaited(best) else self._evaluations.values()

    def _is_saved(self) -> bool:
        """Whether there is a checkpoint of this very batch."""
        saver = self.checkpointer
        return saver is not None and saver.saved_in(self._state) is not None

    def _describe(self, trained: TrainedBatch, speed: Speed) -> StatusLine:
        rates = set(trained.learning_rates)
        return batch_status(
            self._run,
            trained.result,
            num_batches=self.num_batches,
            num_devices=self.context.ranks.world_size,
            speed=speed,
            learning_rate=rates.pop() if len(rates) == 1 else None,
            time_left=self._time_left,
        )


class Fit:
    """Runs the loop from where training stands.

    Args:
        loop: trains.
        max_seconds: how long one call may take; None for as long as it takes.
        settings: what runs, for the first line and for the loggers.
    """

    def __init__(self, loop: FitLoop, *, max_seconds: float | None, settings: RunSettings) -> None:
        self.loop = loop
        self._step = loop.step
        self._context = loop.context
        self._state = loop.context.state
        self._run = loop.context.run
        self._checkpointer = loop.checkpointer
        self._max_seconds = max_seconds
        self._settings = settings
        self._is_running = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One call at a time: two would write the same state.

        Raises:
            ValueError: another one has not returned yet.
        """
        if self._is_running:
            raise ValueError(
                "fit() was called while fit() of the same Trainer is running, as in one of its "
                "callbacks; there, end training with run.stop(…) and call fit() once it has "
                "returned, evaluate with eval(), or train with another Trainer"
            )
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def extend(self, duration: Duration) -> None:
        """Train for that much more than is done.

        Args:
            duration: in whatever unit.

        Raises:
            ValueError: the run is saved, or its tokens are not known.
        """
        if self._checkpointer is not None:
            raise ValueError(
                f"fit(duration='{duration}') goes on from wherever training stands, so a run that "
                "is killed and taken up again from its checkpoints would train for longer than "
                "one that is not; give the Trainer the max_duration of all of it, or no checkpoint"
            )
        self._step.seconds.require_for("duration", duration)
        done = self._state.done(duration.unit)
        until = Duration(value=done + duration.value, unit=duration.unit)
        self._run.requests.max_duration = until
        self._step.tokens.require_for("duration", until)
        self._settings = replace(self._settings, max_duration=until)

    def require_more(self) -> None:
        """Refuse to train where all is done.

        Raises:
            ValueError: ``max_duration`` is reached.
        """
        if self.loop.has_reached_duration and self.loop.is_complete:
            raise ValueError(
                f"fit() has trained for max_duration='{self._settings.max_duration}' already "
                f"({count_of(self._state.batch, 'batch')}); to go on, call fit(duration='1ep') "
                "with what is to come, make a new Trainer with the same model and optimizer, or "
                "give a longer max_duration from the start"
            )

    @contextlib.contextmanager
    def training(self, progress: Progress) -> Iterator[Callable[[], bool]]:
        """Begin, or go on; end in order. Gives what is asked after each batch whether to stop.

        Raises:
            KeyboardInterrupt: Ctrl-C, after the batch that ran is done and saved.
            SystemExit: SIGTERM, the same.
        """
        state, context = self._state, self._context
        reset_peak(self._run.device)
        self._run.requests.stop_reason = None
        self._step.update.clear()  # an interrupted fit leaves those of its last batch
        progress.line(self._settings.line(self.loop.num_batches))
        resume_step = self._resume(progress)
        if not self._run.model.training:
            self._run.model.train()
        context.mode.train()
        time_limit, first = TimeLimit(self._max_seconds), state.batch
        try:
            context.recorder.start(self._settings.values(), resume_step=resume_step)
            with catching_signals(
                saves=self._checkpointer is not None,
                has_peers=context.has_peers,
                say=say_on_stderr if self._run.rank == 0 else _say_nothing,
            ) as interruption:

                def wants_to_stop() -> bool:
                    has_trained = state.batch > first  # a batch at least, however late it is
                    return interruption.name is not None or (has_trained and time_limit.is_over)

                yield wants_to_stop
                interruption.take_note_of_peers(context.ranks)
        except (KeyboardInterrupt, SystemExit) as error:  # a second one
            if self._checkpointer is not None and not is_end_told():
                folder = self._checkpointer.folder
                add_note(
                    error, f"automicro: a run with the same checkpoint=… goes on from {folder}"
                )
            raise
        finally:
            context.mode.eval()
            context.recorder.close()
            if self._checkpointer is not None:
                self._checkpointer.finish()
        self._end_interrupted(interruption, progress)

    def _end_interrupted(self, interruption: Interruption, progress: Progress) -> None:
        """Say where training was interrupted, and leave as whatever interrupted it would."""
        if interruption.name is None:
            return
        where = f"after batch {self._state.batch}"
        saver = self._checkpointer
        folder = None if saver is None else saver.saved_in(self._state)
        if not is_end_told():
            progress.line(interruption.describe(where=where, checkpoint=folder))
        interruption.raise_if_interrupted(where=where, checkpoint=folder)

    def sum_up(self, progress: Progress) -> FitSummary:
        """The summary of the run, shown and returned."""
        reason = self._run.stop_reason
        if not self.loop.is_complete:
            reason = TIME_IS_OVER
        if reason is not None:
            progress.line(f"training stopped: {reason}")
        rehearsal = None if self.loop.rehearsal is None else self.loop.rehearsal.report
        summary = summarize(
            self._state,
            stop_reason=reason,
            peak_memory_bytes=peak_bytes(self._run.device),
            num_devices=self._context.ranks.world_size,
            loss_average_is=self._step.loss_average_is,
            rehearsed=None if rehearsal is None else rehearsal.brief(),
        )
        progress.line(f"\n{summary}")
        return summary

    def _resume(self, progress: Progress) -> int | None:
        """Go on from a checkpoint where training has not begun; the batches done before."""
        if self._checkpointer is None or self._state.batch:
            return self._state.batch or None
        saved = self._checkpointer.resume(self._state, progress)
        if saved is None:
            return None
        if (reason := saved["stop_reason"]) is not None:  # the caller may ask again
            progress.line(f"training had stopped there: {reason}")
        self.loop.catch_up()
        restore_random_numbers(saved)
        return self._state.batch


def _say_nothing(line: str) -> None:
    """One rank speaks for all."""
