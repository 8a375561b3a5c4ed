"""The training loop: a thin layer on top of `Microbatcher`.

::

    trainer         Trainer: fit and eval, with every option
    fit             one call of fit: resume, the loop, a proper end
    loop            the loop over epochs and batches
    step            one optimization batch: gradient, clip, optimizer step
    evaluation      one pass in evaluation mode; evaluators says on what
    evaluation_plan when training is interrupted for that
    feed            passes over a loader that can be taken up in the middle
    snapshot        everything that a checkpoint holds; checkpointing says when
    recording       the numbers of a run, by the names under which they are logged
    session         memory limit, determinism and progress around a run
    building        optimizers and schedulers; parameter_groups sorts by name
    pace            schedulers that count epochs where they are stepped after every batch
    composer        what Composer calls otherwise; composer_data, composer_schedules: its objects
    finiteness      losses and gradients that are NaN or infinite
    config          the options that are plain values
    summary         FitSummary and its table; lines says what progress shows
"""

from automicro.trainer.evaluators import Evaluator
from automicro.trainer.summary import FitSummary
from automicro.trainer.trainer import Trainer

__all__ = ["Evaluator", "FitSummary", "Trainer"]
