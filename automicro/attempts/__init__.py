"""Attempts at a step: propose a size, cut, attempt, commit or roll back, until a batch fits."""

from automicro.attempts.cut_rule import CutRule
from automicro.attempts.phase import Phase
from automicro.attempts.phases import make_phases
from automicro.attempts.plan import Plan
from automicro.attempts.run import Finished, run_attempts

__all__ = ["CutRule", "Finished", "Phase", "Plan", "make_phases", "run_attempts"]
