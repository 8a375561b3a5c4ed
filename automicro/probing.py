"""When to probe a loss, and warning of what the probe finds."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.errors import LossAverageWarning
from automicro.oom import Failure, classify, release
from automicro.probe import probe
from automicro.slicing import BatchLayout
from automicro.transaction import Transaction
from automicro.transfer import on_host
from automicro.weighting import Average

logger = logging.getLogger(__name__)

MAX_LOOKS = 20


class Prober:
    """Probes before the first split, and again while batches had no rows that could tell."""

    def __init__(self, averages: Mapping[str, Average], targets: Callable[[Any], Any]) -> None:
        self._averages = averages
        self._targets = targets
        self._looks_left = MAX_LOOKS

    def look(
        self,
        batch: Any,
        num_rows: int,
        layout: BatchLayout,
        losses_of: Callable[[Any], Mapping[str, Tensor]],
        transaction: Transaction,
        device: torch.device,
    ) -> None:
        """Probe a batch that is about to be split, if that is still of use.

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
        if self._looks_left == 0 or num_rows < 2:
            return
        self._looks_left -= 1
        failure = None

        def take_rows(rows: Sequence[int]) -> Any:
            with on_host():
                return layout.take_rows(batch, rows)

        try:
            transaction.begin()
            result = probe(
                losses_of,
                take_rows,
                layout.leaves(batch),
                num_rows,
                self._averages,
                self._targets,
            )
        except Exception as error:
            if classify(error) is not Failure.RETRYABLE:
                raise
            failure = error
        finally:
            transaction.roll_back()
        if failure is not None:
            release(failure, device)
            logger.warning("no memory to probe the loss on two rows; its average was not checked")
            return
        if result.is_telling:
            self._looks_left = 0
        if result.cause is not None:
            warnings.warn(result.cause, LossAverageWarning, stacklevel=2)
