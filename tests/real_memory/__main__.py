"""All trials in one process, because an installed allocator cannot be removed.

    python -m tests.real_memory LIBRARY REPORT [--full]

Writes a JSON report, which the tests check.
"""

import argparse
import gc
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import torch

from tests.real_memory.allocator import CappedAllocator
from tests.real_memory.measurements import compare_peaks, refuse_once
from tests.real_memory.scenes import Scene
from tests.real_memory.subjects import OPTIMIZERS, PLANTED, SUBJECTS
from tests.real_memory.trials import Laboratory

SAMPLE = ("CNN, BatchNorm, dropout", "activation checkpointing", "forward in threads")


def sample(laboratory: Laboratory) -> dict[str, list[Any]]:
    """Run a sample of the trials in a few seconds."""
    shrinking = [
        *(Scene(subject=subject) for subject in SAMPLE),
        Scene(subject="MLP", in_thread=True),
        Scene(subject="CNN, GroupNorm", call="evaluate"),
        Scene(subject="activation checkpointing", warm_steps=0),
    ]
    step = Scene(subject="MLP", call="optimizer step", warm_steps=0)
    return {
        "shrinking": [laboratory.shrink(scene, 4) for scene in shrinking],
        "faults": [
            laboratory.fail_each(Scene(subject="CNN, BatchNorm, dropout", rows=4), 2, every=13),
            laboratory.fail_each(Scene(subject="MLP", rows=4, call="evaluate"), 2, every=17),
            laboratory.fail_each(step, 8, every=12),
        ],
        "peaks": [compare_peaks(laboratory.allocator, "MLP", 64)],
    }


def everything(laboratory: Laboratory) -> dict[str, list[Any]]:
    """Run all trials in a few minutes."""
    shrinking, faults = [], []
    for subject in SUBJECTS:
        for call, warm in itertools.product(("backward", "evaluate"), (1, 0)):
            scene = Scene(subject=subject, call=call, warm_steps=warm)
            shrinking.append(laboratory.shrink(scene, 12))
        shrinking.append(laboratory.shrink(Scene(subject=subject, in_thread=True), 6))
        for call in ("backward", "evaluate"):
            faults.append(laboratory.fail_each(Scene(subject=subject, rows=4, call=call), 2))
    for subject in ("MLP", "CNN, BatchNorm, dropout"):
        faults.append(laboratory.fail_each(Scene(subject=subject, rows=4, warm_steps=0), 2))
        for name, warm in itertools.product(OPTIMIZERS, (0, 1)):
            step = Scene(subject=subject, call="optimizer step", optimizer=name, warm_steps=warm)
            faults.append(laboratory.fail_each(step, 8))
    peaks = [
        compare_peaks(laboratory.allocator, subject, rows)
        for subject, rows in itertools.product(SUBJECTS, (8, 64))
    ]
    return {"shrinking": shrinking, "faults": faults, "peaks": peaks}


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
    arguments.report.write_text(json.dumps(found, indent=2, default=vars))


if __name__ == "__main__":
    main()
