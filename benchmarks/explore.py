"""Exploration on real jobs: is the choice as good as the best of a sweep, and at what cost?

    python -m benchmarks.explore [--of train|eval|offline] [--processor-time] [--rounds 15] [job …]

Each job trains (or evaluates) with ``"explore"`` until it has chosen, or is passed to
`automicro.explore` with four batches to pool. Then the same process measures all candidates in
turns. The choice is *significantly slower* than the sweep's best if a sign test on the rounds says
so (p < 0.05, two-sided). The cost of exploring in a run is the time of its steps beyond the same
number at the chosen size; before a run it is all of its time.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Explore, Microbatcher, explore
from automicro.policy.explore import cuts
from automicro.policy.policy import Policy
from automicro.tools.explore import POOLED

RUN_STEPS = 2000  # exploring may cost 3 % of these
KINDS = ("train", "eval", "offline")


def digits() -> tuple[nn.Module, Any, dict[str, Any]]:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )
    batch = (torch.randn(256, 1, 8, 8), torch.randint(10, (256,)))
    return model, batch, {"loss_fn": nn.CrossEntropyLoss()}


def resnet() -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return ResNet-18 on 64 × 64 pixels, its BatchNorm with the statistics of microbatches."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], layer_type="basic"
    )
    config.num_labels = 10
    batch = {
        "pixel_values": torch.randn(32, 3, 64, 64),
        "labels": torch.randint(10, (32,)),
    }
    return ResNetForImageClassification(config), batch, {"batchnorm": "ignore"}


def gpt2() -> tuple[nn.Module, Any, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=128,
        n_layer=2,
        n_head=4,
        vocab_size=1000,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = torch.randint(1000, (32, 64))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, {}


def bert() -> tuple[nn.Module, Any, dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=1000,
    )
    batch = {
        "input_ids": torch.randint(1000, (48, 48)),
        "attention_mask": torch.ones(48, 48, dtype=torch.long),
        "labels": torch.randint(2, (48,)),
    }
    return BertForSequenceClassification(config), batch, {}


JOBS = {"digits": digits, "resnet": resnet, "gpt2": gpt2, "bert": bert}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of an exploration, and its candidates.

    Attributes:
        size: chosen rows.
        base: the largest candidate, of a whole batch.
        sizes: candidates, largest first.
        cost: description of the cost, given the seconds of a batch at each size.
        share: cost as a share of a run; 0 before a run.
    """

    size: int
    base: int
    sizes: Sequence[int]
    cost: Callable[[Mapping[int, float]], str]
    share: Callable[[Mapping[int, float]], float]


class Turns(Policy):
    """Policy with a size that is set from outside."""

    size = 1

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(num_rows, self.size)


class Job:
    """A model with its batch, and the phase to time: ``train``, ``eval`` or ``offline``."""

    def __init__(self, name: str, of: str) -> None:
        torch.manual_seed(0)
        self.model, self.batch, self.options = JOBS[name]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.of = of
        self.num_rows = len(next(iter(_tensors(self.batch))))

    def microbatcher(self, policy: Policy) -> Microbatcher:
        return Microbatcher(
            self.model,
            microbatch_size=policy,
            eval_microbatch_size=policy,
            probe=False,
            optimizer=self.optimizer,
            **self.options,
        )

    def step(self, microbatcher: Microbatcher, rows: int) -> tuple[Any, float]:
        """Run one batch of this many rows; return its result and seconds."""
        batch = _taken(self.batch, rows)
        result: Any
        start = time.perf_counter()
        if self.of == "eval":
            result = microbatcher.evaluate(batch)
        elif self.of == "train":
            result = microbatcher.backward(batch)
        else:
            result = microbatcher.accumulate([batch], accept=lambda _: False)
        seconds = time.perf_counter() - start
        if self.of == "train":
            self.optimizer.step()
            self.optimizer.zero_grad()
        return result, seconds

    def explore(self) -> Choice:
        """Return the choice of exploring."""
        return self._before_a_run() if self.of == "offline" else self._in_a_run()

    def _in_a_run(self) -> Choice:
        microbatcher = self.microbatcher(Explore())
        spent: list[float] = []
        while True:
            result, seconds = self.step(microbatcher, self.num_rows)
            spent.append(seconds)
            if result.exploration is not None and result.exploration.is_news:
                print(f"  {result.exploration}", flush=True)
                if result.exploration.ended is not None:
                    break
        size = result.exploration.microbatch_size

        def lost(medians: Mapping[int, float]) -> float:
            return sum(spent) / medians[size] - len(spent)

        def cost(medians: Mapping[int, float]) -> str:
            return (
                f"{len(spent)} steps lost {lost(medians) * medians[size]:.2f} s, as "
                f"{lost(medians):.0f} steps at the choice: {lost(medians) / RUN_STEPS:.2%} of a "
                f"run of {RUN_STEPS:,}; 3 % of one of {math.ceil(lost(medians) / 0.03):,}"
            )

        return Choice(
            size=size,
            base=self.num_rows,
            sizes=cuts(self.num_rows, self.num_rows),
            cost=cost,
            share=lambda medians: lost(medians) / RUN_STEPS,
        )

    def _before_a_run(self) -> Choice:
        batches = [self.batch] * POOLED
        report = explore(self.model, batches, optimizer=self.optimizer, **self.options)
        print("  " + str(report).replace("\n", "\n  "), flush=True)

        def cost(medians: Mapping[int, float]) -> str:
            batches = report.seconds / medians[report.microbatch_size]
            return (
                f"{report.steps} trials took {report.seconds:.1f} s, as {batches:.0f} batches at "
                "the choice"
            )

        most = POOLED * self.num_rows
        return Choice(
            size=report.microbatch_size,
            base=report.base,
            sizes=cuts(most, most),
            cost=cost,
            share=lambda _: 0.0,
        )

    def sweep(self, sizes: Sequence[int], rounds: int) -> dict[int, list[float]]:
        """Return seconds of a batch at all sizes in turns; sizes twice as slow are dropped."""
        policy = Turns()
        microbatcher = self.microbatcher(policy)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(rounds + 1):
            for size in sizes if number % 2 else sizes[::-1]:
                if number > 1 and statistics.median(times[size]) > 2 * min(
                    statistics.median(each) for each in times.values() if each
                ):
                    continue
                policy.size = size
                whole = self.num_rows
                rows = size * max(1, round(whole / size)) if self.of == "offline" else whole
                _, seconds = self.step(microbatcher, rows)
                if number:
                    times[size].append(seconds * whole / rows)
        return {size: each for size, each in times.items() if each}


def _tensors(batch: Any) -> Iterator[Tensor]:
    yield from batch.values() if isinstance(batch, dict) else batch


def _taken(batch: Any, rows: int) -> Any:
    """Return this many rows, repeated if there are fewer."""
    if isinstance(batch, dict):
        return {key: _taken(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_taken(value, rows) for value in batch)
    return batch if len(batch) == rows else batch[torch.arange(rows) % len(batch)]


def run(name: str, of: str, rounds: int) -> bool:
    """Explore, sweep and report; return whether both promises hold."""
    job = Job(name, of)
    choice = job.explore()
    times = job.sweep(choice.sizes, rounds)
    medians = {size: statistics.median(each) for size, each in times.items()}
    size, best = choice.size, min(medians, key=lambda size: medians[size])
    pairs = [(a, b) for a, b in zip(times[size], times[best], strict=False) if a != b]
    p = sign_test(sum(a > b for a, b in pairs), len(pairs))
    table = ", ".join(f"{each}: {medians[each] * 1e3:.1f}" for each in sorted(medians))
    print(f"  sweep, ms a batch by rows: {table}")
    is_good = size == best or p >= 0.05
    print(
        f"  chosen {size}, best of the sweep {best} "
        f"({medians[size] / medians[best] - 1:+.1%}, p = {p:.2f}): "
        f"{'not ' if is_good else ''}significantly slower; "
        f"{medians[choice.base] / medians[size]:.2f}x base of {choice.base}"
    )
    print(f"  {choice.cost(medians)}")
    return is_good and choice.share(medians) <= 0.03


def sign_test(successes: int, number: int) -> float:
    """Return the two-sided p-value of equal probabilities.

    >>> round(sign_test(9, 10), 3)
    0.021
    """
    most = max(successes, number - successes)
    tail = sum(math.comb(number, each) for each in range(most, number + 1)) / 2**number
    return float(min(1.0, 2 * tail))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="*", metavar="job", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--of", action="append", choices=KINDS, help="what to explore; else all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="seconds of this process alone, on a machine that others use; one thread, no device",
    )
    options = parser.parse_args(arguments)
    if options.processor_time:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time  # exploring reads it, too
    held = []
    for of in options.of or KINDS:
        for name in options.jobs or JOBS:
            print(f"{name}, {of}", flush=True)
            held.append(run(name, of, options.rounds))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
