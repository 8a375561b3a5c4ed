"""Whether a run goes on from checkpoints, and from which."""

from dataclasses import replace
from pathlib import Path

from automicro.checkpoints import CheckpointConfig
from automicro.checkpoints.writing import list_checkpoints


def goes_on(checkpoint: CheckpointConfig | None) -> bool:
    """Tell whether a run that is started again takes up its checkpoints.

    >>> goes_on(CheckpointConfig(folder="runs/first/checkpoints")), goes_on(None)
    (True, False)
    """
    return checkpoint is not None and checkpoint.resume != "never"


def own_before_others(
    checkpoint: CheckpointConfig | None, *, was_begun: bool
) -> CheckpointConfig | None:
    """Let a run that began from another's checkpoints go on from its own when it is started again.

    Args:
        checkpoint: what the run is told.
        was_begun: whether it was started before.

    >>> own_before_others(CheckpointConfig(folder="a", resume="b/c"), was_begun=True).resume
    'b/c'
    """
    if checkpoint is None or checkpoint.resume == "never" or not was_begun:
        return checkpoint
    return replace(checkpoint, resume="auto") if _saved(checkpoint) else checkpoint


def source(checkpoint: CheckpointConfig | None) -> Path | None:
    """The folder of the checkpoints that a run goes on from; None where it begins anew.

    >>> source(CheckpointConfig(folder="no-such-folder")) is None
    True
    """
    if checkpoint is None or checkpoint.resume == "never":
        return None
    if checkpoint.resume != "auto":
        return Path(checkpoint.resume)
    return Path(checkpoint.folder) if _saved(checkpoint) else None


def _saved(checkpoint: CheckpointConfig) -> bool:
    return bool(list_checkpoints(Path(checkpoint.folder)))
