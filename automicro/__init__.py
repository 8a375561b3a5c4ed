"""automicro: full optimization batches on any memory.

Pass whole batches. A `Microbatcher` splits them into microbatches that fit, retries with smaller
ones after running out of memory, and leaves the exact gradient of the whole batch in ``.grad``.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from automicro.version import __version__ as __version__

if TYPE_CHECKING:
    from automicro.batch.layout import num_rows as num_rows
    from automicro.batch.layout import split_batch as split_batch
    from automicro.batch.ragged import register_batch_type as register_batch_type
    from automicro.batchnorm import find_batchnorm as find_batchnorm
    from automicro.checking.report import VerifyReport as VerifyReport
    from automicro.checking.verify import verify as verify
    from automicro.checkpoints.store import CheckpointConfig as CheckpointConfig
    from automicro.contrastive import Contrastive as Contrastive
    from automicro.errors import AutomicroError as AutomicroError
    from automicro.errors import AutomicroWarning as AutomicroWarning
    from automicro.errors import BatchError as BatchError
    from automicro.errors import BatchNormWarning as BatchNormWarning
    from automicro.errors import BufferWarning as BufferWarning
    from automicro.errors import CheckpointError as CheckpointError
    from automicro.errors import CheckpointWarning as CheckpointWarning
    from automicro.errors import ConfigError as ConfigError
    from automicro.errors import DataLoaderError as DataLoaderError
    from automicro.errors import DeterminismWarning as DeterminismWarning
    from automicro.errors import GradientWarning as GradientWarning
    from automicro.errors import LoggerWarning as LoggerWarning
    from automicro.errors import LossAverageError as LossAverageError
    from automicro.errors import LossAverageWarning as LossAverageWarning
    from automicro.errors import LossError as LossError
    from automicro.errors import MetricWarning as MetricWarning
    from automicro.errors import NonFiniteLossError as NonFiniteLossError
    from automicro.errors import OptimizerStepError as OptimizerStepError
    from automicro.errors import PaddingWarning as PaddingWarning
    from automicro.errors import RollbackError as RollbackError
    from automicro.errors import SampleTooLargeError as SampleTooLargeError
    from automicro.errors import SizeCacheWarning as SizeCacheWarning
    from automicro.errors import StateWarning as StateWarning
    from automicro.errors import UnsplittableModelError as UnsplittableModelError
    from automicro.errors import UntraceableModelError as UntraceableModelError
    from automicro.events.callback import Callback as Callback
    from automicro.events.run import Run as Run
    from automicro.loss.passes import is_extra_pass as is_extra_pass
    from automicro.memory.budget import MemoryBudget as MemoryBudget
    from automicro.memory.oom import is_out_of_memory as is_out_of_memory
    from automicro.microbatcher import Microbatcher as Microbatcher
    from automicro.nested.split import NestedSplit as NestedSplit
    from automicro.nested.split import split as split
    from automicro.policy.auto import Halving as Halving
    from automicro.policy.explore import Explore as Explore
    from automicro.policy.policy import Fixed as Fixed
    from automicro.policy.policy import Outcome as Outcome
    from automicro.policy.policy import Policy as Policy
    from automicro.step.events import Observing as Observing
    from automicro.step.feature import Feature as Feature
    from automicro.step.feature import MicrobatchRun as MicrobatchRun
    from automicro.step.results import EvalResult as EvalResult
    from automicro.step.results import StepResult as StepResult
    from automicro.tools.explore import ExploreReport as ExploreReport
    from automicro.tools.explore import explore as explore
    from automicro.tools.plan.plan import plan as plan
    from automicro.tools.plan.report import PlanReport as PlanReport
    from automicro.tools.replay import replay as replay
    from automicro.trainer.evaluators import Evaluator as Evaluator
    from automicro.trainer.optimizer import ParameterGroups as ParameterGroups
    from automicro.trainer.report import FitSummary as FitSummary
    from automicro.trainer.trainer import Trainer as Trainer

# Imported on first use: torch takes seconds to import, and a command-line user might want to
# interrupt that.
_EXPORTS = {
    "automicro.batch.layout": "num_rows split_batch",
    "automicro.batch.ragged": "register_batch_type",
    "automicro.batchnorm": "find_batchnorm",
    "automicro.checking.report": "VerifyReport",
    "automicro.checking.verify": "verify",
    "automicro.checkpoints.store": "CheckpointConfig",
    "automicro.contrastive": "Contrastive",
    "automicro.errors": """
        AutomicroError AutomicroWarning BatchError BatchNormWarning BufferWarning
        CheckpointError CheckpointWarning ConfigError DataLoaderError DeterminismWarning
        GradientWarning LoggerWarning LossAverageError LossAverageWarning LossError
        MetricWarning NonFiniteLossError OptimizerStepError PaddingWarning RollbackError
        SampleTooLargeError SizeCacheWarning StateWarning UnsplittableModelError
        UntraceableModelError
    """,
    "automicro.events.callback": "Callback",
    "automicro.events.run": "Run",
    "automicro.loss.passes": "is_extra_pass",
    "automicro.memory.budget": "MemoryBudget",
    "automicro.memory.oom": "is_out_of_memory",
    "automicro.microbatcher": "Microbatcher",
    "automicro.nested.split": "NestedSplit split",
    "automicro.policy.auto": "Halving",
    "automicro.policy.explore": "Explore",
    "automicro.policy.policy": "Fixed Outcome Policy",
    "automicro.step.events": "Observing",
    "automicro.step.feature": "Feature MicrobatchRun",
    "automicro.step.results": "EvalResult StepResult",
    "automicro.tools.explore": "ExploreReport explore",
    "automicro.tools.plan.plan": "plan",
    "automicro.tools.plan.report": "PlanReport",
    "automicro.tools.replay": "replay",
    "automicro.trainer.evaluators": "Evaluator",
    "automicro.trainer.optimizer": "ParameterGroups",
    "automicro.trainer.report": "FitSummary",
    "automicro.trainer.trainer": "Trainer",
}
_HOMES = {name: home for home, names in _EXPORTS.items() for name in names.split()}

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is not None:
            value = getattr(importlib.import_module(home), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            # A submodule that might not be imported yet.
            return importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Cached, so that this function is called once per name.
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
