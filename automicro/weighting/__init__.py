"""What a loss averages over, and the weights that make microbatches add up to the whole batch.

A mean over a batch is ``sum / denominator``. Cut into microbatches, each mean has its own
denominator ``d[i]``; the whole batch's is their sum ``D``. Weighting microbatch ``i`` by
``d[i] / D`` gives the whole batch's loss and gradient exactly, whatever the sizes of the cuts. A
loss that is a sum has weight one everywhere. The only question is what the loss counts: rows, or
targets that are not ignored, or the weights of their classes. `read_average` reads it off.

Denominators are Python numbers where the batch lies on the host, and float64 tensors where it
lies on a device: reading those back would make the host wait for the device.
"""

from automicro.weighting.averages import IGNORED, Average, Counted, Samples, Sum, Tokens, Weight
from automicro.weighting.means import LossMean
from automicro.weighting.reading import LossAverage, is_declared, read_average
from automicro.weighting.weights import BatchWeights, CutBatch, add_up, microbatch_weights

__all__ = [
    "IGNORED",
    "Average",
    "BatchWeights",
    "Counted",
    "CutBatch",
    "LossAverage",
    "LossMean",
    "Samples",
    "Sum",
    "Tokens",
    "Weight",
    "add_up",
    "is_declared",
    "microbatch_weights",
    "read_average",
]
