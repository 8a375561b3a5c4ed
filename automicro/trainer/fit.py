"""One call of `Trainer.fit`: resuming from a checkpoint, the loop, and an orderly end."""

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro.checkpoints.rng import restore_rng_state
from automicro.durations import Duration
from automicro.errors import add_note, warn
from automicro.events.run import LoopState, Run
from automicro.memory.device import peak_bytes, reset_peak
from automicro.ranks.interface import Ranks
from automicro.trainer.context import RunContext, TrainedBatch, told_of_batch
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.loading import empty
from automicro.trainer.evaluation import EvaluationPlan
from automicro.trainer.progress import (
    RecentSpeed,
    RunSettings,
    StatusLine,
    TimeLeft,
    batch_status,
    place_of,
)
from automicro.trainer.rehearsal import Rehearsal
from automicro.trainer.report import TIME_IS_OVER, FitSummary, summarize
from automicro.trainer.resume.checkpointer import Checkpointer
from automicro.trainer.same_on_all_ranks import any_rank, require_same_order
from automicro.trainer.signals import Interruption, catching_signals, is_end_told, say_on_stderr
from automicro.trainer.step import TrainingStep
from automicro.units import count_of


@dataclass(kw_only=True, eq=False)
class Fit:
    """Trains batch by batch from the current state, with evaluations and checkpoints between."""

    step: TrainingStep
    feed: Feed
    context: RunContext
    evaluations: EvaluationPlan
    checkpointer: Checkpointer | None
    rehearsal: Rehearsal | None
    settings: RunSettings  # for the first line and for the loggers
    _is_running: bool = False
    _is_taken_up: bool = False
    _has_begun: bool = False
    _has_looked_at_state: bool = False  # done once, after the first batch
    _left: Iterator[list[Any]] | None = None  # rest of the pass after an orderly stop
    _agreed_batches: int | None = None  # most batches on any rank in this epoch, with peers
    _recent: RecentSpeed = field(default_factory=RecentSpeed)
    _time_left: TimeLeft = field(default_factory=TimeLeft)
    _interruption: Interruption = field(default_factory=Interruption)
    _deadline: float = float("inf")  # of the monotonic clock, which no adjustment changes
    _first_batch: int = 0  # number of batches done before this call
    _has_agreed_to_stop: bool = False
    _trained: TrainedBatch | None = None  # the last step; None if no rank had rows

    @property
    def _state(self) -> LoopState:
        return self.context.state

    @property
    def _run(self) -> Run:
        return self.context.run

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse a second call of `fit` at the same time, because both would write one state."""
        if self._is_running:
            raise ValueError(
                "fit() was called while fit() of the same Trainer is running, for example in a "
                "callback. There, end training with run.stop(…), or train with another Trainer"
            )
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def extend(self, duration: Duration) -> None:
        """Extend training by a duration from the current state."""
        if self.checkpointer is not None:
            raise ValueError(
                f"fit(duration='{duration}') would train for too long if the run is killed and "
                "resumed from its checkpoints. Pass the whole max_duration to the Trainer, or no "
                "checkpoint"
            )
        self.step.seconds.require_for("duration", duration)
        done = self._state.done(duration.unit)
        until = Duration(value=done + duration.value, unit=duration.unit)
        self._run.requests.max_duration = until
        self.step.tokens.require_for("duration", until)

    def require_more(self) -> None:
        """Raise an error if nothing is left to train."""
        if self._has_reached_duration and self._is_complete:
            raise ValueError(
                f"fit() has already trained for max_duration='{self._run.max_duration}' "
                f"({count_of(self._state.batch, 'batch')}). To continue, call fit(duration='1ep') "
                "with the additional duration, or pass a longer max_duration to a new Trainer"
            )

    def run(self, max_seconds: float) -> FitSummary:
        """Train, from the start or a checkpoint, until the duration or the time limit."""
        context, saver = self.context, self.checkpointer
        reset_peak(self._run.device)
        self._run.requests.stop_reason = None
        self.step.update.clear()  # an interrupted fit leaves the gradients of its last batch
        context.progress.line(self.settings.line(self._num_batches))
        resume_step = self._resume()
        if not self._run.model.training:
            self._run.model.train()
        context.mode.train()
        # Earlier calls and processes do not count: a batch system gives each job its own time.
        self._deadline, self._first_batch = time.monotonic() + max_seconds, self._state.batch
        self._has_agreed_to_stop = False
        try:
            context.forget()  # values logged outside of training belong to no step
            context.loggers.start(self.settings.values(), resume_step=resume_step)
            with catching_signals(
                saves=saver is not None,
                has_peers=context.has_peers,
                say=say_on_stderr if self._run.rank == 0 else lambda line: None,
            ) as self._interruption:
                # Steps run here and not where batches are made: few frames lie above the model.
                for batches in self._train():
                    self._trained = self.step.run(batches, known_seconds=self.feed.take_seconds())
                    del batches  # free them before the next batch is fetched
                self._interruption.take_note_of_peers(context.ranks)
        except (KeyboardInterrupt, SystemExit) as error:  # a second interruption
            if saver is not None and not is_end_told():
                add_note(
                    error,
                    f"automicro: a run with the same checkpoint=… resumes from {saver.folder}",
                )
            raise
        finally:
            context.mode.eval()
            context.flush()
            context.loggers.close()
        self._interruption.raise_if_interrupted(
            where=f"after batch {self._state.batch}",
            checkpoint=None if saver is None else saver.saved_in,
            say=context.progress.line,
        )
        return self._sum_up()

    def where(self) -> str:
        """Describe the place in training, for errors."""
        if self.rehearsal is not None and self.rehearsal.at is not None:
            return self.rehearsal.at
        return f"in training, {place_of(self._state)}"

    def _train(self) -> Iterator[list[Any]]:
        """Yield the batches of each step, with everything else that training does around it."""
        context, evaluations = self.context, self.evaluations
        # Reset as after each evaluation, so that a resumed run has the same memory.
        for evaluation in evaluations:
            evaluation.metrics.reset()
        context.tell("fit_start")
        evaluations.refuse_empty()
        if self.checkpointer is not None and self._state.batch == 0:
            self.checkpointer.rehearse()
        if self.rehearsal is not None and self._state.batch == 0:
            self.rehearsal.run()
            self.step.update.clear()
        evaluations.run_due(self._stops)  # interrupted evaluations
        self._agree()
        while not self._is_over:
            yield from self._train_epoch()
        if self._is_finished:
            evaluations.run_at_end(self._stops)
        if (saver := self.checkpointer) is not None:
            saver.save(evaluations.values(saver.best_metric))
        context.mode.eval()
        context.tell("fit_end")

    def _train_epoch(self) -> Iterator[list[Any]]:
        context, state = self.context, self._state
        if not self._has_begun:
            context.progress.doing("waiting for the first batch of data")
        groups = self._begin_epoch()
        for number, group in enumerate(self._timed(groups)):
            if number == 0:
                require_same_order(context.ranks, self.feed.loader, "train_dataloader")
            batches = self._prepare(group)
            del group
            yield batches
            if self._trained is None:
                break  # all ranks are out of rows
            if self.checkpointer is not None and batches and not self._has_looked_at_state:
                self._has_looked_at_state = True
                self.step.warn_of_unsaved_state(batches[0])
            self._conclude(self._trained)
            del batches
            # Values of a step are logged before its checkpoint, or a resumed run would log them
            # twice. So the last batch is evaluated and saved at the end of the epoch.
            total = self._agreed_batches if context.has_peers else self._num_batches
            is_last = state.epoch_batch == total
            if not is_last:
                self.evaluations.run_due(self._stops)
            self._agree()
            if self._is_over:
                if is_last:
                    break
                self._left = groups
                if state.epoch == 0:  # metrics of part of an epoch are better than none
                    self._compute_metrics("a part of an epoch")
                return
            if not is_last:
                self._save_if_due()
        if state.epoch_batch == 0:
            raise empty(self.feed.loader, "train_dataloader")
        # If the loader has no length, the last batch was saved before the end of the epoch.
        saver = self.checkpointer
        was_saved = saver is not None and saver.saved_in is not None
        self._end_epoch()
        self.evaluations.run_due(self._stops)
        self._agree()
        if not self._is_over:
            self._save_if_due(is_due=was_saved)

    def _timed(self, groups: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yield the groups, and count the wait for data as training time."""
        while True:
            start = time.perf_counter()
            group = next(groups, None)
            self._state.train.seconds += time.perf_counter() - start
            if group is None:
                return
            yield group
            del group

    def _begin_epoch(self) -> Iterator[list[Any]]:
        """Begin a pass, or continue one that was stopped or saved in the middle."""
        groups, self._left = self._left, None
        if groups is None:
            if not self._is_taken_up:
                if self._state.epoch_batch:
                    done = count_of(self._state.epoch_batch, "batch")
                    warn(
                        f"an earlier fit() ended with an error in epoch {self._state.epoch + 1}. "
                        f"This epoch begins again, so {done} of it are repeated. To avoid this, "
                        "save checkpoints between batches and resume with a new Trainer",
                        UserWarning,
                    )
                self._state.epoch_batch = 0
                self.step.metrics.reset()
            groups = self.feed.groups(self._state.epoch)
            if self.context.has_peers:  # a rank that is out of rows takes part until all are
                groups = itertools.chain(groups, itertools.repeat([]))
        if self.context.has_peers:
            most = self.context.ranks.most(float(self._num_batches or 0))
            self._agreed_batches = int(most) or None
        self._is_taken_up = False
        self.context.tell("epoch_start")
        return groups

    def _prepare(self, loaded: Sequence[Any]) -> list[Any]:
        """Let callbacks transform the batches of an optimization batch."""
        context = self.context
        if not self._has_begun:
            context.progress.doing("the first batch: checking a few rows, then finding a size")
        self._has_begun = True
        batches = [context.callbacks.transform(self._run, batch) for batch in loaded]
        if batches:
            context.tell("batch_start", batches if self.feed.group_size > 1 else batches[0])
        return batches

    def _conclude(self, trained: TrainedBatch) -> None:
        """Report a trained batch to callbacks, loggers and progress."""
        context, speed = self.context, self._recent.now(self._state)
        told = functools.cache(functools.partial(told_of_batch, trained, context, speed))
        if context.is_read:
            context.log({name: value for name, value, _ in told()})
        context.tell("batch_end", trained.result)
        context.flush()

        def describe() -> StatusLine:
            return batch_status(
                self._state,
                self._run.max_duration,
                [text for _, _, text in told() if text],
                num_batches=self._num_batches,
                time_left=self._time_left,
            )

        context.progress.status(describe)

    def _end_epoch(self) -> None:
        """Conclude a complete pass."""
        state, context = self._state, self.context
        self._compute_metrics("an epoch")
        self.step.update.end("epoch")
        state.epoch += 1
        state.epoch_batch = 0
        context.log({f"train/{name}": value for name, value in state.train.metrics.items()})
        context.tell("epoch_end")
        context.flush()

    def _compute_metrics(self, of: str) -> None:
        self.context.ranks.ready(f"computing the metrics of {of}")
        self._state.train.metrics = self.step.metrics.compute()

    def _save_if_due(self, *, is_due: bool = False) -> None:
        if (saver := self.checkpointer) is not None:
            saver.save_if_due(self.evaluations.values(saver.best_metric), is_due=is_due)

    @property
    def _wants_to_stop(self) -> bool:
        """Whether this rank wants to stop."""
        # At least one batch per call.
        is_late = self._state.batch > self._first_batch and time.monotonic() >= self._deadline
        return self._interruption.name is not None or is_late

    def _stops(self, ranks: Ranks) -> bool:
        """Whether any rank wants to stop; all ranks must call this."""
        self._has_agreed_to_stop |= any_rank(ranks, self._wants_to_stop)[0]
        return self._has_agreed_to_stop

    def _agree(self) -> None:
        """Apply the requests of any rank, or of its callbacks, on all ranks."""
        run = self._run
        has_reason = run.stop_reason is not None
        wants_checkpoint = run.requests.take("wants_checkpoint")
        wishes = any_rank(self.context.ranks, self._wants_to_stop, has_reason, wants_checkpoint)
        self._has_agreed_to_stop |= wishes[0]
        if wishes[1] and not has_reason:
            run.stop("another rank asked for it")
        if wishes[2]:
            run.save_checkpoint()

    @property
    def _is_over(self) -> bool:
        """Whether this call has finished training."""
        return self._is_finished or self._has_agreed_to_stop

    @property
    def _is_finished(self) -> bool:
        """Whether the duration is reached or a callback has asked to stop."""
        return self._has_reached_duration or self._run.stop_reason is not None

    @property
    def _has_reached_duration(self) -> bool:
        return self._state.done(self._run.max_duration.unit) >= self._run.max_duration.value

    @property
    def _is_complete(self) -> bool:
        """Whether training has finished and all evaluations at the end are done."""
        return self._is_finished and self.evaluations.is_complete_at_end

    @property
    def _num_batches(self) -> int | None:
        """Number of optimization batches in an epoch, if the loader has a length."""
        return self.feed.num_groups(self._state.epoch)

    def _sum_up(self) -> FitSummary:
        """Print and return the summary of the run."""
        reason, progress = self._run.stop_reason, self.context.progress
        if not self._is_complete:
            reason = TIME_IS_OVER
        if reason is not None:
            progress.line(f"training stopped: {reason}")
        rehearsal = None if self.rehearsal is None else self.rehearsal.report
        summary = summarize(
            self._state,
            stop_reason=reason,
            peak_memory_bytes=peak_bytes(self._run.device),
            num_devices=self.context.ranks.world_size,
            loss_average_is=self.step.microbatcher.loss_average_is,
            rehearsed=None if rehearsal is None else rehearsal.brief(),
        )
        progress.line(f"\n{summary}")
        return summary

    def _resume(self) -> int | None:
        """Resume from a checkpoint if training has not begun; return the batches done before."""
        if self.checkpointer is None or self._state.batch:
            return self._state.batch or None
        saved = self.checkpointer.resume()
        if saved is None:
            return None
        if (reason := saved["stop_reason"]) is not None:  # the run continues regardless
            self.context.progress.line(f"training already stopped there: {reason}")
        self._is_taken_up = self._state.epoch_batch > 0
        self.evaluations.catch_up()
        restore_rng_state(saved["rng"])
        return self._state.batch
