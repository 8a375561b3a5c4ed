"""Every key of a config, with its type and default."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from automicro.trainer.config import TrainerConfig


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
class RunConfig(TrainerConfig):
    """What the commands read: the Trainer's options, and what is made for it.

    Attributes:
        model: makes the ``torch.nn.Module``.
        weights: a file with a state dict (``torch.save(model.state_dict(), path)``), loaded into
            the model after it is made. All names and shapes have to fit.
        train_data: makes what gives full optimization batches: a ``DataLoader``, or any iterable
            that can be passed over once per epoch.
        eval_data: the same for evaluation.
        loss: makes the loss, called as ``loss(model(inputs), targets)`` on batches of
            ``(inputs, targets)``. Without it and without ``forward``, the model computes its own
            loss.
        forward: makes a function ``(model, microbatch) -> loss``, in place of ``loss``.
        optimizer: makes the optimizer; is handed the model's parameters first.
        scheduler: makes the learning rate scheduler; is handed the optimizer first. It is stepped
            once per optimizer step, not per epoch.
        metrics: names, and nodes that each make a torchmetrics metric. Training and evaluation
            count apart. A name with null is dropped.
        update_metric: makes a function ``(metric, outputs, microbatch) -> None``, in place of
            ``metric.update(outputs, targets)``.
        count_tokens: makes a function ``batch -> number of tokens``, for tokens per second and
            durations in tokens, where a batch does not tell.
        global_batch_size: rows of an optimization batch in all. In ``train_data``,
            ``${global_batch_size}`` is what one device loads at a time: this number divided by
            devices and by ``accumulate_batches``, without a rest. In ``eval_data`` it is this
            number divided by devices alone.
        eval_global_batch_size: rows of an evaluation batch over all devices. In ``eval_data``,
            ``${eval_global_batch_size}`` is what one device loads.
        run_dir: a folder for ``config.yaml``, ``summary.json`` and ``weights.pt``; with null,
            nothing is written. Such as ``runs/${now:%Y-%m-%d_%H-%M-%S}``. Nothing that is there
            already is overwritten.

    >>> RunConfig(max_duration="2ep").run_dir is None
    True
    """

    model: CallConfig | None = None
    weights: str | None = None
    train_data: CallConfig | None = None
    eval_data: CallConfig | None = None
    loss: CallConfig | None = None
    forward: CallConfig | None = None
    optimizer: CallConfig | None = None
    scheduler: CallConfig | None = None
    metrics: dict[str, CallConfig] = field(default_factory=dict)
    update_metric: CallConfig | None = None
    count_tokens: CallConfig | None = None
    global_batch_size: int | None = MISSING
    eval_global_batch_size: int | None = MISSING
    run_dir: str | None = None
