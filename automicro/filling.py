"""Microbatches that count for nothing, for ranks that have fewer rows than others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from automicro.attempts import Phase, Plan
from automicro.errors import BatchError
from automicro.ranks import Ranks
from automicro.slicing import BatchLayout, map_tensors
from automicro.transaction import Transaction
from automicro.transfer import on_host


class Fillers:
    """Microbatches that count for nothing, run so that other ranks find their collectives met.

    Args:
        plan: how many.
        rows: gives the rows that they run on.
        undo: a transaction around what a forward changes beside gradients.
    """

    def __init__(
        self, plan: Plan, rows: Callable[[], Any], undo: Callable[[], Transaction]
    ) -> None:
        self._count = plan.num_fillers
        self._rows = rows
        self._undo = undo

    def microbatches(self) -> list[Any]:
        """Their rows, where the batch lies."""
        return [self._rows()] * self._count if self._count else []

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let no buffer and no random number show what is done meanwhile."""
        transaction = self._undo()
        transaction.begin()
        yield  # where it fails, the whole attempt is rolled back
        transaction.roll_back()


class SpareRows:
    """Rows for fillers: of the batch at hand, or of the first one of this rank.

    Args:
        layout: takes rows out of a batch.
        ranks: that may have more rows than this one.
    """

    def __init__(self, layout: BatchLayout, ranks: Ranks) -> None:
        self._layout = layout
        self._ranks = ranks
        self._kept: Any = None

    def given(self, batch: Any) -> list[Any]:
        """The batch in a list; of several ranks, none where this one's data have run out."""
        return [] if batch is None and not self._ranks.is_alone else [batch]

    def rows_of(self, batches: Sequence[Any]) -> list[int]:
        """How many rows each batch has; of the first one ever, some are kept.

        Raises:
            BatchError: a batch has no rows that could be counted.
        """
        rows = [self._layout.num_rows(batch) for batch in batches]
        if batches and self._kept is None and not self._ranks.is_alone:
            with on_host():
                chosen = self._layout.take_rows(batches[0], [0, min(1, rows[0] - 1)])
                self._kept = map_tensors(chosen, lambda tensor: tensor.detach().cpu())
        return rows

    def fillers(self, plan: Plan, batches: Sequence[Any], phase: Phase) -> Fillers | None:
        """Those of a plan; None where it has none."""
        if not plan.num_fillers:
            return None
        return Fillers(plan, lambda: self._take(batches, phase.min_rows), phase.undoing)

    def _take(self, batches: Sequence[Any], num_rows: int) -> Any:
        source = batches[0] if batches else self._kept
        if source is None:
            raise BatchError(
                f"rank {self._ranks.rank} has no rows, and has never had any, so it cannot take "
                "part in what the other ranks compute; give every rank at least one batch first"
            )
        with on_host():
            last = self._layout.num_rows(source) - 1
            return self._layout.take_rows(source, [0, min(1, last)][:num_rows])
