"""W&B and MLflow: what they have after kills and resumes, each value once."""

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Place:
    """How what a logger has written is read back."""

    read: Callable[[Path], Rows]
    runs: Callable[[Path], list[str]]


def live(kind: str, folder: Path, *, resumed: int, last: int, dies: bool) -> None:
    """One life of a process that logs: it dies after a step, or closes in order."""

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

    # Forked, since to import these packages takes many times as long as such a life.
    log = folder / "said.txt"
    assert end(start(work, log=log), log=log) == (KILLED if dies else 0), log.read_text()


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "wandb": lambda folder: WandbLogger(folder, project="tests", mode="offline", tags=["test"]),
    "mlflow": lambda folder: MLflowLogger(folder, experiment="tests"),
}


def several_lives(test: Any) -> Any:
    return pytest.mark.sweep(pytest.mark.usefixtures("packages")(test))


@pytest.fixture(scope="module")
def packages() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("wandb")
        importlib.import_module("mlflow")


def wandb_records(folder: Path) -> Iterator[Any]:
    """All records of all files that W&B has written: LevelDB's format of a log."""
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
            if kind in (1, 4):  # the whole of a record, or its end
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


def mlflow_client(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def mlflow_runs(folder: Path) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = mlflow_client(folder)
        found = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return list(found)


def read_mlflow(folder: Path) -> Rows:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = mlflow_client(folder)
        return [
            (each.step, name, each.value)
            for run in mlflow_runs(folder)
            for name in run.data.metrics
            for each in client.get_metric_history(run.info.run_id, name)
        ]


PLACES = {
    "wandb": Place(read=read_wandb, runs=runs_of_wandb),
    "mlflow": Place(
        read=read_mlflow,
        runs=lambda folder: [run.info.run_id for run in mlflow_runs(folder)],
    ),
}


def expected(last: int, *, from_life: dict[int, int]) -> Rows:
    """Each value once. What a value is tells in which life it was logged."""
    rows = []
    for step in range(1, last + 1):
        life = max((start for first, start in from_life.items() if step >= first), default=0)
        value = life + 1 / 2**step
        rows += [(step, "train/loss", value)]
        rows += [(step, "eval/loss", value)] if step % 4 == 0 else []
    return sorted(rows)


@several_lives
@pytest.mark.parametrize(("kind", "dies"), [("wandb", False), ("mlflow", True)])
def test_on_a_resume_each_value_is_there_once_in_one_run(
    kind: str, dies: bool, tmp_path: Path
) -> None:
    place = PLACES[kind]
    live(kind, tmp_path, resumed=0, last=8, dies=dies)
    live(kind, tmp_path, resumed=5, last=11, dies=False)  # from an older checkpoint
    live(kind, tmp_path, resumed=11, last=14, dies=False)
    assert sorted(place.read(tmp_path)) == expected(14, from_life={9: 5, 12: 11})
    assert len(place.runs(tmp_path)) == 1


@several_lives
def test_what_wandb_may_have_lost_in_a_kill_is_handed_over_again(tmp_path: Path) -> None:
    live("wandb", tmp_path, resumed=0, last=8, dies=True)
    live("wandb", tmp_path, resumed=5, last=11, dies=False)
    again = [row for row in expected(11, from_life={6: 5}) if row[0] > 5]
    rows = sorted(read_wandb(tmp_path))
    assert [row for row in rows if row[2] > 5] == again
    assert len(runs_of_wandb(tmp_path)) == 1


@several_lives
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_run_that_begins_anew_is_another_run(kind: str, tmp_path: Path) -> None:
    for _ in range(2):
        live(kind, tmp_path, resumed=0, last=2, dies=False)
    place = PLACES[kind]
    assert len(place.runs(tmp_path)) == 2
    assert sorted(place.read(tmp_path)) == sorted(2 * expected(2, from_life={}))


@several_lives
def test_what_is_run_is_the_config_of_wandb(tmp_path: Path) -> None:
    live("wandb", tmp_path, resumed=0, last=1, dies=False)
    (run,) = (each.run for each in wandb_records(tmp_path) if each.HasField("run"))
    assert (run.project, list(run.tags)) == ("tests", ["test"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["seed"] == 0
    assert config["config"] == {"optimizer": {"args": {"lr": 0.1}}}


@several_lives
def test_what_is_run_is_the_parameters_of_mlflow(tmp_path: Path) -> None:
    live("mlflow", tmp_path, resumed=0, last=1, dies=True)
    (run,) = mlflow_runs(tmp_path)
    assert run.data.params == {"seed": "0", "config.optimizer.args.lr": "0.1"}
    assert run.info.status == "RUNNING"
    live("mlflow", tmp_path, resumed=1, last=2, dies=False)
    (run,) = mlflow_runs(tmp_path)
    assert run.info.status == "FINISHED"


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # of libraries
def test_names_and_values_that_mlflow_would_refuse(tmp_path: Path) -> None:
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


PACKAGES = [(TensorBoardLogger, "tensorboard"), (WandbLogger, "wandb"), (MLflowLogger, "mlflow")]


@pytest.mark.parametrize(("logger", "package"), PACKAGES)
def test_without_the_package_the_logger_says_what_to_install(
    logger: Any, package: str, mocker: MockerFixture
) -> None:
    mocker.patch("automicro.loggers.servers.importlib.util.find_spec", return_value=None)
    with pytest.raises(ImportError, match=f"is not installed: pip install {package}$"):
        logger("runs/one")


@pytest.mark.parametrize(
    "make", [JSONLinesLogger, TensorBoardLogger, WandbLogger, MLflowLogger], ids=repr
)
def test_a_logger_that_is_not_open_says_so(make: Any, tmp_path: Path) -> None:
    logger = make(str(tmp_path / "log"))
    assert isinstance(logger, Logger)
    assert repr(logger) == f"{make.__name__}({str(tmp_path / 'log')!r})"
    logger.close()
    with pytest.raises(RuntimeError, match=r"is not open. Call start\(\{\}\) before log"):
        logger.log({"train/loss": 0.5}, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["id", "config"])
def test_what_the_wandb_logger_sets_itself_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"sets '{name}' itself. Leave it out"):
        WandbLogger("runs/one", **{name: "x"})


@pytest.mark.parametrize("content", ["", '{"run": "1f2e"}'])
def test_a_file_that_names_no_run_is_left_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="does not name the run to continue"):
        WandbLogger(tmp_path).start({}, resume_step=3)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.sweep
def test_loggers_import_none_of_the_packages_until_they_begin(tmp_path: Path) -> None:
    code = """\
import sys
from automicro.loggers import MLflowLogger, TensorBoardLogger, WandbLogger
WandbLogger("a"), MLflowLogger("b"), TensorBoardLogger("c")
names = ("wandb", "mlflow", "sqlalchemy", "tensorboard")
print([name for name in names if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []
