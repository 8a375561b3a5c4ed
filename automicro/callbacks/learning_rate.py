"""Logging what the optimizer takes."""

from typing import Any

from automicro.events import Callback, Run
from automicro.results import StepResult


class LearningRateMonitor(Callback):
    """Logs the learning rate of every batch, and the momentum where that is asked for.

    Of one parameter group as ``train/lr`` and ``train/momentum``, of several as ``train/lr/0``,
    ``train/lr/1`` … in the optimizer's order. The momentum of Adam and its like is the first of
    their betas.

    Args:
        momentum: whether to log that, too.

    Example:
        >>> monitor = LearningRateMonitor(momentum=True)
        >>> monitor.values([{"lr": 0.5, "betas": (0.9, 0.999)}])
        {'train/lr': 0.5, 'train/momentum': 0.9}
        >>> monitor.values([{"lr": 0.5}, {"lr": 0.1}])
        {'train/lr/0': 0.5, 'train/lr/1': 0.1}
    """

    def __init__(self, *, momentum: bool = False) -> None:
        self._momentum = momentum
        self._values: dict[str, float] = {}

    def batch_start(self, run: Run, batch: Any) -> None:
        """Read what this batch's step takes; a scheduler changes it right after the step."""
        if run.optimizer is not None:
            self._values = self.values(run.optimizer.param_groups)

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Log it."""
        run.log(self._values)

    def values(self, groups: list[dict[str, Any]]) -> dict[str, float]:
        """What there is to log of an optimizer's parameter groups.

        Args:
            groups: the optimizer's ``param_groups``.
        """
        logged: dict[str, float] = {}
        for index, group in enumerate(groups):
            suffix = f"/{index}" if len(groups) > 1 else ""
            if "lr" in group:
                logged[f"train/lr{suffix}"] = float(group["lr"])
            momentum = group.get("momentum", next(iter(group.get("betas", ())), None))
            if self._momentum and momentum is not None:
                logged[f"train/momentum{suffix}"] = float(momentum)
        return logged
