"""Parts with their own size: overhead, and throughput under one memory limit.

    python -m benchmarks.nested

Two models whose last part needs far more memory per row than everything before it: the joint
network of a transducer, which returns (rows, times, labels, vocabulary), and a language model's
head with a vocabulary of 128k. The limit is simulated (`MemoryBudget`), the seconds are real.
"""

import argparse
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher, split
from automicro.features import Nested


class Joint(nn.Module):
    """Combines each time with each label."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocabulary)

    def forward(self, times: Tensor, labels: Tensor, targets: Tensor) -> Any:
        logits = self.out(torch.tanh(times[:, :, None] + labels[:, None]))
        wanted = targets[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
        return -logits.log_softmax(-1).gather(-1, wanted).mean()


class Transducer(nn.Module):
    """An encoder, a predictor and their joint."""

    def __init__(self, width: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.encoder = nn.GRU(32, width, num_layers=2, batch_first=True)
        self.predictor = nn.Embedding(vocabulary, width)
        self.tail = Joint(width, vocabulary)

    def forward(self, sounds: Tensor, labels: Tensor) -> Any:
        return {"loss": self.tail(self.encoder(sounds)[0], self.predictor(labels), labels)}


class Head(nn.Module):
    """Logits and their loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.out(hidden).flatten(0, -2), labels.flatten())


class LanguageModel(nn.Module):
    """Two blocks with a large vocabulary."""

    def __init__(self, width: int = 64, vocabulary: int = 131_072) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tail = Head(width, vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return {"loss": self.tail(self.blocks(self.embedding(ids)), labels)}


def transducer() -> tuple[nn.Module, dict[str, Tensor]]:
    return Transducer(), {
        "sounds": torch.randn(96, 40, 32),
        "labels": torch.randint(256, (96, 12)),
    }


def language_model() -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(131_072, (32, 17))
    return LanguageModel(), {"ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}


JOBS = {
    "transducer, joint": (transducer, "48MiB"),
    "128k words, head": (language_model, "384MiB"),
}


def under_one_limit(name: str, steps: int) -> list[tuple[str, int, float, float]]:
    """Return size, rows per second and peak in MiB, without and with a size for the part."""
    make, limit = JOBS[name]
    torch.manual_seed(0)
    model, batch = make()
    found = []
    for how, part in (("without", {}), ("rows", {"tail": "auto"})):
        microbatcher = Microbatcher(
            copy.deepcopy(model), memory_limit=limit, features=[Nested(part)]
        )
        seconds = []
        for _ in range(steps + 4):  # the first steps find sizes
            start = time.perf_counter()
            result = microbatcher.backward(batch)
            seconds.append(time.perf_counter() - start)
        num_rows = len(next(iter(batch.values())))
        found.append(
            (
                how,
                result.microbatch_size,
                num_rows / min(seconds[4:]),
                (result.peak_bytes or 0) / 2**20,
            )
        )
    return found


def microseconds(run: Callable[[], Any], repeats: int = 100) -> float:
    for _ in range(5):
        run()
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        rounds.append((time.perf_counter() - start) / repeats)
    return min(rounds) * 1e6


def forward_and_backward(part: nn.Module, given: Sequence[Tensor]) -> None:
    part(*given).sum().backward()


def overhead() -> list[tuple[str, float, float, float]]:
    """Return microseconds of forward and backward of a tiny part: plain, in one slice, in eight."""
    x, targets = torch.randn(16, 8, requires_grad=True), torch.randint(8, (16,))
    found = []
    jobs: tuple[tuple[str, Callable[[], nn.Module], Sequence[Tensor]], ...] = (
        ("middle", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (x,)),
        ("tail", lambda: Head(8, 8), (x, targets)),
    )
    for name, make, given in jobs:
        times = []
        for size in (None, 16, 2):
            part = make()
            if size is not None:
                split(part, microbatch_size=size)
            times.append(microseconds(functools.partial(forward_and_backward, part, given)))
        plain, one, eight = times
        found.append((name, plain, one, eight))
    return found


def found_together(name: str, steps: int) -> tuple[str, float, str, float]:
    """Return both sizes found by "explore" and the best of a grid, each with its rows per second.

    Everything in the grid that fits and the found sizes run in turns.
    """
    make, limit = JOBS[name]
    torch.manual_seed(0)
    model, batch = make()
    num_rows = len(next(iter(batch.values())))

    def made(size: int | str, of_part: int | str) -> Microbatcher:
        own = copy.deepcopy(model)
        nested = {"tail": of_part}
        return Microbatcher(
            own, memory_limit=limit, features=[Nested(nested)], microbatch_size=size
        )

    explored = made("explore", "auto")
    for _ in range(steps):
        explored.backward(batch)
    runners: dict[str, Microbatcher] = {}
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 48, 96) if size <= num_rows]
    for size, of_part in itertools.product(sizes, repeat=2):
        if of_part <= size:
            runner = made(size, of_part)
            try:
                for _ in range(2):  # from the second step on gradients exist
                    runner.backward(batch)
            except torch.OutOfMemoryError:
                continue
            runners[f"{size} and {of_part}"] = runner
    seconds: dict[str, list[float]] = {each: [] for each in ("explored", *runners)}
    for _ in range(5):
        for each, runner in (("explored", explored), *runners.items()):
            start = time.perf_counter()
            result = runner.backward(batch)
            seconds[each].append(time.perf_counter() - start)
            if each == "explored":
                found = f"{result.microbatch_size} and {result.nested_sizes['tail']}"
    speeds = {each: num_rows / statistics.median(times) for each, times in seconds.items()}
    best = max(runners, key=lambda each: speeds[each])
    return found, speeds["explored"], best, speeds[best]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    print("| part | plain | one slice | 8 slices |\n|---|---|---|---|")
    for name, plain, one, eight in overhead():
        print(f"| {name} | {plain:.0f} µs | {one:.0f} µs | {eight:.0f} µs |")
    print("\n| model | part | microbatch | rows per second | peak |\n|---|---|---|---|---|")
    for name in JOBS:
        for unit, size, speed, peak in under_one_limit(name, steps):
            print(f"| {name} | {unit} | {size} | {speed:.1f} | {peak:.0f} MiB |")
    print("\n| model | explored | rows per second | best of a grid | rows per second |")
    print("|---|---|---|---|---|")
    for name in JOBS:
        found, speed, best, most = found_together(name, 80)
        print(f"| {name} | {found} | {speed:.1f} | {best} | {most:.1f} |")


if __name__ == "__main__":
    main()
