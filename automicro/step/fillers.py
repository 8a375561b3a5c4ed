"""Microbatches that count for nothing, for ranks that have fewer rows than others."""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors
from automicro.errors import BatchError, describe_error
from automicro.ranks.interface import Ranks, announcing_failure
from automicro.step.phase import Phase
from automicro.step.plan import Plan
from automicro.transaction.transaction import Transaction


class Fillers:
    """Microbatches that count for nothing, run so that other ranks find their collectives met.

    Args:
        rows: of each, where the batch lies.
        undo: a transaction around what a forward changes beside gradients.

    Attributes:
        rows: as given.
    """

    def __init__(self, rows: Sequence[Any], undo: Callable[[], Transaction]) -> None:
        self.rows = rows
        self._undo = undo

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let no buffer and no random number show what is done meanwhile."""
        transaction = self._undo()
        transaction.begin()
        yield  # where it fails, the whole attempt is rolled back
        transaction.roll_back()


class SpareRows:
    """Rows for fillers: of the batch at hand, of this rank's first one, or of another rank's.

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
        rows = list(map(self._layout.num_rows, batches))
        if batches and self._kept is None and not self._ranks.is_alone:
            with on_host():
                chosen = self._layout.take_rows(batches[0], [0, min(1, rows[0] - 1)])
                self._kept = map_tensors(chosen, lambda tensor: tensor.detach().cpu())
        return rows

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keep none of the batches that come meanwhile."""
        before = self._kept
        try:
            yield
        finally:
            self._kept = before

    @property
    def is_lacking(self) -> bool:
        """Whether this rank has no rows and has never had any."""
        return self._kept is None

    def pass_on(self, donor: int) -> None:
        """Give the rows of one rank to all that have never had any. All ranks call it.

        Args:
            donor: the rank, which has some.

        Raises:
            BatchError: they cannot be sent.
        """
        with announcing_failure(self._ranks):
            message = self._packed() if self._ranks.rank == donor else b""
        message = self._ranks.from_rank(donor, message)
        if self._kept is None:
            with on_host():
                self._kept = pickle.loads(message)  # of a rank that runs the same program

    def _packed(self) -> bytes:
        try:
            return pickle.dumps(self._kept)
        except Exception as error:
            raise BatchError(
                f"another rank has no rows, and those of rank {self._ranks.rank}, a "
                f"{type(self._kept).__name__}, cannot be sent there ({describe_error(error)}); "
                "let batches hold what can be pickled, or give every rank a row in the "
                "first batch"
            ) from error

    def fillers(self, plan: Plan, batches: Sequence[Any], phase: Phase) -> Fillers:
        """Those of a plan."""
        rows: list[Any] = []
        if plan.num_fillers:
            rows = [self._take(batches, phase.rule.min_rows)] * plan.num_fillers
        return Fillers(rows, phase.undoing)

    def _take(self, batches: Sequence[Any], num_rows: int) -> Any:
        source = batches[0] if batches else self._kept
        assert source is not None, "a rank that never had rows was lent some"
        with on_host():
            last = self._layout.num_rows(source) - 1
            return self._layout.take_rows(source, [0, min(1, last)][:num_rows])
