"""Whether a run goes on from checkpoints, from which, and how somebody who stopped it goes on."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from automicro.checkpoints.store import CheckpointConfig
from automicro.checkpoints.writing import list_checkpoints
from automicro.errors import PeerLostError, add_note
from automicro.trainer.signals import STOPPED, WITHOUT_CHECKPOINT, end_told_here


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


@contextlib.contextmanager
def telling_how_to_go_on(
    checkpoint: CheckpointConfig | None, *, run_dir: str | None, inputs: Sequence[str]
) -> Iterator[None]:
    """Say of a run that was stopped in order, or lost a rank, what to do to go on.

    Args:
        checkpoint: what the run was told.
        run_dir: where it lies, interpolations resolved.
        inputs: of the command line.
    """
    try:
        with end_told_here():
            yield
    except (KeyboardInterrupt, SystemExit) as error:
        notes: list[str] = getattr(error, "__notes__", [])
        for place, note in enumerate(notes):
            if STOPPED in note:
                is_saved = not note.endswith(WITHOUT_CHECKPOINT)
                notes[place] = f"{note}: {_remedy(checkpoint, run_dir, inputs, is_saved=is_saved)}"
        raise
    except PeerLostError as error:
        add_note(error, _remedy(checkpoint, run_dir, inputs, is_saved=False))
        raise


def _remedy(
    checkpoint: CheckpointConfig | None,
    run_dir: str | None,
    inputs: Sequence[str],
    *,
    is_saved: bool,
) -> str:
    command = "the same command"
    if checkpoint is None:
        own = "" if run_dir is not None else "run_dir=runs/first "
        return f"{command} begins anew; with {own}checkpoint={{}} it can go on"
    if not is_saved and not _saved(checkpoint):
        return f"{command} begins anew"
    # With ${now:…} in it, the same command would begin in another folder.
    given = [] if run_dir is None else [f"run_dir={run_dir}"]
    added = [shlex.quote(each) for each in given if each not in inputs]
    if checkpoint.resume == "never":
        added.append("checkpoint.resume=auto")
    return " ".join([command, *(["with"] if added else []), *added, "goes on from there"])


def _saved(checkpoint: CheckpointConfig) -> bool:
    return bool(list_checkpoints(Path(checkpoint.folder)))
