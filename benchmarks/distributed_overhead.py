"""Overhead of the microbatcher over torch's plain wrappers on several ranks, once settled.

    python -m benchmarks.distributed_overhead [--ranks 2] [--pairs 30] [--json FILE]
    python -m benchmarks.distributed_overhead --sync [--ranks 4] [--pairs 5] [--link 100]

The model is a transformer with 8 million parameters, wrapped in DDP or by `fully_shard`, with one
batch per rank. By hand: slice, forward, loss times weight, backward, with DDP's `no_sync` for all
microbatches but the last. Ours: `Microbatcher.backward` with a `Halving` policy that has nothing to
halve, votes and guards included. Each uses its own copy of the model, and they run in turn after a
barrier; a step takes as long as its slowest rank. The result is the median of the pairwise ratios,
with its 95 % interval. At the end both have the same gradients.

With ``--sync``: the collectives of a step, the bytes that a rank sends for them, and its seconds,
with gradients reduced as late as each `Sync` says. Gloo within one machine is not a slow link, so
one is simulated: after each collective over it the rank sleeps for as long as its bytes would take,
and nothing overlaps. With FSDP2 all links are slow, with HSDP those between its two replicas.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from automicro import Halving, Microbatcher
from automicro.features import RankReduction
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.interface import Sync
from benchmarks.overhead import Transformer, median_with_interval

GOAL = 1.05
ROWS, LENGTH = 8, 32
WARM_UP = 6  # pairs: the first steps are guarded, later ones replay
KINDS = ("ddp", "fsdp")
MICROBATCHES = (1, 4)

Step = Callable[[], object]


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(width=256, layers=10)
    if kind == "ddp":
        return DistributedDataParallel(model)
    shape = (2, dist.get_world_size() // 2) if kind == "hsdp" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
    """Return the seconds of one step on this rank, started together with all others."""
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


class Link:
    """Counts the collectives of wrappers and delays those over a slow link.

    Args:
        megabytes_per_second: bandwidth of the slow link.
        is_slow: whether a collective of this name goes over it.
    """

    def __init__(self, megabytes_per_second: float, is_slow: Callable[[str], bool]) -> None:
        self._bytes_per_second = megabytes_per_second * 1e6
        self._is_slow = is_slow
        self.count: collections.Counter[str] = collections.Counter()
        self.sent_bytes: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in SENT}
        for name, original in originals.items():
            setattr(dist, name, functools.partial(self._call, name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _call(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        size = dist.get_world_size(kwargs.get("group"))
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        sent = round(SENT[name](max(each.nbytes for each in given), size))
        self.count[name] += 1
        self.sent_bytes[name] += sent
        result = original(*args, **kwargs)
        if self._is_slow(name):
            time.sleep(sent / self._bytes_per_second)
        return result


# Bytes that a rank sends in a ring, by the bytes of the whole tensor and the number of ranks.
SENT: dict[str, Callable[[int, int], float]] = {
    "all_gather_single": lambda whole, ranks: whole * (ranks - 1) / ranks,
    "reduce_scatter_single": lambda whole, ranks: whole * (ranks - 1) / ranks,
    "all_reduce": lambda whole, ranks: 2 * whole * (ranks - 1) / ranks,
}
LATEST = {"fsdp": (Sync.EACH, Sync.LAST), "hsdp": tuple(Sync)}


def measure_sync(
    kind: str, num_microbatches: int, rounds: int, link: float
) -> list[dict[str, Any]]:
    """Measure a step's collectives and seconds, with gradients reduced late and early."""
    size = ROWS // num_microbatches
    torch.manual_seed(dist.get_rank())
    batch = (torch.randint(256, (ROWS, LENGTH)), torch.randint(256, (ROWS, LENGTH)))
    model = wrapped(kind)
    step = Microbatcher(
        model,
        loss_fn=F.cross_entropy,
        microbatch_size=size,
        probe=False,
        features=[RankReduction("auto")],
    )
    ranks = step.ranks
    assert isinstance(ranks, CoordinatedRanks)
    links: dict[Sync, Link] = {}
    seconds: dict[Sync, list[float]] = {sync: [] for sync in LATEST[kind]}
    for index in range(2 + rounds):
        for sync in LATEST[kind]:
            ranks.sync = sync
            links[sync] = Link(link, lambda name: kind == "fsdp" or name == "all_reduce")
            with links[sync].used() if index else contextlib.nullcontext():
                took = time_once(lambda: step.backward(batch), model)
            assert ranks.synced is sync
            if index > 1:
                seconds[sync].append(took)
    found = []
    for sync, used in links.items():
        slowest = torch.tensor(statistics.median(seconds[sync]), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(
            {
                "wrapper": kind,
                "microbatches": num_microbatches,
                "sync": sync.name.lower(),
                "count": dict(used.count),
                "sent_bytes": dict(used.sent_bytes),
                "seconds": round(slowest.item(), 3),
            }
        )
    return found


def rank_main(rank: int, arguments: argparse.Namespace, store: str, report: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nothing here is in-place
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    if arguments.sync:
        kinds = ["fsdp", *(["hsdp"] if arguments.ranks > 2 else [])]
        measured = [measure_sync(each, 4, arguments.pairs, arguments.link) for each in kinds]
        results = [result for each in measured for result in each]
    else:
        results = [
            measure(kind, count, arguments.pairs) for kind in KINDS for count in MICROBATCHES
        ]
    if rank == 0:
        pathlib.Path(report).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs (default 30)")
    parser.add_argument("--sync", action="store_true", help="when gradients are reduced")
    parser.add_argument("--link", type=float, default=100.0, help="MB/s of the slow link")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        spawn(  # type: ignore[no-untyped-call]
            rank_main,
            (arguments, f"{folder}/store", str(report)),
            nprocs=arguments.ranks,
        )
        results = json.loads(report.read_text(encoding="utf-8"))
    for result in results if arguments.sync else ():
        counts = ", ".join(
            f"{count} {name} of {result['sent_bytes'][name] / 1e6:.1f} MB together"
            for name, count in result["count"].items()
        )
        sys.stdout.write(
            f"{result['wrapper']}, {result['microbatches']} microbatches, {arguments.ranks} ranks, "
            f"{result['sync']}: {result['seconds']} s; {counts}\n"
        )
    for result in () if arguments.sync else results:
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
            "link_megabytes_per_second": arguments.link if arguments.sync else None,
            "results": results,
        }
        arguments.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
