"""How long it takes until ``automicro train configs/digits.yaml`` trains, beside importing torch.

Processes take turns, so that what else the machine does falls on both. Of each the wall clock and
the processor's time are taken, and the ratio is that of the medians. ``python -m
benchmarks.start_up`` prints it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from automicro import Callback, Run

ROUNDS = 7
IMPORT = [sys.executable, "-c", "import torch"]
TRAIN = [
    *(sys.executable, "-m", "automicro", "train", "configs/digits.yaml"),
    "callbacks=[{call: benchmarks.start_up.LeaveAtStart}]",
]


class LeaveAtStart(Callback):
    """Ends the process where training begins."""

    def fit_start(self, run: Run) -> None:
        """Everything is imported and made: leave."""
        sys.stdout.flush()
        os._exit(0)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Seconds of one process."""

    wall: float
    processor: float


def run(command: list[str]) -> Taken:
    """Run a process to its end."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Taken(wall=time.perf_counter() - start, processor=usage.ru_utime + usage.ru_stime)


def measure(rounds: int) -> dict[str, list[Taken]]:
    """Seconds of each command, in turns; the first round warms the disk and does not count."""
    commands = {"import torch": IMPORT, "until digits.yaml trains": TRAIN}
    taken: dict[str, list[Taken]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            seconds = run(command)
            if number:
                taken[name].append(seconds)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    taken = measure(parser.parse_args().rounds)
    print(f"{'':26}wall clock  processor")
    medians = {}
    for name, every in taken.items():
        wall = statistics.median(each.wall for each in every)
        processor = statistics.median(each.processor for each in every)
        medians[name] = wall, processor
        print(f"{name:26}{wall:8.2f} s {processor:8.2f} s")
    (torch_wall, torch_processor), (wall, processor) = medians.values()
    print(f"{'ratio':26}{wall / torch_wall:10.2f} {processor / torch_processor:10.2f}")


if __name__ == "__main__":
    main()
