"""automicro: full optimization batches on any memory.

Hand over whole batches; a `Microbatcher` cuts them into microbatches that fit, retries smaller
ones after running out of memory, and leaves the exact gradient of the whole batch in ``.grad``.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from automicro.version import __version__ as __version__

if TYPE_CHECKING:
    from automicro.batchnorm import find_batchnorm
    from automicro.checkpoints import CheckpointConfig
    from automicro.errors import (
        AutomicroError,
        AutomicroWarning,
        BatchError,
        BatchNormWarning,
        BufferWarning,
        CheckpointError,
        CheckpointWarning,
        ConfigError,
        DataLoaderError,
        DeterminismWarning,
        GradientWarning,
        LoggerWarning,
        LossAverageWarning,
        LossError,
        MetricWarning,
        NonFiniteLossError,
        OptimizerStepError,
        RollbackError,
        SampleTooLargeError,
        SchedulerWarning,
        SizeCacheWarning,
        UnsplittableModelError,
    )
    from automicro.events import Callback, Run
    from automicro.extra_passes import is_extra_pass
    from automicro.memory import MemoryBudget
    from automicro.microbatcher import Microbatcher
    from automicro.oom import is_out_of_memory
    from automicro.policy import Fixed, Halving, Outcome, Policy
    from automicro.results import EvalResult, StepResult
    from automicro.slicing import num_rows, register_batch_type, split_batch
    from automicro.trainer import Evaluator, FitSummary, Trainer
    from automicro.verification import VerifyReport, verify

# Imported when they are first asked for: torch takes seconds, and whoever runs the command line may
# want to stop it meanwhile.
_HOMES = {
    "AutomicroError": "automicro.errors",
    "AutomicroWarning": "automicro.errors",
    "BatchError": "automicro.errors",
    "BatchNormWarning": "automicro.errors",
    "BufferWarning": "automicro.errors",
    "Callback": "automicro.events",
    "CheckpointConfig": "automicro.checkpoints",
    "CheckpointError": "automicro.errors",
    "CheckpointWarning": "automicro.errors",
    "ConfigError": "automicro.errors",
    "DataLoaderError": "automicro.errors",
    "EvalResult": "automicro.results",
    "Evaluator": "automicro.trainer",
    "FitSummary": "automicro.trainer",
    "Fixed": "automicro.policy",
    "DeterminismWarning": "automicro.errors",
    "GradientWarning": "automicro.errors",
    "Halving": "automicro.policy",
    "LoggerWarning": "automicro.errors",
    "LossAverageWarning": "automicro.errors",
    "LossError": "automicro.errors",
    "MetricWarning": "automicro.errors",
    "MemoryBudget": "automicro.memory",
    "Microbatcher": "automicro.microbatcher",
    "NonFiniteLossError": "automicro.errors",
    "OptimizerStepError": "automicro.errors",
    "Outcome": "automicro.policy",
    "Policy": "automicro.policy",
    "RollbackError": "automicro.errors",
    "Run": "automicro.events",
    "SampleTooLargeError": "automicro.errors",
    "SchedulerWarning": "automicro.errors",
    "SizeCacheWarning": "automicro.errors",
    "StepResult": "automicro.results",
    "Trainer": "automicro.trainer",
    "UnsplittableModelError": "automicro.errors",
    "VerifyReport": "automicro.verification",
    "find_batchnorm": "automicro.batchnorm",
    "is_extra_pass": "automicro.extra_passes",
    "is_out_of_memory": "automicro.oom",
    "num_rows": "automicro.slicing",
    "register_batch_type": "automicro.slicing",
    "split_batch": "automicro.slicing",
    "verify": "automicro.verification",
}

__all__ = [
    "AutomicroError",
    "AutomicroWarning",
    "BatchError",
    "BatchNormWarning",
    "BufferWarning",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "DataLoaderError",
    "DeterminismWarning",
    "EvalResult",
    "Evaluator",
    "FitSummary",
    "Fixed",
    "GradientWarning",
    "Halving",
    "LoggerWarning",
    "LossAverageWarning",
    "LossError",
    "MemoryBudget",
    "MetricWarning",
    "Microbatcher",
    "NonFiniteLossError",
    "OptimizerStepError",
    "Outcome",
    "Policy",
    "RollbackError",
    "Run",
    "SampleTooLargeError",
    "SchedulerWarning",
    "SizeCacheWarning",
    "StepResult",
    "Trainer",
    "UnsplittableModelError",
    "VerifyReport",
    "find_batchnorm",
    "is_extra_pass",
    "is_out_of_memory",
    "num_rows",
    "register_batch_type",
    "split_batch",
    "verify",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is not None:
            value = getattr(importlib.import_module(home), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
