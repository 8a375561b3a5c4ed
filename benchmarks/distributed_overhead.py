"""What the microbatcher costs above torch's plain wrappers on several ranks, once settled.

    python -m benchmarks.distributed_overhead [--ranks 2] [--pairs 30] [--json FILE]

A transformer of 8 million parameters, wrapped in DDP or by `fully_shard`, one batch per rank. By
hand: slice, forward, loss times weight, backward, with DDP's `no_sync` for all microbatches but the
last. Ours: `Microbatcher.backward` with a `Halving` policy that has nothing to halve, votes and
guards included. Both keep their own copy of the model and run in turn after a barrier; a step takes
as long as its slowest rank. The figure is the median of the ratios pair by pair, with the 95 %
interval of that median. At the end both have the same gradients.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from automicro import Halving, Microbatcher
from automicro.ranks.coordinated import CoordinatedRanks
from benchmarks.overhead import Transformer, median_with_interval

GOAL = 1.05
ROWS, LENGTH = 8, 32
WARM_UP = 6  # pairs: first steps are guarded, then replayed
KINDS = ("ddp", "fsdp")
MICROBATCHES = (1, 4)

Step = Callable[[], object]


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(width=256, layers=10)
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.encoder.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def by_hand(model: nn.Module, batch: tuple[Tensor, Tensor], size: int) -> Step:
    inputs, targets = batch

    def step() -> None:
        for start in range(0, ROWS, size):
            is_last = start + size >= ROWS
            alone: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if isinstance(model, DistributedDataParallel) and not is_last:
                alone = model.no_sync()
            with alone:
                x, y = inputs[start : start + size], targets[start : start + size]
                loss = F.cross_entropy(model(x), y) * (size / ROWS)
                loss.backward()  # type: ignore[no-untyped-call]

    return step


def time_once(step: Step, model: nn.Module) -> float:
    """Seconds of one step on this rank, all having begun together."""
    model.zero_grad(set_to_none=True)
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(kind: str, num_microbatches: int, pairs: int) -> dict[str, Any]:
    size = ROWS // num_microbatches
    torch.manual_seed(dist.get_rank())
    batch = (torch.randint(256, (ROWS, LENGTH)), torch.randint(256, (ROWS, LENGTH)))
    theirs, mine = wrapped(kind), wrapped(kind)
    microbatcher = Microbatcher(
        mine,
        loss_fn=F.cross_entropy,
        microbatch_size=Halving(max_microbatch_size=size),
        probe=False,
    )
    ranks = microbatcher.ranks
    assert isinstance(ranks, CoordinatedRanks)
    hand = by_hand(theirs, batch, size)

    def ours() -> None:
        result = microbatcher.backward(batch)
        assert result.num_microbatches == num_microbatches

    seconds = []
    for index in range(WARM_UP + pairs):
        sides = ((hand, theirs), (ours, mine))
        before = ranks.num_votes
        took = {step: time_once(step, model) for step, model in sides[:: 1 if index % 2 else -1]}
        votes = ranks.num_votes - before
        seconds.append((took[hand], took[ours]))
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    for one, other in zip(theirs.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    times = slowest.tolist()
    median, low, high = median_with_interval([ours / hand for hand, ours in times])
    return {
        "wrapper": kind,
        "microbatches": num_microbatches,
        "parameters": sum(p.numel() for p in theirs.parameters()),
        "pairs": pairs,
        "median_ratio": round(median, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "goal": GOAL,
        "wrapper_ms": round(statistics.median(hand for hand, _ in times) * 1e3, 2),
        "automicro_ms": round(statistics.median(ours for _, ours in times) * 1e3, 2),
        "exchanges_per_batch": votes,
    }


def rank_main(rank: int, ranks: int, store: str, pairs: int, report: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nothing here is in-place
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    results = [measure(kind, count, pairs) for kind in KINDS for count in MICROBATCHES]
    if rank == 0:
        pathlib.Path(report).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs (default 30)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        spawn(  # type: ignore[no-untyped-call]
            rank_main,
            (arguments.ranks, f"{folder}/store", arguments.pairs, str(report)),
            nprocs=arguments.ranks,
        )
        results = json.loads(report.read_text(encoding="utf-8"))
    for result in results:
        low, high = result["interval_95"]
        sys.stdout.write(
            f"{result['wrapper']}, {result['microbatches']} microbatches, {arguments.ranks} ranks: "
            f"×{result['median_ratio']:.3f} [{low:.3f}, {high:.3f}] of the plain wrapper (goal "
            f"×{GOAL}); {result['wrapper_ms']} → {result['automicro_ms']} ms, "
            f"{result['exchanges_per_batch']} exchanges a batch\n"
        )
    if arguments.json:
        whole = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "ranks": arguments.ranks,
            "results": results,
        }
        arguments.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
