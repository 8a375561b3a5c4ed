"""One call of `Trainer.fit`: going on from a checkpoint, the loop, and a proper end."""

from dataclasses import replace

from automicro.duration import Duration
from automicro.events import LoopState, Run
from automicro.memory import peak_bytes, reset_peak
from automicro.ranks import Ranks
from automicro.trainer.checkpointing import Checkpointer
from automicro.trainer.clock import TimeLimit
from automicro.trainer.interruption import (
    Interruption,
    catching_signals,
    is_end_told,
    say_on_stderr,
)
from automicro.trainer.lines import RunSettings, count_of
from automicro.trainer.loop import FitLoop
from automicro.trainer.progress import Progress
from automicro.trainer.recording import Recorder
from automicro.trainer.snapshot import restore_random_numbers
from automicro.trainer.step import TrainingStep
from automicro.trainer.summary import TIME_IS_OVER, FitSummary, summarize


class Fit:
    """Runs the loop from where training stands.

    Args:
        loop: trains.
        step: of the loop.
        state: where training stands.
        run: as callbacks see it.
        recorder: logs the numbers.
        ranks: all that train the model.
        checkpointer: saves and resumes; None for no checkpoints.
        max_seconds: how long one call may take; None for as long as it takes.
        settings: what runs, for the first line and for the loggers.
    """

    def __init__(
        self,
        loop: FitLoop,
        *,
        step: TrainingStep,
        state: LoopState,
        run: Run,
        recorder: Recorder,
        ranks: Ranks,
        checkpointer: Checkpointer | None,
        max_seconds: float | None,
        settings: RunSettings,
    ) -> None:
        self.loop = loop
        self._step = step
        self._state = state
        self._run = run
        self._recorder = recorder
        self._ranks = ranks
        self._checkpointer = checkpointer
        self._max_seconds = max_seconds
        self._settings = settings

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
        done = self._state.done(duration.unit)
        until = Duration(value=done + duration.value, unit=duration.unit)
        self._run.train_until(until)
        self._step.require_tokens("duration", until)
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

    def __call__(self, progress: Progress) -> FitSummary:
        """Train, and sum up.

        Raises:
            KeyboardInterrupt: Ctrl-C, after the batch that ran is done and saved.
            SystemExit: SIGTERM, the same.
        """
        state = self._state
        interruption = self._train(progress)
        if interruption.name is not None:
            where = f"after batch {state.batch}"
            folder = None if self._checkpointer is None else self._checkpointer.saved_in(state)
            if not is_end_told():
                progress.line(interruption.describe(where=where, checkpoint=folder))
            interruption.raise_if_interrupted(where=where, checkpoint=folder)
        reason = self._run.stop_reason
        if not self.loop.is_complete:
            reason = TIME_IS_OVER
        if reason is not None:
            progress.line(f"training stopped: {reason}")
        summary = summarize(
            state,
            stop_reason=reason,
            peak_memory_bytes=peak_bytes(self._run.device),
            num_devices=self._ranks.world_size,
            loss_average_is=self._step.loss_average_is,
        )
        progress.line(f"\n{summary}")
        return summary

    def _train(self, progress: Progress) -> Interruption:
        """Go on until the end, or until any rank is asked to stop; what asked for it."""
        state = self._state
        reset_peak(self._run.device)
        self._run.resume()
        if state.batch == 0 and self._run.rank == 0 and self.loop.num_batches:
            self._step.warn_of_haste(self.loop.num_batches, self._run.max_duration)
        self._step.clear_gradients()  # an interrupted fit leaves those of its last batch
        progress.line(self._settings.line(self.loop.num_batches))
        resume_step = self._resume(progress)
        if not self._run.model.training:
            self._run.model.train()
        time_limit, first = TimeLimit(self._max_seconds), state.batch
        try:
            self._recorder.start(self._settings.values(), resume_step=resume_step)
            with catching_signals(
                saves=self._checkpointer is not None,
                has_peers=self._ranks.world_size > 1,
                say=say_on_stderr if self._run.rank == 0 else _say_nothing,
            ) as interruption:

                def wants_to_stop() -> bool:
                    has_trained = state.batch > first  # a batch at least, however late it is
                    return interruption.name is not None or (has_trained and time_limit.is_over)

                self.loop.run(progress, wants_to_stop)
                interruption.take_note_of_peers(self._ranks)
        finally:
            self._recorder.close()
            if self._checkpointer is not None:
                self._checkpointer.finish()
        return interruption

    def _resume(self, progress: Progress) -> int | None:
        """Go on from a checkpoint where training has not begun; the batches done before."""
        if self._checkpointer is None or self._state.batch:
            return self._state.batch or None
        saved = self._checkpointer.resume(self._state, progress)
        if saved is None:
            return None
        if (reason := saved["stop_reason"]) is not None:  # whoever asked for it may do so again
            progress.line(f"training had stopped there: {reason}")
        self.loop.catch_up()
        restore_random_numbers(saved)
        return self._state.batch


def _say_nothing(line: str) -> None:
    """One rank speaks for all."""
