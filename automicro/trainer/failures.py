"""Where a batch is kept that does not fit, so that its failure can be had again."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from automicro.errors import (
    PeerStoppedError,
    SampleTooLargeError,
    add_note,
    describe_error,
    facts_of,
    text_of,
)
from automicro.memory.device import capacity_bytes
from automicro.memory.oom import is_out_of_memory
from automicro.replaying import FailedBatch, save_batch

KEPT = "failed-batch-"
"""How the names of these files begin."""
CONFIG = "config.yaml"
"""What a run writes beside the batches that it keeps, if it has a config."""


class Failures:
    """Keeps a batch that does not fit even in the smallest microbatches.

    Args:
        device: that is too small.
        rank: of this process.

    Attributes:
        folder: where to keep it; None for a new folder among the system's temporary files.
    """

    def __init__(self, device: torch.device, *, rank: int = 0) -> None:
        self.folder: Path | None = None
        self._device = device
        self._rank = rank

    @contextlib.contextmanager
    def kept(
        self, batches: Sequence[Any], *, phase: str, where: str | Callable[[], str]
    ) -> Iterator[None]:
        """Keep these batches if what is done meanwhile runs out of memory for good.

        The error gets a note that says where they are. Of several ranks those keep theirs on
        which memory ran out.

        Args:
            batches: that make up the optimization batch.
            phase: ``"train"`` or ``"eval"``.
            where: it is, in words, or what says so.
        """
        try:
            yield
        except Exception as error:
            is_own = isinstance(error, SampleTooLargeError) or is_out_of_memory(error)
            is_own &= facts_of(error).bystander is None  # else it is not the batch
            if is_own and batches and not isinstance(error.__cause__, PeerStoppedError):
                told = where if isinstance(where, str) else where()
                self._keep(error, batches, phase=phase, where=told)
            raise

    def _keep(self, error: Exception, batches: Sequence[Any], *, phase: str, where: str) -> None:
        try:
            failed = FailedBatch(
                batches=list(batches),
                phase=phase,
                message=text_of(error),
                where=where,
                device=str(self._device),
                limit_bytes=capacity_bytes(self._device),
            )
            path = self._path()
            save_batch(path, failed)
        except Exception as failure:  # whatever it is, the run has failed already
            add_note(error, f"automicro: the batch could not be kept ({describe_error(failure)})")
            return
        beside = path.parent / CONFIG
        config = "" if beside.exists() else " CONFIG"
        add_note(
            error,
            f"automicro: the batch is kept in {path}; to run it alone: automicro replay "
            f"{shlex.quote(str(path))}{config}",
        )

    def _path(self) -> Path:
        folder = self.folder or new_folder()
        folder.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{self._rank}" if self._rank else ""
        number = 1
        while os.path.lexists(path := folder / f"{KEPT}{number:04d}{rank}.pt"):
            number += 1
        return path


def new_folder() -> Path:
    """A new one among the system's temporary files, for its owner alone."""
    return Path(tempfile.mkdtemp(prefix="automicro-"))
