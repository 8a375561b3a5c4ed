"""A folder of checkpoints: saving, finding, loading, and pruning them."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from automicro.checkpoints import writing as leftovers
from automicro.checkpoints.manifest import Manifest, verify
from automicro.checkpoints.peers import ALONE, Peers, exchange, from_first, together
from automicro.checkpoints.reading import FoundCheckpoint, find_newest, load_checkpoint
from automicro.checkpoints.state import Share
from automicro.checkpoints.writing import list_checkpoints, number_of, write_checkpoint
from automicro.durations import read_duration
from automicro.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    removed,
    warn,
)
from automicro.options import check_choice, read_count

MODES = ("min", "max")
RESUME = ("auto", "never")


@removed(asynchronous="Leave it out: checkpoints are written before training continues")
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and how often checkpoints are saved, which are kept, and whether a run resumes.

    Args:
        folder: folder of the checkpoints; the first save creates it.
        interval: duration between saves, such as ``"1ep"`` or ``"500ba"``; None saves only at
            the end.
        keep_last: number of newest checkpoints to keep; None keeps all.
        keep_best: number of checkpoints to keep in addition, by the best values of a metric.
        best_metric: name of the metric.
        best_mode: ``"min"`` if lower values are better, ``"max"`` if higher values are.
        resume: ``"auto"`` resumes from the newest intact checkpoint in ``folder``, if any;
            ``"never"`` starts from scratch. A path is used if ``folder`` has no checkpoint: it
            names a checkpoint or a folder of several. A checkpoint inside ``folder`` is always
            used.

    Raises:
        TypeError: the interval is a bare number.
        ValueError: an option is unknown, or a number is too small.

    >>> CheckpointConfig(folder="runs/a/checkpoints", interval="500ba").keep_last
    3
    """

    folder: Path | str
    interval: str | None = "1ep"
    keep_last: int | None = 3
    keep_best: int = 0
    best_metric: str = "eval/loss"
    best_mode: str = "min"
    resume: Path | str = "auto"

    def __post_init__(self) -> None:
        for name in ("folder", "resume"):
            value = getattr(self, name)
            if not isinstance(value, str | Path) or not str(value).strip():
                raise ValueError(f"{name}={value!r} is not a path; give the path of a folder")
        if self.interval is not None:
            read_duration("interval", self.interval)
        if self.keep_last is not None:
            read_count("keep_last", self.keep_last)
        read_count("keep_best", self.keep_best, least=0)
        check_choice("best_mode", self.best_mode, MODES)
        # A single word that is not a folder is a mistyped mode. Paths are checked when read.
        path = Path(self.resume)
        if isinstance(self.resume, str) and path.name == self.resume and not path.exists():
            check_choice("resume", self.resume, RESUME)


logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of a run in a folder.

    A checkpoint is written completely or not at all, and loaded as data, never as code. A failed
    save leaves older checkpoints unchanged.

    Args:
        folder: folder of the checkpoints; the first save creates it.
        peers: all ranks that save together (`open_peers`). Each rank has a store on the same
            folder and calls the same methods in the same order.
        options: which checkpoints to keep: ``keep_last``, ``keep_best``, ``best_metric`` and
            ``best_mode`` of `CheckpointConfig`.

    Raises:
        ValueError: a number is too small, or a mode is unknown.

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

    def __init__(self, folder: Path | str, *, peers: Peers = ALONE, **options: Any) -> None:
        self.folder = Path(folder)
        self._peers = peers
        self._config = CheckpointConfig(folder=folder, **options)
        self._missed_metric = False

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, SupportsFloat] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a state and remove checkpoints that need not be kept.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values. On several ranks,
                rank 0's state is saved, with every rank's part of sharded tensors.
            step: number of optimization batches done.
            metrics: metric values by name.
            own: additional state that each rank except rank 0 saves for itself.

        Returns:
            The folder of the new checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written, or the state has values that cannot
                be loaded without running code. Older checkpoints are unchanged.
            PeerLostError: another rank is gone.
            ValueError: the step is not a non-negative integer.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} is no number of batches; give an int from 0")
        values, peers = {name: float(value) for name, value in (metrics or {}).items()}, self._peers
        share = together(peers, lambda: Share.of(state, own=own, rank=peers.rank))
        told = exchange(peers, lambda: (step, share.names))
        if len(set(told)) > 1:
            raise CheckpointError(
                f"ranks save after different batches ({', '.join(str(each) for each, _ in told)}), "
                "or sharded tensors of different names or shapes. Let all ranks save after the "
                "same batch, with the same model and optimizer"
            )
        if peers.rank == 0:
            self._attempt(
                partial(leftovers.clear, self.folder), f"leftovers of a killed run in {self.folder}"
            )
        try:
            path = write_checkpoint(
                self.folder, share=share, step=step, metrics=values, peers=peers
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{error.strerror or error}. The older ones are unchanged. Free space or give "
                "another folder"
            ) from error
        if peers.rank == 0:
            self._check_metric(values)
            self._attempt(self._prune, f"old checkpoints in {self.folder}")
        return path

    def newest(self) -> FoundCheckpoint | None:
        """Find the newest intact checkpoint.

        Returns:
            The checkpoint, or None if the folder has none.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest has another format.
        """
        return find_newest(self.folder, peers=self._peers)

    def best(self) -> FoundCheckpoint | None:
        """Find the intact checkpoint with the best value of the metric; None if none has it.

        >>> CheckpointStore("no-such-folder", best_metric="eval/accuracy", best_mode="max").best()
        """
        for path in from_first(self._peers, lambda: self._best_of(self._survey()[0])):
            try:
                return FoundCheckpoint.at(path, peers=self._peers)
            except DamagedCheckpointError as error:
                # Only rank 0 warns.
                if self._peers.rank:
                    continue
                warn(f"{error}. It was the best one; the next best is used", CheckpointWarning)
        return None

    def load(
        self,
        checkpoint: FoundCheckpoint | Path | str | None = None,
        *,
        into: Mapping[str, Any] | None = None,
    ) -> FoundCheckpoint:
        """Load a checkpoint as data, see `load_checkpoint`.

        Args:
            checkpoint: the result of `newest` or `best`, or a folder; None loads the newest
                intact checkpoint.
            into: parts of the current state whose tensors are overwritten.

        Raises:
            CheckpointError: the checkpoint is missing, cannot be loaded, or does not fit.
        """
        chosen = self.folder if checkpoint is None else checkpoint
        return load_checkpoint(chosen, into=into, peers=self._peers)

    def _best_of(self, good: Mapping[Path, Manifest]) -> list[Path]:
        """Sort the checkpoints that have the metric, best first, newer first if equal."""
        name = self._config.best_metric
        values = {path: each.metrics.get(name, math.nan) for path, each in good.items()}
        sign = 1 if self._config.best_mode == "min" else -1
        there = [path for path in good if not math.isnan(values[path])]
        return sorted(there, key=lambda path: sign * values[path])

    def _prune(self) -> None:
        good, damaged = self._survey()
        best = self._best_of(good)[: self._config.keep_best]
        kept = {*list(good)[: self._config.keep_last], *best}
        if not kept:
            return
        # A damaged checkpoint newer than all kept ones stays: it may be all that is left of its
        # step.
        oldest = min(map(number_of, kept))
        for path in [*good, *damaged]:
            if path not in kept and (path in good or number_of(path) < oldest):
                self._attempt(partial(leftovers.remove, path), str(path))

    def _survey(self) -> tuple[dict[Path, Manifest], list[Path]]:
        """List the intact checkpoints with their manifests, newest first, and the damaged ones."""
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
        """Remove something, and only warn on failure."""
        # What remains costs disk space, but the new checkpoint is complete.
        try:
            remove()
        except OSError as error:
            warn(
                f"{what} could not be removed ({error.strerror or error}); remove it by hand",
                CheckpointWarning,
            )

    def _check_metric(self, metrics: Mapping[str, float]) -> None:
        name = self._config.best_metric
        # Checkpoints between evaluations have no metrics at all, which is expected.
        if not self._config.keep_best or not metrics or name in metrics or self._missed_metric:
            return
        self._missed_metric = True
        warn(
            f"a checkpoint has no metric {name!r}, so it cannot be one of the best; there are: "
            f"{', '.join(metrics)}. Give best_metric= one of them",
            CheckpointWarning,
        )
