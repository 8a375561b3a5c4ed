"""Loops with accelerate: one call replaces the forward and ``accelerator.backward``."""

from typing import Any

import torch
from torch import Tensor, nn

from automicro.integrations.host import check_options, import_host, microbatcher_of, require_seam
from automicro.microbatcher import Microbatcher
from automicro.step.results import StepResult

_accelerate = import_host("accelerate", extra="accelerate")

SUPPORTED = "accelerate 1.10 or later"

_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "torch_xla"}
_OWN = {
    "backward": "accelerator.backward, which scales the loss as the accelerator was configured",
    "precision": "Accelerator(mixed_precision='bf16'), with autocast around the forward",
}


def microbatcher(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any = None,
    **options: Any,
) -> Microbatcher:
    """Create a `Microbatcher` that uses the accelerator's backward, loss scaler and ranks.

    ``loss = step.backward(batch).loss`` replaces the forward and ``accelerator.backward(loss)``.
    Everything else stays unchanged: ``accumulate``, ``clip_grad_norm_``, optimizer, scheduler,
    ``gather_for_metrics``, ``save_state``.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: the model that ``accelerator.prepare`` returned.
        optimizer: the optimizer that ``accelerator.prepare`` returned. Memory for its state is
            reserved while sizes are found.
        options: options of `Microbatcher`, such as ``loss_fn``, ``forward``, ``loss_average`` or
            ``memory_limit``. With ``scales_for_ranks=False`` (default), each rank's loss is the
            mean over its own rows, and gradients are averaged over ranks, as accelerate does. With
            True, the gradient is that of all ranks' rows (or tokens) as one batch.

    Raises:
        TypeError: if ``accelerator`` is not an ``Accelerator``, or if an option is unknown or set
            by the accelerator.
        ValueError: if the model or the optimizer did not come out of ``prepare``, or if the setup
            would silently give different numbers. The message names the remedy.
        ImportError: if accelerate is missing or its version is not supported.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from automicro.integrations.accelerate import microbatcher
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(8, 2)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> loss_fn = torch.nn.CrossEntropyLoss()
        >>> step = microbatcher(accelerator, model, optimizer, loss_fn=loss_fn)
        >>> for batch in [(torch.randn(32, 8), torch.randint(2, (32,)))]:
        ...     loss = step.backward(batch).loss
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> loss.requires_grad
        False
    """
    _check_accelerator(accelerator)
    check_options("microbatcher", options, _OWN)
    check_kind(accelerator, accelerator.gradient_accumulation_steps)
    _check_prepared(accelerator, model, optimizer)
    if accelerator.scaler is not None:
        # The scaler creates its scale on first use, which must not happen inside an attempt.
        accelerator.scaler.scale(torch.zeros((), device=accelerator.device))
    step = microbatcher_of(
        model, options, kind=_InAccelerator, accelerator=accelerator, optimizer=optimizer
    )
    # `prepare` does not wrap a model without gradients, or if device_placement says so.
    if step.ranks.world_size != accelerator.num_processes:
        raise ValueError(
            f"the accelerator has {accelerator.num_processes} processes, but the model is wrapped "
            f"for {step.ranks.world_size}, so its gradients would not be averaged. Let "
            "accelerator.prepare(model, optimizer) wrap it for training"
        )
    return step


class _InAccelerator(Microbatcher):
    """A Microbatcher that refuses to divide gradients twice."""

    def __init__(self, model: nn.Module, *, accelerator: Any, **options: Any) -> None:
        def backward(loss: Tensor) -> None:
            accelerator.backward(loss)

        super().__init__(model, backward=backward, **options)
        self._accelerator = accelerator

    def accumulate(self, batches: Any, *args: Any, **named: Any) -> StepResult:
        batches, steps = list(batches), self._accelerator.gradient_accumulation_steps
        if len(batches) > 1 and steps > 1:
            raise ValueError(
                f"accumulate got {len(batches)} batches and averages over them, but "
                f"accelerator.backward also divides by gradient_accumulation_steps={steps}. Use "
                "Accelerator(gradient_accumulation_steps=1) for one step of several batches, or "
                "backward(batch) inside accelerator.accumulate(model)"
            )
        return super().accumulate(batches, *args, **named)


def _check_accelerator(accelerator: Any) -> None:
    if not isinstance(accelerator, _accelerate.Accelerator):
        raise TypeError(
            f"accelerator is of type {type(accelerator).__name__}, not an accelerate.Accelerator. "
            "Pass the one that prepared the model: microbatcher(accelerator, model, optimizer)"
        )
    require_seam(accelerator, "backward", ["loss"], host="accelerate", supported=SUPPORTED)


def check_kind(accelerator: Any, steps: int) -> None:
    """Raise ValueError if failed attempts cannot be rolled back with this kind of accelerator."""
    each_is_reduced = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    if accelerator.is_fsdp2 and steps > 1 and not each_is_reduced:
        raise ValueError(
            f"between the batches of gradient_accumulation_steps={steps}, FSDP2 holds back whole "
            "gradients, so those of a failed attempt cannot be removed. Reduce them at each batch, "
            "with Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin("
            f"num_steps={steps}, sync_each_batch=True)) or "
            "TrainingArguments(accelerator_config={'gradient_accumulation_kwargs': "
            "{'sync_each_batch': True}})"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in _ENGINES:
        raise ValueError(
            f"{_ENGINES[kind]} keeps its own gradients, which cannot be rolled back after running "
            "out of memory. Use one process, DDP, or FSDP2 "
            "(FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1 keeps its own state between forward and backward, which cannot be rolled back. "
            "Pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "fp8 libraries keep histories of maxima, which a failed attempt would change. Pass "
            "Accelerator(mixed_precision='bf16')"
        )
    if accelerator.has_lomo_optimizer:
        raise ValueError(
            "LOMO changes parameters inside the backward, which cannot be rolled back. Use "
            "another optimizer"
        )
    for name in ("tp_size", "cp_size", "sp_size", "pp_size"):
        # Older versions do not have this setting, and None stands for the default.
        size = getattr(accelerator.parallelism_config, name, 1)
        if size is not None and size > 1:
            raise ValueError(
                f"ParallelismConfig({name}={size}) lets several ranks compute the same rows, "
                "which was not tested with automicro. Use dp_replicate_size and dp_shard_size, or "
                "Microbatcher with a model that you shard"
            )


def _check_prepared(accelerator: Any, model: Any, optimizer: Any) -> None:
    # accelerate 1.10 does not mark the models that it wraps, and keeps a list of them.
    inside = accelerator.unwrap_model(model) if isinstance(model, nn.Module) else None
    known = {id(each) for each in accelerator._models}
    for given in (model, optimizer):
        is_prepared = getattr(given, "_is_accelerate_prepared", False) or given is None
        if not (is_prepared or (given is model and known & {id(model), id(inside)})):
            raise ValueError(
                f"accelerator.prepare did not return this {type(given).__name__}, so autocast, "
                "loss scaling and averaging over ranks are missing. Pass what it returns: model, "
                "optimizer = accelerator.prepare(model, optimizer)"
            )
