"""Two processes under torchrun: a trainer of Hugging Face's or TRL's, plain and with automicro.

    torchrun --nproc-per-node 2 -m tests.integrations.transformers_ranks FOLDER NAME ACCUMULATION
        [fsdp2]

Rank 1 alone runs out of memory with more than half of a batch. Rank 0 writes what was found.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

from automicro.integrations.transformers import enable
from tests.integrations import transformers_runs as runs
from tests.integrations.both import furthest


def shard(trainer: Any) -> Any:
    """FSDP2 as transformers sets it up, which accelerate lets it do on accelerators only.

    Elsewhere ``fsdp=True`` is DDP, without a word.
    """
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator = trainer.accelerator
    policy: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}
    if isinstance(trainer.model, GPT2LMHeadModel):
        policy = {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["GPT2Block"],
        }
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    plugin.cpu_ram_efficient_loading = False
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True
    return trainer


def make(folder: Path, name: str, accumulation: int, *, with_us: bool, is_sharded: bool) -> Any:
    """A trainer of a case of theirs."""
    arguments: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    options: dict[str, Any] = {"eval_microbatch_size": 3}
    if is_sharded:  # else whole gradients of all but the last batch are kept back
        each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        arguments["accelerator_config"] = each
        arguments |= {"eval_on_start": True, "eval_strategy": "epoch"}
    if name not in runs.CASES:
        arguments["rows"] = 44
    case = runs.CASES.get(name, name)
    trainer = runs.make(case, folder, dtype=torch.float64, **arguments)
    if is_sharded:
        shard(trainer)
    return enable(trainer, **options) if with_us else trainer


def fail_above(trainer: Any, rows: int, *, of_pairs: bool) -> Any:
    """Let a trainer's model run out of memory with more rows than these, while it trains."""
    most = 2 * rows if of_pairs else rows

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return trainer.model.register_forward_pre_hook(fail, with_kwargs=True)


def main(folder: Path, name: str, accumulation: int, strategy: str = "ddp") -> None:
    found: dict[str, Any] = {}
    how: dict[str, Any] = {"is_sharded": strategy == "fsdp2"}
    alone = make(folder, name, accumulation, with_us=False, **how)
    plain = runs.run(alone)
    found["kind"] = type(alone.model_wrapped).__name__
    ours = make(folder, name, accumulation, with_us=True, **how)
    handle = None
    if dist.get_rank() == 1:
        handle = fail_above(ours, 4, of_pairs=name in ("DPO", "Reward"))
    got = runs.run(ours)
    if handle is not None:
        handle.remove()
    found["differs"] = furthest(got[0], plain[0])
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
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    # A process group that lives on in a cycle of trainers ends the interpreter by SIGABRT, now and
    # then (pytorch#190489).
    gc.collect()
