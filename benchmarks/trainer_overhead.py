"""Overhead of `Trainer.fit` over `Microbatcher.backward` and `optimizer.step()` in a loop.

    python -m benchmarks.trainer_overhead [--batches 80] [--json FILE]

The language-model job with four microbatches per batch and the JSON lines logger. The Trainer's
loader measures the time from returning one batch to the request for the next, which covers all of
the Trainer's work for a batch; then it trains a second model on the same batch by hand. So the two
run in turn, and at the end their parameters must be equal bit by bit.
"""

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from automicro import Microbatcher, Trainer
from automicro.cli.config.build import Recipe
from automicro.cli.config.load import read_config
from automicro.features import Optimization
from automicro.loggers import JSONLinesLogger
from benchmarks.overhead import Counter, median_with_interval

GOAL_TIME, GOAL_OPERATIONS = 1.05, 1.03
WARM_UP = 8  # batches
SIZE = 16


class ByHand:
    """The loop without a Trainer: the same steps in the same order."""

    def __init__(self, recipe: Recipe) -> None:
        self.model = recipe.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.microbatcher = Microbatcher(
            self.model, optimizer=self.optimizer, microbatch_size=SIZE, probe=False
        )
        self.scheduler = schedule(self.optimizer)

    def step(self, batch: Any) -> None:
        self.microbatcher.backward(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)


class Interleaving:
    """Gives each batch to the Trainer, then trains on it by hand, and times both."""

    def __init__(self, batches: list[Any], hand: ByHand, *, counts: bool) -> None:
        self.batches = batches
        self.hand = hand
        self.counts = counts
        self.trainer: list[float] = []
        self.by_hand: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            counter = Counter()
            if self.counts:
                counter.__enter__()  # type: ignore[no-untyped-call]
            start = time.perf_counter()
            yield batch
            seconds = time.perf_counter() - start
            if self.counts:
                counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.trainer.append(counter.operations if self.counts else seconds)
            counter = Counter()
            if self.counts:
                with counter:
                    self.hand.step(batch)
                self.by_hand.append(counter.operations)
            else:
                start = time.perf_counter()
                self.hand.step(batch)
                self.by_hand.append(time.perf_counter() - start)


def run(recipe: Recipe, batches: list[Any], folder: str, *, counts: bool) -> Interleaving:
    hand = ByHand(recipe)
    loader = Interleaving(batches, hand, counts=counts)
    model = recipe.make_model()
    trainer = Trainer(
        model,
        loader,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        features=[Optimization(schedule, "batch", 1.0)],
        microbatch_size=SIZE,
        probe=False,
        loggers=[JSONLinesLogger(pathlib.Path(folder) / f"log-{counts}.jsonl")],
        progress=False,
        device="cpu",
    )
    trainer.fit()
    for mine, theirs in zip(model.parameters(), hand.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), "the two loops must train alike"
    return loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=80, help="interleaved pairs (default 80)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(read_config(["configs/docs_lm.yaml"], ["memory_limit=null"]).config)
    loaded = iter(recipe.make("train_dataloader"))
    batches = [next(loaded) for _ in range(arguments.batches + WARM_UP)]
    with tempfile.TemporaryDirectory() as folder:
        timed = run(recipe, batches, folder, counts=False)
        counted = run(recipe, batches[: WARM_UP + 2], folder, counts=True)
    pairs = list(zip(timed.trainer, timed.by_hand, strict=True))[WARM_UP:]
    median, low, high = median_with_interval([mine / theirs for mine, theirs in pairs])
    operations = counted.trainer[-1], counted.by_hand[-1]
    result = {
        "job": "docs_lm, 64 rows in 4 microbatches, JSON lines logger",
        "pairs": len(pairs),
        "median_ratio": round(median, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "goal": GOAL_TIME,
        "by_hand_ms": round(statistics.median(theirs for _, theirs in pairs) * 1e3, 2),
        "trainer_ms": round(statistics.median(mine for mine, _ in pairs) * 1e3, 2),
        "operations_by_hand": operations[1],
        "operations_trainer": operations[0],
        "operations_ratio": round(operations[0] / operations[1], 4),
        "operations_goal": GOAL_OPERATIONS,
    }
    print(
        f"Trainer.fit: ×{median:.3f} [{low:.3f}, {high:.3f}] of the loop by hand (goal "
        f"×{GOAL_TIME}); {result['by_hand_ms']} → {result['trainer_ms']} ms a batch; "
        f"{operations[1]} → {operations[0]} operations, ×{result['operations_ratio']} "
        f"(goal ×{GOAL_OPERATIONS})"
    )
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "results": [result],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
