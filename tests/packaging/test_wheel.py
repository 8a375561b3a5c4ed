"""The wheel works in a new environment, as installed by users: newest torch, no extras.

On Linux, torch comes with CUDA on every machine, a download of several gigabytes.
"""

import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NEEDED_BYTES = 12 * 2**30  # while pip unpacks its downloads
INSTALL_SECONDS = 2700
RUN_SECONDS = 600


class Installed:
    """An environment with the wheel, and an empty working folder with a config."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "environment" / "bin"
        self.work = folder / "work"

    def install(self, *what: str) -> None:
        """Install by pip, or fail with pip's output."""
        command = [str(self.bin / "pip"), "install", "--no-cache-dir", *what]
        try:
            done = self._run(command, INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"pip install {' '.join(what)} took more than {INSTALL_SECONDS} s: this machine "
                "cannot download what anyone gets, so nothing of it was tested",
                pytrace=False,
            )
        if done.returncode:
            pytest.fail(
                f"pip install {' '.join(what)} failed, so nothing of what anyone gets was tested. "
                f"It needs a package index and room for some gigabytes:\n{done.stderr[-4000:]}",
                pytrace=False,
            )

    def output_of(self, *command: str, code: int = 0) -> str:
        """Return the output of a command in the environment, which must exit with a given code."""
        done = self._run([str(self.bin / command[0]), *command[1:]], RUN_SECONDS)
        said = done.stdout + done.stderr
        assert done.returncode == code, said[-8000:]
        return done.stdout if code == 0 else said

    def _run(self, command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        environment = {**inherited, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            command,
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        pytest.fail(
            f"{folder} has {free / 2**30:.1f} GiB free, and {NEEDED_BYTES / 2**30:.0f} are needed "
            "to install the newest torch: make room, or point TMPDIR elsewhere",
            pytrace=False,
        )
    environment = Installed(folder)
    environment.work.mkdir()
    shutil.copy(ROOT / "configs" / "digits.yaml", environment.work / "job.yaml")
    try:
        venv.create(environment.bin.parent, with_pip=True)
        environment.install(str(wheel))
        yield environment
    finally:
        shutil.rmtree(folder)  # it holds several gigabytes


@pytest.fixture(scope="module")
def with_digits(installed: Installed) -> Installed:
    """Add the package that the error message names for training on the digits."""
    said = installed.output_of("automicro", "train", "job.yaml", code=2)
    assert re.search(r"scikit-learn.* is not installed", said), said
    assert "pip install" in said
    installed.install("scikit-learn")
    return installed


def test_install_adds_no_extras(installed: Installed) -> None:
    listed = json.loads(installed.output_of("pip", "list", "--format", "json"))
    names = {each["name"].lower() for each in listed}
    extras = {"scikit-learn", "transformers", "tensorboard", "wandb", "mlflow-skinny", "pytest"}
    assert {"automicro", "torch", "torchmetrics", "omegaconf", "rich"} <= names
    assert not names & extras
    ask = """\
import automicro, torch
kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
print(automicro.__file__, torch.__version__, f"built for {kind}, {count} there")
"""
    said = installed.output_of("python", "-c", ask)
    assert said.startswith(str(installed.bin.parent))
    print(said)  # shows the version of torch


def test_commands_without_data_work(installed: Installed) -> None:
    assert installed.output_of("automicro", "--version").startswith("automicro ")
    for command in ("train", "eval", "verify", "config", "cache"):
        assert f"automicro {command}" in installed.output_of("automicro", command, "--help")
    assert "max_duration" in installed.output_of("automicro", "config", "--keys")
    assert "model:" in installed.output_of("automicro", "config", "--template")
    assert "memory_limit: 8MiB" in installed.output_of("automicro", "config", "job.yaml", "--set")
    assert "size is remembered" in installed.output_of("automicro", "cache")


def test_digits_training_finishes_and_evaluates(with_digits: Installed) -> None:
    with_digits.output_of("automicro", "train", "job.yaml", "run_dir=runs/digits")
    text = (with_digits.work / "runs/digits/summary.json").read_text(encoding="utf-8")
    trained = json.loads(text)
    assert trained["train_ooms"] > 0
    assert trained["eval_metrics"]["accuracy"] > 0.95
    weights = "weights=runs/digits/weights.pt"
    found = json.loads(with_digits.output_of("automicro", "eval", "job.yaml", weights, "--json"))
    assert found["accuracy"] == trained["eval_metrics"]["accuracy"]


def test_verify_finds_digits_exact(with_digits: Installed) -> None:
    small = ["train_dataloader.args.batch_size=9", "model.args.channels=8"]
    assert with_digits.output_of("automicro", "verify", "job.yaml", *small).startswith("exact")


def summary(environment: Installed, *options: str, processes: int) -> dict[str, Any]:
    command = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "-m", "automicro"]
    # Ranks draw different random numbers.
    command += ["train", "job.yaml", "max_duration=4ba", "model.args.dropout=0.0", "--json"]
    command += options
    found: dict[str, Any] = json.loads(environment.output_of(*command))
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_match_one_process(with_digits: Installed, parallel: str) -> None:
    alone = summary(with_digits, f"parallel={parallel}", processes=1)
    together = summary(with_digits, f"parallel={parallel}", processes=2)
    assert together["steps"] == alone["steps"] == 4
    assert together["train_ooms"] > 0
    assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-3)
    loss = alone["eval_metrics"]["loss"]
    assert together["eval_metrics"]["loss"] == pytest.approx(loss, rel=1e-3)
