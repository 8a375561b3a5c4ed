"""When a host is lost, the others end within the timeout, and the next start resumes."""

import contextlib
import datetime
import multiprocessing
import os
import re
import signal
import subprocess
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
from tests.ranks.test_trainer_torchrun import JOB, MODULE, free_port, launch, weights
from tests.ranks.wrapping import raised, wrapped

pytestmark = pytest.mark.sweep


GROUP_TIMEOUT = datetime.timedelta(minutes=30)


def join(rank: int, port: int, seconds: str) -> None:
    """Join the process group of a store outside the ranks."""
    torch.set_num_threads(1)
    os.environ["AUTOMICRO_PEER_TIMEOUT"] = seconds
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=GROUP_TIMEOUT)


def step_until_failure(rank: int, port: int, seconds: str, kind: str, pipe: Connection) -> None:
    """Train until a step fails; report the first steps and then the failure."""
    join(rank, port, seconds)
    model = wrapped(kind, nn.Linear(8, 8))
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=2)
    batch = (torch.ones(4, 8), torch.zeros(4, 8))
    for _ in range(3):
        microbatcher.backward(batch)
    pipe.send("steps")

    def train_until_failure() -> None:
        while True:
            microbatcher.backward(batch)

    pipe.send(raised(train_until_failure))
    os._exit(0)


def wait_for_lost_peer(rank: int, port: int, seconds: str, kind: str, pipe: Connection) -> None:
    """Watch the peers, then block in a loop that no error interrupts."""
    join(rank, port, seconds)
    watch_peers(open_exchange())
    pipe.send("waits")
    while True:
        time.sleep(1.0)


RANKS = 3
STOP = """
import signal

def stop_host():
    # The agent first: it would notice nothing, and it must not go on alone.
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)

calls = {}

def reach(where):
    calls[where] = calls.get(where, 0) + 1
    wanted, _, number = os.environ.get("STOP", "").partition(" ")
    if wanted == where and calls[where] == int(number) and os.environ["GROUP_RANK"] == "1":
        open("stopped", "w").close()
        stop_host()

class Stopping(nn.Module):
    def forward(self, inputs):
        if torch.is_grad_enabled():
            inputs.requires_grad_(True)
            inputs.register_hook(lambda gradient: reach("backward"))
        return inputs

class StoppingRows(Rows):
    def __getitem__(self, index):
        reach("data")
        return super().__getitem__(index)

class StoppingOptimizer(torch.optim.SGD):
    def state_dict(self):
        reach("save")
        return super().state_dict()

def make_stopping_model():
    # The hook runs after the last layer's bucket is ready and before the first layer's.
    layers = list(make_model())
    return nn.Sequential(*layers[:3], Stopping(), *layers[3:])

def stopping_loader(batch_size, rows):
    return DataLoader(StoppingRows(rows), batch_size=batch_size)
"""


@contextlib.contextmanager
def running_ranks(
    work: Callable[..., None], kind: str, *, timeout_seconds: float = 2.0
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Start the ranks as processes with a store outside them, as torchrun does."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.jobs"])
    pipes, processes = [], []
    try:
        for rank in range(RANKS):
            here, there = context.Pipe()
            arguments = (rank, store.port, str(timeout_seconds), kind, there)
            process = context.Process(target=work, args=arguments)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield list(processes), pipes
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in pipes:
            pipe.close()


def receive(pipe: Connection, *, within_seconds: float = 60.0) -> Any:
    assert pipe.poll(within_seconds), "a rank said nothing in time"
    return pipe.recv()


def stop(process: BaseProcess, number: int = signal.SIGSTOP) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_stopped_rank_is_named_and_cannot_continue_alone(kind: str) -> None:
    with running_ranks(step_until_failure, kind) as (processes, pipes):
        assert [receive(pipe) for pipe in pipes] == ["steps"] * RANKS
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
    with running_ranks(wait_for_lost_peer, "ddp") as (processes, pipes):
        assert [receive(pipe) for pipe in pipes] == ["waits"] * RANKS
        stop(processes[0])
        for process in processes[1:]:
            process.join(60.0)
            assert process.exitcode == EXIT_CODE


@pytest.mark.slow
def test_stop_shorter_than_timeout_raises_no_alarm() -> None:
    with running_ranks(step_until_failure, "ddp", timeout_seconds=20.0) as (processes, pipes):
        assert [receive(pipe) for pipe in pipes] == ["steps"] * RANKS
        for process in processes:  # one after another
            stop(process)
            time.sleep(5.0)
            stop(process, signal.SIGCONT)
        time.sleep(3.0)
        assert not any(pipe.poll() for pipe in pipes)


class Hosts:
    """Two torchrun agents on this machine, each with one rank."""

    def __init__(self, folder: Path, *, options: tuple[str, ...] = (), **env: str) -> None:
        (folder / "job.yaml").write_text(
            JOB.replace("wide.make_model", "wide.make_stopping_model")
            .replace(
                "train_dataloader: {call: wide.loader",
                "train_dataloader: {call: wide.stopping_loader",
            )
            .replace("torch.optim.SGD", "wide.StoppingOptimizer")
            .replace('"runs/${now:%H-%M-%S}"', "runs/one"),
            encoding="utf-8",
        )
        (folder / "wide.py").write_text(MODULE + STOP, encoding="utf-8")
        self._folder = folder
        self._options = options
        self._port = free_port()
        self._env = env
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, node: int, **env: str) -> subprocess.Popen[str]:
        command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--node-rank={node}", "--monitor-interval=0.5"]
        if any("rdzv" in each for each in self._options):
            command += [f"--rdzv-endpoint=127.0.0.1:{self._port}"]
            command += [f"--rdzv-conf=is_host={1 - node}"]
        else:
            command += ["--master-addr=127.0.0.1", f"--master-port={self._port}"]
        command += [*self._options, "-m", "automicro", "train", "job.yaml", "parallel=ddp"]
        command += ["max_duration=8ep", "eval_interval=null", "checkpoint={interval: 3ba}"]
        given = {**self._env, **env}
        agent = launch(self._folder, *command, env=given, start_new_session=True)
        self.agents.append(agent)
        return agent

    def wait_for_stop(self, *, within_seconds: float = 120.0) -> None:
        end = time.monotonic() + within_seconds
        while not (self._folder / "stopped").exists():
            assert time.monotonic() < end, "the second host was not stopped"
            time.sleep(0.1)


def kill_host(agent: subprocess.Popen[str]) -> None:
    """Kill the agent and its workers, stopped or not."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    pids = children.read_text(encoding="ascii").split() if children.exists() else []
    for pid in [*map(int, pids), agent.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.communicate()


@contextlib.contextmanager
def two_hosts(folder: Path, *, options: tuple[str, ...] = (), **env: str) -> Iterator[Hosts]:
    folder.mkdir()
    hosts = Hosts(folder, options=options, **env)
    try:
        yield hosts
    finally:
        for agent in hosts.agents:
            if agent.poll() is None:
                kill_host(agent)


def output_of(agent: subprocess.Popen[str], *, within_seconds: float = 180.0) -> str:
    return agent.communicate(timeout=within_seconds)[0]


def require_undisturbed_result(folder: Path) -> None:
    with two_hosts(folder / "undisturbed") as hosts:
        agents = [hosts.start(node) for node in (0, 1)]
        for agent in agents:
            said = output_of(agent)
            assert agent.returncode == 0, said
    ours, theirs = weights(folder / "stopped"), weights(folder / "undisturbed")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


# Rows, backwards and saves of the second host; the run has 16 batches, 3 of them before a save.
PLACES = ["data 500", "backward 9", "save 5"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", PLACES)
def test_first_host_ends_after_second_stops_and_restart_resumes(tmp_path: Path, place: str) -> None:
    with two_hosts(tmp_path / "stopped", AUTOMICRO_PEER_TIMEOUT="8") as hosts:
        first, second = hosts.start(0), hosts.start(1, STOP=place)
        hosts.wait_for_stop()
        began = time.monotonic()
        said = output_of(first)
        assert first.returncode == 1, said
        assert time.monotonic() - began < 120.0  # far below any timeout of torch
        assert re.search(
            r"automicro: rank 1 of 2 is lost: no sign of life from host \S+ for 8 s, rank 0 found; "
            "rank 0 stops",
            said,
        ), said
        kill_host(second)
        agents = [hosts.start(node) for node in (0, 1)]
        resumed = output_of(agents[0])
        assert agents[0].returncode == 0, resumed
        assert "resumed from runs/one" in resumed
        output_of(agents[1])
    require_undisturbed_result(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_restarts_with_replacement_for_stopped_host(
    tmp_path: Path,
) -> None:
    options = ("--rdzv-backend=c10d", "--rdzv-id=run", "--max-restarts=2")
    # Without this, torch 2.13 does not tell a new agent where the processes meet.
    env = {"AUTOMICRO_PEER_TIMEOUT": "8", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with two_hosts(tmp_path / "stopped", options=options, **env) as hosts:
        first, second = hosts.start(0), hosts.start(1, STOP="data 500")
        hosts.wait_for_stop()
        time.sleep(30.0)  # torchrun drops an agent after 15 s
        kill_host(second)
        replacement = hosts.start(1)
        said = output_of(first)
        assert first.returncode == 0, f"{said}\n{output_of(replacement)}"
        assert "is lost: no sign of life" in said
        assert "resumed from runs/one" in said
        output_of(replacement)
    require_undisturbed_result(tmp_path)
