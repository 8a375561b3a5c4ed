"""Every key of a config, with its type and default."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(frozen=True, kw_only=True)
class CallConfig:
    """Something to be made: a class or a function by its dotted path, and its arguments.

    Attributes:
        call: the dotted path, such as ``torch.optim.AdamW``.
        args: arguments by name. A mapping with ``call`` inside is made first.

    >>> CallConfig(call="torch.nn.Linear", args={"in_features": 4, "out_features": 2}).call
    'torch.nn.Linear'
    """

    call: str = MISSING
    args: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What ``automicro train`` reads. Keys that are not explained here are the Trainer's.

    Attributes:
        model: makes the module.
        train_data: makes what gives full optimization batches.
        eval_data: the same for evaluation.
        loss: makes the Trainer's ``loss_fn``.
        forward: makes a function ``(model, microbatch) -> loss``, in place of ``loss``.
        optimizer: is handed the model's parameters first.
        scheduler: is handed the optimizer first; stepped once per optimizer step.
        metrics: each makes a torchmetrics metric, by the name under which it is shown.
        update_metric: makes a function ``(metric, outputs, microbatch) -> None``.
        global_batch_size: rows of an optimization batch over all devices, for
            ``${global_batch_size}`` in the data's arguments.
        seed: applied before anything is made, so that the config decides the initial weights.
    """

    model: CallConfig = MISSING
    train_data: CallConfig = MISSING
    eval_data: CallConfig | None = None
    loss: CallConfig | None = None
    forward: CallConfig | None = None
    optimizer: CallConfig = MISSING
    scheduler: CallConfig | None = None
    metrics: dict[str, CallConfig] = field(default_factory=dict)
    update_metric: CallConfig | None = None
    global_batch_size: int | None = MISSING
    max_duration: str = "1ep"
    eval_interval: str | None = "1ep"
    microbatch_size: int | str | None = "auto"
    eval_microbatch_size: int | str | None = "auto"
    memory_limit: int | str | None = None
    loss_average: Any = "auto"
    batchnorm: str = "warn"
    strict_divisible: bool = False
    batch_layout: Any = 0
    precision: str = "fp32"
    grad_clip_norm: float | None = None
    device: str = "auto"
    seed: int | None = None
    progress: bool = True
