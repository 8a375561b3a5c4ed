"""Microbatches that count for nothing, for ranks that have fewer rows than others."""

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import map_tensors
from automicro.errors import BatchError, describe_error
from automicro.ranks.interface import Ranks, announcing_failure


class SpareRows:
    """Rows for fillers: of the batch at hand, of this rank's first one, or of another rank's."""

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
                # Two, because BatchNorm refuses one in training; a single row is there twice. On
                # the host, where they take no memory from attempts.
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

        Raises:
            BatchError: they cannot be sent.
        """
        with announcing_failure(self._ranks):
            message = self._packed() if self._ranks.rank == donor else b""
        # A collective: ranks that have rows of their own take part as well.
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

    def filler(self, batches: Sequence[Any], num_rows: int) -> Any:
        """The rows of a microbatch that counts for nothing, where the batch lies."""
        source = batches[0] if batches else self._kept
        assert source is not None, "a rank that never had rows was lent some"
        with on_host():
            last = self._layout.num_rows(source) - 1
            return self._layout.take_rows(source, [0, min(1, last)][:num_rows])
