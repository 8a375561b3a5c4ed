"""Does splitting change a model's gradient, and why?

::

    verify      the entry; examination: compare several sizes, judge
    subject     the caller's model and loss; copies in another precision
    laboratory  runs of the whole batch and of splits, each from the same state, without a trace
    silence     random draws made constant
    observe     what one run changes beside the gradients
    compare     relative errors of gradients
    diagnose    experiments: hold one suspect still at a time
    rows        how the whole's gradient is made of its rows'; averages: what to try
    culprits    modules whose output for a row depends on other rows
    state       plain attributes, seen; restore: put back; reach: modules that a function captures
    findings    the words; report: the result
"""

from automicro.verification.report import Comparison, Finding, VerifyReport
from automicro.verification.verify import verify

__all__ = ["Comparison", "Finding", "VerifyReport", "verify"]
