"""The training loop: a thin layer on top of `Microbatcher`.

::

    trainer     Trainer: fit and eval
    state       where training stands, and how batches were cut
    loading     one batch after the other, on the host; what loaders do wrong
    building    optimizers and schedulers, given or built once the model is on its device
    metric_set  metrics by name, as plain numbers
    device      which device, how it is described; seeds
    progress    one live line in a terminal, plain lines elsewhere, or nothing
    lines       what those lines say
    summary     FitSummary and its table
"""

from automicro.trainer.summary import FitSummary
from automicro.trainer.trainer import Trainer

__all__ = ["FitSummary", "Trainer"]
