"""When a run saves checkpoints, and how it resumes from one."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from automicro.batch.device import on_host
from automicro.checkpoints.peers import together
from automicro.checkpoints.reading import FoundCheckpoint, open_checkpoint
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.durations import Duration
from automicro.errors import CheckpointError, CheckpointWarning, suggestion, warn
from automicro.events.run import IN_EVALUATION, NO_EVALUATION, ExpectedValues
from automicro.memory.oom import once_more
from automicro.trainer.context import RunContext
from automicro.trainer.evaluation import Interval
from automicro.trainer.resume.snapshot import Snapshot
from automicro.units import count_of


def read_checkpoint(checkpoint: object) -> CheckpointConfig | None:
    """Check the ``checkpoint`` argument of the `Trainer`."""
    if checkpoint is None or isinstance(checkpoint, CheckpointConfig):
        return checkpoint
    raise TypeError(
        f"checkpoint is {checkpoint!r}; pass CheckpointConfig(folder=…), or None for no checkpoints"
    )


def check_best_metric(config: CheckpointConfig, expected: ExpectedValues) -> None:
    """Raise an error if no evaluation in training gives the metric for the best checkpoints."""
    if not config.keep_best:
        return
    name = config.best_metric
    if expected.gives(name) is False or not name.startswith(IN_EVALUATION):
        there = [each for each in expected.names if each.startswith(IN_EVALUATION)]
        hint = suggestion(name, there)
        raise ValueError(
            f"checkpoint.best_metric={name!r}{hint} is not a value of an evaluation in training, "
            f"but keep_best={config.keep_best} compares by one: "
            + (f"give one such as {', '.join(there)}" if there else NO_EVALUATION)
        )


class Checkpointer:
    """Saves a run at its interval and at its end, and resumes it."""

    # A save that fails, because of a full disk for example, is only a warning: older checkpoints
    # are unchanged, and the next save tries again.

    def __init__(self, config: CheckpointConfig, snapshot: Snapshot, context: RunContext) -> None:
        self._config = config
        self._snapshot = snapshot
        self._context = context
        every = None if config.interval is None else Duration.parse(config.interval)
        self._interval = Interval(every)
        self._store = CheckpointStore(**vars(config), peers=snapshot.peers)
        self._world_size = snapshot.peers.world_size
        self._saved_at: tuple[int, int] | None = None  # batch and epoch of the last save or load

    @property
    def best_metric(self) -> str | None:
        """Metric by which the best checkpoints are kept, if any."""
        return self._config.best_metric if self._config.keep_best else None

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return self._store.folder

    @property
    def saved_in(self) -> Path | None:
        """Folder that has a checkpoint of the current state, if any."""
        return self._store.folder if self._saved_at == self._now else None

    @property
    def _now(self) -> tuple[int, int]:
        state = self._context.state
        return state.batch, state.epoch

    def resume(self) -> dict[str, Any] | None:
        """Resume from a checkpoint, if configured and available, and return the loaded state."""
        # The caller restores the random numbers, after all other code that draws some.
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
        # A checkpoint of another folder is saved again here, even if nothing is left to train.
        if self._is_here(opened.path):
            self._saved_at = self._now
        progress.line(f"resumed from {opened.path}, after batch {state.batch}")
        if opened.world_size != self._world_size:
            progress.line(
                f"saved by {count_of(opened.world_size, 'rank')} and resumed by "
                f"{count_of(self._world_size, 'rank')}: random numbers differ from here on"
            )
        return saved

    def _choose(self) -> FoundCheckpoint | Path | None:
        """Choose the newest checkpoint of the run's own folder, or else the requested one."""
        # A run that began from another run's checkpoint and was killed continues from its own.
        # A requested checkpoint in the run's own folder is always used.
        if self._config.resume == "auto":
            return self._store.newest()
        path = Path(self._config.resume)
        return path if self._is_here(path) else self._store.newest() or path

    def _is_here(self, path: Path) -> bool:
        return path.resolve().parent == self._store.folder.resolve()

    def save_if_due(self, metrics: Mapping[str, float], *, is_due: bool) -> None:
        """Save if it is due anyway, by the interval or the best metric, or by a callback's wish."""
        is_due |= self._interval.is_due(self._context.state) or self.best_metric in metrics
        if self._context.run.requests.take("wants_checkpoint") or is_due:
            self.save(metrics)

    def rehearse(self) -> None:
        """Raise an error before training if a checkpoint cannot hold the state."""
        with on_host():  # the random number states are on the host
            self._snapshot.rehearse()

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save the run unless its current state is already saved."""
        if self._saved_at == self._now:
            return
        batch = self._context.state.batch
        with self._context.mode.evaluating():  # a checkpoint has the weights for inference
            snapshot = together(self._snapshot.peers, self._gather)
            try:
                with on_host():  # the data to be written is read on the host
                    own = self._snapshot.own(snapshot)
                    path = self._store.save(snapshot, step=batch, metrics=metrics, own=own)
            except CheckpointError as error:
                if not isinstance(error.__cause__, OSError):
                    raise  # the state cannot be saved, now or later
                warn(f"no checkpoint after batch {batch}: {error}", CheckpointWarning)
                return
            self._saved_at = self._now
            self._context.progress.status(lambda: f"saved a checkpoint after batch {batch}")
            self._context.tell("checkpoint_end", path)

    def _gather(self) -> dict[str, Any]:
        self._context.tell("checkpoint_start")
        if self._world_size > 1:  # the other ranks would wait for a second attempt
            return self._snapshot.gather()
        device = self._context.run.device
        return once_more(self._snapshot.gather, device, doing="gathering a checkpoint")
