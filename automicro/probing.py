"""When to probe a loss, and warning of what the probe finds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from automicro.errors import LossAverageWarning
from automicro.oom import Failure, classify, release
from automicro.probe import Comparisons, LossesOf, telling_pairs
from automicro.slicing import BatchLayout
from automicro.transaction import Transaction
from automicro.transfer import on_host
from automicro.warn import warn
from automicro.weighting import Average

logger = logging.getLogger(__name__)

MAX_LOOKS = 20


class Prober:
    """Probes the first batch that could be split, and later ones until rows could tell."""

    def __init__(self, averages: Mapping[str, Average], targets: Callable[[Any], Any]) -> None:
        self._averages = averages
        self._targets = targets
        self._looks_left = MAX_LOOKS
        self._has_looked = False

    @property
    def is_done(self) -> bool:
        """Whether no further batch is of use."""
        return self._looks_left == 0

    def look(
        self,
        batch: Any,
        num_rows: int,
        layout: BatchLayout,
        losses_of: LossesOf,
        transaction: Transaction,
        device: torch.device,
    ) -> None:
        """Probe a batch that could be split, if that is still of use.

        Args:
            batch: the whole batch.
            num_rows: its rows.
            layout: takes rows out of it.
            losses_of: the losses by name of a batch of rows, without gradients.
            transaction: puts back what the probe's forwards change.
            device: where they run.

        Warns:
            LossAverageWarning: the loss is not what it was taken for.
        """
        if self.is_done or num_rows < 2:
            return
        self._looks_left -= 1
        failure = None

        def rows_of(indices: Sequence[int]) -> Sequence[Any]:
            # What lies between them is cut off too, so that a batch of very many rows costs little.
            ends = [*indices[1:], num_rows]
            cut = [(1, end - start - 1) for start, end in zip(indices, ends, strict=True)]
            sizes = [size for pair in cut for size in pair if size]
            pieces = iter(layout.split(batch, sizes))
            rows = []
            for _, between in cut:
                rows.append(next(pieces))
                if between:
                    next(pieces)
            return rows

        def take_rows(rows: Sequence[int]) -> Any:
            with on_host():
                return layout.take_rows(batch, rows)

        with on_host():
            found = telling_pairs(rows_of, num_rows, len(layout.leaves(batch)), self._targets)
        if found.can_tell:
            self._looks_left = 0
        elif self._has_looked:
            return
        self._has_looked = True
        comparisons = Comparisons(losses_of, batch, take_rows, self._averages)
        try:
            transaction.begin()
            for one, other in [*(((a,), (b,)) for a, b in found.pairs), *found.groups]:
                if not comparisons.add(one, other):
                    break
        except Exception as error:
            if classify(error) is not Failure.RETRYABLE:
                raise
            failure = error
        finally:
            transaction.roll_back()
        if failure is not None:
            release(failure, device)
            if not comparisons.has_looked:
                logger.warning("no memory to probe the loss; its average was not checked")
        with on_host():
            cause = comparisons.cause(self._targets)
        if cause is not None:
            self._looks_left = 0
            warn(cause, LossAverageWarning)
