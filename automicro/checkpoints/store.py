"""A folder of checkpoints: saving, finding, loading, keeping the last and the best."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
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
from automicro.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, warn
from automicro.options import check_choice, read_count
from automicro.units import read_duration

MODES = ("min", "max")
RESUME = ("auto", "never")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often they are saved, which stay, and whether a run goes on.

    Args:
        folder: in which they lie; made by the first save.
        interval: a duration, such as ``"1ep"`` or ``"500ba"``; None for the end only.
        keep_last: how many of the newest stay; None keeps all.
        keep_best: how many stay besides, by the best value of a metric.
        best_metric: its name.
        best_mode: ``"min"`` where less is better, ``"max"`` where more is.
        resume: ``"auto"`` goes on from the newest good one in the folder where there is one,
            ``"never"`` starts anew, and a path does the same as ``"auto"`` but begins from that
            checkpoint, or from the newest good one in that folder. A path of a checkpoint in
            ``folder`` itself is taken in any case.

    Raises:
        TypeError: the interval is a bare number.
        ValueError: an option is not known, or a number is too small.

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
        # A word that is no folder is a mistyped one; whether a path exists is seen when it is read.
        path = Path(self.resume)
        if isinstance(self.resume, str) and path.name == self.resume and not path.exists():
            check_choice("resume", self.resume, RESUME)


logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of a run, in a folder.

    A checkpoint is written whole or not at all, and loaded as data, never as code. A failed save
    leaves the older ones as they were.

    Args:
        folder: in which they lie; made by the first save.
        peers: all ranks, where several save together (`open_peers`). Each of them has a store on
            the same folder, and calls the same methods in the same order.
        options: which stay: ``keep_last``, ``keep_best``, ``best_metric`` and ``best_mode`` of
            `CheckpointConfig`.

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
        """Save a state, and remove what need not stay. Its folder.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values. Of several ranks,
                rank 0's is saved, and every rank's part of sharded tensors.
            step: optimization batches done.
            metrics: values by name.
            own: a state besides, of which every rank but 0 saves its own.

        Raises:
            CheckpointError: it could not be written, or the state holds what only code could
                load. The older checkpoints are as they were.
            PeerLostError: a rank is gone.
            ValueError: the step is no number from 0.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} counts no batches; give a whole number from 0")
        values, peers = {name: float(value) for name, value in (metrics or {}).items()}, self._peers
        share = together(peers, lambda: Share.of(state, own=own, rank=peers.rank))
        told = exchange(peers, lambda: (step, share.names))
        if len(set(told)) > 1:
            raise CheckpointError(
                f"ranks save after different batches ({', '.join(str(each) for each, _ in told)}), "
                "or sharded tensors of different names or shapes; let all of them save after the "
                "same batch, with the same model and optimizer"
            )
        if peers.rank == 0:
            self._attempt(
                partial(leftovers.clear, self.folder), f"what a killed run left in {self.folder}"
            )
        try:
            path = write_checkpoint(
                self.folder, share=share, step=step, metrics=values, peers=peers
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{error.strerror or error}. The older ones are as they were; free space or give "
                "another folder"
            ) from error
        if peers.rank == 0:
            self._check_metric(values)
            self._attempt(self._prune, f"what need not stay in {self.folder}")
        return path

    def newest(self) -> FoundCheckpoint | None:
        """The newest checkpoint that is good; None where there is none at all.

        Raises:
            CheckpointError: all are damaged, or the newest has another format.
        """
        return find_newest(self.folder, peers=self._peers)

    def best(self) -> FoundCheckpoint | None:
        """The good checkpoint with the best value of the metric; None where none has it.

        >>> CheckpointStore("no-such-folder", best_metric="eval/accuracy", best_mode="max").best()
        """
        for path in from_first(self._peers, self._ranked):
            try:
                return FoundCheckpoint.at(path, peers=self._peers)
            except DamagedCheckpointError as error:
                # One warning is enough, and rank 0 gives it.
                if self._peers.rank:
                    continue
                warn(f"{error}. It was the best one; taking the next best", CheckpointWarning)
        return None

    def load(
        self,
        checkpoint: FoundCheckpoint | Path | str | None = None,
        *,
        into: Mapping[str, Any] | None = None,
    ) -> FoundCheckpoint:
        """Load a checkpoint as data, see `load_checkpoint`.

        Args:
            checkpoint: what `newest` or `best` found, or a folder; None for the newest good one.
            into: parts of the current state whose tensors are overwritten.

        Raises:
            CheckpointError: there is none, or it cannot be loaded, or does not fit.
        """
        chosen = self.folder if checkpoint is None else checkpoint
        return load_checkpoint(chosen, into=into, peers=self._peers)

    def _ranked(self) -> Sequence[Path]:
        return self._best_of(self._survey()[0])

    def _best_of(self, good: Mapping[Path, Manifest]) -> list[Path]:
        """Those that have the metric, the best first; of equal ones the newer."""
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
        # A damaged one may be all that is left of a step, until newer good ones are enough.
        oldest = min(map(number_of, kept))
        for path in [*good, *damaged]:
            if path not in kept and (path in good or number_of(path) < oldest):
                self._attempt(partial(leftovers.remove, path), str(path))

    def _survey(self) -> tuple[dict[Path, Manifest], list[Path]]:
        """The manifests of those that look good, the newest first, and the damaged ones.

        Those of another format are neither.
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
        name = self._config.best_metric
        # Between evaluations there are none at all, which is as it should be.
        if not self._config.keep_best or not metrics or name in metrics or self._missed_metric:
            return
        self._missed_metric = True
        warn(
            f"a checkpoint has no metric {name!r}, so it is not kept as one of the best; there "
            f"are: {', '.join(metrics)}. Give best_metric= one of them",
            CheckpointWarning,
        )
