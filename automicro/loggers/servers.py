"""Loggers of others: TensorBoard, W&B, MLflow."""

import abc
import importlib.util
import io
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from automicro.files import write_whole
from automicro.loggers.lines import AppendFile, FileLogger, json_values
from automicro.loggers.logger import not_started

_PREFIX = "events.out.tfevents."
_RGBA = 4  # as TensorBoard numbers them


class TensorBoardLogger(FileLogger):
    """Writes event files that ``tensorboard --logdir FOLDER`` shows.

    Values are scalars under their own names, of 32 bits, as TensorBoard keeps them. What is run
    is the text ``run``. Each `start` begins a file of its own; on a resume it tells TensorBoard
    to leave out what earlier files hold of later steps.

    Events are written where they are logged, each whole or not at all: torch's ``SummaryWriter``
    hands them to a thread, which ends for good when a write fails, and is missing after a fork.

    Args:
        folder: of the run; made where there is none.

    Raises:
        ImportError: the package tensorboard is not installed.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> logger = TensorBoardLogger(folder)
        >>> logger.start({"seed": 0})
        >>> logger.log({"train/loss": 0.5}, step=1)
        >>> logger.close()
        >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        >>> [event.value for event in EventAccumulator(folder).Reload().Scalars("train/loss")]
        [0.5]
    """

    def __init__(self, folder: str | Path) -> None:
        _require("tensorboard", "TensorBoardLogger")
        super().__init__(folder)

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Begin an event file.

        Raises:
            OSError: the file cannot be made or written.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import text

        self.close()
        self._file = AppendFile(_next_path(self._path), is_new=True)
        self._write(file_version="brain.Event:2")
        if resume_step is not None:
            # Readers drop what earlier files hold from this step on.
            # A file is not cut: several processes may have written there, and readers know this
            # mark.
            start = SessionLog(status=SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)
        shown = json.dumps(json_values(run), indent=2, ensure_ascii=False)
        # Four spaces are code in Markdown.
        block = "\n".join("    " + line for line in shown.splitlines())
        summary = text("run", block)  # type: ignore[no-untyped-call]
        self._write(step=resume_step or 0, summary=summary)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write the values as one event.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=each) for name, each in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def show(self, name: str, picture: Any, *, step: int) -> None:
        """Write a picture among the images.

        Args:
            name: under which it stands.
            picture: a figure of matplotlib, such as those of `automicro.tools.pictures`.
            step: optimization batches done.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        picture.savefig(target := io.BytesIO(), format="png")
        # Width and height stand at fixed places in the head of a PNG, so no decoder is needed.
        png = target.getvalue()
        size = {"width": int.from_bytes(png[16:20]), "height": int.from_bytes(png[20:24])}
        image = Summary.Image(encoded_image_string=png, colorspace=_RGBA, **size)
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
            RecordWriter,
        )

        event = Event(wall_time=time.time(), **content)
        RecordWriter(self._opened).write(event.SerializeToString())


def _require(package: str, logger: str) -> None:
    # Said at once: while training it would be one more logger that fails.
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{logger} needs the package {package}, which is not installed: pip install {package}"
        )


def _next_path(folder: Path) -> Path:
    """A path that sorts after all event files there: readers read them in that order."""
    files = folder.glob(f"{_PREFIX}*")
    taken = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in files]
    last = max((int(each) for each in taken if each.isdecimal()), default=0)
    # Two starts within a second, or a clock that was set back, would mix their order.
    seconds = max(int(time.time()), last + 1)
    return folder / f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"


class GivenOnce:
    """The run that values go to, and how far it has come, in a file that outlasts the process.

    A file can be cut when a run goes on from an older checkpoint; a server keeps what it has. So
    the steps that come again are left out up to where the earlier process died, and the run there
    has each value once.

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
        # An earlier process got further than the checkpoint, and gave these steps already.
        if step < self._step:
            return {}
        # At the last step it may have died between two of its values.
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
            # Of a slow place it is not known how much of the last steps it has: its own count
            # decides.
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
        text = json.dumps(content).encode()
        # Half a file would look like that of another program, and no run could go on.
        write_whole(self._path, lambda file: file.write(text))


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


class _ServerLogger(abc.ABC):
    """Goes on in the same run there: the folder says which it is, and how far it has come."""

    _note: ClassVar[str]
    """The file in the folder that says it."""
    _is_slow: ClassVar[bool] = False

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._given = GivenOnce(self._folder / self._note, is_slow=self._is_slow)
        self._there: Any = None  # the run, while it is open

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Begin a run, or go on in the one that the folder names.

        Raises:
            Exception: what the place raises where it cannot begin.
        """
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._there = self._begin(run, self._given.begin(resume_step=resume_step))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Hand on the values that are new there.

        Raises:
            OSError: the folder cannot be written.
            Exception: what the place raises.
        """
        if self._there is None:
            raise not_started(self)
        if new := self._given.take(values, step=step):
            self._give(self._there, new, step)

    def close(self) -> None:
        """End: what is not sent yet is sent now."""
        if self._there is not None:
            # Let go first: an error in ending must not end it twice.
            there, self._there = self._there, None
            self._end(there)

    @abc.abstractmethod
    def _begin(self, run: Mapping[str, Any], name: str | None) -> Any:
        """Open the run of a name, or another one; what the next two get."""

    @abc.abstractmethod
    def _give(self, there: Any, values: Mapping[str, float], step: int) -> None: ...

    @abc.abstractmethod
    def _end(self, there: Any) -> None: ...


_OWN = ("config", "dir", "id", "resume")


class WandbLogger(_ServerLogger):
    """Logs to a run of Weights & Biases, and goes on in the same run after a resume.

    The folder holds which run it is and how far it has come, so another process finds it, also
    after a kill. Values of steps that the run has got already are not logged again: W&B takes
    nothing back. What is run becomes the run's config.

    W&B writes what it is given seconds later, so a kill loses the last of it. The steps after the
    checkpoint are handed over again then. Online, those that W&B has are left out.

    With ``mode="offline"`` (or ``WANDB_MODE=offline``) nothing is sent. Each process leaves a
    folder ``wandb/offline-run-*``, and ``wandb sync --append`` sends those of one run together.

    Args:
        folder: of the run; made where there is none.
        project: of W&B; None for W&B's own choice.
        name: of the run; None for W&B's own choice.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None for W&B's own choice.
        options: further arguments of ``wandb.init``, such as ``entity``, ``group`` or ``tags``.

    Raises:
        ImportError: the package wandb is not installed.
        TypeError: options that the logger sets itself.

    Example:
        >>> logger = WandbLogger("runs/first", project="digits", mode="offline", tags=["cpu"])
    """

    _note, _is_slow = "wandb.json", True

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str | None = None,
        name: str | None = None,
        mode: str | None = None,
        **options: Any,
    ) -> None:
        _require("wandb", "WandbLogger")
        taken = [each for each in _OWN if each in options]
        if taken:
            raise TypeError(
                f"WandbLogger sets {taken[0]!r} itself: leave it out. The folder decides which run "
                "goes on, and what is run becomes the config"
            )
        super().__init__(folder)
        self._options = {"project": project, "name": name, "mode": mode, **options}

    def _begin(self, run: Mapping[str, Any], name: str | None) -> Any:
        import wandb

        if name is None:
            # Chosen here and noted before the server knows it: a kill in between begins no second
            # run.
            name = uuid.uuid4().hex[:12]
            self._given.name_run(name)
        return wandb.init(
            dir=str(self._folder), id=name, resume="allow", config=json_values(run), **self._options
        )

    def _give(self, there: Any, values: Mapping[str, float], step: int) -> None:
        if step >= there.step:  # of a run that goes on: what W&B has
            there.log(values, step=step)

    def _end(self, there: Any) -> None:
        there.finish()
        self._given.finish()


_MOST_PARAMETERS = 100  # in one call
_MOST_LETTERS = 500  # of a parameter, in the oldest version
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")


class MLflowLogger(_ServerLogger):
    """Logs to a run of MLflow, and goes on in the same run after a resume.

    The folder holds which run it is and how far it has come, so another process finds it, also
    after a kill. Values of steps that the run has got already are not logged again: MLflow would
    keep both. What is run becomes the run's parameters, such as ``config.optimizer.args.lr``.

    Letters that MLflow does not take in a name become ``_``.

    Args:
        folder: of the run; made where there is none.
        experiment: that the run belongs to; made where there is none.
        name: of the run; None for MLflow's own choice.
        tracking_uri: of the server or the database. None for ``MLFLOW_TRACKING_URI``, and where
            that is not set either, for a database in the folder: ``mlflow.db``.

    Raises:
        ImportError: the package mlflow is not installed.

    Example:
        >>> logger = MLflowLogger("runs/first", experiment="digits")
    """

    _note = "mlflow.json"

    def __init__(
        self,
        folder: str | Path,
        *,
        experiment: str = "Default",
        name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        _require("mlflow", "MLflowLogger")
        super().__init__(folder)
        self._experiment = experiment
        self._name = name
        self._tracking_uri = tracking_uri

    def _begin(self, run: Mapping[str, Any], name: str | None) -> tuple[Any, str]:
        from mlflow import MlflowClient

        client = MlflowClient(self._where())
        if name is None:
            return client, self._create(client, run)
        # It was ended, or its process was killed, and shows as such.
        client.update_run(name, status="RUNNING")
        return client, name

    def _give(self, there: tuple[Any, str], values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        (client, run_id), now = there, int(time.time() * 1000)
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in values.items()
        ]
        client.log_batch(run_id, metrics=metrics)  # all in one call

    def _end(self, there: tuple[Any, str]) -> None:
        client, run_id = there
        client.set_terminated(run_id, "FINISHED")

    def _create(self, client: Any, run: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = client.get_experiment_by_name(self._experiment)
        where = experiment.experiment_id if experiment else None
        made = client.create_run(
            where or client.create_experiment(self._experiment), run_name=self._name
        )
        run_id: str = made.info.run_id
        # Before anything is logged: a kill after this line finds the run again.
        self._given.name_run(run_id)
        parameters = [
            Param(_NOT_IN_NAMES.sub("_", name), str(value)[:_MOST_LETTERS])
            for name, value in flat(json_values(run)).items()
        ]
        # The server refuses more in one call.
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(run_id, params=parameters[first : first + _MOST_PARAMETERS])
        return run_id

    def _where(self) -> str | None:
        from mlflow.tracking import is_tracking_uri_set

        is_set: bool = is_tracking_uri_set()  # type: ignore[no-untyped-call]
        if self._tracking_uri is not None or is_set:
            return self._tracking_uri
        return f"sqlite:///{self._folder.resolve()}/mlflow.db"
