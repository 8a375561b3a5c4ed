"""Values for MLflow."""

import importlib.util
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.loggers.given_once import GivenOnce, flat
from automicro.loggers.json_lines import to_json
from automicro.loggers.values import not_started

_MOST_PARAMETERS = 100  # in one call
_MOST_LETTERS = 500  # of a parameter, in the oldest version
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")


class MLflowLogger:
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

    def __init__(
        self,
        folder: str | Path,
        *,
        experiment: str = "Default",
        name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        # Said now: while training it would be one more logger that fails.
        if importlib.util.find_spec("mlflow") is None:
            raise ImportError(
                "MLflowLogger needs the package mlflow, which is not installed: pip install mlflow"
            )
        self._folder = Path(folder)
        self._experiment = experiment
        self._name = name
        self._tracking_uri = tracking_uri
        self._given = GivenOnce(self._folder / "mlflow.json")
        self._client: Any = None
        self._run_id = ""

    def __repr__(self) -> str:
        return f"MLflowLogger({str(self._folder)!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Begin a run, or go on in the one that the folder names.

        Raises:
            Exception: what MLflow raises where it cannot begin.
        """
        from mlflow import MlflowClient

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(self._where())
        found = self._given.begin(resume_step=resume_step)
        if found is None:
            self._run_id = self._create(client, run)
        else:
            self._run_id = found
            client.update_run(found, status="RUNNING")
        self._client = client

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write the values, all in one call.

        Raises:
            OSError: the folder cannot be written.
            Exception: what MLflow raises.
        """
        from mlflow.entities import Metric

        if self._client is None:
            raise not_started(self)
        new = self._given.take(values, step=step)
        if new:
            now = int(time.time() * 1000)
            metrics = [
                Metric(_NOT_IN_NAMES.sub("_", name), value, now, step)
                for name, value in new.items()
            ]
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Say that the run has ended."""
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run_id, "FINISHED")

    def _create(self, client: Any, run: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = client.get_experiment_by_name(self._experiment)
        where = experiment.experiment_id if experiment else None
        made = client.create_run(
            where or client.create_experiment(self._experiment), run_name=self._name
        )
        run_id: str = made.info.run_id
        self._given.name_run(run_id)
        parameters = [
            Param(_NOT_IN_NAMES.sub("_", name), str(value)[:_MOST_LETTERS])
            for name, value in flat(to_json(run)).items()
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(run_id, params=parameters[first : first + _MOST_PARAMETERS])
        return run_id

    def _where(self) -> str | None:
        from mlflow.tracking import is_tracking_uri_set

        is_set: bool = is_tracking_uri_set()  # type: ignore[no-untyped-call]
        if self._tracking_uri is not None or is_set:
            return self._tracking_uri
        return f"sqlite:///{self._folder.resolve()}/mlflow.db"
