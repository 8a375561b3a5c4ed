"""Trainers of Hugging Face and TRL on two ranks, plain and with automicro."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from automicro.integrations.transformers import enable
from tests.integrations import transformers_runs as runs
from tests.integrations.both import max_diff


def shard(trainer: Any) -> Any:
    """Set up FSDP2 as transformers does on accelerator devices.

    On other devices, ``fsdp=True`` falls back to DDP silently.
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
    """Return a trainer of a Hugging Face or TRL case."""
    arguments: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    options: dict[str, Any] = {"eval_microbatch_size": 3}
    if is_sharded:  # otherwise all but the last batch hold back whole gradients
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
    """Let a trainer's model run out of memory above a number of rows during training."""
    most = 2 * rows if of_pairs else rows

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return trainer.model.register_forward_pre_hook(fail, with_kwargs=True)


def compare_on_ranks(
    rank: int, folder: str, name: str, accumulation: int, strategy: str = "ddp"
) -> dict[str, Any]:
    """Run one rank; only rank 1 runs out of memory above half of a batch."""
    how: dict[str, Any] = {"is_sharded": strategy == "fsdp2"}
    alone = make(Path(folder), name, accumulation, with_us=False, **how)
    plain = runs.run(alone)
    ours = make(Path(folder), name, accumulation, with_us=True, **how)
    handle = fail_above(ours, 4, of_pairs=name in ("DPO", "Reward")) if rank == 1 else None
    got = runs.run(ours)
    if handle is not None:
        handle.remove()
    evaluations = [float(ours.evaluate()["eval_loss"])]
    size = ours.automicro.microbatch_size
    ours.automicro.disable()
    evaluations.append(float(ours.evaluate()["eval_loss"]))
    return {
        "kind": type(alone.model_wrapped).__name__,
        "differs": max_diff(got[0], plain[0]),
        "losses": [runs.losses(each[1]) for each in (plain, got)],
        "microbatch_size": size,
        "evaluations": evaluations,
    }
