"""Time until ``automicro train configs/digits.yaml`` trains, compared with importing torch.

    python -m benchmarks.start_up [--rounds 7]

Processes take turns, so that other load affects all of them. Wall-clock time and CPU time are
measured, and ratios are those of the medians. The first optimizer of a process imports torch's
compiler, which imports FSDP and takes as long as torch itself: a loop written by hand pays for it,
too. The same holds for the imports of torchmetrics.
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
LEAVE = "; import os; os._exit(0)"  # as the others do, without cleanup
BY_HAND = "import torch; torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())"
METRICS = f"{BY_HAND}; import torchmetrics.classification"
TRAIN = [
    *(sys.executable, "-m", "automicro", "train", "configs/digits.yaml"),
    "callbacks=[{call: benchmarks.start_up.LeaveAtStart}]",
]
COMMANDS = {
    "import torch": [sys.executable, "-c", f"import torch{LEAVE}"],
    "and an optimizer": [sys.executable, "-c", BY_HAND + LEAVE],
    "and torchmetrics": [sys.executable, "-c", METRICS + LEAVE],
    "digits.yaml trains": TRAIN,
    "and without metrics": [*TRAIN, "metrics={}"],
}


class LeaveAtStart(Callback):
    """Ends the process when training begins."""

    def fit_start(self, run: Run) -> None:
        """Exit after everything is imported and created."""
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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Taken(wall=time.perf_counter() - start, processor=usage.ru_utime + usage.ru_stime)


def measure(rounds: int) -> dict[str, list[Taken]]:
    """Return seconds of each command, in turns, without the first round, which warms the disk."""
    taken: dict[str, list[Taken]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            seconds = run(command)
            if number:
                taken[name].append(seconds)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    taken = measure(parser.parse_args().rounds)
    print(f"{'':22}wall clock  ratio   processor  ratio")
    first: tuple[float, float] | None = None
    for name, every in taken.items():
        wall = statistics.median(each.wall for each in every)
        processor = statistics.median(each.processor for each in every)
        first = first or (wall, processor)
        ratios = wall / first[0], processor / first[1]
        print(f"{name:22}{wall:8.2f} s {ratios[0]:6.2f}{processor:10.2f} s {ratios[1]:6.2f}")


if __name__ == "__main__":
    main()
