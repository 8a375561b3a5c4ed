"""The folder of a run: its config, summary, weights and checkpoints, and how a run resumes.

Files of other runs are never overwritten. A run with checkpoints resumes in its folder.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from automicro.checkpoints.store import CheckpointConfig
from automicro.checkpoints.writing import list_checkpoints
from automicro.cli.config.load import to_yaml
from automicro.cli.config.nodes import leaves
from automicro.cli.config.sources import read_file
from automicro.cli.output import to_json
from automicro.errors import ConfigError, PeerLostError, about, add_note, facts_of, remember
from automicro.files import write_whole
from automicro.trainer.failed_batch import CONFIG, KEPT
from automicro.trainer.report import TIME_IS_OVER, FitSummary
from automicro.trainer.signals import end_told_here

SUMMARY, WEIGHTS = "summary.json", "weights.pt"
ANOTHER = "give another run_dir, such as 'runs/${now:%Y-%m-%d_%H-%M-%S}', or remove the folder"
# Keys that do not affect training; the same folder can be named in many ways.
THE_SAME_RUN = frozenset({"run_dir", "progress", "max_time"})
UNSET = object()


class RunDir:
    """The folder of a run, or none. Each file is written completely or not at all."""

    def __init__(
        self, path: str | None, config: Mapping[str, Any], *, goes_on: bool = False
    ) -> None:
        self._path = None if path is None else Path(path)
        self._config = config
        self._goes_on = goes_on
        if self._path is not None:
            _refuse_another_run(self._path, config, goes_on=goes_on)

    @about("run_dir")
    def finished(self) -> dict[str, Any] | None:
        """Return the saved summary if the run was trained to its end, otherwise None."""
        if self._path is None or not self._goes_on or not (self._path / SUMMARY).exists():
            return None
        try:
            summary: dict[str, Any] = json.loads((self._path / SUMMARY).read_text("utf-8"))
            # A run that used up its time has not reached its end, so it resumes.
            return None if summary["stop_reason"] == TIME_IS_OVER else summary
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"run_dir={str(self._path)!r} holds a summary.json that cannot be read ({error}): "
                f"remove this file to go on from the checkpoints, or {ANOTHER}"
            ) from error

    @about("run_dir")
    def begin(self) -> None:
        """Write the config."""
        if self._path is None:
            return
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            text = to_yaml(self._config)
            write_whole(self._path / CONFIG, lambda file: file.write(text.encode()), lasts=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir={str(self._path)!r} cannot be written ({error}): give a folder that can"
            ) from error

    def end(self, weights: Mapping[str, Any], summary: FitSummary) -> str:
        """Write the weights, then the summary, which marks the run as complete."""
        if self._path is None:
            return ""
        write_whole(self._path / WEIGHTS, lambda file: torch.save(weights, file), lasts=True)
        text = to_json(summary, indent=2) + "\n"
        write_whole(self._path / SUMMARY, lambda file: file.write(text.encode()), lasts=True)
        return f"wrote {CONFIG}, {SUMMARY} and {WEIGHTS} into {self._path}"


@about("run_dir")
def _refuse_another_run(folder: Path, config: Mapping[str, Any], *, goes_on: bool) -> None:
    where = f"run_dir={str(folder)!r}"
    path = folder / CONFIG
    if path.exists():
        changes = _changes(read_file(path)[0], config)
        # A run that failed before it wrote anything else can be replaced.
        if changes and not all(map(_is_in_nobodys_way, folder.iterdir())):
            saved = folder / "checkpoints"
            more = shlex.join([f"run_dir={folder}-2", f"checkpoint.resume={saved}"])
            go_on = f"; to resume from it, add {more} to the same command" * saved.is_dir()
            raise ConfigError(f"{where} holds another run ({', '.join(changes)}): {ANOTHER}{go_on}")
    results = [name for name in (SUMMARY, WEIGHTS) if (folder / name).exists()]
    if results and not (goes_on and path.exists()):
        raise ConfigError(
            f"{where} holds the {' and the '.join(results)} of a run already: {ANOTHER}"
        )


def _is_in_nobodys_way(path: Path) -> bool:
    return path.name == CONFIG or path.name.startswith(KEPT)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = leaves(old), leaves(new)
    return [
        f"{key}: {_show(before.get(key, UNSET))} → {_show(after.get(key, UNSET))}"
        for key in before | after
        if key not in THE_SAME_RUN and before.get(key, UNSET) != after.get(key, UNSET)
    ]


def _show(value: object) -> str:
    return "not set" if value is UNSET else to_yaml({"": value}).partition(": ")[2].strip()


def goes_on(checkpoint: CheckpointConfig | None) -> bool:
    """Return whether a restarted run resumes from its checkpoints."""
    return checkpoint is not None and checkpoint.resume != "never"


def goes_on_from(checkpoint: CheckpointConfig | None) -> Path | None:
    """Return the folder to resume from: the run's own, then another run's, or None."""
    if checkpoint is None or not goes_on(checkpoint):
        return None
    if _saved(checkpoint):
        return Path(checkpoint.folder)
    return None if checkpoint.resume == "auto" else Path(checkpoint.resume)


@contextlib.contextmanager
def telling_how_to_go_on(
    checkpoint: CheckpointConfig | None, *, run_dir: str | None, inputs: Sequence[str]
) -> Iterator[None]:
    """Add how to resume to the error of a run that was stopped or that lost a rank."""
    try:
        with end_told_here():
            yield
    except (KeyboardInterrupt, SystemExit, PeerLostError) as error:
        told = facts_of(error).stopped
        remedy = _remedy(checkpoint, run_dir, inputs, is_saved=bool(told and told.checkpoint))
        if told is None:  # ended at once, by a second signal or a lost rank
            add_note(error, remedy)
        else:
            remember(error, stopped=replace(told, remedy=remedy))
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
        return f"{command} starts over; with {own}checkpoint={{}} it can resume"
    if not is_saved and not _saved(checkpoint):
        return f"{command} starts over"
    # With ${now:…} in run_dir, the same command would start in another folder.
    given = [] if run_dir is None else [f"run_dir={run_dir}"]
    added = [shlex.quote(each) for each in given if each not in inputs]
    if checkpoint.resume == "never":
        added.append("checkpoint.resume=auto")
    return " ".join([command, *(["with"] if added else []), *added, "resumes from there"])


def _saved(checkpoint: CheckpointConfig) -> bool:
    return bool(list_checkpoints(Path(checkpoint.folder)))
