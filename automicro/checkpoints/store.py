"""A folder of checkpoints: saving, finding, loading, keeping the last and the best."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

from automicro.checkpoints import writing as leftovers
from automicro.checkpoints.manifest import Manifest, verify
from automicro.checkpoints.peers import ALONE, Peers, exchange, from_first, together
from automicro.checkpoints.reading import (
    FoundCheckpoint,
    LoadedCheckpoint,
    find_newest,
    load_checkpoint,
    open_checkpoint,
)
from automicro.checkpoints.state import Share
from automicro.checkpoints.writing import list_checkpoints, number_of, write_checkpoint
from automicro.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    RankError,
    suggestion,
    text_of,
    warn,
)
from automicro.options import check_choice
from automicro.units import read_duration

MODES = ("min", "max")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        asynchronous: write in the background, from a copy in the host's memory.
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
    asynchronous: bool = False
    resume: Path | str = "auto"

    def __post_init__(self) -> None:
        _check_folder("folder", self.folder)
        if self.interval is not None:
            read_duration("interval", self.interval)
        if self.keep_last is not None and not (_is_int(self.keep_last) and self.keep_last >= 1):
            raise ValueError(
                f"keep_last={self.keep_last!r} would leave nothing to go on from; give a number "
                "from 1, or None to keep all"
            )
        if not (_is_int(self.keep_best) and self.keep_best >= 0):
            raise ValueError(
                f"keep_best={self.keep_best!r} is not a number of checkpoints; give a number from 0"
            )
        if not self.best_metric:
            raise ValueError(
                "best_metric='' is not a name; give that of a metric, such as 'eval/loss'"
            )
        check_choice("best_mode", self.best_mode, MODES)
        _check_folder("resume", self.resume)
        # A word that is no folder is a mistyped one; whether a path exists is seen when it is read.
        if isinstance(self.resume, str) and self.resume not in RESUME:
            is_word = not any(sign and sign in self.resume for sign in (os.sep, os.altsep))
            if is_word and not Path(self.resume).exists():
                hint = suggestion(self.resume, RESUME)
                raise ValueError(
                    f"resume={self.resume!r} is not known{hint}; use 'auto', 'never' or the "
                    "folder of a checkpoint"
                )


def _check_folder(name: str, value: object) -> None:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(f"{name}={value!r} is not a path; give the path of a folder")


logger = logging.getLogger(__name__)


T = TypeVar("T")
_Metrics = Mapping[str, SupportsFloat] | None


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
        self._saving: tuple[Executor, Future[Path]] | None = None  # in the background
        self._missed_metric = False

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: _Metrics = None,
        own: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a state, and remove what need not stay. Its folder.

        A save that runs in the background is waited for. If it failed, that is a warning now.

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
        values = _checked(step, metrics)
        share = self._prepare(lambda: self._share_of(state, own), step)
        return self._write(share, step, values)

    def save_async(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: _Metrics = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy a state to the host's memory, and save the copy in the background.

        On return the state may change. One save runs at a time: this waits for the one before,
        and warns if it failed. The process does not end while one runs, unless it is killed.

        Args:
            state: nested dicts, lists and tuples of tensors and plain values, see `save`.
            step: optimization batches done.
            metrics: values by name.
            own: a state besides, of which every rank but 0 saves its own.

        Raises:
            CheckpointError: the state holds what only code could load.
            PeerLostError: a rank is gone.
            ValueError: the step is no number from 0.
        """
        values = _checked(step, metrics)
        share = self._prepare(lambda: self._share_of(state, own).copied(), step)
        # The copy alone is handed over, because the state may change from here on. Python waits
        # for the thread at exit, so the last save of a script is not lost.
        thread = ThreadPoolExecutor(1, thread_name_prefix="automicro-checkpoint")
        self._saving = thread, thread.submit(self._write, share, step, values)
        self._saving[1].add_done_callback(_log_failure)

    def wait(self) -> None:
        """Wait for the save that runs in the background, if any.

        Raises:
            CheckpointError: it could not be written.
        """
        error = self._finish()
        if error is not None:
            raise error

    def together(self, work: Callable[[], T]) -> T:
        """Do some work on all ranks that save here; an error on one of them is one on all.

        Args:
            work: what each rank does.

        Raises:
            Exception: what went wrong on this rank, or on another, which it names then.
        """
        return together(self._exchange(), work)

    def open(self, checkpoint: FoundCheckpoint | Path | str) -> FoundCheckpoint:
        """Read what a checkpoint holds, without its data, see `open_checkpoint`.

        Args:
            checkpoint: what `newest` or `best` found, or a folder.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        return open_checkpoint(checkpoint, peers=self._exchange())

    def newest(self) -> FoundCheckpoint | None:
        """The newest checkpoint that is good; None where there is none at all.

        Raises:
            CheckpointError: all are damaged, or the newest has another format.
        """
        return find_newest(self.folder, peers=self._exchange())

    def best(self) -> FoundCheckpoint | None:
        """The good checkpoint with the best value of the metric; None where none has it.

        >>> CheckpointStore("no-such-folder", best_metric="eval/accuracy", best_mode="max").best()
        """
        for path in from_first(self._exchange(), self._ranked):
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
    ) -> LoadedCheckpoint:
        """Load a checkpoint as data, see `load_checkpoint`.

        Args:
            checkpoint: what `newest` or `best` found, or a folder; None for the newest good one.
            into: parts of the current state whose tensors are overwritten.

        Raises:
            CheckpointError: there is none, or it cannot be loaded, or does not fit.
        """
        chosen = self.folder if checkpoint is None else checkpoint
        return load_checkpoint(chosen, into=into, peers=self._exchange())

    def _ranked(self) -> Sequence[Path]:
        return self._best_of(self._survey()[0])

    def _best_of(self, good: Mapping[Path, Manifest]) -> list[Path]:
        """Those that have the metric, the best first; of equal ones the newer."""
        name = self._config.best_metric
        values = {path: each.metrics.get(name, math.nan) for path, each in good.items()}
        sign = 1 if self._config.best_mode == "min" else -1
        there = [path for path in good if not math.isnan(values[path])]
        return sorted(there, key=lambda path: sign * values[path])

    def _share_of(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Share:
        return Share.of(state, own=own, rank=self._peers.rank)

    def _prepare(self, work: Callable[[], Share], step: int) -> Share:
        """The shares of all ranks, once all of them have one."""
        shares: list[Share] = []

        def prepare() -> tuple[int, int]:
            # Before a copy, or there would be two copies at a time. Here and not outside: an
            # error of the last save of one rank must not keep it from this exchange.
            self._finish_quietly()
            shares.append(work())
            return step, shares[0].names

        _require_same(exchange(self._peers, prepare))
        return shares[0]

    def _exchange(self) -> Peers:
        """All ranks. A save in the background talks to them, too; one talks at a time."""
        if self._peers.world_size > 1:
            self._finish_quietly()
        return self._peers

    def _write(self, share: Share, step: int, metrics: Mapping[str, float]) -> Path:
        is_first = self._peers.rank == 0
        if is_first:
            self._attempt(
                partial(leftovers.clear, self.folder), f"what a killed run left in {self.folder}"
            )
        try:
            path = write_checkpoint(
                self.folder, share=share, step=step, metrics=metrics, peers=self._peers
            )
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{error.strerror or error}. The older ones are as they were; free space or give "
                "another folder"
            ) from error
        if not is_first:
            return path
        logger.info("saved %s", path)
        self._check_metric(metrics)
        self._attempt(self._prune, f"what need not stay in {self.folder}")
        return path

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

    def _finish(self) -> BaseException | None:
        """Wait for the save in the background, if any. The error that ended it, told once."""
        if self._saving is None:
            return None
        (thread, future), self._saving = self._saving, None
        thread.shutdown()
        return future.exception()

    def _finish_quietly(self) -> None:
        error = self._finish()
        if isinstance(error, RankError):
            raise error
        if error is not None:
            warn(f"a save in the background failed: {error}", CheckpointWarning)


def _log_failure(saving: "Future[Path]") -> None:
    # A caller that asks gets it. It is logged for a process that ends without asking.
    if (error := saving.exception()) is not None:
        logger.error("automicro: saving in the background failed: %s", text_of(error))


def _require_same(parts: list[tuple[int, int]]) -> None:
    """Refuse to put together what does not belong together."""
    steps = [step for step, _ in parts]
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"ranks save checkpoints of different steps: {', '.join(map(str, steps))} on ranks 0 "
            f"to {len(steps) - 1}. Let all ranks save after the same batch"
        )
    if len({names for _, names in parts}) > 1:
        raise CheckpointError(
            "the states of the ranks have sharded tensors of different names or shapes: build the "
            "same model and the same optimizer on all ranks"
        )


def _checked(step: int, metrics: _Metrics) -> dict[str, float]:
    if type(step) is not int or step < 0:
        raise ValueError(f"step={step!r} counts no batches; give a whole number from 0")
    return {name: float(value) for name, value in (metrics or {}).items()}
