"""Starting from the size that an earlier run found, and leaving one for the next."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from automicro.attempts.run import Finished
from automicro.policy import Policy
from automicro.size_cache import RememberedSize, RunKey, SizeCache, SizeMemory

logger = logging.getLogger(__name__)

# Batches of varying length have a size each: what is remembered of them changes by this share.
CHANGE = 0.05


class Recollection:
    """What one phase of a run takes from the cache of sizes, and gives to it.

    Args:
        describe: ``describe(batch, rows=…)`` is the key of a run, from its first batch.
        shapes: of a batch; see `describe_shapes`.
        cache: where sizes lie; that of the user unless given.
    """

    def __init__(
        self,
        describe: Callable[..., RunKey],
        shapes: Callable[[Any], Mapping[str, str]],
        *,
        cache: SizeCache | None = None,
    ) -> None:
        self._describe = describe
        self._shapes = shapes
        self._cache = cache or SizeCache()
        self._memory: SizeMemory | None = None
        self._size: int | None = None
        # The most elements of a microbatch that fitted, while lengths vary.
        self._elements = 0.0

    def look_up(self, batch: Any, rows: int, policy: Policy, *, is_new: bool) -> int | None:
        """Let a policy start from what is remembered, at the first batch of a new run.

        Returns the rows that it starts from, None where nothing was recalled.

        Args:
            batch: that comes next.
            rows: of that batch.
            policy: of the sizes; told where it can be.
            is_new: whether nothing was found yet, here or in a checkpoint.
        """
        if self._memory is not None:
            if not self._memory.varies:
                self._memory.see(self._shapes(batch))
            return None
        self._memory = SizeMemory(self._cache, self._describe(batch, rows=rows))
        recalled, suggest = self._memory.recalled, getattr(policy, "suggest", None)
        if recalled is None or suggest is None or not is_new:
            return None
        suggest(recalled.microbatch_size, recalled.cost_per_row)
        logger.info(
            "starting from %d rows per microbatch, which an earlier run found; "
            '"automicro cache" lists what is remembered',
            recalled.microbatch_size,
        )
        return recalled.microbatch_size

    def take_down(self, finished: Finished[Any], costs: Sequence[float]) -> None:
        """Remember the size of a step, once it is settled.

        While all batches have one shape, two in a row had it. Where lengths vary, it is the
        largest that fitted, in elements, until one of no more than these fails.
        """
        size, self._size = self._size, finished.microbatch_size
        if self._memory is None or not finished.is_committed:
            return
        index = max(
            range(len(costs)), key=lambda each: finished.cuts[each][0] * (costs[each] or 1)
        )
        rows, cost = finished.cuts[index][0], costs[index]
        if self._memory.varies:
            if not self._is_news(rows * cost, [each * cost for each in finished.failed_sizes]):
                return
        elif size != self._size:
            return
        measured = finished.measured
        found = RememberedSize(
            microbatch_size=rows,
            cost_per_row=cost or None,
            peak_bytes=None if measured is None else measured.peak_bytes,
            seconds=None if measured is None else measured.seconds,
        )
        self._memory.settle(found, rows=sum(finished.cuts[index]))

    def _is_news(self, elements: float, failed: Sequence[float]) -> bool:
        if min(failed, default=float("inf")) <= self._elements:
            self._elements = 0.0
        if elements <= self._elements * (1 + CHANGE):
            return False
        self._elements = elements
        return True
