"""Which checkpoints stay: the last few, and the best few by a metric."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from automicro.checks import check_choice

MODES = ("min", "max")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How many checkpoints stay.

    Args:
        keep_last: the newest ones, at least 1; None keeps all.
        keep_best: besides, those with the best value of a metric.
        best_metric: its name.
        best_mode: ``"min"`` where less is better, ``"max"`` where more is.

    Raises:
        ValueError: a number is too small, or a mode is not known.

    >>> keep = Retention(keep_last=1, keep_best=1, best_metric="loss", best_mode="min")
    >>> saved = {Path("c"): {"loss": 0.5}, Path("b"): {"loss": 0.2}, Path("a"): {"loss": 0.9}}
    >>> [str(path) for path in keep.choose(saved)]
    ['c', 'b']
    """

    keep_last: int | None = 3
    keep_best: int = 0
    best_metric: str = "eval/loss"
    best_mode: str = "min"

    def __post_init__(self) -> None:
        if self.keep_last is not None and not (_is_int(self.keep_last) and self.keep_last >= 1):
            raise ValueError(
                f"keep_last={self.keep_last!r} would leave nothing to go on from; give a number "
                "from 1, or None to keep all"
            )
        if not (_is_int(self.keep_best) and self.keep_best >= 0):
            raise ValueError(
                f"keep_best={self.keep_best!r} is no number of checkpoints; give a number from 0"
            )
        if not self.best_metric:
            raise ValueError(
                "best_metric='' is no name; give that of a metric, such as 'eval/loss'"
            )
        check_choice("best_mode", self.best_mode, MODES)

    def choose(self, saved: Mapping[Path, Mapping[str, float]]) -> list[Path]:
        """Which of the checkpoints stay.

        Args:
            saved: the metrics of all good ones, the newest first.
        """
        newest = list(saved)
        best = self.ranked(saved)[: self.keep_best]
        kept = set(newest[: self.keep_last]) | set(best)
        return [path for path in newest if path in kept]

    def ranked(self, saved: Mapping[Path, Mapping[str, float]]) -> Sequence[Path]:
        """Those that have the metric, the best first; of equal ones the newer.

        Args:
            saved: the metrics of all good ones, the newest first.
        """
        sign = 1 if self.best_mode == "min" else -1
        values = {
            path: sign * metrics[self.best_metric]
            for path, metrics in saved.items()
            if self.best_metric in metrics and not math.isnan(metrics[self.best_metric])
        }
        return sorted(values, key=values.__getitem__)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
