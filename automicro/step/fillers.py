"""Fillers: microbatches with no weight, for ranks that have fewer rows than others."""

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
    """Rows for fillers: from the current batch, this rank's first batch, or another rank."""

    def __init__(self, layout: BatchLayout, ranks: Ranks) -> None:
        self._layout = layout
        self._ranks = ranks
        self._kept: Any = None

    def given(self, batch: Any) -> list[Any]:
        """Return the batch in a list; on several ranks, an empty one if the data have run out."""
        return [] if batch is None and not self._ranks.is_alone else [batch]

    def rows_of(self, batches: Sequence[Any]) -> list[int]:
        """Return the number of rows of each batch; keep some rows of the very first one."""
        rows = list(map(self._layout.num_rows, batches))
        if batches and self._kept is None and not self._ranks.is_alone:
            with on_host():
                # Keep two rows, because BatchNorm refuses one in training; a single row is
                # repeated. They stay on the host, where they take no memory from attempts.
                chosen = self._layout.take_rows(batches[0], [0, min(1, rows[0] - 1)])
                self._kept = map_tensors(chosen, lambda tensor: tensor.detach().cpu())
        return rows

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keep no rows of the batches inside the context."""
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
        """Send the rows of one rank to all that have never had any. All ranks call it."""
        with announcing_failure(self._ranks):
            message = self._packed() if self._ranks.rank == donor else b""
        # A collective: ranks that have rows of their own take part, too.
        message = self._ranks.from_rank(donor, message)
        if self._kept is None:
            with on_host():
                self._kept = pickle.loads(message)  # trusted: the sender runs the same program

    def _packed(self) -> bytes:
        try:
            return pickle.dumps(self._kept)
        except Exception as error:
            raise BatchError(
                f"another rank has no rows, and a batch of rank {self._ranks.rank} "
                f"({type(self._kept).__name__}) cannot be sent to it ({describe_error(error)}). "
                "Use batches that can be pickled, or give every rank a row in the first batch"
            ) from error

    def filler(self, batches: Sequence[Any], num_rows: int) -> Any:
        """Return the rows of a filler, on the device of the batch."""
        source = batches[0] if batches else self._kept
        assert source is not None, "a rank that never had rows was lent some"
        with on_host():
            last = self._layout.num_rows(source) - 1
            return self._layout.take_rows(source, [0, min(1, last)][:num_rows])
