"""When checkpoints are saved, and going on from one."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from automicro.batch.device import on_host
from automicro.checkpoints.peers import together
from automicro.checkpoints.reading import FoundCheckpoint, open_checkpoint
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.errors import CheckpointError, CheckpointWarning, suggestion, warn
from automicro.events.run import IN_EVALUATION, NO_EVALUATION, ExpectedValues
from automicro.memory.oom import once_more
from automicro.trainer.context import RunContext
from automicro.trainer.evaluation import Interval
from automicro.trainer.resume.snapshot import Snapshot, describe_change
from automicro.units import Duration

_NO_METRICS: Mapping[str, float] = MappingProxyType({})


def read_checkpoint(checkpoint: object) -> CheckpointConfig | None:
    """The config, or None.

    >>> read_checkpoint(None) is None
    True
    """
    if checkpoint is None or isinstance(checkpoint, CheckpointConfig):
        return checkpoint
    raise TypeError(
        f"checkpoint is {checkpoint!r}; pass CheckpointConfig(folder=…), or None for no checkpoints"
    )


def check_best_metric(config: CheckpointConfig, expected: ExpectedValues) -> None:
    """Refuse a metric to keep the best by that no evaluation in training gives.

    >>> check_best_metric(CheckpointConfig(folder="runs/a"), ExpectedValues())
    """
    if not config.keep_best:
        return
    name = config.best_metric
    if expected.gives(name) is False or not name.startswith(IN_EVALUATION):
        there = [each for each in expected.names if each.startswith(IN_EVALUATION)]
        hint = suggestion(name, there)
        raise ValueError(
            f"checkpoint.best_metric={name!r}{hint} is not a value of an evaluation in training, "
            f"and keep_best={config.keep_best} keeps by such: "
            + (f"give one such as {', '.join(there)}" if there else NO_EVALUATION)
        )


class Checkpointer:
    """Saves a run at its interval and at its end, and takes it up again.

    A save that fails (a full disk) is a warning, and the next one is tried: the older checkpoints
    are as they were.
    """

    def __init__(self, config: CheckpointConfig, snapshot: Snapshot, context: RunContext) -> None:
        self._config = config
        self._snapshot = snapshot
        self._context = context
        every = None if config.interval is None else Duration.parse(config.interval)
        self._interval = Interval(every)
        self._store = CheckpointStore(**vars(config), peers=snapshot.peers)
        self._world_size = snapshot.peers.world_size
        self._saved_at: tuple[int, int] | None = None  # batch and epoch of the last save

    @property
    def best_metric(self) -> str | None:
        """The metric by which the best checkpoints are kept; None where none are."""
        return self._config.best_metric if self._config.keep_best else None

    @property
    def folder(self) -> Path:
        """Where checkpoints are."""
        return self._store.folder

    @property
    def saved_in(self) -> Path | None:
        """Where the state as it is was saved; None where that failed."""
        return self._store.folder if self._saved_at == self._now else None

    @property
    def _now(self) -> tuple[int, int]:
        state = self._context.state
        return state.batch, state.epoch

    def resume(self) -> dict[str, Any] | None:
        """Go on from a checkpoint, if the config says so and there is one; what was loaded.

        Random numbers are left for the caller to put back, after whatever else draws some.
        """
        if self._config.resume == "never":
            return None
        with on_host():
            chosen = self._choose()
            opened = None if chosen is None else open_checkpoint(chosen, peers=self._snapshot.peers)
        if opened is None:
            return None
        together(self._snapshot.peers, partial(self._snapshot.compare, opened))
        saved = together(self._snapshot.peers, partial(self._snapshot.restore, opened))
        state, progress = self._context.state, self._context.progress
        self._interval.catch_up(state)
        # One of another folder is saved here, too, even if there is nothing left to train.
        if self._is_here(opened.path):
            self._saved_at = self._now
        progress.line(f"resumed from {opened.path}, after batch {state.batch}")
        if opened.world_size != self._world_size:
            progress.line(describe_change(was=opened.world_size, now=self._world_size))
        return saved

    def _choose(self) -> FoundCheckpoint | Path | None:
        """The newest of this run's own folder, else the one that was asked for.

        A run that began with another's checkpoint, and was killed, goes on with its own. Only one
        of its own folder that is asked for by its path is taken as asked.
        """
        if self._config.resume == "auto":
            return self._store.newest()
        path = Path(self._config.resume)
        return path if self._is_here(path) else self._store.newest() or path

    def _is_here(self, path: Path) -> bool:
        return path.resolve().parent == self._store.folder.resolve()

    def save_if_due(self, metrics: Mapping[str, float] = _NO_METRICS) -> None:
        """Save if the interval or a callback asks for it."""
        is_due = self._interval.is_due(self._context.state)
        if self._context.run.requests.take("wants_checkpoint") or is_due:
            self.save(metrics)

    def rehearse(self) -> None:
        """Refuse now what no checkpoint can hold, before anything was trained."""
        with on_host():  # where random numbers lie
            self._snapshot.rehearse()

    def save(self, metrics: Mapping[str, float] = _NO_METRICS) -> None:
        """Save the run as it is, unless that was done."""
        if self._saved_at == self._now:
            return
        with self._context.mode.evaluating():  # a checkpoint has the weights to be used with
            self._save(self._context.state.batch, metrics)

    def _save(self, batch: int, metrics: Mapping[str, float]) -> None:
        snapshot = together(self._snapshot.peers, self._gather)
        try:
            with on_host():  # where what is written is read
                own = self._snapshot.own(snapshot)
                path = self._store.save(snapshot, step=batch, metrics=metrics, own=own)
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise  # a state that no checkpoint can hold will be one next time, too
            warn(f"no checkpoint after batch {batch}: {error}", CheckpointWarning)
            return
        self._saved_at = self._now
        self._context.progress.status(lambda: f"saved a checkpoint after batch {batch}")
        self._context.tell("checkpoint_end", path)

    def _gather(self) -> dict[str, Any]:
        self._context.tell("checkpoint_start")
        if self._world_size > 1:  # who would wait for it
            return self._snapshot.gather()
        return once_more(
            self._snapshot.gather, self._context.device, doing="gathering a checkpoint"
        )
