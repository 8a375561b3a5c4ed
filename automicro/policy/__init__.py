"""How large a microbatch should be: pure Python, no torch."""

from automicro.policy.base import Outcome, Policy, canonical_size, cut_size
from automicro.policy.choose import make_policy
from automicro.policy.fixed import Fixed
from automicro.policy.halving import Halving

__all__ = ["Fixed", "Halving", "Outcome", "Policy", "canonical_size", "cut_size", "make_policy"]
