"""Peers on one device with real models: their cost, and the effects of running out of memory.

    python -m benchmarks.gpu_peers --device cuda [--tiny] [--json FILE]

A loop written by hand, `Microbatcher`, accelerate, Lightning and Composer train GPT-2 124M and
ResNet-50, created from configs with random weights, without downloads. First with room for all, at
the same microbatch size: the time from one optimizer step to the next. Then with room for half of
an optimization batch: each uses its own remedy, as in `benchmarks.sizes_of_peers`, which runs them.
Peers that are not installed are listed as absent. ``--tiny`` rehearses with small models of the
same kinds; on a CPU the memory is simulated.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import logging
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from automicro import Microbatcher
from automicro.memory.budget import MemoryBudget, limit_memory
from automicro.memory.device import peak_bytes, read_counts, reset_peak, synchronize
from automicro.memory.oom import empty_cache, first_line, is_out_of_memory
from benchmarks.overhead import open_device
from benchmarks.sizes_of_peers import (
    BATCHES,
    PEERS,
    PeerRun,
    Steps,
    Subject,
    repair_torchvision,
    run_automicro,
    version_of,
)

TIMED = 6  # optimization batches, the first of which are not counted
WARM_UP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A model from a config, and rows for it.

    Attributes:
        name: name in the tables.
        model: creates the model, whose output has a ``loss``.
        row: creates the tensors of a row by name, from random numbers.
        batch: rows of an optimization batch.
        microbatch: rows at a time, if everything fits.
    """

    name: str
    model: Callable[[], nn.Module]
    row: Callable[[torch.Generator], dict[str, Tensor]]
    batch: int
    microbatch: int


def gpt2(*, tiny: bool) -> Job:
    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = (
        {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 257} if tiny else {}
    )
    # Without dropout, whose masks depend on the cut, so that weights can be compared.
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **dropout, use_cache=False)
    length = 32 if tiny else 512

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(config.vocab_size, (length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Job(
        name="tiny GPT-2" if tiny else "GPT-2 124M",
        model=lambda: transformers.GPT2LMHeadModel(config),
        row=row,
        batch=16 if tiny else 32,
        microbatch=4,
    )


def resnet(*, tiny: bool) -> Job:
    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if tiny else {}
    )
    config = transformers.ResNetConfig(**sizes, num_labels=10 if tiny else 1000)
    side = 32 if tiny else 224

    def row(generator: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn(3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(10, (), generator=generator)}

    return Job(
        name="tiny ResNet" if tiny else "ResNet-50",
        model=lambda: transformers.ResNetForImageClassification(config),
        row=row,
        batch=16 if tiny else 128,
        microbatch=4 if tiny else 16,
    )


class Rows(Dataset[Any]):
    """Data set of this many rows, which repeat a few batches."""

    def __init__(self, kept: dict[str, Tensor], count: int) -> None:
        self.kept, self.count = kept, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Any:
        # A slice, which copies nothing: assembling batches is not part of the comparison.
        start = indices[0] % len(next(iter(self.kept.values())))
        return {name: each[start : start + len(indices)] for name, each in self.kept.items()}


class Losing(nn.Module):
    """Returns the loss of a batch on any device, and records its requests."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self.device = inner, device
        self.asked: list[tuple[int, bool]] = []
        self.ooms_before = num_ooms(device)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.asked.append((len(batch["labels"]), True))
        moved = {n: each.to(self.device, non_blocking=True) for n, each in batch.items()}
        loss: Tensor = self.inner(**moved).loss
        return loss

    @property
    def failures(self) -> int:
        return num_ooms(self.device) - self.ooms_before


class TimedSteps(Steps):
    """Optimizer that records when each step is done on the device."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-3)
        self.device = self.param_groups[0]["params"][0].device
        self.done_at: list[float] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        synchronize(self.device)
        self.done_at.append(time.perf_counter())
        return loss


def num_ooms(device: torch.device) -> int:
    return read_counts(device).ooms or 0


class Bench:
    """Creates the same subject repeatedly on a device.

    Args:
        job: the job that all train.
        device: the device.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        generator = torch.Generator().manual_seed(2)
        rows = [job.row(generator) for _ in range(BATCHES * job.batch)]
        self.rows = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if device.type != "cpu":
            self.rows = {name: each.pin_memory() for name, each in self.rows.items()}
        self.optimizers: list[TimedSteps] = []

    def loader(self, rows: int, batch_size: int) -> "DataLoader[Any]":
        dataset = Rows(self.rows, rows)
        return DataLoader(dataset, batch_size=batch_size, collate_fn=lambda batch: batch)

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> TimedSteps:
        self.optimizers.append(TimedSteps(parameters))
        return self.optimizers[-1]

    def subject(self) -> Subject:
        torch.manual_seed(1)
        return Subject(
            model=Losing(self.job.model().to(self.device), self.device),
            batch=self.job.batch,
            loader=self.loader,
            optimizer=self.optimizer,
            accelerator="cpu" if self.device.type == "cpu" else "gpu",
        )

    def clear(self) -> None:
        """Drop everything that was trained."""
        self.optimizers.clear()
        gc.collect()
        empty_cache(self.device)


# With room for all: optimization batches in microbatches of one size.


def time_by_hand(subject: Subject, batches: int, size: int) -> None:
    optimizer = subject.optimizer(subject.model.parameters())
    share = size / subject.batch
    for number, rows in enumerate(subject.loader(batches * subject.batch, size), 1):
        torch.autograd.backward(subject.model(rows) * share)
        if number % (subject.batch // size) == 0:
            optimizer.step()
            optimizer.zero_grad()


def time_automicro(subject: Subject, batches: int, size: int) -> None:
    assert isinstance(subject.model, nn.Module)
    optimizer = subject.optimizer(subject.model.parameters())
    step = Microbatcher(
        subject.model,
        forward=lambda model, batch: model(batch),
        microbatch_size=size,
        loss_average="samples",
        batchnorm="ignore",
        optimizer=optimizer,
        probe=False,
    )
    for rows in subject.loader(batches * subject.batch, subject.batch):
        step.backward(rows)
        optimizer.step()
        optimizer.zero_grad()


def time_accelerate(subject: Subject, batches: int, size: int) -> None:
    kind = importlib.import_module("accelerate").Accelerator
    accelerator = kind(
        gradient_accumulation_steps=subject.batch // size, cpu=subject.accelerator == "cpu"
    )
    model, optimizer, loader = accelerator.prepare(
        subject.model,
        subject.optimizer(subject.model.parameters()),
        subject.loader(batches * subject.batch, size),
    )
    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows))
            optimizer.step()
            optimizer.zero_grad()


def time_lightning(subject: Subject, batches: int, size: int) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = subject.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> Steps:
            return subject.optimizer(self.parameters())

    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            accelerator=subject.accelerator,
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=subject.batch // size,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(Module(), subject.loader(batches * subject.batch, size))


def time_composer(subject: Subject, batches: int, size: int) -> None:
    composer: Any = importlib.import_module("composer")

    class Module(composer.ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = subject.model

        def forward(self, batch: Any) -> Any:
            return self.model(batch)

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs

    trainer = composer.Trainer(
        model=Module(),
        train_dataloader=subject.loader(batches * subject.batch, subject.batch),
        optimizers=subject.optimizer(subject.model.parameters()),
        max_duration=f"{batches}ba",
        device=subject.accelerator,
        device_train_microbatch_size=size,
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    trainer.close()


BY_HAND = "by hand"
TIMED_PEERS: dict[str, Callable[[Subject, int, int], None]] = {
    BY_HAND: time_by_hand,
    "automicro": time_automicro,
    "accelerate": time_accelerate,
    "Lightning": time_lightning,
    "Composer": time_composer,
}


# With room for half of a batch.


def recover_by_hand(subject: Subject) -> PeerRun:
    """Fail, because a loop by hand has no remedy."""
    time_by_hand(subject, BATCHES, subject.batch)
    raise AssertionError("there was room for the whole batch")


def recover_automicro(subject: Subject) -> PeerRun:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about BatchNorm, which all split alike
        return run_automicro(subject)


RECOVERING_PEERS: dict[str, Callable[[Subject], PeerRun]] = {
    BY_HAND: recover_by_hand,
    "automicro": recover_automicro,
    **{name: peer.run for name, peer in PEERS.items() if name in ("accelerate", "Composer")},
    "Lightning": PEERS["Lightning (binsearch)"].run,
}


def measure_overhead(bench: Bench, name: str) -> dict[str, Any]:
    subject = bench.subject()
    TIMED_PEERS[name](subject, TIMED, bench.job.microbatch)
    done = bench.optimizers[-1].done_at[WARM_UP - 1 :]
    assert len(done) == TIMED - WARM_UP + 1, f"{len(done)} steps"
    taken = [after - before for before, after in itertools.pairwise(done)]
    return {
        "microbatch": bench.job.microbatch,
        "ms_per_batch": round(statistics.median(taken) * 1e3, 3),
    }


def half_of_a_batch(bench: Bench) -> tuple[int, list[Tensor]]:
    """Return a limit between half a batch and a whole one, and the expected parameters."""
    peaks = []
    for size in (bench.job.batch // 2, bench.job.batch):
        budget = MemoryBudget(None) if bench.device.type == "cpu" else contextlib.nullcontext()
        with budget:
            subject = bench.subject()
            reset_peak(bench.device)
            time_by_hand(subject, BATCHES, size)
            peaks.append(peak_bytes(bench.device) or 0)
            ended = [each.detach().cpu() for each in subject.model.parameters()]
        del subject
        bench.clear()
    return sum(peaks) // 2, ended


def measure_recovery(
    bench: Bench, name: str, limit_bytes: int, expected: list[Tensor]
) -> dict[str, Any]:
    with limit_memory(limit_bytes, bench.device):
        subject = bench.subject()
        start = time.perf_counter()
        run = RECOVERING_PEERS[name](subject)
        synchronize(bench.device)
        seconds = time.perf_counter() - start
        ended = [each.detach().cpu() for each in subject.model.parameters()]
    apart = max(float((a - b).abs().max()) for a, b in zip(ended, expected, strict=True))
    return {
        "ended": not run.died,
        "batch": run.batch,
        "microbatch": run.found.size,
        "steps": run.steps,
        "steps_due": BATCHES,
        "failures": run.found.failures,
        "parameters_differ": apart,
        "seconds": round(seconds, 3),
    }


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements, or the error instead, so that others are still measured."""
    try:
        return work()
    except Exception as error:
        return {"ended": False, "error": f"{type(error).__name__}: {first_line(error)[:200]}"}


class Findings:
    """Findings so far, also in a file."""

    def __init__(self, path: pathlib.Path | None, device: torch.device) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "device": str(device),
            "versions": {},
            "absent": {},
            "rows": [],
        }

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"].append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


DISTRIBUTIONS = {
    "automicro": ("automicro", "automicro"),
    **{
        name: (PEERS[peer].distribution, PEERS[peer].module)
        for name, peer in (
            ("accelerate", "accelerate"),
            ("Lightning", "Lightning (binsearch)"),
            ("Composer", "Composer"),
        )
    },
}


def understand_simulated_memory() -> None:
    """Make peers that search for CUDA's own message recognize simulated errors, too."""
    for module, name in (
        ("lightning.pytorch.tuner.batch_size_scaling", "is_oom_error"),
        ("composer.trainer.trainer", "_is_cuda_oom"),
    ):
        with contextlib.suppress(ImportError):
            setattr(importlib.import_module(module), name, is_out_of_memory)


def find_peers(findings: Findings) -> list[str]:
    """Return the peers that can be imported, starting with the loop by hand."""
    there = [BY_HAND]
    for name, (distribution, module) in DISTRIBUTIONS.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation can fail in any way
            findings.content["absent"][name] = f"{type(error).__name__}: {first_line(error)}"
            continue
        findings.content["versions"][name] = version_of(distribution)
        there.append(name)
    findings.write()
    return there


def measure(bench: Bench, names: list[str], findings: Findings) -> None:
    by_hand: float | None = None
    for name in names:
        row: dict[str, Any] = {"kind": "overhead", "job": bench.job.name, "with": name}
        found = attempt(functools.partial(measure_overhead, bench, name))
        if name == BY_HAND:
            by_hand = found.get("ms_per_batch")
        if by_hand and "ms_per_batch" in found:
            found["ratio"] = round(found["ms_per_batch"] / by_hand, 4)
        findings.add({**row, **found})
        bench.clear()
    limit_bytes, expected = half_of_a_batch(bench)
    for name in names:
        row = {"kind": "recovery", "job": bench.job.name, "with": name}
        work = functools.partial(measure_recovery, bench, name, limit_bytes, expected)
        findings.add({**row, "limit_bytes": limit_bytes, **attempt(work)})
        bench.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=open_device, default=torch.device("cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models of the same kinds")
    parser.add_argument("--json", type=pathlib.Path, help="write what is found here, as it goes")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    repair_torchvision()
    if arguments.device.type == "cpu":
        understand_simulated_memory()
    findings = Findings(arguments.json, arguments.device)
    names = find_peers(findings)
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("the models are made by transformers: pip install transformers")
    for make in (gpt2, resnet):
        measure(Bench(make(tiny=arguments.tiny), arguments.device), names, findings)
    if any("error" in row for row in findings.content["rows"] if row["with"] == "automicro"):
        raise SystemExit(1)  # others might fail, and their rows say so


if __name__ == "__main__":
    main()
