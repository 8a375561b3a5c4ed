"""Batches by row length: time to order ten million rows, and the padding of each mode.

    python -m benchmarks.samplers            # prints the table of docs/lengths.md, all modes
    python -m benchmarks.samplers --rows 1000000

Each mode runs in its own process. Time is CPU time, because other processes might run; memory is
the largest resident size of the whole process, including torch and lengths.
"""

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from automicro.data import MODES, LengthBatchSampler
from automicro.data.sampler import Array, length_cost

ROWS_PER_BATCH = 32
PADDED_ROWS = 200_000  # of the jobs in the table of paddings


@dataclass(frozen=True, kw_only=True)
class Job:
    """Rows with two lengths.

    Attributes:
        name: name in the table.
        lengths: seconds or tokens, of shape (rows,).
        second_lengths: tokens of the transcript or the answer, of shape (rows,).
        edges: boundaries of given buckets.
    """

    name: str
    lengths: Array
    second_lengths: Array
    edges: tuple[float, ...]


def language(rows: int) -> Job:
    """Return instructions: log-normal tokens, a quarter of the longest on average, at most 2048."""
    random = np.random.default_rng(0)
    lengths = np.clip(np.round(random.lognormal(5.96, 0.8, rows)), 8, 2048)
    answers = np.clip(np.round(lengths * random.uniform(0.2, 0.9, rows)), 1, None)
    edges = (128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 1536.0)
    return Job(name="language", lengths=lengths, second_lengths=answers, edges=edges)


def speech(rows: int) -> Job:
    """Return utterances: half short, half near the longest, with 2 to 5 tokens per second."""
    random = np.random.default_rng(0)
    short = random.lognormal(1.5, 0.6, rows)
    long = random.normal(14, 1.2, rows)
    lengths = np.clip(np.where(random.random(rows) < 0.5, short, long), 0.5, 16.7)
    tokens = np.round(lengths * random.uniform(2, 5, rows))
    return Job(name="speech", lengths=lengths, second_lengths=tokens, edges=(4.0, 8.0, 12.0, 15.0))


def make_sampler(mode: str, job: Job, rows: int = ROWS_PER_BATCH) -> LengthBatchSampler:
    """Return the sampler of a mode with about this many rows per batch."""
    [budget] = MODES[mode].budgets[:1] if MODES[mode].dimensions != 1 else ["batch_length"]
    options: dict[str, Any] = {"mode": mode, "lengths": job.lengths}
    options["second_lengths"] = job.second_lengths
    if mode == "1D-bucketing":
        options["bucket_edges"] = job.edges
    if budget == "batch_size":
        return LengthBatchSampler(**options, batch_size=rows)
    if budget == "batch_length":
        return LengthBatchSampler(**options, batch_length=float(job.lengths.mean() * rows))
    cost = float(length_cost(job.lengths, job.second_lengths).mean()) * rows
    return LengthBatchSampler(**options, batch_cost=_fitted_cost(options, cost, rows))


def _fitted_cost(options: dict[str, Any], cost: float, rows: int) -> float:
    """Return the budget for which batches have this many rows on average."""
    sample = slice(None, None, max(1, len(options["lengths"]) // 20_000))
    fewer = {name: options[name][sample] for name in ("lengths", "second_lengths")}
    for _ in range(8):
        found = LengthBatchSampler(**(options | fewer), batch_cost=cost).average_batch().rows
        cost *= rows / found
    return cost


@dataclass(frozen=True, kw_only=True)
class Row:
    """Statistics of the batches of a mode.

    Attributes:
        mode: mode of the sampler.
        batches: number of batches.
        rows: average rows per batch.
        padding: share of padding.
        largest: padded length of the largest batch, relative to the average.
        largest_cost: the same for length × second length.
    """

    mode: str
    batches: int
    rows: float
    padding: float
    largest: float
    largest_cost: float


def measure(mode: str, job: Job) -> Row:
    """Return statistics of the batches of a mode."""
    sampler = make_sampler(mode, job)
    plan = sampler.plan()
    counts = np.diff(plan.starts)
    longest, most = (
        np.maximum.reduceat(each[plan.rows], plan.starts[:-1])
        for each in (job.lengths, job.second_lengths)
    )
    padded, cost = counts * longest, counts * length_cost(longest, most)
    return Row(
        mode=mode,
        batches=len(plan),
        rows=sampler.average_batch().rows,
        padding=1 - float(job.lengths.sum() / padded.sum()),
        largest=float(padded.max() / padded.mean()),
        largest_cost=float(cost.max() / cost.mean()),
    )


def describe_padding(job: Job) -> str:
    """Return the table of a job."""
    lines = [
        f"| {job.name} | rows per batch | padding | largest batch | largest by cost |",
        "|---|---|---|---|---|",
    ]
    for mode in MODES:
        row = measure(mode, job)
        lines.append(
            f"| `{row.mode}` | {row.rows:.1f} | {row.padding:.1%} | {row.largest:.1f} × "
            f"| {row.largest_cost:.1f} × |"
        )
    return "\n".join(lines)


def order(mode: str, rows: int) -> tuple[float, float]:
    """Return seconds for a sampler and its first plan, and GiB of the process."""
    job = speech(rows)
    start = time.process_time()
    make_sampler(mode, job).plan()
    seconds = time.process_time() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--rows", type=int, default=10_000_000, help="to order")
    rows: int = parser.parse_args().rows
    for job in (language(PADDED_ROWS), speech(PADDED_ROWS)):
        print(describe_padding(job), end="\n\n", flush=True)
    print(f"| {rows:,} rows | seconds | GiB |\n|---|---|---|", flush=True)
    context = multiprocessing.get_context("spawn")
    for mode in MODES:
        with context.Pool(1) as pool:
            seconds, memory = pool.apply(order, (mode, rows))
        print(f"| `{mode}` | {seconds:.1f} | {memory:.2f} |", flush=True)


_Plain = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
