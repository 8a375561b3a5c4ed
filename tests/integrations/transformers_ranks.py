"""Two processes under torchrun: a trainer of Hugging Face's, plain and with automicro.

    torchrun --nproc-per-node 2 -m tests.integrations.transformers_ranks FOLDER NAME ACCUMULATION

Rank 1 alone runs out of memory with more than half of a batch. Rank 0 writes what was found.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations import transformers_runs as runs


def fail(module: Any, args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled() and len(kwargs["input_ids"]) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def main(folder: Path, name: str, accumulation: int) -> None:
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {
        "dtype": torch.float64,
        "gradient_accumulation_steps": accumulation,
    }
    plain = runs.run(runs.make(runs.CASES[name], folder, **arguments))
    options = {"eval_microbatch_size": 3}
    ours = runs.make(runs.CASES[name], folder, with_us=True, options=options, **arguments)
    handle = None
    if dist.get_rank() == 1:
        handle = ours.model.register_forward_pre_hook(fail, with_kwargs=True)
    got = runs.run(ours)
    if handle is not None:
        handle.remove()
    found["differs"] = runs.furthest(got[0], plain[0])
    found["losses"] = [runs.losses(each[1]) for each in (plain, got)]
    found["microbatch_size"] = ours.automicro.microbatch_size
    found["evaluations"] = [float(ours.evaluate()["eval_loss"])]
    ours.automicro.disable()
    found["evaluations"].append(float(ours.evaluate()["eval_loss"]))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(every), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
