"""A run of several ranks that is saved and resumed, and what goes wrong with it."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once for all worlds: the first optimizer of a process imports it
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import automicro.checkpoints.tensors  # noqa: F401  once for all worlds
from automicro.callbacks import ExponentialMovingAverage
from automicro.checkpoints.peers import ALONE, Peers, open_peers, together
from automicro.checkpoints.rng import restore_rng_state
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.events.callback import Callbacks
from automicro.events.run import LoopState, Requests, Run
from automicro.loggers import LoggerGroup
from automicro.ranks.interface import OneRank
from automicro.trainer.context import RunContext
from automicro.trainer.data.feed import Feed
from automicro.trainer.failed_batch import Failures
from automicro.trainer.optimizer import OptimizerMode
from automicro.trainer.progress import Progress
from automicro.trainer.resume.checkpointer import Checkpointer
from automicro.trainer.resume.snapshot import Part, Scope, Snapshot
from automicro.units import Duration
from tests.checkpoints.faults import Faults, fail, kill

ROWS = 12
BATCHES_PER_EPOCH = 3


class Net(nn.Module):
    def __init__(self, *, noisy: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)  # of 6 rows, so that shards are uneven at 4
        self.norm = nn.BatchNorm1d(6) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.5 if noisy else 0.0)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.last = nn.Linear(6, 1)  # of 1 row, so that shards are empty

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        for block in self.blocks:
            x = x + block(x).tanh()
        output: Tensor = self.last(x)
        return output


def wrap(net: nn.Module, kind: str) -> nn.Module:
    if kind == "plain":
        return net
    if kind == "ddp":
        return DistributedDataParallel(net, forward_sync_buffers=False)
    world = dist.get_world_size()
    shape = (2, world // 2) if kind == "hsdp" else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


class Lines(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


class Training:
    """Trains on the same rows at every world size."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        noisy: bool = False,
        averages: bool = False,
        feed: type[Feed] = Feed,
        **config: Any,
    ) -> None:
        torch.manual_seed(0)
        is_parallel = kind != "plain"
        self.peers: Peers = open_peers() if is_parallel else ALONE
        net = Net(noisy=noisy).double()
        self.model = wrap(net, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.state = LoopState()
        self.run = Run(
            state=self.state,
            model=net,
            modules=[self.model],
            optimizer=self.optimizer,
            device=torch.device("cpu"),
            requests=Requests(max_duration=Duration.parse("9ba")),
            evaluations=[],
            make_microbatcher=NotImplemented,
        )
        self.average = ExponentialMovingAverage(decay=0.5) if averages else None
        self.callbacks = Callbacks([self.average] if self.average else [])
        self.feed = feed(list(range(BATCHES_PER_EPOCH)), "train_dataloader")
        self.progress = Lines()
        context = RunContext(
            run=self.run,
            state=self.state,
            callbacks=self.callbacks,
            loggers=LoggerGroup(()),
            ranks=OneRank(),
            failures=Failures(device=torch.device("cpu")),
            mode=OptimizerMode(self.optimizer),
            progress=self.progress,
        )
        snapshot = Snapshot(
            context,
            parts={
                "scheduler": Part(owner=self.scheduler),
                "data": Part(owner=self.feed, scope=Scope.EPOCH, is_on_host=True),
            },
            peers=self.peers,
        )
        self.checkpointer = Checkpointer(
            CheckpointConfig(folder=folder, **({"interval": "1ba"} | config)),
            snapshot,
            context,
        )
        torch.manual_seed(100 + self.peers.rank)

    def resume(self) -> None:
        saved = self.checkpointer.resume()
        if saved is not None:
            restore_rng_state(saved["rng"])

    def train(self, until: int) -> None:
        self.callbacks.fire("fit_start", self.run)
        while self.state.batch < until:
            for number in self.feed.batches(self.state.epoch):
                self.step(self.state.epoch * BATCHES_PER_EPOCH + number)
                self.checkpointer.save_if_due({}, is_due=False)
                if self.state.batch == until:
                    break

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
        share = ROWS // self.peers.world_size
        mine = x[self.peers.rank * share :][:share]
        loss = (self.model(mine) - mine.sum(1, keepdim=True)).square().sum() / share
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.batch += 1
        self.state.epoch_batch += 1
        if self.state.epoch_batch == BATCHES_PER_EPOCH:
            self.state.epoch, self.state.epoch_batch = self.state.epoch + 1, 0
        if self.average:
            self.callbacks.fire("batch_end", self.run, None)
        self.model.eval()
        with torch.no_grad():  # which leaves the root of a sharded model whole
            self.model(mine)
        self.model.train()

    def everything(self, *, averages: bool = True) -> dict[str, Tensor]:
        """All that training goes on with, whole, by names that do not tell the wrapper."""
        found: dict[str, Tensor] = {}
        names: dict[Tensor, str] = {}
        self.model.state_dict()  # shards them again
        for name, parameter in self.model.named_parameters():
            names[parameter] = name.removeprefix("module.")
            found[name.removeprefix("module.")] = parameter
        for owner, slots in self.optimizer.state.items():
            found |= {f"{names[owner]}.{slot}": value for slot, value in slots.items()}
        if self.average and averages:
            found |= {f"average.{n}": v for n, v in self.average.average_state_dict().items()}
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        found["batch"] = torch.tensor(self.state.batch)
        return {name: whole(each) for name, each in found.items()}

    def of_this_rank(self) -> dict[str, Tensor]:
        return {"rng": torch.get_rng_state(), **dict(self.run.model.named_buffers())}


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


# Jobs, which every rank of a world runs.


def go_on(
    kind: str, folder: Path, until: int, *, resumes: bool = True, **options: Any
) -> dict[str, Any]:
    """Go on from the newest checkpoint, if there is one; everything at the end."""
    training = Training(kind, folder, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if resumes:
            training.resume()
        at = training.state.batch
        after_resume = training.everything(averages=False)
        training.train(until)
    return {
        "resumed_at": at,
        "after_resume": after_resume,
        "end": training.everything(),
        "own": training.of_this_rank(),
        "lines": training.progress.lines,
        "warnings": [str(each.message) for each in caught],
    }


def error_of(kind: str, folder: Path, until: int, **options: Any) -> str:
    """What is said of a run that cannot go on."""
    try:
        go_on(kind, folder, until, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def faults_here(ranks: tuple[int, ...], at: int, *, lasts: bool, kills: bool) -> Iterator[Faults]:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        if dist.get_rank() in ranks:
            hit = (lambda n: n >= at) if lasts else (lambda n: n == at)
            faults.arm(hit, kill if kills else fail)
        yield faults


def count_points(folder: Path, kind: str, **options: Any) -> int:
    """How often this rank touches the disk in one save."""
    training = Training(kind, folder, **options)
    training.train(2)
    with faults_here((), 0, lasts=False, kills=False) as faults:
        training.train(3)
        return len(faults.seen)


def fill_disk(
    folder: Path, kind: str, ranks: tuple[int, ...], at: int, **options: Any
) -> dict[str, Any]:
    """A save that fails on some ranks, and one after it; what was warned and is there then."""
    training = Training(kind, folder, **options)
    training.train(2)
    store = CheckpointStore(folder, peers=training.peers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with faults_here(ranks, at, lasts=True, kills=False):
            training.train(3)
    found = store.newest()
    training.train(4)
    last = store.newest()
    assert found is not None
    assert last is not None
    dist.barrier()
    return {
        "warnings": [str(each.message) for each in caught],
        "steps": (found.step, last.step),
        "names": sorted(path.name for path in folder.iterdir()),
    }


def die_in_save(
    folder: Path, kind: str, ranks: tuple[int, ...], at: int, **options: Any
) -> dict[str, Any]:
    """A rank dies at a point of the third save."""
    training = Training(kind, folder, **options)
    training.train(2)
    try:
        with faults_here(ranks, at, lasts=False, kills=True):
            training.train(3)
            training.train(4)
    except RuntimeError as error:
        return {"kind": "PeerLostError", "was": type(error).__name__, "text": str(error)}
    return {"kind": "PeerLostError", "was": None, "text": ""}


def raise_in_gather(folder: Path, kind: str) -> dict[str, str]:
    """What each rank says where the state of one of them cannot be gathered."""
    training = Training(kind, folder)
    if dist.get_rank() == 1:
        training.scheduler.state_dict = NotImplemented  # type: ignore[method-assign]
    try:
        training.train(1)
    except Exception as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {"text": ""}


def newest(folder: Path) -> tuple[int | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = CheckpointStore(folder, peers=open_peers()).newest()
    return None if found is None else found.step, [str(each.message) for each in caught]


def fail_together(errors: list[Exception | None]) -> str:
    """What each rank says where some of them fail in the same work."""
    mine = errors[dist.get_rank()]

    def work() -> None:
        if mine is not None:
            raise mine

    peers = open_peers()
    try:
        together(peers, work)
    except Exception as error:
        assert together(peers, lambda: "and goes on") == "and goes on"
        return f"{type(error).__name__}: {error}"
    return ""
