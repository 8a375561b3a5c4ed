"""Runs whose checkpoints an earlier version wrote, and goes on with, to be compared.

What lies in ``earlier/`` was written once, by commit 7ecc4e8, with this very file::

    PYTHONPATH=<a checkout of 7ecc4e8> python tests/trainer/resume/earlier_runs.py <folder>

Each kind of run has a folder: checkpoints after batch 5, and ``ends.pt``, the weights that the same
version ended with when it went on from there to batch 9.
"""

import datetime
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import CheckpointConfig, Evaluator, MemoryBudget, Microbatcher, StepResult, Trainer
from automicro.callbacks import ExponentialMovingAverage

EARLIER = Path(__file__).parent / "earlier"
STOPS_AT, ENDS_AT = "5ba", "9ba"
# Written by: several ranks one and the same folder.
KINDS = {"alone": 1, "averaged": 1, "ddp": 2, "fsdp": 2}
NORMALISES = ("alone", "averaged")  # the batch


class Net(nn.Module):
    """With whatever a model may keep: statistics, random numbers, tied weights."""

    def __init__(self, *, normalises: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.middle = nn.BatchNorm1d(8) if normalises else nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(torch.relu(self.middle(self.first(x)))))
        return out


def data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(48, 6, generator=generator)
    return TensorDataset(rows, rows[:, :3].argmax(1))


def make_trainer(kind: str, folder: Path, *, until: str) -> Trainer:
    """A run of a kind, which goes on from whatever its folder has."""
    torch.manual_seed(7)
    model = Net(normalises=kind in NORMALISES)
    options: dict[str, Any] = {}
    if kind in ("ddp", "fsdp"):
        options["parallel"] = kind
    if kind == "averaged":
        options["callbacks"] = [ExponentialMovingAverage(decay=0.5)]
    return Trainer(
        model,
        DataLoader(data(1), batch_size=12 // KINDS[kind], shuffle=True, drop_last=True),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        metrics={"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=3)},
        eval_dataloader={"held_out": Evaluator(dataloader=DataLoader(data(2), batch_size=16))},
        eval_interval="3ba",
        max_duration=until,
        microbatch_size="auto" if kind == "alone" else 3,
        batchnorm="ignore",
        grad_clip_norm=1.0,
        seed=11,
        device="cpu",
        progress=False,
        checkpoint=CheckpointConfig(folder=folder, interval="5ba"),
        **options,
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """The weights and statistics of a run, whole, wherever they lie."""
    state = trainer._run.model.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


def write(kind: str, folder: Path) -> None:
    make_trainer(kind, folder / "checkpoints", until=STOPS_AT).fit()
    with tempfile.TemporaryDirectory() as aside:
        copied = Path(aside) / "checkpoints"
        if KINDS[kind] > 1:  # of all ranks, so each works on what is there
            dist.barrier()
            copied = folder / "aside"
            if dist.get_rank() == 0:
                shutil.copytree(folder / "checkpoints", copied)
            dist.barrier()
        else:
            shutil.copytree(folder / "checkpoints", copied)
        trainer = make_trainer(kind, copied, until=ENDS_AT)
        trainer.fit()
        ends = weights(trainer)
    if KINDS[kind] == 1 or dist.get_rank() == 0:
        torch.save(ends, folder / "ends.pt")
        shutil.rmtree(folder / "aside", ignore_errors=True)


# BatchNorm takes the bias before it away again: its gradient is nothing but rounding, which Adam
# makes steps of, and another processor rounds otherwise.
_ROUNDING = {"first.bias", "middle.running_mean"}


def compare(kind: str, folder: Path) -> list[str]:
    """Go on with a copy of what was written, and name the weights that end differently.

    To what processors differ in: the earlier version ran on another one.
    """
    trainer = make_trainer(kind, folder, until=ENDS_AT)
    trainer.fit()
    ends = torch.load(EARLIER / kind / "ends.pt")
    found = weights(trainer)
    assert found.keys() == ends.keys()
    assert trainer.state.batch == 9
    left_out = _ROUNDING if kind in NORMALISES else set()
    return [
        name
        for name, value in found.items()
        if name not in left_out and not torch.allclose(value, ends[name], rtol=1e-6, atol=1e-6)
    ]


def write_on_rank(rank: int, kind: str, folder: Path, meeting: str) -> None:
    size = KINDS[kind]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    write(kind, folder)
    dist.destroy_process_group()


def train_with_remembered_size() -> list[StepResult]:
    """A run that finds a size, or begins with one that an earlier run has left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    with MemoryBudget("1MiB"):
        microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), remember_sizes=True)
        results = []
        for _ in range(4):
            batch = torch.randn(512, 64), torch.randint(4, (512,))
            results.append(microbatcher.backward(batch))
            model.zero_grad()
    return results


if __name__ == "__main__":
    where = Path(sys.argv[1])
    for each, ranks in KINDS.items():
        (where / each).mkdir(parents=True)
        if ranks == 1:
            write(each, where / each)
            continue
        with tempfile.TemporaryDirectory() as meeting:
            torch.multiprocessing.spawn(  # type: ignore[attr-defined]
                write_on_rank, (each, where / each, f"{meeting}/store"), nprocs=ranks
            )
    os.environ["AUTOMICRO_CACHE_DIR"] = str(where / "sizes")
    train_with_remembered_size()
