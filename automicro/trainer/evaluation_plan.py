"""When training is interrupted for evaluations, and what they found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from automicro.checkpoints import restore_rng_state, rng_state
from automicro.duration import Unit
from automicro.events import Callbacks, LoopState, Run
from automicro.ranks import Ranks
from automicro.trainer.evaluation import Evaluation
from automicro.trainer.lines import position
from automicro.trainer.progress import Progress
from automicro.trainer.recording import Recorder


class EvaluationPlan:
    """Evaluates in the middle of training, which goes on as if nothing had been.

    An evaluation that is broken off, by a signal or an error, counts for nothing and stays due:
    it comes first when training goes on, in a run that is taken up again, too.

    Args:
        evaluations: what to evaluate on.
        state: where training stands; the evaluations are written down there.
        callbacks: told of every event.
        recorder: logs the numbers.
        run: as callbacks see it.

    Raises:
        ValueError: data that can be passed over only once, for several evaluations.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        *,
        state: LoopState,
        callbacks: Callbacks,
        recorder: Recorder,
        run: Run,
    ) -> None:
        for evaluation in evaluations:
            evaluation.check_passes(run.max_duration)
        self._evaluations = evaluations
        self._state = state
        self._callbacks = callbacks
        self._recorder = recorder
        self._run = run
        self._loaded: Sequence[str] = ()

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self._evaluations)

    @property
    def is_complete_at_end(self) -> bool:
        """Whether all that evaluate at the end have seen the model as it is."""
        return all(map(self._is_done, filter(_happens_at_end, self._evaluations)))

    def values(self) -> dict[str, float]:
        """What was found for the model as it is, by the names under which it is logged.

        Values of an earlier evaluation are those of other weights and are left out.
        """
        found: dict[str, float] = {}
        for evaluation in filter(self._is_done, self._evaluations):
            found |= evaluation.values_in(self._state.eval)
        return found

    def is_awaited(self, name: str) -> bool:
        """Whether a value is of an evaluation that has not seen the model as it is."""
        return any(each.gives(name) and not self._is_done(each) for each in self._evaluations)

    def run_due(self, progress: Progress, is_stopped: Callable[[Ranks], bool]) -> None:
        """Evaluate where an interval was reached.

        Args:
            progress: where to say how it goes.
            is_stopped: asked before each evaluation and each of its batches.
        """
        # At the end of an epoch, those of its last batch come before those of the epoch.
        for evaluation in sorted(self._evaluations, key=_counts_epochs):
            if evaluation.interval.is_pending(self._state):
                self._evaluate(evaluation, progress, is_stopped)

    def run_at_end(self, progress: Progress, is_stopped: Callable[[Ranks], bool]) -> None:
        """Evaluate at the end of training, with all that do so in the middle of it."""
        for evaluation in filter(_happens_at_end, self._evaluations):
            self._evaluate(evaluation, progress, is_stopped)

    def catch_up(self) -> None:
        """Take what is done for handled, in a run that is taken up again."""
        for evaluation in self._evaluations:
            is_pending = evaluation.name in self._loaded
            evaluation.interval.catch_up(self._state, is_pending=is_pending)

    def state_dict(self) -> dict[str, Any]:
        """The evaluations that are due, which were broken off."""
        pending = (each for each in self._evaluations if each.interval.is_pending(self._state))
        return {"pending": [each.name for each in pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take these for due with the next `catch_up`."""
        self._loaded = state["pending"]

    def _is_done(self, evaluation: Evaluation) -> bool:
        return self._state.evaluated_at.get(evaluation.name) == self._state.batch

    def _evaluate(
        self, evaluation: Evaluation, progress: Progress, is_stopped: Callable[[Ranks], bool]
    ) -> None:
        """Evaluate, unless that was done for this very batch."""
        if not self._is_done(evaluation):
            if is_stopped(evaluation.microbatcher.ranks):
                return
            here = rng_state()  # a loader draws some, and training must not depend on that
            values = evaluation.run(
                self._state.eval,
                progress,
                callbacks=self._callbacks,
                recorder=self._recorder,
                run=self._run,
                where=position(self._state, self._run.max_duration),
                is_stopped=is_stopped,
            )
            restore_rng_state(here)
            if values is None:
                return
            self._state.evaluated_at[evaluation.name] = self._state.batch
            self._recorder.flush()
        evaluation.interval.catch_up(self._state)


def _counts_epochs(evaluation: Evaluation) -> bool:
    return evaluation.interval.unit is Unit.EPOCHS


def _happens_at_end(evaluation: Evaluation) -> bool:
    return evaluation.happens_at_end
