"""How sizes are found: our policy against the rules of peers, on the same memory functions.

    python -m benchmarks.sizes [--seeds 1000] [--json FILE] [--markdown docs/sizes.md]

The functions are those of tests/policy: simulated devices on which a batch fits or does not. A rule
is charged for every failed attempt, for wasted rows (a failed attempt counts as its whole batch, a
trial before the training as its rows), and for its final size. The rules reimplement those of the
peers; `benchmarks.sizes_of_peers` runs the peers themselves and checks whether they agree, and its
newest result is shown below the table.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from automicro.policy.auto import Halving
from tests.policy.memory_functions import Device, make_device, train

FAMILIES = ("affine", "lines", "steps")
RESULTS = pathlib.Path(__file__).parent / "results"
# Lightning's defaults: the steps of a trial, and the maximum size.
LIGHTNING_STEPS = 3
LIGHTNING_LARGEST = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Cost and result of a rule; a size of 0 means that it found none."""

    failures: int
    rows_in_vain: int
    size: int


def ours(device: Device) -> Found:
    run = train(device, Halving())
    return Found(failures=run.failures, rows_in_vain=run.rows_in_vain, size=run.sizes[-1])


def fits(device: Device, size: int) -> bool:
    return device.fits(size, 1.0, 0)


def composer_rule(device: Device) -> Found:
    """Halve the microbatch, rounded down, until it fits; a remainder is one more microbatch."""
    size, failures = device.batch, 0
    while not fits(device, size):
        failures, size = failures + 1, size // 2
        if size == 0:
            break
    return Found(failures=failures, rows_in_vain=failures * device.batch, size=size)


def accelerate_rule(device: Device) -> Found:
    """Reduce the batch by a tenth until it fits; each time the training restarts."""
    size, failures, vain = device.batch, 0, 0
    while size and not fits(device, size):
        failures, vain, size = failures + 1, vain + size, int(size * 0.9)
    return Found(failures=failures, rows_in_vain=vain, size=size)


def lightning_power(device: Device) -> Found:
    """Double from two rows until it fails, whatever the batch; if two rows fail, try one."""
    # This happens before the training; three steps of each size that fits are discarded.
    size, failures, vain, any_fits = 2, 0, 0, False
    while 0 < size < LIGHTNING_LARGEST:
        if fits(device, size):
            vain, size, any_fits = vain + LIGHTNING_STEPS * size, 2 * size, True
            continue
        failures, vain, size = failures + 1, vain + size, size // 2
        if any_fits:
            break
    return Found(failures=failures, rows_in_vain=vain, size=size)


def lightning_binsearch(device: Device, *, margin: float = 0.05) -> Found:
    """Double, then bisect between fit and failure, minus the margin; assume that one row fits."""
    size, low, failures, vain = 2, 1, 0, 0
    high: int | None = None
    while size < LIGHTNING_LARGEST:
        if fits(device, size):
            vain, low = vain + LIGHTNING_STEPS * size, size
        else:
            failures, vain, high = failures + 1, vain + size, size
        if high is None:
            size *= 2
            continue
        if high - low <= 1:
            size = low
            break
        size = (low + high) // 2
    return Found(failures=failures, rows_in_vain=vain, size=max(1, int(size * (1 - margin))))


RULES: dict[str, Callable[[Device], Found]] = {
    "automicro `auto`": ours,
    "Composer's rule (halve)": composer_rule,
    "accelerate's rule (×0.9, restart)": accelerate_rule,
    "Lightning's rule (power)": lightning_power,
    "Lightning's rule (binsearch, its margin of 5 %)": lightning_binsearch,
    "Lightning's rule (binsearch, no margin)": functools.partial(lightning_binsearch, margin=0.0),
}


def measure(rule: Callable[[Device], Found], devices: list[Device]) -> dict[str, Any]:
    found = [(device, rule(device)) for device in devices]
    # Batches that fit whole cost nothing.
    excess, nothing = [], 0
    for device, each in found:
        if each.size == 0 or not fits(device, min(each.size, device.batch)):
            nothing += 1
            continue
        best = device.best(1.0, 0)
        excess.append(-(-device.batch // each.size) / best - 1)
    return {
        "functions": len(found),
        "failures_mean": statistics.mean(each.failures for _, each in found),
        "failures_max": max(each.failures for _, each in found),
        "batches_in_vain_mean": statistics.mean(
            each.rows_in_vain / device.batch for device, each in found
        ),
        "excess_mean": statistics.mean(excess),
        "excess_max": max(excess),
        "at_the_optimum": sum(value <= 0 for value in excess) / len(found),
        "found_nothing": nothing,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| rule | failed attempts, mean (most) | batches in vain, mean | microbatches above the "
        "optimum, mean (most) | at the optimum | found no size |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['failures_mean']:.1f} ({row['failures_max']}) "
            f"| {row['batches_in_vain_mean']:.1f} "
            f"| {row['excess_mean']:.0%} ({row['excess_max']:.0%}) "
            f"| {row['at_the_optimum']:.0%} | {row['found_nothing']} |"
        )
    return "\n".join(lines)


def table_of_peers(report: dict[str, Any]) -> str:
    """Return the results of `benchmarks.sizes_of_peers` on rules and later training."""
    lines = [
        "The peers themselves, as installed and with their defaults (Composer's check for a GPU is "
        "lifted),",
        f"asked to train three batches on {report['seeds']:,} of these functions "
        "(`python -m benchmarks.sizes_of_peers`).",
        "automicro here is a `Microbatcher` that measures no peaks and so only halves. In vain are "
        "the rows",
        "that the model was given and that were thrown away, not whole attempts as above.",
        "",
        "| peer | failed attempts and final size as its rule says | batches in vain, mean "
        "| batch kept | more, fewer than three optimizer steps | trainings that then ran out "
        "of memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in report["peers"].items():
        kept = row["batch_kept"] / row["functions"]
        more, fewer = (row[key] / row["functions"] for key in ("too_many_steps", "too_few_steps"))
        lines.append(
            f"| {name} {row['version']} | {row['agree_with_the_rule']:,} of {row['functions']:,} "
            f"| {row['batches_in_vain_mean']:.1f} | {kept:.0%} | {more:.0%}, {fewer:.0%} "
            f"| {row['training_ran_out_of_memory']} |"
        )
    if report["not_run"]:
        lines += ["", f"Not run: {', '.join(report['not_run'])}."]
    return "\n".join(lines)


def told_of_peers() -> str:
    """Return the table of the newest run, if there is one."""
    newest = max(RESULTS.glob("*-sizes-of-peers.json"), default=None)
    return "" if newest is None else table_of_peers(json.loads(newest.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    devices = [make_device(seed, FAMILIES[seed % len(FAMILIES)]) for seed in range(arguments.seeds)]
    results = {name: measure(rule, devices) for name, rule in RULES.items()}
    print(table(results))
    if arguments.json is not None:
        report = {
            "date": datetime.date.today().isoformat(),
            "seeds": arguments.seeds,
            "families": list(FAMILIES),
            "rules": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.markdown is not None:
        text = arguments.markdown.read_text()
        head, rest = text.split("<!-- table -->\n")[0], text.split("<!-- end of table -->")[1]
        parts = [part for part in ("<!-- table -->", table(results), told_of_peers()) if part]
        marked = "\n\n".join([*parts, "<!-- end of table -->"])
        arguments.markdown.write_text(head + marked + rest)


if __name__ == "__main__":
    main()
