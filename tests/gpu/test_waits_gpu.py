"""How often a settled batch, whole or split, waits for the device.

The counts are those of the table in docs/benchmarks.md. The stand-in counts every wait. On CUDA,
torch's sync-debug mode warns of each one, except for copies to and from pageable memory.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from automicro import Callback, Microbatcher, StepResult, Trainer
from automicro.events.run import Run
from automicro.features import NonFinite, with_features
from automicro.loggers import JSONLinesLogger
from tests.gpu import subjects
from tests.gpu.device import DEVICE, GPU, accelerator, num_segments, pinned, to_device, waits

pytestmark = GPU

ROWS = 12
CUTS = (1, 3, 6)  # microbatches
Batch = Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Queue(Net):
    """A model with a large buffer that changes in every forward, like a queue of keys."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(17 * 2**20, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        self.queue[:16] += 1
        return super().forward(x)


class Packed(nn.Linear):
    def forward(self, x: PackedSequence) -> Tensor:  # type: ignore[override]
        assert x.unsorted_indices is not None
        out = super().forward(x.data[: len(x.unsorted_indices)])
        return out + 0 * x.unsorted_indices[:, None]


class Jagged(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x.values()[x.offsets()[:-1]])


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(4, (ROWS,), generator=generator)


def loader_of(batches: int) -> DataLoader[Any]:
    inputs, targets = rows(0)
    data = TensorDataset(inputs.repeat(batches, 1), targets.repeat(batches))
    return DataLoader(data, batch_size=ROWS)


def pageable(batch: Batch) -> Batch:
    return batch


def sequences(inputs: Tensor) -> list[Tensor]:
    return [inputs[: 1 + index % 3] for index in range(ROWS)]


def packed(batch: Batch) -> Batch:
    rows = pack_sequence(sequences(batch[0]), enforce_sorted=False)
    return rows.pin_memory(), batch[1].pin_memory()


def jagged(batch: Batch) -> Batch:
    rows = torch.nested.nested_tensor(sequences(batch[0]), layout=torch.jagged)
    return rows.to(DEVICE), batch[1].to(DEVICE)


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.5])


def weighted_loss() -> nn.Module:
    return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.to(DEVICE))


def named(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    out = model(batch[0])
    return {"task": F.cross_entropy(out, batch[1]), "size": out.square().mean()}


BY_SAMPLES = {"loss_average": "samples"}
NEVER = (0, 0, 0)
# By name: the model, the place of its batches, options, and waits per batch for each of `CUTS`.
STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Batch], Batch], Any, Any]] = {
    "batch on the device": (Net, to_device, {}, NEVER),
    "batch in pinned memory": (Net, pinned, {}, NEVER),
    "batch in pageable memory": (Net, pageable, {}, NEVER),
    "counted targets on the device": (Net, to_device, {"loss_average": "tokens"}, NEVER),
    "counting function": (
        *(Net, to_device, {"loss_average": lambda each: (each[1] > 0).sum()}, (1, 1, 1)),
    ),
    "class weights on the device, targets on the host": (
        *(Net, pageable, {"loss_fn": weighted_loss}, NEVER),
    ),
    "losses by name": (Net, to_device, {"forward": named, **BY_SAMPLES}, NEVER),
    "packed sequences, unsorted, in pinned memory": (
        *(lambda: Packed(6, 4), packed, BY_SAMPLES, NEVER),
    ),
    "jagged rows on the device": (lambda: Jagged(6, 4), jagged, BY_SAMPLES, (0, 2, 2)),
    "a buffer of 17 MiB that changes": (Queue, to_device, {}, NEVER),
}


def step_of(model: nn.Module, size: int, options: dict[str, Any]) -> Microbatcher:
    options = dict(options)
    if "forward" not in options:
        options["loss_fn"] = options.get("loss_fn", nn.CrossEntropyLoss)()
    return Microbatcher(
        model, microbatch_size=size, eval_microbatch_size=size, probe=False, **options
    )


@pytest.mark.parametrize("call", ["backward", "evaluate"])
@pytest.mark.parametrize("name", STEPS)
def test_settled_batch_sync_count_matches_table(
    name: str, call: str, record_property: Callable[[str, object], None]
) -> None:
    make, place, options, expected = STEPS[name]
    found = {}
    for cut in CUTS:
        net = make().to(DEVICE)
        step = step_of(net, ROWS // cut, {"batchnorm": "ignore", **options})
        batches = [place(rows(seed)) for seed in range(4)]
        for batch in batches[:3]:
            getattr(step, call)(batch)
            net.zero_grad()
        accelerator.synchronize(DEVICE)
        found[cut] = waits(functools.partial(getattr(step, call), batches[3]))
    record_property("waits", found)
    assert tuple(found.values()) == expected


def test_reading_value_counts_as_sync() -> None:
    value = torch.ones((), device=DEVICE)
    accelerator.synchronize(DEVICE)
    assert waits(lambda: value.add(1).item()) >= 1


@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("place", [to_device, pinned, pageable])
def test_settled_step_allocates_no_new_segments(place: Callable[[Batch], Batch], size: Any) -> None:
    net = subjects.model()
    step = subjects.microbatcher(net, size)
    for seed in range(6):  # enough batches to settle sizes and finish checks
        step.backward(place(subjects.batch(seed=seed)))
        net.zero_grad()
    last = place(subjects.batch(seed=6))
    accelerator.synchronize(DEVICE)
    before = num_segments()
    waited = waits(lambda: step.backward(last))
    assert num_segments() == before
    assert place is pageable or waited == 0


class WaitCounter(Callback):
    """Counts the waits of every batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._last = 0

    def batch_end(self, run: Run, result: StepResult) -> None:
        now = int(torch.ops.standin.num_waits())
        self.counts.append(now - self._last)
        self._last = now


FUSED: dict[str, Any] = {"optimizer": functools.partial(torch.optim.AdamW, fused=True)}
IGNORES: dict[str, Any] = {"features": [NonFinite("ignore")]}
NAMED: dict[str, Any] = {"forward": named, "loss_average": "samples"}
TRAINERS: dict[str, tuple[dict[str, Any], int]] = {
    "as it is": ({}, 1),
    "clipped": ({"grad_clip_norm": 1.0}, 2),
    "losses by name": (NAMED, 1),
    'clipped, named, non_finite="ignore"': ({**IGNORES, "grad_clip_norm": 1.0, **NAMED}, 1),
    "fp16": ({"precision": "fp16"}, 2),
    "fp16, fused, clipped": ({"precision": "fp16", "grad_clip_norm": 1.0, **FUSED}, 2),
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="waits are counted on the stand-in")
@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_batch_sync_count_matches_table(name: str, tmp_path: Path) -> None:
    options, expected = TRAINERS[name]
    options = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), **options}
    with_loss: Any = {} if "forward" in options else {"loss_fn": nn.CrossEntropyLoss()}
    for cut in CUTS:
        watch = WaitCounter()
        Trainer(
            Net(),
            loader_of(8),
            device=str(DEVICE),
            microbatch_size=ROWS // cut,
            batchnorm="ignore",
            probe=False,
            callbacks=[watch],
            loggers=[JSONLinesLogger(tmp_path / f"{cut}.jsonl")],
            max_duration="1ep",
            **with_loss,
            **with_features(options),
        ).fit()
        assert watch.counts[4:] == [expected] * 4
        assert "train/loss" in (tmp_path / f"{cut}.jsonl").read_text(encoding="utf-8")


def test_evaluation_sync_count_is_independent_of_batch_count() -> None:
    found = []
    for batches in (2, 12):
        loader = loader_of(batches)
        net = Net().to(DEVICE)
        trainer = Trainer(
            net,
            loader,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            loss_fn=nn.CrossEntropyLoss(),
            eval_dataloader=loader,
            device=str(DEVICE),
            eval_microbatch_size=4,
            probe=False,
        )
        trainer.eval()
        found.append(waits(trainer.eval))
    assert found[0] == found[1] <= 1
