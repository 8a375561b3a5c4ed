"""The options of the `Trainer` that are plain values, for those who read them from somewhere."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Every option of the `Trainer` that text can say, with the same default.

    The `Trainer` explains them. What has to be made (a model, a loader, an optimizer) is left to
    whoever makes it.

    >>> TrainerConfig(max_duration="2ep").microbatch_size
    'auto'
    """

    max_duration: str = "1ep"
    max_time: str | None = None
    eval_interval: str | None = "1ep"
    scheduler_interval: str = "batch"
    accumulate_batches: int | str = 1
    batch_layout: Any = 0
    microbatch_size: Any = "auto"
    eval_microbatch_size: Any = "auto"
    microbatch_unit: Any = "rows"
    nested: Any = None
    when_too_large: Any = "error"
    padding: Any = None
    cut_padding: Any = "auto"
    strict_divisible: bool = False
    memory_limit: int | float | str | None = None
    loss_average: Any = "auto"
    batchnorm: str = "warn"
    probe: bool = True
    remember_sizes: bool | None = None
    rehearse: str | None = None
    precision: str = "fp32"
    gradient_sums: str = "fp32"
    sync: str = "each"
    grad_clip_norm: float | None = None
    parameter_groups: Any = ()
    non_finite: str = "stop"
    channels_last: bool = False
    compile: Any = False
    deterministic: bool = False
    parallel: str | None = None
    device: str = "auto"
    seed: int | None = None
    progress: bool = True
