"""The names of all keys of a config, in groups."""

from collections.abc import Mapping

# In the order in which a reader wants them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "What is made": (
        "model",
        "weights",
        "loss",
        "forward",
        "optimizer",
        "parameter_groups",
        "scheduler",
        "scheduler_interval",
        "metrics",
        "update_metric",
        "count_tokens",
    ),
    "Data and batches": (
        "train_data",
        "eval_data",
        "global_batch_size",
        "eval_global_batch_size",
        "accumulate_batches",
        "batch_layout",
    ),
    "How long": ("max_duration", "max_time", "eval_interval"),
    "Memory and microbatches": (
        "microbatch_size",
        "eval_microbatch_size",
        "memory_limit",
        "strict_divisible",
        "loss_average",
        "batchnorm",
        "probe",
        "remember_sizes",
    ),
    "Precision and numerics": (
        "precision",
        "gradient_sums",
        "grad_clip_norm",
        "non_finite",
        "channels_last",
        "compile",
        "deterministic",
    ),
    "The run": (
        "parallel",
        "device",
        "seed",
        "progress",
        "run_dir",
        "callbacks",
        "loggers",
        "checkpoint",
    ),
}
KEYS = tuple(key for keys in GROUPS.values() for key in keys)
