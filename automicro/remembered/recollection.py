"""Sizes that earlier runs found, for a run that starts, and those of this run for later ones."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from automicro.batch.layout import BatchLayout
from automicro.errors import SizeCacheWarning, describe_error, warn
from automicro.policy.policy import Policy
from automicro.ranks.interface import Ranks, announcing_failure
from automicro.remembered.cache import RememberedSize, RunKey, SizeCache
from automicro.remembered.describing import describe_run, describe_shapes
from automicro.step.feature import Feature
from automicro.step.plan import ROWS, Finished, ReadBatch
from automicro.step.setup import Setup

logger = logging.getLogger(__name__)

# Batches of varying length have a size each: what is remembered of them changes by this share.
CHANGE = 0.05


class RememberSizes(Feature):
    """``"auto"`` starts from the size that an earlier run of the same kind found.

    And leaves its own for the next; see ``automicro cache``.

    Example:
        >>> import torch
        >>> from automicro import Microbatcher
        >>> microbatcher = Microbatcher(
        ...     torch.nn.Linear(8, 2), loss_fn=torch.nn.MSELoss(), features=[RememberSizes()]
        ... )
    """

    def attach(self, setup: Setup) -> None:
        setup.recollect = _recollect


def _recollect(setup: Setup, phase: str) -> "Recollection":
    describe = functools.partial(
        describe_run,
        setup.modules,
        device=setup.device,
        optimizer=setup.optimizer,
        precision=setup.precision,
        phase=phase,
        world_size=setup.ranks.world_size,
    )
    layout: BatchLayout = setup.carrying.layout
    return Recollection(describe, functools.partial(describe_shapes, layout=layout))


class Recollection:
    """What one phase of a run takes from the cache of sizes, and gives to it.

    Nothing in it can stop a run: whatever goes wrong is one `SizeCacheWarning`, and the run goes
    on without remembering.

    Args:
        describe: ``describe(shapes, rows=…)`` is the key of a run, from its first batch.
        shapes: of a batch; see `describe_shapes`.
    """

    def __init__(
        self, describe: Callable[..., RunKey], shapes: Callable[[Any], Mapping[str, str]]
    ) -> None:
        self._describe = describe
        self._shapes = shapes
        self._has_asked = False
        self._cache: SizeCache | None = None  # None where nothing is remembered
        self._key: RunKey
        self._varies = False  # batches of several shapes were seen
        self._written: tuple[object, ...] | None = None
        self._row_cost: float | None = None
        self._size: int | None = None
        # While lengths vary: the most elements of a microbatch that fitted, of batches that were
        # cut if any was.
        self._elements = 0.0
        self._has_cut = False

    def look_up(
        self, batch: ReadBatch | None, policy: Policy, *, is_new: bool, ranks: Ranks
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
        row_cost = None if batch is None else batch.cost
        if self._has_asked:
            is_same = row_cost is not None and row_cost == self._row_cost
            if self._cache is not None and not (self._varies or is_same or batch is None):
                with self._going_on():
                    self._varies = self._shapes(batch.batch) != self._key.shapes
                if self._varies:
                    self._key, self._written = self._key.with_any_shape(), None
            return None
        self._row_cost = row_cost
        with announcing_failure(ranks):
            size, cost, level = 0.0, 0.0, 0.0
            if ranks.rank == 0 and batch is not None:
                with self._going_on():
                    size, cost, level = self._recall(batch, policy.levels)
        if not ranks.is_alone:
            size, cost, level = ranks.from_first([size, cost, level])
        self._has_asked = True
        if not size or not is_new:
            return None
        at = {"level": int(level)} if level else {}
        if not policy.suggest(int(size), cost or None, **at):
            return None
        logger.info(
            "starting from %d rows per microbatch%s, which an earlier run found; "
            '"automicro cache" lists what is remembered',
            int(size),
            f", {policy.levels[int(level)]}" if level else "",
        )
        return int(size)

    def _recall(self, batch: ReadBatch, levels: Sequence[str]) -> tuple[float, float, float]:
        """Rows, cost of a row and level that are remembered; zeros where nothing is of use."""
        self._key = self._describe(self._shapes(batch.batch), rows=batch.num_rows)
        self._cache = SizeCache()
        recalled = self._cache.find(self._key)
        if recalled is None:
            return 0.0, 0.0, 0.0
        self._written = self._content(recalled)
        is_whole = recalled.level == levels[0] and recalled.microbatch_size >= batch.num_rows
        # The whole batch comes first anyway, and longer rows may fit as well.
        if is_whole or recalled.level not in levels:
            return 0.0, 0.0, 0.0
        level = levels.index(recalled.level)
        return float(recalled.microbatch_size), recalled.cost_per_row or 0.0, float(level)

    def take_down(self, finished: Finished[Any]) -> None:
        """Remember the size of a step, once it is settled.

        While all batches have one shape, two in a row had it. Where lengths vary, it is the
        largest that fitted, in elements, until one of no more than these fails.
        """
        before, self._size = self._size, finished.microbatch_size
        if self._cache is None or not finished.is_committed or not finished.cuts:
            return
        if finished.plan.is_measuring or finished.plan.unit != ROWS:
            return
        widest = max(finished.cuts, key=lambda cut: cut.largest * (cut.row_cost or 1))
        if self._varies:
            cost = widest.row_cost or 1.0
            failed = [each * cost for each in finished.failed_sizes]
            if not self._is_news(widest.largest * cost, failed, is_cut=widest.is_split):
                return
        elif before != self._size:
            return
        # Batches of other rows, such as the last one of an epoch, say nothing of this key.
        if widest.num_rows != self._key.rows:
            return
        with self._going_on():
            measured = finished.measured
            found = RememberedSize(
                key=self._key,
                microbatch_size=widest.largest,
                cost_per_row=widest.row_cost or None,
                peak_bytes=None if measured is None else measured.peak_bytes,
                level=finished.level_name,
            )
            if self._content(found) != self._written:
                self._written = self._content(found)
                self._cache.remember(found)

    def _content(self, size: RememberedSize) -> tuple[object, ...]:
        """What makes two sizes the same: where lengths vary, as many rows may be longer ones."""
        return size.microbatch_size, size.cost_per_row if self._varies else None, size.level

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except SizeCacheWarning:  # one of those that the user wants as errors
            raise
        except Exception as error:
            self._cache = None
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
