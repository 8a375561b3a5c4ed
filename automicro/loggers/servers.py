"""Loggers for TensorBoard, W&B and MLflow."""

import importlib.util
import json
import os
import re
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.errors import describe_error
from automicro.files import write_whole
from automicro.loggers.lines import AppendFile, OpenLogger
from automicro.showing import json_values


class TensorBoardLogger(OpenLogger):
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
        # Readers sort files by name, and two starts might be within a second.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._open = AppendFile(self._path / name)
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


class _ServerLogger(OpenLogger):
    """Base of loggers whose folder names a run on a server, so that a resume continues it."""

    _note = ""  # name of the file that names the run

    def _named(self, resume_step: int | None) -> tuple[str | None, int]:
        """Return the run to continue and the last step that it surely has, or None and -1."""
        path = self._path / self._note
        if resume_step is None or not path.exists():
            return None, -1
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return str(saved["run"]), int(saved["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} does not name the run to continue ({describe_error(error)}). "
                "Remove it to begin another run, or use another folder"
            ) from error

    def _name(self, run: str, *, step: int = -1) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"run": run, "step": step}).encode()
        write_whole(self._path / self._note, lambda file: file.write(text))


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

    _note = "wandb.json"

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
        if taken := {"config", "dir", "id", "resume"} & options.keys():
            raise TypeError(
                f"WandbLogger sets {min(taken)!r} itself. Leave it out: the folder names the run "
                "to continue, and the description of the run becomes the config"
            )
        super().__init__(folder)
        self._options = {"project": project, "name": name, "mode": mode, **options}
        self._step = self._newest = -1  # last step that W&B surely has; last step sent

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Start a run, or continue the run that the folder names.

        Raises:
            Exception: an error of W&B.
        """
        import wandb

        self.close()
        name, self._step = self._named(resume_step)
        if self._step == resume_step:  # an evaluation after this step might follow
            self._step -= 1
        # Chosen here and recorded before the server knows it, so that a kill in between does not
        # create a second run.
        name = name or uuid.uuid4().hex[:12]
        self._name(name, step=self._step)
        self._open = wandb.init(
            dir=str(self._path), id=name, resume="allow", config=json_values(run), **self._options
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Send the values of a step that W&B does not have yet.

        Raises:
            Exception: an error of W&B.
        """
        # W&B has the steps up to an orderly end, and online it counts them itself.
        run = self._opened
        if step > self._step and step >= run.step:
            run.log(values, step=step)
            self._newest = step

    def _end(self, run: Any) -> None:
        run.finish()
        self._name(run.id, step=max(self._step, self._newest))


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
        self._run_name = name
        self._tracking_uri = tracking_uri
        self._steps: defaultdict[str, int] = defaultdict(lambda: -1)  # last step of each metric

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Start a run, or continue the run that the folder names.

        Raises:
            Exception: an error of MLflow.
        """
        from mlflow import MlflowClient
        from mlflow.tracking import is_tracking_uri_set

        self.close()
        where, is_set = self._tracking_uri, is_tracking_uri_set()  # type: ignore[no-untyped-call]
        if where is None and not is_set:
            self._path.mkdir(parents=True, exist_ok=True)
            where = f"sqlite:///{self._path.resolve()}/mlflow.db"
        client = MlflowClient(where)
        name, _ = self._named(resume_step)
        self._steps.clear()
        if name is None:
            name = self._create(client, run)
        else:
            # The run is marked as ended or killed.
            client.update_run(name, status="RUNNING")
            for metric in client.get_run(name).data.metrics:
                history = client.get_metric_history(name, metric)
                self._steps[metric] = max(each.step for each in history)
        self._open = client, name

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Send the values that MLflow does not have yet.

        Raises:
            Exception: an error of MLflow.
        """
        from mlflow.entities import Metric

        (client, name), now = self._opened, int(time.time() * 1000)
        named = {_NOT_IN_NAMES.sub("_", each): value for each, value in values.items()}
        # A step is sent only once, because MLflow would keep both values.
        new = [
            Metric(each, value, now, step)
            for each, value in named.items()
            if step > self._steps[each]
        ]
        client.log_batch(name, metrics=new)
        self._steps.update({each.key: step for each in new})

    def _end(self, run: Any) -> None:
        client, name = run
        client.set_terminated(name, "FINISHED")

    def _create(self, client: Any, run: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = client.get_experiment_by_name(self._experiment)
        where = experiment.experiment_id if experiment else None
        made = client.create_run(
            where or client.create_experiment(self._experiment), run_name=self._run_name
        )
        name: str = made.info.run_id
        # Before anything is logged, so that the run is found again if the process is killed.
        self._name(name)
        parameters = [
            Param(_NOT_IN_NAMES.sub("_", each), str(value)[:_MOST_LETTERS])
            for each, value in flat(json_values(run)).items()
        ]
        # The server limits the parameters per call.
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(name, params=parameters[first : first + _MOST_PARAMETERS])
        return name


def flat(run: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Return nested settings as one level, because MLflow lists and compares them that way.

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
