"""One pass over the data in evaluation mode."""

import math
import time
from collections.abc import Iterable
from typing import Any

from automicro.microbatcher import Microbatcher
from automicro.policy import Policy
from automicro.trainer.lines import count_of, evaluation_line
from automicro.trainer.loading import fetch
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.progress import Progress
from automicro.trainer.session import noting
from automicro.trainer.state import PhaseState
from automicro.trainer.step import show_recovery


class Evaluation:
    """Evaluates whole batches, at a size of its own.

    Args:
        microbatcher: runs the forward.
        policy: the one that it asks for the sizes of evaluation.
        metrics: count every row once, from zero in each pass.
    """

    def __init__(self, microbatcher: Microbatcher, policy: Policy, metrics: MetricSet) -> None:
        self._microbatcher = microbatcher
        self._policy = policy
        self._metrics = metrics

    def run(
        self,
        loader: Iterable[Any],
        phase: PhaseState,
        progress: Progress,
        *,
        name: str,
        where: str = "",
    ) -> dict[str, float]:
        """Pass over the data once; the values go into the phase, too.

        Args:
            loader: gives whole batches.
            phase: takes note of what happens.
            progress: where to say it.
            name: of the loader, for errors.
            where: where training stands, to say so.
        """
        start = time.perf_counter()
        self._metrics.reset()
        losses: list[tuple[float, int]] = []
        samples = batches = 0
        with noting(lambda: f"in evaluation, batch {batches + 1} of the pass"):
            for batch in fetch(loader, name):
                known = self._policy.state_dict()
                result = self._microbatcher.evaluate(batch, self._metrics.metrics)
                phase.count(result)
                show_recovery(result, "eval", self._policy, known, progress)
                if result.loss is not None:
                    losses.append((result.loss.item(), result.num_samples))
                samples += result.num_samples
                batches += 1
                done = f"evaluating: {count_of(batches, 'batch')} done"
                progress.status(lambda done=done: done)  # type: ignore[misc]
            values = _mean_loss(losses) | self._metrics.compute()
        phase.metrics = values
        phase.seconds += time.perf_counter() - start
        assert phase.cut is not None
        progress.line(evaluation_line(values, samples=samples, cut=phase.cut, where=where))
        return values


def _mean_loss(losses: list[tuple[float, int]]) -> dict[str, float]:
    """The mean over all rows, where there were losses."""
    if not losses:
        return {}
    total = math.fsum(loss * rows for loss, rows in losses)
    return {"loss": total / sum(rows for _, rows in losses)}
