"""The two-row probe: is the loss of two rows the average of their losses?

Nothing can be read off a plain function, so before a batch is split for the first time the loss
of two rows together is compared with the loss of each. Evaluation mode, no gradient, and buffers
and random numbers are put back. What does not add up is named: a sum, a mean over tokens, class
weights, or a loss that compares rows.

::

    rows      which pairs of rows can tell one average from another
    compare   their losses
    causes    what a mismatch means, and what to do
"""

from automicro.probe.compare import LossesOf, compare
from automicro.probe.rows import Pairs, telling_pairs

__all__ = ["LossesOf", "Pairs", "compare", "telling_pairs"]
