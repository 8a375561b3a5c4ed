"""The cost of each level on real jobs, and whether "auto" takes the fastest.

    python -m benchmarks.levels [--rounds 9] [--steps 40] [job …]

Each job has a limit. For every level (nothing, recompute, offload, both) "auto" sizes find the
largest microbatch that fits. Then all levels run in turns, each at its size, and their median
seconds count. A run with ``when_too_large="auto"`` chooses a level, which is compared with the
best. Every level must give the gradient of the job without a limit, bit by bit if the microbatches
are the same.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Microbatcher, SampleTooLargeError
from automicro.features import with_features
from automicro.savers.levels import Level, make_levels
from automicro.units import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, one batch, and a limit.

    Attributes:
        make: creates the model.
        batch: its batch.
        limit: amount of memory, as text.
        options: options of the `Microbatcher`.
        repeats: whether a microbatch of the whole batch always gives the same bits, unlike smaller
            ones.
    """

    make: Callable[[], nn.Module]
    batch: Any
    limit: str
    options: dict[str, Any]


def gpt2(rows: int, length: int, limit: str, *, layers: int = 4, vocabulary: int = 500) -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=96, n_layer=layers, n_head=4, vocab_size=vocabulary, n_positions=length,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(vocabulary, (rows, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return Job(make=lambda: GPT2LMHeadModel(config), batch=batch, limit=limit, options={})


def bert() -> Job:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384,
        vocab_size=1000,
    )  # fmt: skip
    batch = {
        "input_ids": torch.randint(1000, (16, 64)),
        "attention_mask": torch.ones(16, 64, dtype=torch.long),
        "labels": torch.randint(2, (16,)),
    }
    return Job(
        make=lambda: BertForSequenceClassification(config), batch=batch, limit="16MiB", options={}
    )


def mlp() -> Job:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(8)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(256, 10))
    batch = (torch.randn(2048, 256), torch.randint(10, (2048,)))
    options = {"loss_fn": nn.CrossEntropyLoss()}
    return Job(make=lambda: model, batch=batch, limit="12MiB", options=options)


class Convolutions(nn.Module):
    """Residual blocks with GroupNorm on small images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32),
            )
            for _ in range(4)
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.stem(pictures)
        for block in self.blocks:
            hidden = torch.relu(hidden + block(hidden))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


def convolutions() -> Job:
    batch = (torch.randn(8, 3, 64, 64), torch.randint(10, (8,)))
    options = {"loss_fn": nn.CrossEntropyLoss()}
    return Job(make=Convolutions, batch=batch, limit="24MiB", options=options)


JOBS: dict[str, Callable[[], Job]] = {
    "one-row": lambda: gpt2(1, 512, "24MiB"),  # a row needs three times as much
    "long-rows": lambda: gpt2(8, 256, "20MiB"),
    "short-rows": lambda: gpt2(32, 64, "24MiB"),
    "bert": bert,
    "mlp": mlp,
    "convolutions": convolutions,
}


class Runner:
    """One way to run a job repeatedly."""

    def __init__(self, job: Job, *, level: Level | None = None, steps: int = 0) -> None:
        torch.manual_seed(0)
        self._job = job
        self._model = copy.deepcopy(job.make())
        when: dict[str, Any] = {} if level is not None else {"when_too_large": "auto"}
        self._microbatcher = Microbatcher(
            self._model, memory_limit=job.limit, **with_features({**when, **job.options})
        )
        self._level = level
        if level is not None and level.savers:
            # The level of another copy of the model refers to its own blocks.
            name = [each.name for each in level.savers]
            self._level = make_levels(name, [self._model], torch.device("cpu"))[-1]
        self.result: Any = None
        for _ in range(steps):
            self.step()

    def step(self) -> float:
        """Return the seconds of one step."""
        self._model.zero_grad()
        began = time.perf_counter()
        if self._level is None or not self._level.savers:
            self.result = self._microbatcher.backward(self._job.batch)
        else:
            with self._level.applied():
                self.result = self._microbatcher.backward(self._job.batch)
        return time.perf_counter() - began

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self.result.num_samples)


def measure(name: str, *, steps: int, rounds: int) -> bool:
    """Run one job at every level and with its own choice; return whether that is good enough."""
    job = JOBS[name]()
    levels = make_levels("auto", [job.make()], torch.device("cpu"))
    print(f"{name}: limit {format_bytes(parse_bytes(job.limit))}", flush=True)
    runners: dict[str, Runner] = {}
    for level in levels:
        try:
            runners[level.name] = Runner(job, level=level, steps=8)
        except SampleTooLargeError:
            print(f"  {level.name:<22} does not fit")
    own = Runner(job, steps=steps)
    seconds: dict[str, list[float]] = {each: [] for each in (*runners, "auto")}
    for _ in range(rounds):
        for each, runner in (*runners.items(), ("auto", own)):
            seconds[each].append(runner.step())
    medians = {each: statistics.median(times) for each, times in seconds.items()}
    best = min(runners, key=lambda each: medians[each])
    for each, runner in runners.items():
        size, speed = runner.result.microbatch_size, runner.rows / medians[each]
        peak = format_bytes(runner.result.peak_bytes or 0)
        print(f"  {each:<22} {size:>5} rows  {speed:>9.1f} rows/s  peak {peak}")
    chosen = own.result.level
    ratio = medians["auto"] / medians[best]
    of_level = medians.get(chosen, medians["auto"]) / medians[best]
    print(
        f"  auto: {chosen}, {own.result.microbatch_size} rows, {own.rows / medians['auto']:.1f} "
        f"rows/s; {ratio:.3f} of the best's time ({best}), its level alone {of_level:.3f}",
        flush=True,
    )
    return ratio <= 1.05 or of_level <= 1.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs; return 1 if a choice was more than 5 % slower than the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(JOBS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each")
    parser.add_argument("--steps", type=int, default=40, help='that "auto" may take to choose')
    given = parser.parse_args(arguments)
    import logging

    logging.getLogger("automicro").setLevel(logging.ERROR)
    good = [
        measure(name, steps=given.steps, rounds=given.rounds) for name in given.jobs or list(JOBS)
    ]
    print(f"{sum(good)} of {len(good)} choices within 5 % of the best")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
