"""``torchrun -m automicro train``: recovery, errors, signals and lost hosts of real processes."""

import contextlib
import datetime
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from automicro import Microbatcher
from automicro.ranks.coordinated import open_exchange
from automicro.ranks.heartbeat import EXIT_CODE, watch_peers
from automicro.torch_private_distributed import TCPStore
from tests.ranks.wrapping import raised, wrapped

JOB = """
global_batch_size: 128
model: {call: wide.make_model}
train_dataloader: {call: wide.loader, args: {batch_size: "${global_batch_size}", rows: 200}}
eval_dataloader: {call: wide.loader, args: {batch_size: 32, rows: 45}}
loss_fn: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: wide.SGD, args: {lr: 0.1}}
max_duration: 2ep
seed: 0
device: cpu
remember_sizes: false
run_dir: "runs/one"
"""
MODULE = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

calls = {}

def reach(where):
    calls[where] = calls.get(where, 0) + 1
    if os.environ.get("STOP") == f"{where} {calls[where]}" and os.environ["GROUP_RANK"] == "1":
        open("stopped", "w").close()
        # The agent first: it would notice nothing, and it must not go on alone.
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

class Hooked(nn.Module):
    def forward(self, inputs):
        time.sleep(float(os.environ.get("SLOW", 0)))
        if torch.is_grad_enabled():
            # After the last layer's bucket is ready, and before the first layer's.
            inputs.register_hook(lambda gradient: reach("backward"))
        return inputs

def make_model():
    layers = nn.Linear(6, 512), Hooked(), nn.Tanh(), nn.Linear(512, 3)
    return nn.Sequential(*layers).double()

class Rows(Dataset):
    def __init__(self, rows):
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        self.targets = self.inputs[:, :3].argmax(1)
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        reach("data")
        if str(index) == os.environ.get("BROKEN"):
            raise KeyError(f"row {index} is broken")
        return self.inputs[index], self.targets[index]

class SGD(torch.optim.SGD):
    def state_dict(self):
        reach("save")
        return super().state_dict()

def loader(batch_size, rows):
    return DataLoader(Rows(rows), batch_size=batch_size)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def launch(folder: Path, *arguments: str, launcher: list[str], **env: str) -> Any:
    """Start a job in a folder, in a session of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    (folder / "wide.py").write_text(MODULE, encoding="utf-8")
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "automicro", "train", "job.yaml", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def two_ranks(folder: Path, *arguments: str, **env: str) -> Iterator[Any]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    with ending(launch(folder, *arguments, launcher=launcher, **env)) as job:
        yield job


@contextlib.contextmanager
def ending(job: Any) -> Iterator[Any]:
    """Kill a job and its processes at the end, stopped or not."""
    try:
        yield job
    finally:
        kill_host(job)


def children_of(job: Any) -> list[int]:
    path = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [*map(int, path.read_text(encoding="ascii").split())] if path.exists() else []


def kill_host(job: Any) -> None:
    for pid in [*children_of(job), job.pid] if job.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.communicate()


def signal_rank(job: Any, rank: int, number: int) -> None:
    for pid in children_of(job):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            os.kill(pid, number)


def wait_for(job: Any, beginning: str) -> None:
    """Read until a line starts with this text."""
    lines = []
    for line in job.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return
    raise AssertionError("".join(lines))


def output_of(job: Any, *, code: int = 0, within_seconds: float = 180.0) -> str:
    said: str = job.communicate(timeout=within_seconds)[0]
    assert job.returncode == code, said
    return said


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / "runs/one/weights.pt")
    return loaded


@pytest.mark.slow
def test_job_recovers_and_matches_one_process(tmp_path: Path) -> None:
    limit = "memory_limit=${oc.env:LIMIT_${oc.env:RANK}}"
    limits = {"LIMIT_0": "1GiB", "LIMIT_1": "600KiB"}
    with two_ranks(tmp_path / "together", "parallel=fsdp", limit, **limits) as job:
        said = output_of(job)
    assert "fsdp, 2 ranks" in said
    assert said.count("wrote config.yaml, summary.json and weights.pt") == 1
    with ending(launch(tmp_path / "alone", "parallel=ddp", launcher=[])) as job:
        assert "ddp, 1 rank (start more with torchrun)" in output_of(job)
    found, expected = (
        json.loads((tmp_path / name / "runs/one/summary.json").read_text(encoding="utf-8"))
        for name in ("together", "alone")
    )
    assert found["train_ooms"] > 0
    assert found["samples"] == expected["samples"] == 400
    assert found["eval_metrics"] == pytest.approx(expected["eval_metrics"], abs=1e-9)
    ours, theirs = weights(tmp_path / "together"), weights(tmp_path / "alone")
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) < 1e-9


@pytest.mark.slow
def test_error_names_its_rank_and_others_end_with_one_line(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "parallel=ddp", BROKEN="70") as job:
        said = output_of(job, code=1)
    assert "automicro: the run failed: KeyError: 'row 70 is broken'" in said
    assert "this happened on rank 1 of 2" in said
    root_cause = said.partition("Root Cause")[2]  # torchrun's summary
    assert "rank      : 1 " in root_cause
    assert "KeyError: 'row 70 is broken'" in root_cause
    assert "automicro: rank 0 of 2 stops because another rank failed: rank 1: KeyError" in said
    assert "Traceback" not in said.partition("torch/distributed/elastic")[0]


ENDLESS = ("parallel=ddp", "max_duration=500ep")


@pytest.mark.slow
def test_sigterm_on_one_rank_ends_all_after_same_batch(tmp_path: Path) -> None:
    with two_ranks(tmp_path, *ENDLESS, "checkpoint={}", SLOW="0.02") as job:
        wait_for(job, "epoch 1/500")
        signal_rank(job, 1, signal.SIGTERM)
        said = job.communicate(timeout=60)[0]
    assert len(re.findall(r"(?m)^automicro: SIGTERM: stopped after batch \d+, saved in", said)) == 1
    assert len(list(tmp_path.glob("runs/*/checkpoints/*-step-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "end"),
    [
        (["checkpoint={interval: 2ba}"], r"the same command with run_dir=runs/.*from there$"),
        ([], r"the same command starts over; with checkpoint=\{\} it can resume$"),
    ],
    ids=["with checkpoints", "without"],
)
def test_survivor_of_killed_rank_explains_how_to_continue(
    tmp_path: Path, options: list[str], end: str
) -> None:
    with two_ranks(tmp_path, *ENDLESS, *options, SLOW="0.02") as job:
        wait_for(job, "epoch 1/500")
        while options and not list(tmp_path.glob("runs/*/checkpoints/*-step-*/")):
            assert job.poll() is None
        signal_rank(job, 1, signal.SIGKILL)
        said = output_of(job, code=1)
    [line] = re.findall(r"(?m)^automicro: (rank 0 of 2 could not go on at .*)$", said)
    assert "rank 1 of 2 gone or stuck. A retry needs all ranks: " in line
    assert "failed attempt" not in line
    assert re.search(end, line)


# Lost hosts: the others end within the timeout, and the next start resumes


def host(folder: Path, node: int, port: int, *options: str, **env: str) -> Any:
    """Start one of two torchrun agents on this machine, each with one rank."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += [f"--node-rank={node}", "--monitor-interval=0.5", *options]
    if options:
        launcher += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={1 - node}"]
    else:
        launcher += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    arguments = "parallel=ddp", "max_duration=8ep", "checkpoint={interval: 3ba}"
    return launch(folder, *arguments, "eval_interval=null", launcher=launcher, **env)


ELASTIC = ("--rdzv-backend=c10d", "--rdzv-id=run", "--max-restarts=2")
# Rows, backwards and saves of the second host; the run has 16 batches, 3 of them before a save.
PLACES = [("data 500", ()), ("backward 9", ()), ("save 5", ()), ("data 500", ELASTIC)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("place", "options"), PLACES)
def test_run_goes_on_after_host_was_stopped(
    tmp_path: Path, place: str, options: tuple[str, ...]
) -> None:
    """The agents start again by hand, or torchrun restarts the first one with a replacement."""
    folder, port = tmp_path / "stopped", free_port()
    # Without the second, torch 2.13 does not tell a new agent where the processes meet.
    env = {"AUTOMICRO_PEER_TIMEOUT": "8", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with contextlib.ExitStack() as stack:

        def start(folder: Path, node: int, **more: str) -> Any:
            return stack.enter_context(ending(host(folder, node, port, *options, **env, **more)))

        first, second = start(folder, 0), start(folder, 1, STOP=place)
        end = time.monotonic() + 120.0
        while not (folder / "stopped").exists():
            assert time.monotonic() < end, "the second host was not stopped"
            time.sleep(0.1)
        if options:
            time.sleep(30.0)  # torchrun drops an agent after 15 s
            kill_host(second)
            start(folder, 1)
            lost = resumed = output_of(first)
        else:
            began = time.monotonic()
            lost = output_of(first, code=1)
            assert time.monotonic() - began < 120.0  # far below any timeout of torch
            kill_host(second)
            agents = [start(folder, node) for node in (0, 1)]
            resumed = output_of(agents[0])
        line = r"rank 1 of 2 is lost: no sign of life from host \S+ for 8 s, rank 0 found; rank 0"
        assert re.search(line, lost), lost
        assert "resumed from runs/one" in resumed
        port = free_port()
        for agent in [start(tmp_path / "undisturbed", node) for node in (0, 1)]:
            output_of(agent)
    ours, theirs = weights(folder), weights(tmp_path / "undisturbed")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


RANKS = 3


def join(rank: int, port: int) -> None:
    """Join the process group of a store outside the ranks."""
    torch.set_num_threads(1)
    os.environ["AUTOMICRO_PEER_TIMEOUT"] = "2"
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    timeout = datetime.timedelta(minutes=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)


def step_until_failure(rank: int, port: int, pipe: Connection) -> None:
    """Train until a step fails; report the first steps and then the failure."""
    join(rank, port)
    model = wrapped("ddp", nn.Linear(8, 8))
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=2)
    batch = (torch.ones(4, 8), torch.zeros(4, 8))
    for _ in range(3):
        microbatcher.backward(batch)
    pipe.send("began")

    def train_until_failure() -> None:
        while True:
            microbatcher.backward(batch)

    pipe.send(raised(train_until_failure))
    os._exit(0)


def wait_for_lost_peer(rank: int, port: int, pipe: Connection) -> None:
    """Watch the peers, then block in a loop that no error interrupts."""
    join(rank, port)
    watch_peers(open_exchange())
    pipe.send("began")
    while True:
        time.sleep(1.0)


@contextlib.contextmanager
def running_ranks(
    work: Callable[..., None],
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Start the ranks as processes with a store outside them, as torchrun does."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.jobs"])
    pipes = [context.Pipe() for _ in range(RANKS)]
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(rank, store.port, there))
        for rank, (_, there) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        ours = [here for here, _ in pipes]
        assert [receive(pipe) for pipe in ours] == ["began"] * RANKS
        yield processes, ours
    finally:
        for process in processes:
            stop(process, signal.SIGKILL)
            process.join()


def receive(pipe: Connection) -> Any:
    assert pipe.poll(60.0), "a rank said nothing in time"
    return pipe.recv()


def stop(process: BaseProcess, number: int = signal.SIGSTOP) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)


@pytest.mark.sweep
def test_stopped_rank_is_named_and_cannot_continue_alone() -> None:
    with running_ranks(step_until_failure) as (processes, pipes):
        stop(processes[2])
        for pipe in pipes[:2]:
            error, said = receive(pipe)
            assert error == "PeerLostError"
            assert re.match(r"rank 2 of 3 is lost: no sign of life from host \S+ for 2 s", said)
        stop(processes[2], signal.SIGCONT)
        error, said = receive(pipes[2])
        assert error == "PeerLostError"
        assert "was given up by rank" in said


@pytest.mark.slow
def test_blocked_process_ends_with_its_own_exit_code() -> None:
    with running_ranks(wait_for_lost_peer) as (processes, _):
        stop(processes[0])
        for process in processes[1:]:
            process.join(60.0)
            assert process.exitcode == EXIT_CODE
