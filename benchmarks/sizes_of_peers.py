"""The peers themselves on simulated memory, against their rules in `benchmarks.sizes`.

    python -m benchmarks.sizes_of_peers [--seeds 300] [--json FILE]

Runs accelerate's `find_executable_batch_size`, Lightning's `Tuner.scale_batch_size` and Composer's
`Trainer` with their defaults, as installed. Each trains three optimization batches with a real
model and optimizer on the CPU; only the memory is simulated: the model asks the memory function of
a seed whether its rows fit, and raises CUDA's out-of-memory error if they do not. `Microbatcher`
does the same job without measured peaks, so that it only halves. Peers that cannot be imported are
listed as not run.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.metadata
import json
import logging
import pathlib
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import automicro
from automicro import Microbatcher
from automicro.policy.auto import Halving
from benchmarks.sizes import (
    FAMILIES,
    Found,
    accelerate_rule,
    composer_rule,
    lightning_binsearch,
    lightning_power,
    table_of_peers,
)
from tests.policy.memory_functions import Device, make_device, train

BATCHES = 3
# Lightning never shrinks a batch as large as the dataset: during its search there are more rows.
MANY_ROWS = 10**6


class Rows(Dataset[Tensor]):
    """Data set of this many equal rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.ones(len(indices), 1)


def loader(rows: int, batch_size: int) -> DataLoader[Tensor]:
    return DataLoader(Rows(rows), batch_size=batch_size, collate_fn=lambda batch: batch)


class Memory(nn.Module):
    """One weight, and a forward that runs out of memory when the memory function says so."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.device = device
        self.asked: list[tuple[int, bool]] = []

    def forward(self, batch: Tensor) -> Tensor:
        rows = len(batch)
        fits = self.device.fits(rows, 1.0, 0)
        self.asked.append((rows, fits))
        if not fits:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} rows.")
        return (self.weight * batch).mean()

    @property
    def failures(self) -> int:
        return sum(not fits for _, fits in self.asked)


class Steps(torch.optim.SGD):
    """Optimizer that counts its steps."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float = 1e-6) -> None:
        super().__init__(parameters, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)  # a closure might run out of memory: then no step was taken
        self.count += 1
        return loss


class Asked(Protocol):
    """A model that returns the loss of a batch, and records its requests.

    Attributes:
        asked: rows of each request, and whether they fitted.
        failures: number of out-of-memory errors.
    """

    asked: list[tuple[int, bool]]

    @property
    def failures(self) -> int: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def __call__(self, batch: Any) -> Tensor: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """Everything that a peer trains with.

    Attributes:
        model: returns its loss.
        batch: rows of an optimization batch.
        loader: creates a loader from numbers of rows and of rows per batch.
        optimizer: creates an optimizer of its parameters.
        accelerator: "cpu" or "gpu".
    """

    model: Asked
    batch: int
    loader: Callable[[int, int], "DataLoader[Any]"] = loader
    optimizer: Callable[[Iterator[nn.Parameter]], Steps] = Steps
    accelerator: str = "cpu"


def simulated(device: Device) -> Subject:
    return Subject(model=Memory(device), batch=device.batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerRun:
    """Cost and result of a peer; the size is its microbatch or, without microbatches, its batch."""

    found: Found
    batch: int
    steps: int
    was_tried: bool = True
    died: bool = False


def run_accelerate(subject: Subject) -> PeerRun:
    find = importlib.import_module("accelerate.utils").find_executable_batch_size
    memory = subject.model
    optimizer = subject.optimizer(memory.parameters())

    def train_at(batch_size: int) -> int:
        for batch in subject.loader(BATCHES * subject.batch, batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(memory(batch))
            optimizer.step()
        return batch_size

    size = find(train_at, starting_batch_size=subject.batch)()
    return PeerRun(
        found=Found(
            failures=memory.failures,
            rows_in_vain=sum(rows for rows, fits in memory.asked if not fits),
            size=size,
        ),
        batch=size,
        steps=optimizer.count,
    )


def run_lightning(subject: Subject, *, mode: str, margin: float = 0.05) -> PeerRun:
    lightning = importlib.import_module("lightning.pytorch")
    tuner = importlib.import_module("lightning.pytorch.tuner").Tuner
    memory = subject.model

    class Job(lightning.LightningModule):  # type: ignore[misc, name-defined]
        batch_size = 2
        rows = MANY_ROWS

        def __init__(self) -> None:
            super().__init__()
            self.memory = memory

        def train_dataloader(self) -> DataLoader[Tensor]:
            return subject.loader(self.rows, self.batch_size)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.memory(batch)

        def configure_optimizers(self) -> Steps:
            self.steps = subject.optimizer(self.memory.parameters())
            return self.steps

    def trainer(folder: str) -> Any:
        return lightning.Trainer(
            accelerator=subject.accelerator,
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )

    job = Job()
    with tempfile.TemporaryDirectory() as folder:
        size = tuner(trainer(folder)).scale_batch_size(job, mode=mode, margin=margin)
        tried, failures = list(memory.asked), memory.failures
        job.batch_size, job.rows = size, BATCHES * subject.batch
        died = False
        try:
            trainer(folder).fit(job)
        except torch.OutOfMemoryError:
            died = True
    return PeerRun(
        found=Found(failures=failures, rows_in_vain=sum(rows for rows, _ in tried), size=size),
        batch=size,
        steps=job.steps.count,
        was_tried=any(fits and rows >= size for rows, fits in tried),
        died=died,
    )


def run_composer(subject: Subject) -> PeerRun:
    composer = importlib.import_module("composer")
    checks: Any = importlib.import_module("composer.trainer.trainer")
    checks._is_auto_microbatching = lambda size, device=None: size == "auto"  # also without a GPU
    memory = subject.model

    class Job(composer.ComposerModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.memory = memory

        def forward(self, batch: Tensor) -> Tensor:
            return memory(batch)

        def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
            return outputs

    optimizer = subject.optimizer(memory.parameters())
    trainer = composer.Trainer(
        model=Job(),
        train_dataloader=subject.loader(BATCHES * subject.batch, subject.batch),
        optimizers=optimizer,
        max_duration=f"{BATCHES}ba",
        device=subject.accelerator,
        device_train_microbatch_size="auto",
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    size = trainer.state.device_train_microbatch_size
    trainer.close()
    return PeerRun(
        found=Found(
            failures=memory.failures,
            # Microbatches that fitted before the failing one are lost with it.
            rows_in_vain=sum(rows for rows, _ in memory.asked) - BATCHES * subject.batch,
            size=size,
        ),
        batch=subject.batch,
        steps=optimizer.count,
    )


def run_automicro(subject: Subject) -> PeerRun:
    memory = subject.model
    assert isinstance(memory, nn.Module)
    optimizer = subject.optimizer(memory.parameters())
    microbatcher = Microbatcher(
        memory,
        forward=lambda model, batch: model(batch),
        loss_average="samples",
        optimizer=optimizer,
        probe=False,
    )
    for batch in subject.loader(BATCHES * subject.batch, subject.batch):
        result = microbatcher.backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    return PeerRun(
        found=Found(
            failures=memory.failures,
            rows_in_vain=sum(rows for rows, _ in memory.asked) - BATCHES * subject.batch,
            size=result.microbatch_size,
        ),
        batch=result.num_samples,
        steps=optimizer.count,
    )


def our_rule(device: Device) -> Found:
    """Apply our rule without measured peaks, as on a CPU without a budget."""
    run = train(device, Halving(), batches=BATCHES, measured=False)
    return Found(failures=run.failures, rows_in_vain=run.rows_in_vain, size=run.sizes[-1])


# At module level, because its definitions disappear with it.
OPERATORS: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]


def repair_torchvision() -> None:
    """Make a CUDA build of torchvision importable, as Lightning and Composer need."""
    # Without a GPU it registers no operators and then misses two of them.
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        return


@dataclasses.dataclass(frozen=True)
class Peer:
    """A peer, and the rule that should do the same."""

    distribution: str
    module: str
    run: Callable[[Subject], PeerRun]
    rule: Callable[[Device], Found]


TUNER = ("lightning", "lightning.pytorch.tuner")
PEERS = {
    "automicro": Peer("automicro", "automicro", run_automicro, our_rule),
    "accelerate": Peer("accelerate", "accelerate.utils", run_accelerate, accelerate_rule),
    "Lightning (power)": Peer(
        *TUNER, functools.partial(run_lightning, mode="power"), lightning_power
    ),
    "Lightning (binsearch)": Peer(
        *TUNER, functools.partial(run_lightning, mode="binsearch"), lightning_binsearch
    ),
    "Lightning (binsearch, no margin)": Peer(
        *TUNER,
        functools.partial(run_lightning, mode="binsearch", margin=0.0),
        functools.partial(lightning_binsearch, margin=0.0),
    ),
    "Composer": Peer("mosaicml", "composer.trainer", run_composer, composer_rule),
}


def version_of(distribution: str) -> str:
    if distribution == "automicro":  # from the working tree, installed or not
        return automicro.__version__
    return importlib.metadata.version(distribution)


def measure(peer: Peer, devices: list[Device]) -> dict[str, Any]:
    start = time.perf_counter()
    pairs = [(device, peer.run(simulated(device))) for device in devices]
    seconds = time.perf_counter() - start
    runs = [run for _, run in pairs]
    differences, excess = [], []
    for device, run in pairs:
        rule, found = peer.rule(device), run.found
        if (rule.failures, rule.size) != (found.failures, found.size):
            both = {"rule": dataclasses.asdict(rule), "peer": dataclasses.asdict(found)}
            differences.append({"seed": device.seed, **both})
        excess.append(-(-device.batch // max(1, found.size)) / device.best(1.0, 0) - 1)
    off = [run.steps - BATCHES for run in runs]
    return {
        "version": version_of(peer.distribution),
        "functions": len(devices),
        "agree_with_the_rule": len(devices) - len(differences),
        "differences": differences,
        "failures_mean": statistics.mean(run.found.failures for run in runs),
        "failures_max": max(run.found.failures for run in runs),
        "batches_in_vain_mean": statistics.mean(
            run.found.rows_in_vain / device.batch for device, run in pairs
        ),
        "excess_mean": statistics.mean(excess),
        "excess_max": max(excess),
        "at_the_optimum": sum(value <= 0 for value in excess) / len(devices),
        "batch_kept": sum(run.batch == device.batch for device, run in pairs),
        "sizes_never_tried": sum(not run.was_tried for run in runs),
        "training_ran_out_of_memory": sum(run.died for run in runs),
        "optimizer_steps_due": BATCHES,
        "too_many_steps": sum(value > 0 for value in off),
        "too_few_steps": sum(value < 0 for value in off),
        "steps_median": statistics.median(run.steps for run in runs),
        "steps_max": max(run.steps for run in runs),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    repair_torchvision()
    devices = [make_device(seed, FAMILIES[seed % len(FAMILIES)]) for seed in range(arguments.seeds)]
    results: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    for name, peer in PEERS.items():
        try:
            importlib.import_module(peer.module)
        except Exception as error:  # a broken installation can fail in any way
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: not run ({missing[name]})")
    # They collect garbage after each failure, which takes no time without imported objects.
    gc.freeze()
    for name, peer in PEERS.items():
        if name not in missing:
            results[name] = measure(peer, devices)
            print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seeds": arguments.seeds,
        "families": list(FAMILIES),
        "not_run": missing,
        "peers": results,
    }
    print(table_of_peers(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
