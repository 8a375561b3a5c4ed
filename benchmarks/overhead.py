"""What the microbatcher costs above a hand-written loop at the same, fixed microbatch size.

    python -m benchmarks.overhead [--pairs 40] [--device cuda] [--json FILE]

Both do the same work on the same model and batch: slice, forward, loss times weight, backward.
Neither reads a value back. They run in turn, so that a machine whose speed drifts slows both; the
figure is the median of the ratios pair by pair, with the 95 % interval of that median.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher, is_extra_pass
from automicro.memory.device import synchronize
from automicro.torch_private import OperationMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One model, one batch, one microbatch size, and the ratio that is aimed for."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    microbatch_size: int
    goal: float


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits.transpose(1, 2)


def tiny_mlp(device: torch.device) -> Job:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    batch = (torch.randn(64, 32).to(device), torch.randint(10, (64,)).to(device))
    return Job(name="tiny MLP", model=model, batch=batch, microbatch_size=1, goal=1.15)


def small_transformer(device: torch.device) -> Job:
    model = Transformer().to(device)
    batch = (torch.randint(256, (32, 64)).to(device), torch.randint(256, (32, 64)).to(device))
    return Job(name="small transformer", model=model, batch=batch, microbatch_size=4, goal=1.05)


def hand_written(job: Job) -> Callable[[], object]:
    """The loop that people write: exact because all slices have the same number of targets.

    It keeps no loss, which ours does.
    """
    inputs, targets = job.batch
    rows, size = len(inputs), job.microbatch_size

    def step() -> None:
        for start in range(0, rows, size):
            x, y = inputs[start : start + size], targets[start : start + size]
            loss = F.cross_entropy(job.model(x), y) * (len(x) / rows)
            loss.backward()  # type: ignore[no-untyped-call]

    return step


def automatic(job: Job) -> Callable[[], object]:
    microbatcher = Microbatcher(
        job.model, loss_fn=F.cross_entropy, microbatch_size=job.microbatch_size
    )
    return lambda: microbatcher.backward(job.batch)


class Counter(OperationMode):
    operations = 0

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        self.operations += 1
        return func(*args, **kwargs)


def count_operations(step: Callable[[], object]) -> int:
    counter = Counter()
    with counter:
        step()
    return counter.operations


def time_once(step: Callable[[], object], model: nn.Module, repeats: int) -> float:
    """Seconds of one step, gradients cleared outside the clock."""
    total = 0.0
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        wait_for_device()
        start = time.perf_counter()
        step()
        wait_for_device()
        total += time.perf_counter() - start
    return total / repeats


def open_device(name: str) -> torch.device:
    """A device by name; the tests' stand-in for one is made first."""
    if name.startswith("standin"):
        importlib.import_module("tests.standin.device").install()
    return torch.device(name)


def wait_for_device() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        synchronize(device)


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval from order statistics, which assumes no distribution."""
    ordered = sorted(values)
    spread = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - spread))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + spread))
    return statistics.median(ordered), ordered[low], ordered[high]


def measure(job: Job, pairs: int, repeats: int) -> dict[str, Any]:
    hand, ours = hand_written(job), automatic(job)
    for step in (hand, ours) * 5:
        time_once(step, job.model, 1)
    job.model.zero_grad(set_to_none=True)
    hand()
    gradients = [parameter.grad for parameter in job.model.parameters()]
    job.model.zero_grad(set_to_none=True)
    ours()
    # Kernels of an accelerator do not add up in the same order each time.
    for parameter, gradient in zip(job.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    ratios, hand_seconds, our_seconds = [], [], []
    for index in range(pairs):
        order = (hand, ours) if index % 2 else (ours, hand)
        seconds = {step: time_once(step, job.model, repeats) for step in order}
        hand_seconds.append(seconds[hand])
        our_seconds.append(seconds[ours])
        ratios.append(seconds[ours] / seconds[hand])
    median, low, high = median_with_interval(ratios)
    microbatches = len(job.batch[0]) // job.microbatch_size
    difference = statistics.median(
        mine - theirs for mine, theirs in zip(our_seconds, hand_seconds, strict=True)
    )
    job.model.zero_grad(set_to_none=True)
    operations_by_hand = count_operations(hand)
    job.model.zero_grad(set_to_none=True)
    return {
        "job": job.name,
        "microbatches": microbatches,
        "pairs": pairs,
        "median_ratio": round(median, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "goal": job.goal,
        "hand_ms": round(statistics.median(hand_seconds) * 1e3, 3),
        "automicro_ms": round(statistics.median(our_seconds) * 1e3, 3),
        "python_us_per_microbatch": round(difference / microbatches * 1e6, 2),
        "operations_by_hand": operations_by_hand,
        "operations_automicro": count_operations(ours),
    }


def measure_look(job: Job, pairs: int) -> dict[str, Any]:
    """What a look at a few rows costs: passes, rows, time beside a hand-written step, and when."""
    lengths: list[int] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if module is job.model and is_extra_pass():
            lengths.append(len(args[0]))

    hand = hand_written(job)
    handle = nn.modules.module.register_module_forward_hook(note)
    batches_looked_at = []
    try:
        step = automatic(job)
        for number in range(1, 21):
            before = len(lengths)
            step()
            if len(lengths) > before:
                batches_looked_at.append(number)
    finally:
        handle.remove()
    extra = []
    for _ in range(pairs):
        step = automatic(job)
        first, settled = (time_once(step, job.model, 1) for _ in range(2))
        later = [time_once(step, job.model, 1) for _ in range(3)]
        extra.append((first + settled) / 2 - statistics.median(later))
    by_hand = statistics.median(time_once(hand, job.model, 1) for _ in range(pairs))
    return {
        "job": job.name,
        "passes_per_look": len(lengths) // len(batches_looked_at),
        "most_rows": max(lengths),
        "batches_looked_at": batches_looked_at,
        "look_ms": round(statistics.median(extra) * 1e3, 3),
        "hand_ms": round(by_hand * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60, help="interleaved pairs (default 60)")
    parser.add_argument("--repeats", type=int, default=5, help="steps per side of a pair")
    parser.add_argument("--device", type=open_device, default=torch.device("cpu"))
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = [
        measure(job(arguments.device), arguments.pairs, arguments.repeats)
        for job in (tiny_mlp, small_transformer)
    ]
    for result in results:
        low, high = result["interval_95"]
        print(
            f"{result['job']}, {result['microbatches']} microbatches: "
            f"×{result['median_ratio']:.3f} [{low:.3f}, {high:.3f}] of the hand-written loop "
            f"(goal ×{result['goal']}); {result['hand_ms']} → {result['automicro_ms']} ms, "
            f"{result['python_us_per_microbatch']} µs per microbatch, "
            f"{result['operations_by_hand']} → {result['operations_automicro']} operations"
        )
    looks = [
        measure_look(job(arguments.device), min(arguments.pairs, 15))
        for job in (tiny_mlp, small_transformer)
    ]
    for look in looks:
        print(
            f"a look, {look['job']}: {look['passes_per_look']} passes over at most "
            f"{look['most_rows']} rows, {look['look_ms']} ms where a step by hand takes "
            f"{look['hand_ms']}; at batches {look['batches_looked_at']} of 20"
        )
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(arguments.device),
            "results": results,
            "looks": looks,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
