"""Runs of several ranks that save and resume, with and without faults."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # imported once for all worlds: the first optimizer of a process needs it
import torch.distributed as dist
from torch import Tensor

import automicro.checkpoints.tensors  # noqa: F401  once for all worlds
from automicro import Callback, CheckpointConfig, Trainer
from automicro.callbacks import ExponentialMovingAverage
from automicro.checkpoints.peers import open_peers, together
from automicro.checkpoints.store import CheckpointStore
from automicro.features import Optimization
from automicro.trainer.progress import Progress
from tests.checkpoints.faults import Faults, fail, kill
from tests.ranks import trainer_jobs
from tests.ranks.trainer_jobs import Net, make_loader
from tests.ranks.wrapping import raised, whole, wrapped

BATCHES_PER_EPOCH = 3


class Faulty(Callback):
    """Injects faults into the save after one batch, until the next batch begins."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, is_hit: Any, fault: Any) -> None:
        self.faults, self.points, self.newest_step = Faults(patch), 0, -1
        self._folder, self._is_hit, self._fault = folder, is_hit, fault

    def checkpoint_start(self, run: Any) -> None:
        if run.state.batch == BATCHES_PER_EPOCH:
            self.faults.arm(self._is_hit, self._fault)

    def batch_start(self, run: Any, batch: Any) -> None:
        if run.state.batch == BATCHES_PER_EPOCH:
            self.points = len(self.faults.seen)
            self.faults.disarm()
            self.newest_step = newest(self._folder)[0] or 0


class Resumed(Callback):
    """Records the state that a run resumes from."""

    def fit_start(self, run: Any) -> None:
        self.at = run.state.batch
        self.state = everything(run)


def everything(run: Any, average: Any = None) -> dict[str, Tensor]:
    """Return all state of training, unsharded, with names that do not depend on the wrapper."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    found: dict[str, Any] = {name: parameter for parameter, name in names.items()}
    for owner, slots in run.optimizer.state.items():
        found |= {f"{names[owner]}.{slot}": value for slot, value in slots.items()}
    if average is not None:
        found |= {f"average.{n}": v for n, v in average.average_state_dict().items()}
    found["lr"] = torch.tensor(run.optimizer.param_groups[0]["lr"])
    found["batch"] = torch.tensor(run.state.batch)
    return {name: whole(each).clone() for name, each in found.items()}


step_lr = torch.optim.lr_scheduler.StepLR


def make_trainer(
    kind: str, folder: Path, until: int, *callbacks: Callback, noisy: bool = False, **more: Any
) -> Trainer:
    torch.manual_seed(0)
    net = Net(noisy=noisy)
    scheduler = more.pop("scheduler", functools.partial(step_lr, step_size=2, gamma=0.5))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return trainer_jobs.make_trainer(
        wrapped(kind, net, *net.blocks),
        train_dataloader=make_loader(36, 12 // world_size, shuffle=False),
        eval_dataloader=None,
        metrics=None,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.05),
        features=[Optimization(scheduler, "batch")],
        max_duration=f"{until}ba",
        callbacks=callbacks,
        checkpoint=CheckpointConfig(folder=folder, interval="1ba"),
        batchnorm="ignore",
    )


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect warnings."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught]


# Jobs for all ranks of a world.


def resume_run(
    kind: str, folder: Path, until: int, *, averages: bool = False, **options: Any
) -> dict[str, Any]:
    """Resume from the newest checkpoint, if one exists; return all state at the end."""
    resumed, average = Resumed(), ExponentialMovingAverage(decay=0.5)
    lines: list[str] = []
    with (
        told() as messages,
        mock.patch.object(Progress, "line", lambda _, text: lines.append(text)),
    ):
        trainer = make_trainer(kind, folder, until, resumed, *[average] * averages, **options)
        trainer.fit()
    return {
        "resumed_at": resumed.at,
        "after_resume": resumed.state,
        "end": everything(trainer._run, average if averages else None),
        "own": {"rng": torch.get_rng_state(), **dict(trainer.model.named_buffers())},
        "lines": lines,
        "warnings": messages,
    }


def error_of(kind: str, folder: Path, until: int) -> str:
    return ": ".join(raised(lambda: resume_run(kind, folder, until)))


@contextmanager
def faulty_save(
    folder: Path, ranks: tuple[int, ...], is_hit: Callable[[int], bool], fault: Any
) -> Iterator[Faulty]:
    with pytest.MonkeyPatch.context() as patch:
        yield Faulty(folder, patch, is_hit if dist.get_rank() in ranks else lambda n: False, fault)


def count_points(folder: Path, kind: str, **options: Any) -> int:
    """Return how often this rank touches the disk in the third save."""
    with faulty_save(folder, (), bool, fail) as faulty:
        make_trainer(kind, folder, 4, faulty, **options).fit()
    return faulty.points


def fill_disk(folder: Path, kind: str, ranks: tuple[int, ...], at: int) -> dict[str, Any]:
    """Fail one save on some ranks, and save again; return the warnings and the remaining files."""
    with told() as messages, faulty_save(folder, ranks, lambda n: n >= at, fail) as faulty:
        make_trainer(kind, folder, 4, faulty).fit()
    last, _ = newest(folder)
    dist.barrier()
    return {
        "warnings": messages,
        "steps": (faulty.newest_step, last),
        "names": sorted(path.name for path in folder.iterdir()),
    }


def die_in_save(folder: Path, kind: str, rank: int, at: int, **options: Any) -> dict[str, Any]:
    """Kill this rank at a point of the third save."""
    with faulty_save(folder, (rank,), lambda n: n == at, kill) as faulty:
        was, _ = raised(make_trainer(kind, folder, 4, faulty, **options).fit)
    return {"kind": "PeerLostError", "was": was}


def raise_in_gather(folder: Path, kind: str) -> str:
    """Return the error of each rank when the state of rank 1 cannot be gathered."""
    made: list[Any] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        made.append(step_lr(optimizer, 2))
        return made[0]

    class Breaks(Callback):
        def batch_end(self, run: Any, result: Any) -> None:
            if run.rank == 1:
                made[0].state_dict = NotImplemented

    return ": ".join(raised(make_trainer(kind, folder, 2, Breaks(), scheduler=scheduler).fit))


def newest(folder: Path) -> tuple[int | None, list[str]]:
    with told() as messages:
        found = CheckpointStore(folder, peers=open_peers()).newest()
    return None if found is None else found.step, messages


def fail_together(errors: list[Exception | None]) -> str:
    """Return the error of each rank when some ranks fail in the same work."""
    mine = errors[dist.get_rank()]

    def work() -> None:
        if mine is not None:
            raise mine

    peers = open_peers()
    kind, text = raised(lambda: together(peers, work))
    assert together(peers, lambda: "and goes on") == "and goes on"
    return f"{kind}: {text}" if kind else ""
