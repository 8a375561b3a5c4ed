"""Every key of a config, with its type and default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from automicro.checkpoints.store import CheckpointConfig
from automicro.trainer.config import TrainerConfig
from automicro.trainer.evaluators import INHERITED


@dataclass(frozen=True, kw_only=True)
class CallConfig:
    """Something to be made: a class or a function by its dotted path, and its arguments.

    Attributes:
        call: the dotted path, such as ``torch.optim.AdamW``.
        args: arguments by name. A mapping with ``call`` inside is made first.

    >>> CallConfig(call="torch.nn.Linear", args={"in_features": 4, "out_features": 2}).call
    'torch.nn.Linear'
    """

    call: str = MISSING
    args: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """One evaluation with options of its own. What is ``inherited`` is what the run has.

    Attributes:
        data: makes what gives whole batches, as ``train_data`` does.
        metrics: in place of ``metrics``: names and nodes, or None for none.
        microbatch_size: in place of ``eval_microbatch_size``; found on its own.
        max_batches: how many batches to evaluate on; None for all.
        interval: in place of ``eval_interval``; None for never while training.

    >>> EvaluatorConfig(data=CallConfig(call="my_data.loader"), max_batches=2).interval
    'inherited'
    """

    data: CallConfig = MISSING
    metrics: Any = INHERITED
    microbatch_size: Any = INHERITED
    max_batches: int | None = None
    interval: str | None = INHERITED


SECTIONS: Mapping[str, type] = {"eval_data": EvaluatorConfig, "checkpoint": CheckpointConfig}
"""Keys that hold further keys, and what says which."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainerConfig):
    """What the commands read: the Trainer's options, and what is made for it.

    Attributes:
        model: makes the ``torch.nn.Module``.
        weights: a file with a state dict (``torch.save(model.state_dict(), path)``), or a folder
            of checkpoints, of which the model of the newest good one is taken. Loaded into the
            model after it is made; all names and shapes have to fit. A run that goes on from a
            checkpoint has the weights from there.
        train_data: makes what gives full optimization batches: a ``DataLoader``, or any iterable
            that can be passed over once per epoch.
        eval_data: the same for evaluation, or a mapping of the keys below, or a mapping from
            names to either: ``{seen: {call: …}, new: {data: {call: …}, max_batches: 10}}``. Values
            are then called ``seen/loss``, and logged as ``eval/seen/loss``. A name with null is
            dropped.
        loss: makes the loss, called as ``loss(model(inputs), targets)`` on batches of
            ``(inputs, targets)``. Without it and without ``forward``, the model computes its own
            loss.
        forward: makes a function ``(model, microbatch) -> loss``, in place of ``loss``.
        optimizer: makes the optimizer; is handed the model's parameters first.
        scheduler: makes the learning rate scheduler; is handed the optimizer first. It is stepped
            once per optimizer step, unless ``scheduler_interval`` says otherwise.
        metrics: names, and nodes that each make a torchmetrics metric. Training and evaluation
            count apart. A name with null is dropped.
        update_metric: makes a function ``(metric, outputs, microbatch) -> None``, in place of
            ``metric.update(outputs, targets)``. With a fourth parameter called ``name`` it is told
            the metric's name.
        count_tokens: makes a function ``batch -> number of tokens``, for tokens per second and
            durations in tokens, where a batch does not tell.
        global_batch_size: rows of an optimization batch in all. In ``train_data``,
            ``${global_batch_size}`` is what one device loads at a time: this number divided by
            devices and by ``accumulate_batches``, without a rest. In ``eval_data`` it is this
            number divided by devices alone.
        eval_global_batch_size: rows of an evaluation batch over all devices. In ``eval_data``,
            ``${eval_global_batch_size}`` is what one device loads.
        callbacks: nodes that each make a callback, told of every event in this order; shipped ones
            are in ``automicro.callbacks``.
        loggers: nodes that each make a logger, such as
            ``{call: automicro.loggers.JSONLinesLogger, args: {path: "${run_dir}/log.jsonl"}}``.
        checkpoint: where and how often to save the run, so that the same command goes on where it
            was interrupted: a mapping of the keys below; ``{}`` takes their defaults, null saves
            nothing.
        run_dir: a folder for ``config.yaml``, ``summary.json``, ``weights.pt`` and checkpoints;
            with null, nothing is written. Such as ``runs/${now:%Y-%m-%d_%H-%M-%S}``. Nothing of
            another run is overwritten.

    >>> RunConfig(max_duration="2ep").run_dir is None
    True
    """

    model: CallConfig | None = None
    weights: str | None = None
    train_data: CallConfig | None = None
    eval_data: Any = None
    loss: CallConfig | None = None
    forward: CallConfig | None = None
    optimizer: CallConfig | None = None
    scheduler: CallConfig | None = None
    metrics: dict[str, CallConfig] = field(default_factory=dict)
    update_metric: CallConfig | None = None
    count_tokens: CallConfig | None = None
    global_batch_size: int | None = MISSING
    eval_global_batch_size: int | None = MISSING
    callbacks: list[CallConfig] = field(default_factory=list)
    loggers: list[CallConfig] = field(default_factory=list)
    checkpoint: Any = None
    run_dir: str | None = None
