"""W&B and MLflow contain each value once after kills and resumes."""

import importlib
import json
import os
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture

from automicro.loggers import (
    JSONLinesLogger,
    Logger,
    LoggerGroup,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from tests.processes import KILLED, end, start

Rows = list[tuple[int, str, float]]


def log_in_process(kind: str, folder: Path, *, resumed: int, last: int, dies: bool) -> None:
    """Log in a process, which is killed after the last step or closes its logger."""

    def work() -> None:
        warnings.simplefilter("ignore")
        logger: Logger = LOGGERS[kind](folder)
        run = {"seed": 0, "config": {"optimizer": {"args": {"lr": 0.1}}}}
        logger.start(run, resume_step=resumed or None)
        for step in range(resumed + 1, last + 1):
            logger.log({"train/loss": resumed + 1 / 2**step}, step=step)
            if step % 4 == 0:
                logger.log({"eval/loss": resumed + 1 / 2**step}, step=step)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        logger.close()

    # Forked, since importing these packages takes much longer than the process itself.
    log = folder / "said.txt"
    assert end(start(work, log=log), log=log) == (KILLED if dies else 0), log.read_text()


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "wandb": lambda folder: WandbLogger(folder, project="tests", mode="offline", tags=["test"]),
    "mlflow": lambda folder: MLflowLogger(folder, experiment="tests"),
}


def multi_process(test: Any) -> Any:
    of_libraries = pytest.mark.filterwarnings("ignore")
    return pytest.mark.sweep(of_libraries(pytest.mark.usefixtures("packages")(test)))


@pytest.fixture(scope="module")
def packages() -> None:
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("wandb")
        importlib.import_module("mlflow")


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield all records of all files that W&B wrote, in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2 as messages

    make: Any = vars(messages)["Record"]
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            rest = 32768 - at % 32768
            if rest < 7:
                at += rest
                continue
            _, length, kind = struct.unpack("<IHB", content[at : at + 7])
            whole += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or its end
                record = make()
                record.ParseFromString(whole)
                yield record
                whole = b""


def read_wandb(folder: Path) -> Rows:
    rows = [
        (
            record.history.step.num,
            "/".join(item.nested_key) or item.key,
            json.loads(item.value_json),
        )
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
    ]
    return [row for row in rows if not row[1].startswith("_")]


def runs_of_wandb(folder: Path) -> list[str]:
    runs = [record.run.run_id for record in wandb_records(folder) if record.HasField("run")]
    return sorted(set(runs))


def mlflow_runs(folder: Path) -> list[Any]:
    client = mlflow_client(folder)
    return list(client.search_runs([each.experiment_id for each in client.search_experiments()]))


def mlflow_client(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def read_mlflow(folder: Path) -> Rows:
    client = mlflow_client(folder)
    return [
        (each.step, name, each.value)
        for run in mlflow_runs(folder)
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    ]


def runs_of_mlflow(folder: Path) -> list[str]:
    return [run.info.run_id for run in mlflow_runs(folder)]


# The readers of all values and of all runs.
BACKENDS = {"wandb": (read_wandb, runs_of_wandb), "mlflow": (read_mlflow, runs_of_mlflow)}


def expected(last: int, *, resumed_at: dict[int, int]) -> Rows:
    """Return each value once; a value shows the resume step of its process."""
    rows = []
    for step in range(1, last + 1):
        starts = [start for first, start in resumed_at.items() if step >= first]
        value = max(starts, default=0) + 1 / 2**step
        rows += [(step, "train/loss", value)]
        rows += [(step, "eval/loss", value)] if step % 4 == 0 else []
    return sorted(rows)


@multi_process
@pytest.mark.parametrize(("kind", "dies"), [("wandb", False), ("mlflow", True)])
def test_resumed_run_has_each_value_once(kind: str, dies: bool, tmp_path: Path) -> None:
    read, runs = BACKENDS[kind]
    log_in_process(kind, tmp_path, resumed=0, last=8, dies=dies)
    if kind == "mlflow":
        (run,) = mlflow_runs(tmp_path)
        assert run.data.params == {"seed": "0", "config.optimizer.args.lr": "0.1"}
        assert run.info.status == "RUNNING"
    else:
        (run,) = (each.run for each in wandb_records(tmp_path) if each.HasField("run"))
        assert (run.project, list(run.tags)) == ("tests", ["test"])
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (config["seed"], config["config"]) == (0, {"optimizer": {"args": {"lr": 0.1}}})
    log_in_process(kind, tmp_path, resumed=5, last=11, dies=False)  # from an older checkpoint
    log_in_process(kind, tmp_path, resumed=11, last=14, dies=False)
    assert sorted(read(tmp_path)) == expected(14, resumed_at={9: 5, 12: 11})
    assert len(runs(tmp_path)) == 1
    assert kind == "wandb" or mlflow_runs(tmp_path)[0].info.status == "FINISHED"


@multi_process
def test_wandb_logs_again_values_possibly_lost_in_kill(tmp_path: Path) -> None:
    log_in_process("wandb", tmp_path, resumed=0, last=8, dies=True)
    log_in_process("wandb", tmp_path, resumed=5, last=11, dies=False)
    again = [row for row in expected(11, resumed_at={6: 5}) if row[0] > 5]
    assert [row for row in sorted(read_wandb(tmp_path)) if row[2] > 5] == again
    assert len(runs_of_wandb(tmp_path)) == 1


@multi_process
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_restart_without_resume_creates_new_run(kind: str, tmp_path: Path) -> None:
    read, runs = BACKENDS[kind]
    for _ in range(2):
        log_in_process(kind, tmp_path, resumed=0, last=2, dies=False)
    assert len(runs(tmp_path)) == 2
    assert sorted(read(tmp_path)) == sorted(2 * expected(2, resumed_at={}))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # from libraries
def test_invalid_mlflow_names_and_values_are_adapted(tmp_path: Path) -> None:
    logger = MLflowLogger(tmp_path)
    group = LoggerGroup([logger])
    group.start({"<key>": "x" * 9000, **{f"key {index}": index for index in range(250)}})
    group.log({'train/loss, "best"': 0.5, "nan": float("nan")}, step=1)
    group.close()
    (run,) = mlflow_runs(tmp_path)
    assert len(run.data.params) == 251
    assert len(run.data.params["_key_"]) == 500
    assert run.data.metrics["train/loss_ _best_"] == 0.5
    assert run.data.metrics["nan"] != run.data.metrics["nan"]


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (JSONLinesLogger, ""),
        (TensorBoardLogger, "tensorboard"),
        (WandbLogger, "wandb"),
        (MLflowLogger, "mlflow"),
    ],
)
def test_closed_logger_and_missing_package_are_errors(
    make: Any, package: str, tmp_path: Path, mocker: MockerFixture
) -> None:
    logger = make(str(tmp_path / "log"))
    assert isinstance(logger, Logger)
    assert repr(logger) == f"{make.__name__}({str(tmp_path / 'log')!r})"
    logger.close()
    with pytest.raises(RuntimeError, match=r"is not open. Call start\(\{\}\) before log"):
        logger.log({"train/loss": 0.5}, step=1)
    assert list(tmp_path.iterdir()) == []
    if package:
        mocker.patch("automicro.loggers.servers.importlib.util.find_spec", return_value=None)
        with pytest.raises(ImportError, match=f"is not installed: pip install {package}$"):
            make("runs/one")


@pytest.mark.parametrize("content", ["", '{"run": "1f2e"}'])
def test_file_without_run_id_is_left_unchanged(content: str, tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="does not name the run to continue"):
        WandbLogger(tmp_path).start({}, resume_step=3)
    assert path.read_text(encoding="utf-8") == content
