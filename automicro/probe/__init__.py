"""The probe: do the gradients of a few rows, apart, add up to those of the rows together?

Nothing can be read off a plain function, and a model can do anything over the rows of a batch. So
at the first batches that could be split a few rows are looked at: forward and backward in training
mode, draws held constant, together and in two parts. What does not add up is named; what could not
be seen is named too.

::

    rows          which rows can tell, and what they have yet to show
    silence       random draws made constant
    passes        passes over a few rows that leave no trace
    look          one look
    measured      gradients, and how far they are apart
    averages      what else a loss may average over
    causes        what explains a difference, and what to do
    prober        when to look, and what is said
"""

from automicro.probe.passes import Probed
from automicro.probe.prober import Prober

__all__ = ["Probed", "Prober"]
