"""Early stopping: end training when a value stops improving."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from automicro.errors import suggestion, warn
from automicro.events.callback import Callback
from automicro.events.run import IN_EVALUATION, IN_TRAINING, NO_EVALUATION, Run
from automicro.options import check_choice, read_count
from automicro.step.results import StepResult
from automicro.units import count_of


class EarlyStopping(Callback):
    """Ends training when a value has not improved for a while.

    Values of an evaluation are checked after each evaluation that has them. Of training
    (``"train/…"``), metrics are checked after each epoch, and other values after each batch. Values
    that callbacks log under other names are checked after each evaluation. NaN never counts as an
    improvement. Evaluations outside `fit` are ignored.

    Args:
        monitor: the name under which the value is logged: ``"eval/loss"``, ``"eval/accuracy"``,
            ``"train/loss"``.
        patience: number of checks in a row (evaluations, epochs or batches) without an improvement
            after which training ends.
        mode: whether smaller (``"min"``) or larger (``"max"``) values are better.
        min_delta: minimum difference to the best value that counts as an improvement.

    Raises:
        TypeError, ValueError: an argument is invalid.

    An unknown name raises a ``ValueError`` before training starts. If names are known only with
    their values (named losses, metric collections), it is raised right after the evaluation, or
    after the first epoch for training.

    Example:
        >>> stopping = EarlyStopping(monitor="eval/accuracy", mode="max", patience=2)
        >>> stopping.best is None
        True
    """

    def __init__(
        self,
        monitor: str = "eval/loss",
        *,
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
    ) -> None:
        if not monitor:
            raise ValueError("monitor='' is not a name; pass one such as 'eval/loss'")
        self._monitor = monitor
        self._patience = read_count("patience", patience)
        # Multiplied by the sign, smaller is better in both modes.
        self._sign = 1 if check_choice("mode", mode, ("min", "max")) == "min" else -1
        given: Any = min_delta
        if not isinstance(given, Real) or not min_delta >= 0:
            raise ValueError(f"min_delta={min_delta!r} must be 0 or above; mode sets the direction")
        self._min_delta = float(min_delta)
        self._best: float | None = None
        self._without_better = 0
        self._is_training = False  # evaluations outside fit do not count
        self._was_found = False
        self._was_loaded = False

    @property
    def best(self) -> float | None:
        """The best value so far, or None before the first."""
        return self._best

    @property
    def without_better(self) -> int:
        """Number of checks in a row without an improvement."""
        return self._without_better

    def fit_start(self, run: Run) -> None:
        """Start monitoring. A run that was stopped stops again, unless patience was increased."""
        self._is_training = True
        # Refuse only names known to be missing: None means that only the values will show.
        if run.expected.gives(self._monitor) is False:
            names = [each for each in run.expected.names if each.startswith(IN_EVALUATION)]
            self._refuse(names or None)
        # Otherwise each restart of a stopped run would train for one more round of patience.
        if self._was_loaded and self._without_better >= self._patience:
            times = "" if self._without_better == 1 else f" {self._without_better} times in a row"
            run.stop(f"{self._monitor} did not improve{times} before the run was resumed")
        self._was_loaded = False

    def fit_end(self, run: Run) -> None:
        """Stop monitoring.

        Warns:
            UserWarning: the value was never logged.
        """
        self._is_training = False
        # A run that ended within its first epoch might rightly have had no evaluation.
        if self._best is None and self._without_better == 0 and run.state.epoch:
            warn(
                f"EarlyStopping never found {self._monitor!r} in {run.state.epoch} epochs: it "
                "checks evaluations, and in each batch the values of training ('train/…'). Pass "
                "eval_dataloader=… and an eval_interval, or monitor a value such as 'train/loss'",
                UserWarning,
            )

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Check a value that is logged for each batch."""
        # A training metric covers an epoch. Checked after each batch, the same value would use up
        # the patience.
        is_of_epochs = self._monitor.removeprefix(IN_TRAINING) in run.state.train.metrics
        if self._monitor.startswith(IN_TRAINING) and not is_of_epochs:
            value = run.values.get(self._monitor)
            if value is not None:
                self._look_at(run, value, "batch")

    def epoch_end(self, run: Run) -> None:
        """Check a training metric."""
        if not self._monitor.startswith(IN_TRAINING):
            return
        metrics = {f"{IN_TRAINING}{name}": each for name, each in run.state.train.metrics.items()}
        if self._monitor in metrics:
            self._look_at(run, metrics[self._monitor], "epoch")
        # After a whole epoch every value of training was logged at least once.
        elif self._monitor not in run.values:
            of_batches = (name for name in run.values if name.startswith(IN_TRAINING))
            self._refuse(sorted({*of_batches, *metrics}))

    def eval_end(self, run: Run, values: Mapping[str, float]) -> None:
        """Check a value of an evaluation."""
        if self._monitor.startswith(IN_TRAINING) or not self._is_training:
            return
        found = {_logged_name(name): value for name, value in values.items()}
        # A name without a known prefix belongs to another callback.
        if not self._monitor.startswith(IN_EVALUATION):
            found |= run.values
        if self._monitor in found:
            self._was_found = True
            self._look_at(run, found[self._monitor], "evaluation")
        elif not self._was_found and not self._comes_later(run, found):
            self._refuse(sorted(found))

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of checks without an improvement."""
        return {"best": self._best, "without_better": self._without_better}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._best = state["best"]
        self._without_better = state["without_better"]
        self._was_loaded = True

    def _comes_later(self, run: Run, found: Mapping[str, float]) -> bool:
        """Return whether another evaluation than the one with these values logs the value."""
        prefixes = [f"{IN_EVALUATION}{name}/" for name in run.evaluations if name]
        its = next((prefix for prefix in prefixes if self._monitor.startswith(prefix)), None)
        return its is not None and not any(name.startswith(its) for name in found)

    def _look_at(self, run: Run, value: float, what: str) -> None:
        value, best = float(value), self._best
        # The first value always counts as an improvement.
        gain = math.inf if best is None else self._sign * (best - value)
        # Comparisons with NaN are always false, so NaN needs a check of its own.
        if not math.isnan(value) and gain > self._min_delta:
            self._best, self._without_better = value, 0
            return
        self._without_better += 1
        if self._without_better >= self._patience:
            than = "a number" if best is None else f"better than {best:.6g}"
            whats = what if self._patience == 1 else f"{count_of(self._patience, what)} in a row"
            verb = "was not" if self._patience == 1 else "has not been"
            run.stop(f"{self._monitor} {verb} {than} in {whats} (at last {value:.6g})")

    def _refuse(self, names: list[str] | None) -> None:
        there = f"the names are: {', '.join(names)}" if names else NO_EVALUATION
        hint = suggestion(self._monitor, sorted(set(names or ())))
        raise ValueError(f"there is no value called {self._monitor!r} to monitor{hint}; {there}")


def _logged_name(name: str) -> str:
    return name if name.startswith(IN_EVALUATION) else f"{IN_EVALUATION}{name}"
