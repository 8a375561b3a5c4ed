"""Overhead of the microbatcher over a hand-written loop at the same microbatch size.

    python -m benchmarks.overhead [--pairs 60] [--device cuda] [--json FILE]

All do the same work on the same model and batch: slice, forward, loss times weight, backward. None
reads a value back. They run in turn, so that drift of the machine's speed affects all equally; the
results are medians of pairwise ratios, with their 95 % intervals. On the CPU, process time counts,
and each is timed with warm caches, and with a large model between the batches, which empties the
caches as other work of a step does.
"""

import argparse
import atexit
import dataclasses
import datetime
import functools
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
from automicro.torch_private_execution import OperationMode
from tests.outside import Outside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One model, one batch, one microbatch size, and the target ratio."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    microbatch_size: int | None  # None for the whole batch
    goal: float | None = None  # ratio
    goal_us: float | None = None  # microseconds per batch
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy


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
    return Job(name="tiny MLP", model=model, batch=batch, microbatch_size=1, goal=1.08)


def small_transformer(device: torch.device) -> Job:
    model = Transformer().to(device)
    batch = (torch.randint(256, (32, 64)).to(device), torch.randint(256, (32, 64)).to(device))
    return Job(name="small transformer", model=model, batch=batch, microbatch_size=4, goal=1.03)


def chain(num_parameters: int, device: torch.device) -> Job:
    """Return small layers in sequence, which have little beyond the fixed cost of a batch."""
    layers = [x for _ in range(num_parameters // 2) for x in (nn.Linear(16, 16), nn.ReLU())]
    batch = (torch.randn(64, 16).to(device), torch.randn(64, 16).to(device))
    return Job(
        name=f"{num_parameters} parameters",
        model=nn.Sequential(*layers).to(device),
        batch=batch,
        microbatch_size=None,
        goal_us=120 + 0.8 * num_parameters,
        loss_fn=F.mse_loss,
    )


def wide_mlp(device: torch.device) -> Job:
    """Return two million parameters in sixteen tensors; a step takes about ten milliseconds."""
    layers = [x for _ in range(8) for x in (nn.Linear(512, 512), nn.ReLU())]
    batch = (torch.randn(64, 512).to(device), torch.randn(64, 512).to(device))
    return Job(
        name="MLP of two million",
        model=nn.Sequential(*layers).to(device),
        batch=batch,
        microbatch_size=None,
        goal=1.02,
        loss_fn=F.mse_loss,
    )


JOBS: tuple[Callable[[torch.device], Job], ...] = (
    functools.partial(chain, 8),
    functools.partial(chain, 500),
    wide_mlp,
    small_transformer,
    tiny_mlp,
)


def hand_written(job: Job) -> Callable[[], object]:
    """Return a typical loop, exact because all slices have the same number of targets.

    It keeps no loss, unlike ours.
    """
    inputs, targets = job.batch
    rows, size = len(inputs), job.microbatch_size

    def whole() -> None:
        job.loss_fn(job.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    if size is None:
        return whole

    def step() -> None:
        for start in range(0, rows, size):
            x, y = inputs[start : start + size], targets[start : start + size]
            loss = job.loss_fn(job.model(x), y) * (len(x) / rows)
            loss.backward()  # type: ignore[no-untyped-call]

    return step


def automatic(job: Job, size: int | str | None) -> Callable[[], object]:
    microbatcher = Microbatcher(job.model, loss_fn=job.loss_fn, microbatch_size=size)
    return lambda: microbatcher.backward(job.batch)


def large_model(device: torch.device) -> Callable[[], object]:
    """Return work that removes the batch from the caches."""
    model, batch = nn.Linear(2048, 2048).to(device), torch.randn(64, 2048).to(device)
    return lambda: model(batch).sum().backward()


def nothing() -> None:
    """Do nothing between batches."""


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


def time_once(
    step: Callable[[], object],
    model: nn.Module,
    repeats: int,
    between: Callable[[], object] = nothing,
) -> float:
    """Return the seconds of one step; gradients are cleared outside the measurement."""
    clock = time.perf_counter if torch.accelerator.is_available() else time.process_time
    total = 0.0
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        between()
        wait_for_device()
        start = clock()
        step()
        wait_for_device()
        total += clock() - start
    return total / repeats


def open_device(name: str) -> torch.device:
    """Return a device by name, creating the tests' stand-in if needed."""
    if name.startswith("standin"):
        importlib.import_module("tests.standin.device").install()
    device = torch.device(name)
    if device.type != "cpu":
        # torch's device thread frees the last backward after it has returned, and needs the
        # interpreter for that: a process that ends at that moment aborts (pytorch#190489).
        atexit.register(time.sleep, 0.5)
    return device


def wait_for_device() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        synchronize(device)


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its distribution-free 95 % interval, from order statistics."""
    ordered = sorted(values)
    spread = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - spread))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + spread))
    return statistics.median(ordered), ordered[low], ordered[high]


def measure(
    job: Job, pairs: int, repeats: int, between: Callable[[], object] = nothing
) -> dict[str, Any]:
    hand, ours = hand_written(job), automatic(job, job.microbatch_size)
    steps = {"hand": hand, "fixed": ours, "auto": automatic(job, "auto")}
    if job.microbatch_size is not None:
        del steps["auto"]  # it would take the batch whole
    for step in [*steps.values()] * 10:
        time_once(step, job.model, 1)
    job.model.zero_grad(set_to_none=True)
    hand()
    gradients = [parameter.grad for parameter in job.model.parameters()]
    job.model.zero_grad(set_to_none=True)
    ours()
    # Kernels of an accelerator do not always add in the same order.
    for parameter, gradient in zip(job.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(pairs):
        for name in list(steps)[:: 1 if index % 2 else -1]:
            seconds[name].append(time_once(steps[name], job.model, repeats, between))
    by_hand = seconds["hand"]
    ratios = [mine / theirs for mine, theirs in zip(seconds["fixed"], by_hand, strict=True)]
    median, low, high = median_with_interval(ratios)
    above = {
        name: statistics.median(m - t for m, t in zip(taken, by_hand, strict=True)) * 1e6
        for name, taken in seconds.items()
    }
    microbatches = len(job.batch[0]) // (job.microbatch_size or len(job.batch[0]))
    job.model.zero_grad(set_to_none=True)
    operations_by_hand = count_operations(hand)
    job.model.zero_grad(set_to_none=True)
    return {
        "job": job.name,
        "between": "nothing" if between is nothing else "a large model",
        "microbatches": microbatches,
        "pairs": pairs,
        "median_ratio": round(median, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "goal": job.goal,
        "goal_us": job.goal_us,
        "hand_ms": round(statistics.median(by_hand) * 1e3, 3),
        "automicro_ms": round(statistics.median(seconds["fixed"]) * 1e3, 3),
        "us_per_batch": round(above["fixed"], 1),
        "auto_us_per_batch": round(above["auto"], 1) if "auto" in above else None,
        "python_us_per_microbatch": round(above["fixed"] / microbatches, 2),
        "operations_by_hand": operations_by_hand,
        "operations_automicro": count_operations(ours),
    }


def describe(result: dict[str, Any]) -> str:
    low, high = result["interval_95"]
    goal = f"×{result['goal']}" if result["goal"] else f"{result['goal_us']:.0f} µs"
    count = result["microbatches"]
    auto = result["auto_us_per_batch"]
    return (
        f"{result['job']}, {count} microbatch{'' if count == 1 else 'es'}, "
        f"{result['between']} between batches: ×{result['median_ratio']:.3f} "
        f"[{low:.3f}, {high:.3f}] of the hand-written loop; "
        f"{result['hand_ms']} → {result['automicro_ms']} ms, {result['us_per_batch']} µs a batch"
        f"{'' if auto is None else f', {auto} with auto'} (goal {goal}), "
        f"{result['python_us_per_microbatch']} µs a microbatch, "
        f"{result['operations_by_hand']} → {result['operations_automicro']} operations"
    )


def measure_look(job: Job, pairs: int) -> dict[str, Any]:
    """Measure a check of a few rows: passes, rows, relative time, and occasions."""
    seen = Outside(lengths=[])  # a check undoes the changes of its passes

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if module is job.model and is_extra_pass():
            seen.lengths.append(len(args[0]))

    hand = hand_written(job)
    handle = nn.modules.module.register_module_forward_hook(note)
    batches_looked_at = []
    try:
        step = automatic(job, job.microbatch_size)
        for number in range(1, 21):
            before = len(seen.lengths)
            step()
            if len(seen.lengths) > before:
                batches_looked_at.append(number)
    finally:
        handle.remove()
    extra = []
    for _ in range(pairs):
        step = automatic(job, job.microbatch_size)
        first, settled = (time_once(step, job.model, 1) for _ in range(2))
        later = [time_once(step, job.model, 1) for _ in range(3)]
        extra.append((first + settled) / 2 - statistics.median(later))
    by_hand = statistics.median(time_once(hand, job.model, 1) for _ in range(pairs))
    return {
        "job": job.name,
        "passes_per_look": len(seen.lengths) // len(batches_looked_at),
        "most_rows": max(seen.lengths),
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
    between = large_model(arguments.device)
    results = []
    for make in JOBS:
        for each in (nothing, between):
            results.append(
                measure(make(arguments.device), arguments.pairs, arguments.repeats, each)
            )
            print(describe(results[-1]), flush=True)
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
