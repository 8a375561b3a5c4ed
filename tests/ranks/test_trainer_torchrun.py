"""``torchrun -m automicro train``: a job on real processes from the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch

pytestmark = pytest.mark.slow  # each test starts processes that import torch

JOB = """
global_batch_size: 128
model: {call: wide.make_model}
train_dataloader: {call: wide.loader, args: {batch_size: "${global_batch_size}", rows: 200}}
eval_dataloader: {call: wide.loader, args: {batch_size: 32, rows: 45}}
loss_fn: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: torch.optim.SGD, args: {lr: 0.1}}
metrics:
  accuracy:
    call: torchmetrics.classification.MulticlassAccuracy
    args: {num_classes: 3, average: micro}
max_duration: 2ep
seed: 0
device: cpu
remember_sizes: false
run_dir: "runs/${now:%H-%M-%S}"
"""
MODULE = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(nn.Module):
    def forward(self, inputs):
        time.sleep(float(os.environ.get("SLOW", 0)))
        return inputs

def make_model():
    return nn.Sequential(
        nn.Linear(6, 512, dtype=torch.float64), Slow(), nn.Tanh(),
        nn.Linear(512, 3, dtype=torch.float64),
    )

class Rows(Dataset):
    def __init__(self, rows):
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        self.targets = self.inputs[:, :3].argmax(1)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        if str(index) == os.environ.get("BROKEN"):
            raise KeyError(f"row {index} is broken")
        return self.inputs[index], self.targets[index]

def loader(batch_size, rows):
    return DataLoader(Rows(rows), batch_size=batch_size)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def launch(folder: Path, *command: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python command in a folder, with one thread and additional variables."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **options.pop("env")}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


class Run:
    """A job under torchrun, or in one process."""

    def __init__(self, folder: Path, *arguments: str, processes: int, **env: str) -> None:
        (folder / "job.yaml").write_text(JOB, encoding="utf-8")
        (folder / "wide.py").write_text(MODULE, encoding="utf-8")
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
            launcher += [f"--master-port={free_port()}"]
        command = [*launcher, "-m", "automicro", "train", "job.yaml", *arguments]
        self.process = launch(folder, *command, env=env)

    def wait_for(self, beginning: str) -> None:
        """Read until a line starts with this text."""
        assert self.process.stdout is not None
        stdout: IO[str] = self.process.stdout
        lines = []
        for line in stdout:
            lines.append(line)
            if line.startswith(beginning):
                return
        raise AssertionError("".join(lines))

    def signal_rank(self, rank: int, number: int) -> None:
        agent = self.process.pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="ascii")
        for pid in children.split():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                os.kill(int(pid), number)

    def end(self, *, within_seconds: float = 60.0) -> str:
        try:
            return self.process.communicate(timeout=within_seconds)[0]
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its processes
            raise


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("runs/*/weights.pt")
    loaded: dict[str, torch.Tensor] = torch.load(path)
    return loaded


def summary(folder: Path) -> dict[str, object]:
    (path,) = folder.glob("runs/*/summary.json")
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_job_recovers_and_matches_one_process(tmp_path: Path) -> None:
    for name in ("together", "alone"):
        (tmp_path / name).mkdir()
    together = Run(
        tmp_path / "together",
        "parallel=fsdp",
        "memory_limit=${oc.env:LIMIT_${oc.env:RANK}}",
        processes=2,
        LIMIT_0="1GiB",
        LIMIT_1="600KiB",
    )
    alone = Run(tmp_path / "alone", "parallel=ddp", processes=1)
    said = together.end()
    assert together.process.returncode == 0, said
    assert "fsdp, 2 ranks" in said
    assert said.count("wrote config.yaml, summary.json and weights.pt") == 1
    assert "ddp, 1 rank (start more with torchrun)" in alone.end()
    found, expected = summary(tmp_path / "together"), summary(tmp_path / "alone")
    assert isinstance(found["train_ooms"], int)
    assert found["train_ooms"] > 0
    assert found["samples"] == expected["samples"] == 400
    assert found["eval_metrics"] == pytest.approx(expected["eval_metrics"], abs=1e-9)
    ours, theirs = weights(tmp_path / "together"), weights(tmp_path / "alone")
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) < 1e-9


def test_error_names_its_rank_and_others_end_with_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "parallel=ddp", processes=2, BROKEN="70")
    said = run.end()
    assert run.process.returncode == 1
    assert "automicro: the run failed: KeyError: 'row 70 is broken'" in said
    assert "this happened on rank 1 of 2" in said
    root_cause = said.partition("Root Cause")[2]  # torchrun's summary
    assert "rank      : 1 " in root_cause
    assert "KeyError: 'row 70 is broken'" in root_cause
    assert "automicro: rank 0 of 2 stops because another rank failed: rank 1: KeyError" in said
    ours = said.partition("torch/distributed/elastic")[0]
    assert "Traceback" not in ours


def test_config_error_is_reported_in_one_line_per_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, "parallel=ddp", "max_duratoin=3ep", processes=2)
    said = run.end()
    assert run.process.returncode == 1  # the exit code of torchrun
    assert (
        len(re.findall(r"(?m)^automicro: (rank 1 of 2: )?the override .*'max_duration'", said)) == 2
    )
    assert said.count("exitcode  : 2") >= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_on_one_rank_ends_all_after_same_batch(tmp_path: Path, rank: int) -> None:
    run = Run(
        tmp_path, "parallel=ddp", "max_duration=500ep", "checkpoint={}", processes=2, SLOW="0.02"
    )
    run.wait_for("epoch 1/500")
    run.signal_rank(rank, signal.SIGTERM)
    said = run.end()
    assert len(re.findall(r"(?m)^automicro: SIGTERM: stopped after batch \d+, saved in", said)) == 1
    assert len(list(tmp_path.glob("runs/*/checkpoints/*-step-*"))) == 1


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (["checkpoint={interval: 2ba}"], "the same command with run_dir=runs/"),
        ([], "the same command starts over; with checkpoint={} it can resume"),
    ],
    ids=["with checkpoints", "without"],
)
def test_survivor_of_killed_rank_explains_how_to_continue(
    tmp_path: Path, options: list[str], end: str
) -> None:
    run = Run(tmp_path, "parallel=ddp", "max_duration=500ep", *options, processes=2, SLOW="0.02")
    run.wait_for("epoch 1/500")
    while options and not list(tmp_path.glob("runs/*/checkpoints/*-step-*/")):
        assert run.process.poll() is None
    run.signal_rank(1, signal.SIGKILL)
    said = run.end()
    assert run.process.returncode == 1
    [line] = re.findall(r"(?m)^automicro: (rank 0 of 2 could not go on at .*)$", said)
    assert "rank 1 of 2 gone or stuck. A retry needs all ranks: " in line
    assert "failed attempt" not in line
    assert end in line
    assert line.endswith("it can resume" if not options else "resumes from there")
