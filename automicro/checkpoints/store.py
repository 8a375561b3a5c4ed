"""A folder of checkpoints: saving, finding, loading, keeping the last and the best."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from torch import Tensor

from automicro.checkpoints import leftovers
from automicro.checkpoints.background import Background
from automicro.checkpoints.config import CheckpointConfig
from automicro.checkpoints.manifest import Manifest, verify
from automicro.checkpoints.reading import (
    FoundCheckpoint,
    LoadedCheckpoint,
    find_newest,
    load_checkpoint,
)
from automicro.checkpoints.retention import Retention
from automicro.checkpoints.structure import take_apart
from automicro.checkpoints.writing import list_checkpoints, number_of, write_checkpoint
from automicro.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError
from automicro.warn import warn

logger = logging.getLogger(__name__)

_Metrics = Mapping[str, SupportsFloat] | None


class CheckpointStore:
    """The checkpoints of a run, in a folder.

    A checkpoint is written whole or not at all, and loaded as data, never as code. A failed save
    leaves the older ones as they were.

    Args:
        folder: in which they lie; made by the first save.
        keep_last: how many of the newest stay; None keeps all.
        keep_best: how many stay besides, by the best value of a metric.
        best_metric: its name.
        best_mode: ``"min"`` where less is better, ``"max"`` where more is.

    Raises:
        ValueError: a number is too small, or a mode is not known.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = CheckpointStore(folder, keep_last=2)
        ...     path = store.save({"model": model.state_dict(), "epoch": 3}, step=7)
        ...     loaded = store.load(into={"model": model.state_dict()})
        >>> path.name, loaded.step, loaded.state["epoch"]
        ('00001-step-7', 7, 3)
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int | None = 3,
        keep_best: int = 0,
        best_metric: str = "eval/loss",
        best_mode: str = "min",
    ) -> None:
        self.folder = Path(folder)
        self._retention = Retention(
            keep_last=keep_last, keep_best=keep_best, best_metric=best_metric, best_mode=best_mode
        )
        self._background = Background()
        self._missed_metric = False

    @classmethod
    def of(cls, config: CheckpointConfig) -> "CheckpointStore":
        """The store that a configuration describes.

        >>> CheckpointStore.of(CheckpointConfig(folder="checkpoints")).newest() is None
        True
        """
        return cls(
            config.folder,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            best_metric=config.best_metric,
            best_mode=config.best_mode,
        )

    def save(self, state: Mapping[str, Any], *, step: int, metrics: _Metrics = None) -> Path:
        """Save a state, and remove what need not stay. Its folder.

        A save that runs in the background is waited for. If it failed, that is a warning now.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values.
            step: optimization batches done.
            metrics: values by name.

        Raises:
            CheckpointError: it could not be written, or the state holds what only code could
                load. The older checkpoints are as they were.
            ValueError: the step is no number from 0.
        """
        values = _checked(step, metrics)
        structure, tensors = take_apart(state)
        self._finish_quietly()
        return self._write(structure, tensors, step, values)

    def save_async(self, state: Mapping[str, Any], *, step: int, metrics: _Metrics = None) -> None:
        """Copy a state to the host's memory, and save the copy in the background.

        On return the state may change. One save runs at a time: this waits for the one before,
        and warns if it failed. The process does not end while one runs, unless it is killed.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values.
            step: optimization batches done.
            metrics: values by name.

        Raises:
            CheckpointError: the state holds what only code could load.
            ValueError: the step is no number from 0.
        """
        values = _checked(step, metrics)
        structure, tensors = take_apart(state)
        # Before the copy, or there would be two copies at a time.
        self._finish_quietly()
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        self._background.start(partial(self._write, structure, copies, step, values))

    def wait(self) -> None:
        """Wait for the save that runs in the background, if any.

        Raises:
            CheckpointError: it could not be written.
        """
        error = self._background.finish()
        if error is not None:
            raise error

    def newest(self) -> FoundCheckpoint | None:
        """The newest checkpoint that is good; None where there is none at all.

        Raises:
            CheckpointError: all are damaged, or the newest is from a newer automicro.
        """
        return find_newest(self.folder)

    def best(self) -> FoundCheckpoint | None:
        """The good checkpoint with the best value of the metric; None where none has it.

        >>> CheckpointStore("no-such-folder", best_metric="eval/accuracy", best_mode="max").best()
        """
        good, _ = self._survey()
        for path in self._retention.ranked({path: each.metrics for path, each in good.items()}):
            try:
                return FoundCheckpoint.at(path)
            except DamagedCheckpointError as error:
                warn(f"{error}. It was the best one; taking the next best", CheckpointWarning)
        return None

    def load(
        self,
        checkpoint: FoundCheckpoint | Path | str | None = None,
        *,
        into: Mapping[str, Any] | None = None,
    ) -> LoadedCheckpoint:
        """Load a checkpoint as data, see `load_checkpoint`.

        Args:
            checkpoint: what `newest` or `best` found, or a folder; None for the newest good one.
            into: parts of the current state whose tensors are overwritten.

        Raises:
            CheckpointError: there is none, or it cannot be loaded, or does not fit.
        """
        return load_checkpoint(self.folder if checkpoint is None else checkpoint, into=into)

    def _write(
        self,
        structure: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        step: int,
        metrics: Mapping[str, float],
    ) -> Path:
        self._attempt(
            partial(leftovers.clear, self.folder), f"what a killed run left in {self.folder}"
        )
        try:
            path = write_checkpoint(
                self.folder, structure=structure, tensors=tensors, step=step, metrics=metrics
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{error.strerror or error}. The older ones are as they were; free space or give "
                "another folder"
            ) from error
        logger.info("saved %s", path)
        self._check_metric(metrics)
        self._attempt(self._prune, f"what need not stay in {self.folder}")
        return path

    def _prune(self) -> None:
        good, damaged = self._survey()
        kept = self._retention.choose({path: each.metrics for path, each in good.items()})
        if not kept:
            return
        # A damaged one may be all that is left of a step, until newer good ones are enough.
        oldest = min(map(number_of, kept))
        for path in [*good, *damaged]:
            if path not in kept and (path in good or number_of(path) < oldest):
                self._attempt(partial(leftovers.remove, path), str(path))

    def _survey(self) -> tuple[dict[Path, Manifest], list[Path]]:
        """The manifests of those that look good, the newest first, and the damaged ones.

        Those of a newer automicro are neither.
        """
        good: dict[Path, Manifest] = {}
        damaged = []
        for path in list_checkpoints(self.folder):
            try:
                good[path] = verify(path, contents=False)
            except DamagedCheckpointError:
                damaged.append(path)
            except CheckpointError as error:
                logger.info("left alone: %s", error)
        return good, damaged

    def _attempt(self, remove: Callable[[], None], what: str) -> None:
        """Remove something. What cannot be removed costs space, and no checkpoint."""
        try:
            remove()
        except OSError as error:
            warn(
                f"{what} could not be removed ({error.strerror or error}); remove it by hand",
                CheckpointWarning,
            )

    def _check_metric(self, metrics: Mapping[str, float]) -> None:
        name = self._retention.best_metric
        # Between evaluations there are none at all, which is as it should be.
        if not self._retention.keep_best or not metrics or name in metrics or self._missed_metric:
            return
        self._missed_metric = True
        warn(
            f"a checkpoint has no metric {name!r}, so it is not kept as one of the best; there "
            f"are: {', '.join(metrics)}. Give best_metric= one of them",
            CheckpointWarning,
        )

    def _finish_quietly(self) -> None:
        error = self._background.finish()
        if error is not None:
            warn(f"a save in the background failed: {error}", CheckpointWarning)


def _checked(step: int, metrics: _Metrics) -> dict[str, float]:
    if type(step) is not int or step < 0:
        raise ValueError(f"step={step!r} counts no batches; give a whole number from 0")
    return {name: float(value) for name, value in (metrics or {}).items()}
