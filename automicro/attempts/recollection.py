"""Starting from the size that an earlier run found, and leaving one for the next."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from automicro.attempts.plan import Finished
from automicro.attempts.step import ReadBatch
from automicro.errors import SizeCacheWarning, describe_error
from automicro.policy import Policy
from automicro.ranks import OneRank, Ranks, telling
from automicro.size_cache import RememberedSize, RunKey, SizeCache, SizeMemory
from automicro.warn import warn

logger = logging.getLogger(__name__)

# Batches of varying length have a size each: what is remembered of them changes by this share.
CHANGE = 0.05


class Recollection:
    """What one phase of a run takes from the cache of sizes, and gives to it.

    Nothing in it can stop a run: whatever goes wrong is one `SizeCacheWarning`, and the run goes
    on without remembering.

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
        self._has_asked = False
        self._row_cost: float | None = None
        self._size: int | None = None
        # While lengths vary: the most elements of a microbatch that fitted, of batches that were
        # cut if any was.
        self._elements = 0.0
        self._has_cut = False

    def look_up(
        self,
        batch: ReadBatch | None,
        policy: Policy,
        *,
        is_new: bool,
        ranks: Ranks | None = None,
    ) -> int | None:
        """Let a policy start from what is remembered, at the first batch of a new run.

        Returns the rows that it starts from, None where nothing was recalled.

        Args:
            batch: that comes next; None where this rank has none. While the cost of a row stays,
                shapes are not read, which takes longer.
            policy: of the sizes; told where it can be.
            is_new: whether nothing was found yet, here or in a checkpoint.
            ranks: that all start from what the first of them remembers.
        """
        ranks = ranks or OneRank()
        row_cost = None if batch is None else batch.cost
        if self._has_asked:
            is_same = row_cost is not None and row_cost == self._row_cost
            if self._memory is not None and not (self._memory.varies or is_same or batch is None):
                with self._going_on():
                    self._memory.see(self._shapes(batch.batch))
            return None
        self._row_cost = row_cost
        with telling(ranks):
            size, cost = 0.0, 0.0
            if ranks.rank == 0:
                with self._going_on():
                    size, cost = self._recall(batch)
        if not ranks.is_alone:
            size, cost = ranks.from_first([size, cost])
        self._has_asked = True
        if not size or not is_new or not policy.suggest(int(size), cost or None):
            return None
        logger.info(
            "starting from %d rows per microbatch, which an earlier run found; "
            '"automicro cache" lists what is remembered',
            int(size),
        )
        return int(size)

    def _recall(self, batch: ReadBatch | None) -> tuple[float, float]:
        """Rows and cost of a row that are remembered; zeros where nothing is of use."""
        if batch is None:
            return 0.0, 0.0
        self._memory = SizeMemory(self._cache, self._describe(batch.batch, rows=batch.num_rows))
        recalled = self._memory.recalled
        if recalled is None or recalled.microbatch_size >= batch.num_rows:
            return 0.0, 0.0  # the whole batch comes first anyway, and longer rows may fit as well
        return float(recalled.microbatch_size), recalled.cost_per_row or 0.0

    def take_down(self, finished: Finished[Any], costs: Sequence[float | None]) -> None:
        """Remember the size of a step, once it is settled.

        While all batches have one shape, two in a row had it. Where lengths vary, it is the
        largest that fitted, in elements, until one of no more than these fails.
        """
        size, self._size = self._size, finished.microbatch_size
        if self._memory is None or not finished.is_committed or not costs:
            return
        with self._going_on():
            self._take_down(self._memory, finished, costs, size)

    def _take_down(
        self,
        memory: SizeMemory,
        finished: Finished[Any],
        costs: Sequence[float | None],
        size: int | None,
    ) -> None:
        index = max(range(len(costs)), key=lambda each: finished.cuts[each][0] * (costs[each] or 1))
        rows, cost = finished.cuts[index][0], costs[index] or 1.0
        if memory.varies:
            is_cut = len(finished.cuts[index]) > 1
            failed = [each * cost for each in finished.failed_sizes]
            if not self._is_news(rows * cost, failed, is_cut=is_cut):
                return
        elif size != self._size:
            return
        measured = finished.measured
        found = RememberedSize(
            microbatch_size=rows,
            cost_per_row=costs[index] or None,
            peak_bytes=None if measured is None else measured.peak_bytes,
            seconds=measured.seconds if measured is not None and measured.has_waited else None,
        )
        memory.settle(found, rows=sum(finished.cuts[index]))

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except SizeCacheWarning:  # one of those that the user wants as errors
            raise
        except Exception as error:
            self._memory = None
            warn(
                f"microbatch sizes are not remembered in this run ({describe_error(error)}); it "
                "finds them by itself, and remember_sizes=False says nothing of it",
                SizeCacheWarning,
            )

    def _is_news(self, elements: float, failed: Sequence[float], *, is_cut: bool) -> bool:
        if is_cut < self._has_cut:
            return False  # a batch that went whole tells less than one that did not
        if is_cut > self._has_cut or min(failed, default=math.inf) <= self._elements:
            self._has_cut, self._elements = is_cut, 0.0
        if elements <= self._elements * (1 + CHANGE):
            return False
        self._elements = elements
        return True
