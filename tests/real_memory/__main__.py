"""All trials in one process, because an installed allocator cannot be removed.

    python -m tests.real_memory LIBRARY REPORT [--full]

Writes a JSON report, which the tests check.
"""

import argparse
import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch

from tests.real_memory.allocator import CappedAllocator
from tests.real_memory.measurements import compare_peaks, fail_in_a_row, refuse_once
from tests.real_memory.scenes import Scene
from tests.real_memory.subjects import OPTIMIZERS, PLANTED, SUBJECTS
from tests.real_memory.trials import Laboratory

SAMPLE = ("CNN, BatchNorm, dropout", "activation checkpointing", "forward in threads")


def sample(laboratory: Laboratory) -> dict[str, list[Any]]:
    """Run a sample of the trials in a few seconds."""
    shrinking = [laboratory.shrink(Scene(subject=subject), 4) for subject in SAMPLE]
    shrinking += [
        laboratory.shrink(Scene(subject="MLP", in_thread=True), 4),
        laboratory.shrink(Scene(subject="CNN, GroupNorm", call="evaluate"), 4),
        laboratory.shrink(Scene(subject="activation checkpointing", warm_steps=0), 4),
    ]
    faults = [
        laboratory.fail_each(Scene(subject="CNN, BatchNorm, dropout", rows=4), 2, every=13),
        laboratory.fail_each(Scene(subject="MLP", rows=4, call="evaluate"), 2, every=17),
        laboratory.fail_each(
            Scene(subject="MLP", call="optimizer step", warm_steps=0), 8, every=12
        ),
    ]
    return {
        "shrinking": shrinking,
        "faults": faults,
        "series": [fail_in_a_row(laboratory.allocator, Scene(subject="MLP"), 60)],
        "peaks": [compare_peaks(laboratory.allocator, "MLP", 64)],
    }


def everything(laboratory: Laboratory) -> dict[str, list[Any]]:
    """Run all trials in a few minutes."""
    shrinking, faults = [], []
    for subject in SUBJECTS:
        for warm_steps in (1, 0):
            shrinking += [
                laboratory.shrink(Scene(subject=subject, call=call, warm_steps=warm_steps), 12)
                for call in ("backward", "evaluate")
            ]
        shrinking.append(laboratory.shrink(Scene(subject=subject, in_thread=True), 6))
        faults += [
            laboratory.fail_each(Scene(subject=subject, rows=4, call="evaluate"), 2),
            laboratory.fail_each(Scene(subject=subject, rows=4), 2),
        ]
    for subject in ("MLP", "CNN, BatchNorm, dropout"):
        faults.append(laboratory.fail_each(Scene(subject=subject, rows=4, warm_steps=0), 2))
        faults += [
            laboratory.fail_each(
                Scene(subject=subject, call="optimizer step", optimizer=name, warm_steps=warm), 8
            )
            for name in OPTIMIZERS
            for warm in (0, 1)
        ]
    subjects = ("MLP", "CNN, BatchNorm, dropout", "activation checkpointing")
    return {
        "shrinking": shrinking,
        "faults": faults,
        "series": [fail_in_a_row(laboratory.allocator, Scene(subject=s), 1000) for s in subjects],
        "peaks": [
            compare_peaks(laboratory.allocator, subject, rows)
            for subject in SUBJECTS
            for rows in (8, 64)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--full", action="store_true", help="everything, not a sample")
    arguments = parser.parse_args()
    logging.getLogger("automicro").setLevel(logging.ERROR)  # otherwise one warning per rollback
    torch.set_num_threads(1)
    allocator = CappedAllocator(arguments.library)
    gc.collect()
    gc.freeze()
    laboratory = Laboratory(allocator)
    found = everything(laboratory) if arguments.full else sample(laboratory)
    found["refusals"] = [refuse_once(allocator, in_thread=each) for each in (False, True)]
    found["planted"] = [laboratory.shrink(Scene(subject=PLANTED), 3)]
    report = {part: [vars(row) for row in rows] for part, rows in found.items()}
    arguments.report.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
