"""Exploring on real jobs: is the choice as good as the best of a sweep, and what did it cost?

    python -m benchmarks.explore [--rounds 15] [job …]

Each job trains with ``microbatch_size="explore"`` until it has chosen, and then, in the same
process, passes over all its candidates in turns. The choice is *significantly slower* than the
sweep's best where a sign test on the rounds says so (p < 0.05, two-sided). What exploring lost is
the time of its steps beyond as many at the chosen size.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from automicro import Explore, Microbatcher
from automicro.policy.explore import cuts
from automicro.policy.policy import Policy

RUN_STEPS = 2000  # of which exploring may lose 3 %


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
    """ResNet-18 on 64 × 64 pixels, its BatchNorm with the statistics of microbatches."""
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


class Turns(Policy):
    """The size that somebody sets."""

    size = 1

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(num_rows, self.size)


def run(name: str, rounds: int) -> bool:
    """Explore, sweep, and say what came of it; whether both promises hold."""
    torch.manual_seed(0)
    model, batch, options = JOBS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def stepping(policy: Policy) -> tuple[Microbatcher, Callable[[], tuple[Any, float]]]:
        microbatcher = Microbatcher(
            model, microbatch_size=policy, probe=False, optimizer=optimizer, **options
        )

        def step() -> tuple[Any, float]:
            start = time.perf_counter()
            result = microbatcher.backward(batch)
            seconds = time.perf_counter() - start
            optimizer.step()
            optimizer.zero_grad()
            return result, seconds

        return microbatcher, step

    _, step = stepping(Explore())
    spent: list[float] = []
    while True:
        result, seconds = step()
        spent.append(seconds)
        if result.exploration is not None and result.exploration.is_news:
            print(f"  {result.exploration}", flush=True)
            if result.exploration.ended is not None:
                break
    choice = result.exploration.microbatch_size
    policy = Turns()
    _, step = stepping(policy)
    sizes = cuts(result.num_samples, result.num_samples)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size in sizes if number % 2 else sizes[::-1]:
            if number > 1 and statistics.median(times[size]) > 2 * min(
                statistics.median(each) for each in times.values() if each
            ):
                continue  # twice as slow is no rival
            policy.size = size
            _, seconds = step()
            if number:
                times[size].append(seconds)
    medians = {size: statistics.median(each) for size, each in times.items() if each}
    best = min(medians, key=lambda size: medians[size])
    pairs = [(a, b) for a, b in zip(times[choice], times[best], strict=False) if a != b]
    p = sign_test(sum(a > b for a, b in pairs), len(pairs))
    lost = sum(spent) - len(spent) * medians[choice]
    share = lost / (RUN_STEPS * medians[choice])
    table = ", ".join(f"{size}: {medians[size] * 1e3:.1f}" for size in sorted(medians))
    print(f"  sweep, ms a batch by rows: {table}")
    is_good = choice == best or p >= 0.05 or medians[choice] <= medians[best]
    print(
        f"  chosen {choice}, best of the sweep {best} "
        f"({medians[choice] / medians[best] - 1:+.1%}, p = {p:.2f}): "
        f"{'not ' if is_good else ''}significantly slower"
    )
    print(
        f"  {len(spent)} steps lost {lost:.2f} s, as {lost / medians[choice]:.0f} steps at the "
        f"choice: {share:.2%} of a run of {RUN_STEPS:,}; 3 % of one of "
        f"{math.ceil(lost / medians[choice] / 0.03):,}; "
        f"{medians[max(medians)] / medians[choice]:.2f}x base"
    )
    return is_good and share <= 0.03


def sign_test(successes: int, number: int) -> float:
    """Two-sided, that both are as probable.

    >>> round(sign_test(9, 10), 3)
    0.021
    """
    most = max(successes, number - successes)
    tail = sum(math.comb(number, each) for each in range(most, number + 1)) / 2**number
    return float(min(1.0, 2 * tail))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="*", metavar="job", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    held = []
    for name in options.jobs or JOBS:
        print(name)
        held.append(run(name, options.rounds))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
