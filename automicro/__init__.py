"""automicro: full optimization batches on any memory.

Hand over whole batches; a `Microbatcher` cuts them into microbatches that fit, retries smaller
ones after running out of memory, and leaves the exact gradient of the whole batch in ``.grad``.
"""

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
    LoggerWarning,
    LossAverageWarning,
    LossError,
    NonFiniteLossError,
    OptimizerStepError,
    RollbackError,
    SampleTooLargeError,
    UnsplittableModelError,
)
from automicro.events import Callback, Run
from automicro.memory import MemoryBudget
from automicro.microbatcher import Microbatcher
from automicro.oom import is_out_of_memory
from automicro.policy import Fixed, Halving, Outcome, Policy
from automicro.results import EvalResult, StepResult
from automicro.slicing import num_rows, register_batch_type, split_batch
from automicro.trainer import Evaluator, FitSummary, Trainer
from automicro.verification import VerifyReport, verify

__version__ = "0.1.0"

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
    "EvalResult",
    "Evaluator",
    "FitSummary",
    "Fixed",
    "Halving",
    "LoggerWarning",
    "LossAverageWarning",
    "LossError",
    "MemoryBudget",
    "Microbatcher",
    "NonFiniteLossError",
    "OptimizerStepError",
    "Outcome",
    "Policy",
    "RollbackError",
    "Run",
    "SampleTooLargeError",
    "StepResult",
    "Trainer",
    "UnsplittableModelError",
    "VerifyReport",
    "find_batchnorm",
    "is_out_of_memory",
    "num_rows",
    "register_batch_type",
    "split_batch",
    "verify",
]
