"""Loggers for TensorBoard, W&B and MLflow."""

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
_RGBA = 4  # TensorBoard's number for this color space


class TensorBoardLogger(FileLogger):
    """Writes event files for ``tensorboard --logdir FOLDER``.

    Values are scalars under their own names, in float32 as TensorBoard stores them. The description
    of the run is the text ``run``. Each `start` creates a new file. When a run resumes, the new
    file tells TensorBoard to ignore later steps in earlier files.

    Each event is written when it is logged, completely or not at all. This does not use torch's
    ``SummaryWriter``, because its writer thread ends for good after a failed write, and is missing
    after a fork.

    Args:
        folder: folder of the run; created if necessary.

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
        """Create an event file.

        Raises:
            OSError: the file cannot be created or written.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import text

        self.close()
        self._file = AppendFile(_next_path(self._path), is_new=True)
        self._write(file_version="brain.Event:2")
        if resume_step is not None:
            # Readers then ignore this and later steps in earlier files. Files are not truncated,
            # because several processes might have written there.
            start = SessionLog(status=SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)
        shown = json.dumps(json_values(run), indent=2, ensure_ascii=False)
        # An indent of four spaces is code in Markdown.
        block = "\n".join("    " + line for line in shown.splitlines())
        summary = text("run", block)  # type: ignore[no-untyped-call]
        self._write(step=resume_step or 0, summary=summary)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write the values as one event.

        Raises:
            OSError: the event cannot be written; the file is left unchanged.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=each) for name, each in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def show(self, name: str, picture: Any, *, step: int) -> None:
        """Write a figure to the images.

        Args:
            name: name under which the figure is shown.
            picture: a matplotlib figure, such as those of `automicro.tools.pictures`.
            step: number of optimization batches done.

        Raises:
            OSError: the event cannot be written; the file is left unchanged.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        picture.savefig(target := io.BytesIO(), format="png")
        # Width and height are at fixed offsets in a PNG, so no decoder is needed.
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
    # Raised here, because during training it would only be a warning.
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{logger} needs the package {package}, which is not installed: pip install {package}"
        )


def _next_path(folder: Path) -> Path:
    """Return a path that sorts after all existing event files, because readers sort them."""
    files = folder.glob(f"{_PREFIX}*")
    taken = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in files]
    last = max((int(each) for each in taken if each.isdecimal()), default=0)
    # Otherwise two starts within a second, or a clock set back, would mix up the order.
    seconds = max(int(time.time()), last + 1)
    return folder / f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"


class GivenOnce:
    """File that records which values a server has received, so that it gets each only once.

    A file can be truncated when a run resumes from an older checkpoint, but a server keeps its
    values. Repeated steps are therefore skipped up to the point where the earlier process died.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> given = GivenOnce(path)
        >>> given.begin(resume_step=None)
        >>> given.name_run("1f2e")
        >>> given.take({"train/loss": 0.5}, step=8)
        {'train/loss': 0.5}
        >>> again = GivenOnce(path)  # the process died, and another continues from step 4
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
        self._names: set[str] = set()  # received at this step

    def begin(self, *, resume_step: int | None) -> str | None:
        """Start a new run, or return the name of the run to continue."""
        self._run, self._step, self._names = None, -1, set()
        if resume_step is not None and self._path.exists():
            self._read()
        elif resume_step is None:
            self._path.unlink(missing_ok=True)
        return self._run

    def name_run(self, name: str) -> None:
        """Record the name of the run."""
        self._run = name
        self._write()

    def take(self, values: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Record values, and return the new ones."""
        # An earlier process got past the checkpoint, and sent these steps already.
        if step < self._step:
            return {}
        # At its last step, the process might have died between two values.
        known = self._names if step == self._step else set()
        new = {name: value for name, value in values.items() if name not in known}
        if new:
            self._step, self._names = step, known | new.keys()
            self._write()
        return new

    def finish(self) -> None:
        """Record that the server has written all values."""
        self._write(is_finished=True)

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self._run, step, names = content["run"], int(content["step"]), set(content["names"])
            # A slow server might lack the last steps, so its own count decides.
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
        # Half a file would look like that of another program, and no run could continue.
        write_whole(self._path, lambda file: file.write(text))


def flat(run: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Return nested settings as one level, because servers list and compare them that way.

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
    """Base of loggers that continue the same run on a server; a file in the folder names it."""

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
        """Start a run, or continue the run that the folder names.

        Raises:
            Exception: an error of the server or its client.
        """
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._there = self._begin(run, self._given.begin(resume_step=resume_step))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Send the values that the server does not have yet.

        Raises:
            OSError: the folder is not writable.
            Exception: an error of the server or its client.
        """
        if self._there is None:
            raise not_started(self)
        if new := self._given.take(values, step=step):
            self._give(self._there, new, step)

    def close(self) -> None:
        """Send remaining values, and end the run."""
        if self._there is not None:
            # Cleared first, so that a failure does not end the run twice.
            there, self._there = self._there, None
            self._end(there)

    @abc.abstractmethod
    def _begin(self, run: Mapping[str, Any], name: str | None) -> Any:
        """Open the named run or a new one; the result is passed to the other two methods."""

    @abc.abstractmethod
    def _give(self, there: Any, values: Mapping[str, float], step: int) -> None: ...

    @abc.abstractmethod
    def _end(self, there: Any) -> None: ...


_OWN = ("config", "dir", "id", "resume")


class WandbLogger(_ServerLogger):
    """Logs to a run of Weights & Biases, and continues the same run after a resume.

    The folder records the run and its progress, so another process can continue it, even after a
    kill. Values of steps that the run already has are not logged again, because W&B cannot remove
    them. The description of the run becomes its config.

    W&B writes values seconds later, so a kill loses the last of them. Steps after the checkpoint
    are then sent again, except (online) those that W&B has.

    With ``mode="offline"`` (or ``WANDB_MODE=offline``) nothing is sent. Each process leaves a
    folder ``wandb/offline-run-*``, and ``wandb sync --append`` sends the folders of one run
    together.

    Args:
        folder: folder of the run; created if necessary.
        project: project in W&B, or None for W&B's default.
        name: name of the run, or None for W&B's default.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``, or None for W&B's default.
        options: additional arguments of ``wandb.init``, such as ``entity``, ``group`` or ``tags``.

    Raises:
        ImportError: the package wandb is not installed.
        TypeError: an option is one that the logger sets itself.

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
            # Chosen here and recorded before the server knows it, so that a kill in between does
            # not create a second run.
            name = uuid.uuid4().hex[:12]
            self._given.name_run(name)
        return wandb.init(
            dir=str(self._folder), id=name, resume="allow", config=json_values(run), **self._options
        )

    def _give(self, there: Any, values: Mapping[str, float], step: int) -> None:
        if step >= there.step:  # W&B already has the earlier steps of a continued run
            there.log(values, step=step)

    def _end(self, there: Any) -> None:
        there.finish()
        self._given.finish()


_MOST_PARAMETERS = 100  # per call
_MOST_LETTERS = 500  # per parameter, in the oldest supported version
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")


class MLflowLogger(_ServerLogger):
    """Logs to a run of MLflow, and continues the same run after a resume.

    The folder records the run and its progress, so another process can continue it, even after a
    kill. Values of steps that the run already has are not logged again, because MLflow would keep
    both. The description of the run becomes its parameters, such as ``config.optimizer.args.lr``.

    Characters that MLflow does not allow in a name are replaced by ``_``.

    Args:
        folder: folder of the run; created if necessary.
        experiment: experiment of the run; created if necessary.
        name: name of the run, or None for MLflow's default.
        tracking_uri: URI of the server or database. None uses ``MLFLOW_TRACKING_URI``, or a
            database ``mlflow.db`` in the folder if that is not set.

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
        # The run is marked as ended or killed.
        client.update_run(name, status="RUNNING")
        return client, name

    def _give(self, there: tuple[Any, str], values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        (client, run_id), now = there, int(time.time() * 1000)
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in values.items()
        ]
        client.log_batch(run_id, metrics=metrics)

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
        # Before anything is logged, so that the run is found again if the process is killed.
        self._given.name_run(run_id)
        parameters = [
            Param(_NOT_IN_NAMES.sub("_", name), str(value)[:_MOST_LETTERS])
            for name, value in flat(json_values(run)).items()
        ]
        # The server limits the parameters per call.
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(run_id, params=parameters[first : first + _MOST_PARAMETERS])
        return run_id

    def _where(self) -> str | None:
        from mlflow.tracking import is_tracking_uri_set

        is_set: bool = is_tracking_uri_set()  # type: ignore[no-untyped-call]
        if self._tracking_uri is not None or is_set:
            return self._tracking_uri
        return f"sqlite:///{self._folder.resolve()}/mlflow.db"
