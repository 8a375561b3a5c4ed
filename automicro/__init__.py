"""automicro: full optimization batches on any memory.

Hand over whole batches; a `Microbatcher` cuts them into microbatches that fit, retries smaller
ones after running out of memory, and leaves the exact gradient of the whole batch in ``.grad``.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from automicro.version import __version__ as __version__

if TYPE_CHECKING:
    from automicro.batch.layout import num_rows, split_batch
    from automicro.batch.types import register_batch_type
    from automicro.batchnorm import find_batchnorm
    from automicro.checking.report import VerifyReport
    from automicro.checking.verify import verify
    from automicro.checkpoints.store import CheckpointConfig
    from automicro.contrastive import Contrastive
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
        LossAverageError,
        LossAverageWarning,
        LossError,
        MetricWarning,
        NonFiniteLossError,
        OptimizerStepError,
        PaddingWarning,
        RollbackError,
        SampleTooLargeError,
        SizeCacheWarning,
        StateWarning,
        UnsplittableModelError,
        UntraceableModelError,
    )
    from automicro.events.callback import Callback
    from automicro.events.run import Run
    from automicro.loss.passes import is_extra_pass
    from automicro.memory.budget import MemoryBudget
    from automicro.memory.oom import is_out_of_memory
    from automicro.microbatcher import Microbatcher
    from automicro.nested.split import NestedSplit, split
    from automicro.policy.auto import Halving
    from automicro.policy.explore import Explore
    from automicro.policy.policy import Fixed, Outcome, Policy
    from automicro.step.events import Observing
    from automicro.step.feature import Feature, MicrobatchRun
    from automicro.step.results import EvalResult, StepResult
    from automicro.tools.explore import ExploreReport, explore
    from automicro.tools.plan.plan import plan
    from automicro.tools.plan.report import PlanReport
    from automicro.tools.replay import replay
    from automicro.trainer.evaluators import Evaluator
    from automicro.trainer.report import FitSummary
    from automicro.trainer.trainer import Trainer

# Imported when they are first asked for: torch takes seconds, and whoever runs the command line may
# want to stop it meanwhile.
_HOMES = {
    "AutomicroError": "automicro.errors",
    "AutomicroWarning": "automicro.errors",
    "BatchError": "automicro.errors",
    "BatchNormWarning": "automicro.errors",
    "BufferWarning": "automicro.errors",
    "Callback": "automicro.events.callback",
    "CheckpointConfig": "automicro.checkpoints.store",
    "CheckpointError": "automicro.errors",
    "CheckpointWarning": "automicro.errors",
    "ConfigError": "automicro.errors",
    "Contrastive": "automicro.contrastive",
    "DataLoaderError": "automicro.errors",
    "EvalResult": "automicro.step.results",
    "Evaluator": "automicro.trainer.evaluators",
    "Explore": "automicro.policy.explore",
    "ExploreReport": "automicro.tools.explore",
    "FitSummary": "automicro.trainer.report",
    "Fixed": "automicro.policy.policy",
    "DeterminismWarning": "automicro.errors",
    "GradientWarning": "automicro.errors",
    "Halving": "automicro.policy.auto",
    "LoggerWarning": "automicro.errors",
    "LossAverageError": "automicro.errors",
    "LossAverageWarning": "automicro.errors",
    "LossError": "automicro.errors",
    "MetricWarning": "automicro.errors",
    "PaddingWarning": "automicro.errors",
    "MemoryBudget": "automicro.memory.budget",
    "Microbatcher": "automicro.microbatcher",
    "NestedSplit": "automicro.nested.split",
    "NonFiniteLossError": "automicro.errors",
    "OptimizerStepError": "automicro.errors",
    "Outcome": "automicro.policy.policy",
    "PlanReport": "automicro.tools.plan.report",
    "Policy": "automicro.policy.policy",
    "RollbackError": "automicro.errors",
    "Run": "automicro.events.run",
    "SampleTooLargeError": "automicro.errors",
    "SizeCacheWarning": "automicro.errors",
    "StateWarning": "automicro.errors",
    "Feature": "automicro.step.feature",
    "MicrobatchRun": "automicro.step.feature",
    "Observing": "automicro.step.events",
    "StepResult": "automicro.step.results",
    "Trainer": "automicro.trainer.trainer",
    "UnsplittableModelError": "automicro.errors",
    "UntraceableModelError": "automicro.errors",
    "VerifyReport": "automicro.checking.report",
    "explore": "automicro.tools.explore",
    "find_batchnorm": "automicro.batchnorm",
    "is_extra_pass": "automicro.loss.passes",
    "is_out_of_memory": "automicro.memory.oom",
    "num_rows": "automicro.batch.layout",
    "plan": "automicro.tools.plan.plan",
    "register_batch_type": "automicro.batch.types",
    "replay": "automicro.tools.replay",
    "split": "automicro.nested.split",
    "split_batch": "automicro.batch.layout",
    "verify": "automicro.checking.verify",
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
    "Contrastive",
    "DataLoaderError",
    "DeterminismWarning",
    "EvalResult",
    "Evaluator",
    "Explore",
    "ExploreReport",
    "Feature",
    "FitSummary",
    "Fixed",
    "GradientWarning",
    "Halving",
    "LoggerWarning",
    "LossAverageError",
    "LossAverageWarning",
    "LossError",
    "MemoryBudget",
    "MetricWarning",
    "MicrobatchRun",
    "Microbatcher",
    "NestedSplit",
    "NonFiniteLossError",
    "Observing",
    "OptimizerStepError",
    "Outcome",
    "PaddingWarning",
    "PlanReport",
    "Policy",
    "RollbackError",
    "Run",
    "SampleTooLargeError",
    "SizeCacheWarning",
    "StateWarning",
    "StepResult",
    "Trainer",
    "UnsplittableModelError",
    "UntraceableModelError",
    "VerifyReport",
    "explore",
    "find_batchnorm",
    "is_extra_pass",
    "is_out_of_memory",
    "num_rows",
    "plan",
    "register_batch_type",
    "replay",
    "split",
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
