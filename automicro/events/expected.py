"""Which values a run will give, as far as that is known before it gives any."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

IN_TRAINING = "train/"
IN_EVALUATION = "eval/"
NO_EVALUATION = "there is no evaluation in training: pass eval_dataloader=… and an eval_interval"


@dataclass(frozen=True, kw_only=True)
class ExpectedValues:
    """The names of values that training and its evaluations will log.

    Attributes:
        evaluations: the metrics of each evaluation that happens in training, by its name, an empty
            one where there is only one; None for metrics whose names come with their values.
        training: the metrics of training; None as above.
        has_one_loss: whether losses of several names are out of the question.

    >>> expected = ExpectedValues(evaluations={"": ["accuracy"]}, has_one_loss=True)
    >>> expected.gives("eval/accuracy"), expected.gives("eval/acc"), expected.gives("score")
    (True, False, None)
    """

    evaluations: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    training: Collection[str] | None = ()
    has_one_loss: bool = False

    @property
    def names(self) -> list[str]:
        """The names that are known."""
        found = [f"{IN_TRAINING}{each}" for each in ("loss", *(self.training or ()))]
        for name, metrics in self.evaluations.items():
            prefix = _prefix(name)
            found += [f"{prefix}{each}" for each in ("loss", *(metrics or ()))]
        return found

    def gives(self, name: str) -> bool | None:
        """Whether there will be a value of a name: None where nobody knows yet.

        Args:
            name: under which it would be logged. What callbacks log is not known.
        """
        if name.startswith(IN_TRAINING):
            # Callbacks log there, too.
            return self._is_of(name.removeprefix(IN_TRAINING), self.training) or None
        if not name.startswith(IN_EVALUATION):
            return None
        answers = [
            self._is_of(name.removeprefix(_prefix(each)), metrics)
            for each, metrics in self.evaluations.items()
            if name.startswith(_prefix(each))
        ]
        return True if True in answers else None if None in answers else False

    def _is_of(self, name: str, metrics: Collection[str] | None) -> bool | None:
        if name == "loss":
            return True
        if name.startswith("loss/"):
            return False if self.has_one_loss else None
        if metrics is None:
            return None
        # A metric of several values gives each as name/index.
        return any(name == each or name.startswith(f"{each}/") for each in metrics)


def _prefix(evaluation: str) -> str:
    return f"{IN_EVALUATION}{evaluation}/" if evaluation else IN_EVALUATION
