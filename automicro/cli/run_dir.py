"""The folder of a run: its config, its summary, its weights, its checkpoints.

Nothing of another run is overwritten. A run that saves checkpoints goes on in its folder.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from automicro.cli.nodes import items_inside
from automicro.cli.reading import read_yaml
from automicro.cli.results import to_json
from automicro.cli.saved_summary import read_summary
from automicro.cli.writing import to_yaml
from automicro.errors import ConfigError
from automicro.trainer.report import TIME_IS_OVER, FitSummary

CONFIG, SUMMARY, WEIGHTS = "config.yaml", "summary.json", "weights.pt"
ANOTHER = "give another run_dir, such as 'runs/${now:%Y-%m-%d_%H-%M-%S}', or remove the folder"
# Keys that change nothing of what is trained; the same folder may be named in many ways.
THE_SAME_RUN = frozenset({"run_dir", "progress", "max_time"})
UNSET = object()


class RunDir(Protocol):
    """Where a run leaves what it was and what it came to."""

    @property
    def was_begun(self) -> bool:
        """Whether this run was started here before."""

    def finished(self) -> FitSummary | None:
        """What the run came to, where it trained to its end and goes on from there."""

    def begin(self) -> None:
        """Leave what the run is."""

    def end(self, weights: Mapping[str, Any], summary: FitSummary) -> str:
        """Leave the results; return a line that says where, empty where there are none."""


def open_run_dir(path: str | None, config: Mapping[str, Any], *, goes_on: bool = False) -> RunDir:
    """The folder at a path, or one that keeps nothing. Nothing is written yet.

    Args:
        path: of the folder; None for nowhere.
        config: every key of the run.
        goes_on: whether the run goes on from its checkpoints, where it has any.

    Raises:
        ConfigError: the folder holds another run, or a finished one.

    >>> open_run_dir(None, {}).begin()
    """
    return Nowhere() if path is None else Folder(Path(path), config, goes_on=goes_on)


class Nowhere:
    """Keeps nothing."""

    was_begun = False

    def finished(self) -> FitSummary | None:
        """Know of nothing."""
        return None

    def begin(self) -> None:
        """Keep nothing."""

    def end(self, weights: Mapping[str, Any], summary: FitSummary) -> str:
        """Keep nothing."""
        return ""


class Folder:
    """A folder on disk. Each file appears whole or not at all.

    Args:
        path: of the folder; made where there is none.
        config: every key of the run.
        goes_on: whether the run goes on from its checkpoints, where it has any.

    Raises:
        ConfigError: the folder holds another run, or a finished one that does not go on. An
            interrupted run of the same config may be started again in its folder.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, goes_on: bool = False) -> None:
        self._path = path
        self._config = config
        self._goes_on = goes_on
        self._refuse_another_run()

    @property
    def was_begun(self) -> bool:
        """Whether this run was started here before."""
        return (self._path / CONFIG).exists()

    def finished(self) -> FitSummary | None:
        """What the run came to, where it trained to its end and goes on from there.

        Raises:
            ConfigError: the summary cannot be read.
        """
        path = self._path / SUMMARY
        if not self._goes_on or not path.exists():
            return None
        try:
            summary = read_summary(path.read_text(encoding="utf-8"))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"run_dir={str(self._path)!r} holds a summary.json that cannot be read ({error}): "
                f"remove this file to go on from the checkpoints, or {ANOTHER}"
            ) from error
        # A run whose time was over is not at its end: it goes on when it is started again.
        return None if summary.stop_reason == TIME_IS_OVER else summary

    def begin(self) -> None:
        """Write the config.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            text = to_yaml(self._config)
            self._write(CONFIG, lambda file: file.write(text.encode()))
        except OSError as error:
            raise ConfigError(
                f"run_dir={str(self._path)!r} cannot be written ({error}): give a folder that can"
            ) from error

    def end(self, weights: Mapping[str, Any], summary: FitSummary) -> str:
        """Write the weights, then the summary, whose presence says that the run is complete."""
        self._write(WEIGHTS, lambda file: torch.save(weights, file))
        text = to_json(summary, indent=2) + "\n"
        self._write(SUMMARY, lambda file: file.write(text.encode()))
        return f"wrote {CONFIG}, {SUMMARY} and {WEIGHTS} into {self._path}"

    def _refuse_another_run(self) -> None:
        where = f"run_dir={str(self._path)!r}"
        path = self._path / CONFIG
        if path.exists():
            changes = _changes(read_yaml(path), self._config)
            # One that failed before it left anything else is in nobody's way.
            if changes and any(each.name != CONFIG for each in self._path.iterdir()):
                saved = self._path / "checkpoints"
                go_on = f"; with checkpoint.resume={saved} there, it goes on" * saved.is_dir()
                raise ConfigError(
                    f"{where} holds another run ({', '.join(changes)}): {ANOTHER}{go_on}"
                )
        results = [name for name in (SUMMARY, WEIGHTS) if (self._path / name).exists()]
        if results and not (self._goes_on and self.was_begun):
            raise ConfigError(
                f"{where} holds the {' and the '.join(results)} of a run already: {ANOTHER}"
            )

    def _write(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        number, temporary = tempfile.mkstemp(dir=self._path, prefix=f".{name}.")
        try:
            with os.fdopen(number, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            # Temporary files are for their owner alone; these are as readable as any other.
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, self._path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(self._path)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = _leaves(old), _leaves(new)
    return [
        f"{key}: {_show(before.get(key, UNSET))} → {_show(after.get(key, UNSET))}"
        for key in before | after
        if key not in THE_SAME_RUN and before.get(key, UNSET) != after.get(key, UNSET)
    ]


def _leaves(value: Any, key: str = "") -> dict[str, Any]:
    inside = items_inside(value)
    if not inside:
        return {key: value}
    return {
        name: leaf
        for part, each in inside
        for name, leaf in _leaves(each, f"{key}.{part}" if key else str(part)).items()
    }


def _show(value: object) -> str:
    return "not set" if value is UNSET else to_yaml({"": value}).partition(": ")[2].strip()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(path: Path) -> None:
    """Make a new name in a folder outlast a loss of power, where the system can."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
