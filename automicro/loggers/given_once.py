"""What a place that takes nothing back has been given, so that nothing is given twice."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


class GivenOnce:
    """The run that values go to, and how far it has come, in a file that outlasts the process.

    A file can be cut when a run goes on from an older checkpoint; a server keeps what it has. So
    the steps that come again are left out up to where the earlier process died, and the run there
    has each value once.

    Args:
        path: of the file; its folder is made where there is none.
        is_slow: whether what was given may die with the process, because the place writes it
            later: after a kill it is given again.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> given = GivenOnce(path)
        >>> given.begin(resume_step=None)
        >>> given.name_run("1f2e")
        >>> given.take({"train/loss": 0.5}, step=8)
        {'train/loss': 0.5}
        >>> again = GivenOnce(path)  # the process died, and another goes on from step 4
        >>> again.begin(resume_step=4)
        '1f2e'
        >>> again.take({"train/loss": 0.7}, step=7)
        {}
        >>> again.take({"train/loss": 0.5, "eval/loss": 0.6}, step=8)
        {'eval/loss': 0.6}
    """

    def __init__(self, path: Path, *, is_slow: bool = False) -> None:
        self._path = path
        self._is_slow = is_slow
        self._run: str | None = None
        self._step = -1
        self._names: set[str] = set()  # at that step

    def begin(self, *, resume_step: int | None) -> str | None:
        """Begin another run, or go on with the one in the file.

        Args:
            resume_step: the optimization batches done by the run that is resumed, or None.

        Returns:
            The name of the run to go on with; None for another run, or one without a name.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file holds something else.
        """
        self._run, self._step, self._names = None, -1, set()
        if resume_step is not None and self._path.exists():
            self._read()
        elif resume_step is None:
            self._path.unlink(missing_ok=True)
        return self._run

    def name_run(self, name: str) -> None:
        """Note down what the run is called, to go on with it.

        Raises:
            OSError: the file cannot be written.
        """
        self._run = name
        self._write()

    def take(self, values: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Note down values, and return those that are new.

        They are noted before they are given: where the process dies in between, they are missing
        and not there twice.

        Raises:
            OSError: the file cannot be written.
        """
        if step < self._step:
            return {}
        known = self._names if step == self._step else set()
        new = {name: value for name, value in values.items() if name not in known}
        if new:
            self._step, self._names = step, known | new.keys()
            self._write()
        return new

    def finish(self) -> None:
        """Note down that the place has written all that it was given.

        Raises:
            OSError: the file cannot be written.
        """
        self._write(is_finished=True)

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self._run, step, names = content["run"], int(content["step"]), set(content["names"])
            if content["is_finished"] or not self._is_slow:
                self._step, self._names = step, names
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(self._path)!r} does not say which run to go on with; it is left as it is: "
                "remove it to begin another run, or use another folder"
            ) from error

    def _write(self, *, is_finished: bool = False) -> None:
        content = {
            "run": self._run,
            "step": self._step,
            "names": sorted(self._names),
            "is_finished": is_finished,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(content), encoding="utf-8")
        os.replace(partial, self._path)  # whole or not at all, also where the process is killed


def flat(run: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Settings in one level, as servers list and compare them.

    >>> flat({"seed": 0, "config": {"model": {"call": "MyModel"}}})
    {'seed': 0, 'config.model.call': 'MyModel'}
    """
    found: dict[str, object] = {}
    for name, value in run.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
