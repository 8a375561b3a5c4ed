"""The probe: is the loss of a few rows the average of the losses of their parts?

Nothing can be read off a plain function, so at the first batch that could be split the loss of two
rows together is compared with the loss of each, and that of a group with those of two uneven parts
of it. Evaluation mode, no gradient, and buffers and random numbers are put back. What does not add
up is named: a sum, a mean over tokens, a mean by weights in the batch, class weights, or a loss
that compares rows.

::

    columns   what a tensor of the batch holds in each row
    rows      which rows can tell one average from another
    compare   their losses
    readings  what a loss could be
    causes    which reading explains all comparisons, and what to do
"""

from automicro.probe.compare import Comparisons, LossesOf
from automicro.probe.rows import Pairs, telling_pairs

__all__ = ["Comparisons", "LossesOf", "Pairs", "telling_pairs"]
