"""The loop around a step: propose, attempt, commit or roll back."""

from automicro.attempts.cut_rule import CutRule
from automicro.attempts.phase import Phase, Shared
from automicro.attempts.plan import Finished, Plan
from automicro.attempts.recollection import Recollection
from automicro.attempts.run import run
from automicro.attempts.step import ReadBatch, Step
from automicro.attempts.trial import Work

__all__ = [
    "CutRule",
    "Finished",
    "Phase",
    "Plan",
    "ReadBatch",
    "Recollection",
    "Shared",
    "Step",
    "Work",
    "run",
]
