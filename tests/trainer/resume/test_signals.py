"""SIGTERM, Ctrl-C and the time limit in a process that trains from the command line."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from automicro.checkpoints.reading import load_checkpoint
from automicro.cli import main
from tests.processes import end, start
from tests.trainer.resume.lives import warm_up
from tests.trainer.resume.trials import assert_same

pytestmark = pytest.mark.sweep

# The fifth batch waits for the file "go".
MODULE = """\
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset


class Waiting(torch.nn.Module):
    calls = 0

    def forward(self, outputs, targets):
        Waiting.calls += 1
        if Waiting.calls == 5 and not Path("go").exists():
            Path("ready").touch()
            while not Path("go").exists():
                time.sleep(0.005)
        return torch.nn.functional.cross_entropy(outputs, targets)


def loader():
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows[:, :2].argmax(1)), batch_size=16, shuffle=True)


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 2))
"""
JOB = """\
model: {call: resume_job.model}
train_dataloader: {call: resume_job.loader}
loss_fn: {call: resume_job.Waiting}
loss_average: samples
probe: false
remember_sizes: false
optimizer: {call: torch.optim.AdamW, args: {lr: 0.01}}
max_duration: 3ep
device: cpu
seed: 3
run_dir: run
checkpoint: {}
progress: false
"""
TIMEOUT_SECONDS = 20.0
LINES = {
    signal.SIGTERM: "SIGTERM: finishing this batch, then saving; a second one stops at once",
    signal.SIGINT: "Ctrl-C: finishing this batch, then saving; press again to stop at once",
}
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
BOTH = pytest.mark.parametrize("number", LINES, ids=lambda number: number.name)


class Folder:
    """A job in its own folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self._running: set[int] = set()
        path.mkdir()
        (path / "resume_job.py").write_text(MODULE, encoding="utf-8")
        (path / "job.yaml").write_text(JOB, encoding="utf-8")

    def train(self, *overrides: str) -> int:
        """Start a process that trains, and return its ID."""

        def work() -> None:
            os.chdir(self.path)
            sys.path.insert(0, str(self.path))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.exit(main(["train", "job.yaml", *overrides]))

        process = start(work, log=self.log)
        self._running.add(process)
        return process

    def end(self, process: int) -> int:
        self._running.discard(process)
        return end(process, log=self.log, timeout_seconds=TIMEOUT_SECONDS)

    def end_all(self) -> None:
        """Kill processes that a failed test left behind."""
        for process in self._running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def train_to_the_end(self, *overrides: str) -> None:
        (self.path / "go").touch()
        assert self.end(self.train(*overrides)) == 0, self.log.read_text()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def wait_for_line(self, line: str) -> None:
        self.wait_for(lambda: line in self.log.read_text())

    def wait_until_ready(self) -> None:
        self.wait_for((self.path / "ready").exists)

    def finish_batch(self) -> None:
        (self.path / "go").touch()

    def checkpoint(self) -> dict:
        state = load_checkpoint(self.path / "run" / "checkpoints").state
        for phase in ("train", "eval"):
            del state["progress"][phase]["seconds"]
        return state


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    warm_up()
    made = Folder(tmp_path / "job")
    yield made
    made.end_all()


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict:
    warm_up()
    other = Folder(tmp_path / "undisturbed")
    other.train_to_the_end()
    return other.checkpoint()


@BOTH
@pytest.mark.parametrize("again", [False, True])
def test_first_signal_finishes_step_and_second_stops_at_once(
    folder: Folder, undisturbed: dict, number: signal.Signals, again: bool
) -> None:
    process = folder.train()
    folder.wait_until_ready()
    os.kill(process, number)
    folder.wait_for_line(LINES[number])
    if again:
        os.kill(process, number)  # the batch never finishes
    else:
        folder.finish_batch()
    assert folder.end(process) == CODES[number]
    said = f"{LINES[number].partition(':')[0]}: stopped after batch 5, saved in run/checkpoints"
    assert again or said in " ".join(folder.log.read_text().split())
    assert folder.checkpoint()["progress"]["batch"] == (4 if again else 5)
    folder.train_to_the_end()
    assert_same(folder.checkpoint(), undisturbed)


def test_run_saves_at_time_limit_and_resumes_as_undisturbed(
    folder: Folder, undisturbed: dict
) -> None:
    process = folder.train("max_time=1s")
    folder.wait_until_ready()
    time.sleep(1.0)
    folder.finish_batch()
    assert folder.end(process) == 0, folder.log.read_text()
    assert "max_time is over" in folder.log.read_text()
    assert folder.checkpoint()["progress"]["batch"] == 5

    folder.train_to_the_end()
    assert_same(folder.checkpoint(), undisturbed)


@pytest.mark.slow
@BOTH
def test_installed_command_exits_with_signal_code(
    folder: Folder, undisturbed: dict, number: signal.Signals
) -> None:
    command = [str(Path(sys.executable).with_name("automicro")), "train", "job.yaml"]
    with folder.log.open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder.path, stdout=log, stderr=log, start_new_session=True
        )
        try:
            folder.wait_until_ready()
            process.send_signal(number)
            folder.wait_for_line(LINES[number])
            folder.finish_batch()
            assert process.wait(TIMEOUT_SECONDS) == CODES[number]
        finally:
            process.kill()
            process.wait()
    folder.train_to_the_end()
    assert_same(folder.checkpoint(), undisturbed)
