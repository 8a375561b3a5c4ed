"""Training and evaluating with whole batches, on a device too small for them."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

from automicro.checks import check_model, resolve_device
from automicro.duration import Duration, Unit
from automicro.memory import limit_memory, peak_bytes, reset_peak
from automicro.microbatcher import Microbatcher
from automicro.policy import Policy, make_policy
from automicro.trainer.arguments import read_duration, read_norm
from automicro.trainer.building import (
    OptimizerOrFactory,
    SchedulerOrFactory,
    build_optimizer,
    build_scheduler,
)
from automicro.trainer.device import choose_device, seed_everything
from automicro.trainer.evaluation import Evaluation
from automicro.trainer.lines import batch_line, count_of, start_line
from automicro.trainer.loading import announce_epoch, check_loader, fetch, num_batches
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.progress import Progress, make_progress
from automicro.trainer.session import noting, running
from automicro.trainer.speed import RecentSpeed
from automicro.trainer.state import Cut, LoopState, PhaseState
from automicro.trainer.step import TrainingStep
from automicro.trainer.summary import FitSummary, summarize
from automicro.weighting import LossAverage


class Trainer:
    """Trains a model on full optimization batches, whatever the memory.

    For each batch: forward and backward by a `Microbatcher`, clip, optimizer step, clear the
    gradients, scheduler step. Batches, steps and schedule are the same on any device.

    Example:
        >>> import torch
        >>> from automicro import Trainer
        >>> rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
        >>> trainer = Trainer(
        ...     torch.nn.Linear(8, 2),
        ...     torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True),
        ...     loss_fn=torch.nn.CrossEntropyLoss(),
        ...     optimizer=torch.optim.AdamW,
        ...     max_duration="3ep",
        ...     device="cpu",
        ...     progress=False,
        ... )
        >>> summary = trainer.fit()
        >>> summary.steps, summary.microbatch_size, summary.train_ooms
        (6, 32, 0)

    Submodules that are in evaluation mode when `fit` begins (frozen BatchNorm, say) stay in it.
    Only a model that is in evaluation mode itself is put into training mode, as a whole.

    Args:
        model: the model. It is moved to the device.
        train_dataloader: an iterable of full optimization batches that can be passed over once
            per epoch. Samplers with ``set_epoch`` are told the epoch.
        eval_dataloader: the same for evaluation.
        loss_fn: see `Microbatcher`, as for ``forward``, ``loss_average``, ``batchnorm``,
            ``modules``, ``strict_divisible``, ``batch_layout`` and ``update_metric``. A loss that
            is a module is moved to the device.
        forward: see `Microbatcher`.
        optimizer: an optimizer, or a callable that makes one of a list of the model's
            parameters, which are on the device by then: ``torch.optim.AdamW``, or
            ``partial(torch.optim.AdamW, lr=0.01)``.
        scheduler: a learning rate scheduler, or a callable that makes one of the optimizer.
            Stepped once after every optimizer step, not once per epoch.
        metrics: a torchmetrics Metric, a MetricCollection, or a mapping from names to these.
            Training and evaluation update clones of their own.
        max_duration: ``"2ep"`` (epochs) or ``"500ba"`` (batches), counted from the trainer's
            construction.
        microbatch_size: rows: an int, ``"auto"``, None (the whole batch), or a policy.
        eval_microbatch_size: the same for evaluation, found on its own.
        loss_average: what the loss is a mean over.
        batchnorm: what to do where layers average over the batch.
        memory_limit: bytes, or text such as ``"24MiB"``, for the whole of `fit` or `eval`,
            optimizer step included: a simulated device on a CPU, the process's share on CUDA.
        strict_divisible: refuse a batch that is not a multiple of the microbatch size.
        precision: ``"fp32"``, or ``"bf16"`` for autocast of the forward and the loss.
        grad_clip_norm: the largest norm of the gradient of all the optimizer's parameters
            together; larger gradients are scaled down to it.
        device: ``"auto"`` (an accelerator where there is one, else the CPU), or a device.
        seed: seeds Python, NumPy and torch when the trainer is constructed. A model or a loader
            made before has already drawn its random numbers.
        progress: whether to write to stdout how it goes, and the summary at the end.
        eval_interval: how often `fit` evaluates: ``"1ep"``, ``"100ba"``, or None for never. With
            an interval, it also does at the end.
        batch_layout: which dimension holds the rows, and what is shared.
        update_metric: ``update_metric(metric, outputs, microbatch)``.
        modules: further modules that take part in the forward.

    Raises:
        TypeError, ValueError: arguments that make no sense, each with its remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Iterable[Any] | None = None,
        *,
        eval_dataloader: Iterable[Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        optimizer: OptimizerOrFactory | None = None,
        scheduler: SchedulerOrFactory | None = None,
        metrics: Any = None,
        max_duration: str | Duration = "1ep",
        microbatch_size: int | str | Policy | None = "auto",
        eval_microbatch_size: int | str | Policy | None = "auto",
        loss_average: LossAverage = "auto",
        batchnorm: str = "warn",
        memory_limit: str | int | None = None,
        strict_divisible: bool = False,
        precision: str = "fp32",
        grad_clip_norm: float | None = None,
        device: torch.device | str = "auto",
        seed: int | None = None,
        progress: bool = True,
        eval_interval: str | Duration | None = "1ep",
        batch_layout: int | Mapping[str, Any] = 0,
        update_metric: Callable[[Any, Any, Any], None] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        if seed is not None:
            seed_everything(seed)
        check_model(model)
        check_loader("train_dataloader", train_dataloader)
        check_loader("eval_dataloader", eval_dataloader)
        self._train_dataloader = train_dataloader
        self._eval_dataloader = eval_dataloader
        self._max_duration = read_duration("max_duration", max_duration)
        self._eval_interval = (
            None if eval_interval is None else read_duration("eval_interval", eval_interval)
        )
        self._device = choose_device(device)
        self._memory_limit = memory_limit
        if memory_limit is not None:
            limit_memory(memory_limit, self._device)  # refuses what cannot be a limit
        self._precision = precision
        self._console: Console | None = None
        self._shows_progress = progress
        make_progress(progress)  # refuses what is not True or False
        self._model = model
        self._modules = [model, *modules]
        resolve_device(None, model)  # refuses a model without data, which cannot be moved
        for module in [*self._modules, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]:
            module.to(self._device)
        optimizer = build_optimizer(optimizer, model, self._modules)
        self._residents: list[nn.Module | torch.optim.Optimizer] = [*self._modules]
        if optimizer is not None:
            self._residents.append(optimizer)
        self._policy = make_policy(microbatch_size)
        self._eval_policy = make_policy(eval_microbatch_size)
        microbatcher = Microbatcher(
            model,
            loss_fn=loss_fn,
            forward=forward,
            microbatch_size=self._policy,
            eval_microbatch_size=self._eval_policy,
            loss_average=loss_average,
            batchnorm=batchnorm,
            optimizer=optimizer,
            modules=self._modules[1:],
            device=self._device,
            strict_divisible=strict_divisible,
            precision=precision,
            batch_layout=batch_layout,
            update_metric=update_metric,
        )
        self._metrics = MetricSet(metrics, self._device)
        self._evaluation = Evaluation(
            microbatcher, self._eval_policy, MetricSet(metrics, self._device)
        )
        scheduler = build_scheduler(scheduler, optimizer)
        grad_clip_norm = read_norm("grad_clip_norm", grad_clip_norm)
        self._step: TrainingStep | None = None
        if optimizer is not None:
            self._step = TrainingStep(
                microbatcher,
                policy=self._policy,
                metrics=self._metrics,
                modules=self._modules,
                optimizer=optimizer,
                scheduler=scheduler,
                grad_clip_norm=grad_clip_norm,
                device=self._device,
            )
        elif train_dataloader is not None:
            raise ValueError(
                "there is a train_dataloader and no optimizer; pass optimizer=torch.optim.AdamW, "
                "another callable from a list of parameters to an optimizer, or an optimizer of "
                "the model"
            )
        self._state = LoopState()
        self._speed = RecentSpeed()
        self._evaluated_at: int | None = None  # batches done at the last evaluation

    @property
    def state(self) -> LoopState:
        """Where training stands; read-only."""
        return self._state

    def fit(self) -> FitSummary:
        """Train until ``max_duration``.

        After an interruption (Ctrl-C, an error) it can be called again: the counts go on, and the
        epoch that was interrupted starts over.

        Raises:
            ValueError: no training data, or it has trained for ``max_duration`` already.
            DataLoaderError: a pass over the data gave no batch.
            NonFiniteLossError: the loss of a batch, or where gradients are clipped their norm, is
                NaN or infinite. Raised before the optimizer steps.
            OptimizerStepError: memory ran out inside the optimizer's step.
            SampleTooLargeError: not even one row fits.

        Every exception carries a note that says in which epoch and batch it was raised.
        """
        loader, step = self._require_training()
        state = self._state
        with self._running() as progress, noting(self._where):
            self._begin(step, progress)
            while not self._is_finished():
                state.epoch_batch = 0
                self._metrics.reset()
                announce_epoch(loader, state.epoch)
                for batch in fetch(loader, "train_dataloader"):
                    cut = step.run(batch, state, progress)
                    progress.status(partial(self._describe, cut))
                    self._evaluate_if_due(Unit.BATCHES, state.batch, progress)
                    if self._is_finished():
                        break
                self._end_epoch(loader)
                self._evaluate_if_due(Unit.EPOCHS, state.epoch, progress)
            if self._eval_interval is not None:
                self._evaluate(progress)
            summary = summarize(state, peak_memory_bytes=peak_bytes(self._device))
            progress.line(f"\n{summary}")
        return summary

    def eval(self, dataloader: Iterable[Any] | None = None) -> dict[str, float]:
        """Evaluate, and return ``"loss"`` and the metrics by name.

        The model is in evaluation mode meanwhile and as before afterwards. The loss is the mean
        over all rows: each batch's loss is weighted by its rows. It is missing where the forward
        gives no loss. Metrics count every row once.

        Args:
            dataloader: ``eval_dataloader`` unless given.

        Raises:
            ValueError: there is no data to evaluate on.
            DataLoaderError: the pass over the data gave no batch.
            SampleTooLargeError: not even one row fits.
        """
        check_loader("dataloader", dataloader)
        loader = self._eval_dataloader if dataloader is None else dataloader
        if loader is None:
            raise ValueError(
                "there is nothing to evaluate on; pass eval_dataloader=… to the Trainer, or a "
                "loader to eval()"
            )
        name = "eval_dataloader" if dataloader is None else "dataloader"
        with self._running() as progress:
            return self._evaluation.run(loader, PhaseState(), progress, name=name)

    def _running(self) -> AbstractContextManager[Progress]:
        return running(
            make_progress(self._shows_progress, self._console),
            memory_limit=self._memory_limit,
            device=self._device,
            residents=self._residents,
        )

    def _require_training(self) -> tuple[Iterable[Any], TrainingStep]:
        if self._train_dataloader is None or self._step is None:
            raise ValueError(
                "there is nothing to train on; pass train_dataloader=… and optimizer=… to the "
                "Trainer"
            )
        if self._is_finished():
            raise ValueError(
                f"fit() has trained for max_duration='{self._max_duration}' already "
                f"({count_of(self._state.batch, 'batch')}); to go on, make a new Trainer with the "
                "same model and optimizer, or give a longer max_duration from the start"
            )
        return self._train_dataloader, self._step

    def _begin(self, step: TrainingStep, progress: Progress) -> None:
        reset_peak(self._device)
        if not self._model.training:
            self._model.train()
        step.clear_gradients()  # an interrupted fit leaves those of its last batch
        progress.line(
            start_line(
                device=self._device,
                memory_limit=self._memory_limit,
                precision=self._precision,
                policies=(self._policy, self._eval_policy),
                parameters=self._model.parameters(),
                num_batches=num_batches(self._train_dataloader),
                max_duration=self._max_duration,
            )
        )

    def _end_epoch(self, loader: Iterable[Any]) -> None:
        state = self._state
        state.train.metrics = self._metrics.compute()
        # Only a duration in batches ends inside a pass, perhaps with its last batch.
        if not self._is_finished() or state.epoch_batch == num_batches(loader):
            state.epoch += 1
            state.epoch_batch = 0

    def _is_finished(self) -> bool:
        epochs = self._max_duration.unit is Unit.EPOCHS
        return (self._state.epoch if epochs else self._state.batch) >= self._max_duration.value

    def _evaluate_if_due(self, unit: Unit, done: int, progress: Progress) -> None:
        interval = self._eval_interval
        if interval is not None and interval.unit is unit and done and done % interval.value == 0:
            self._evaluate(progress)

    def _evaluate(self, progress: Progress) -> None:
        """Evaluate in the middle of training, unless that was done for this very batch."""
        state = self._state
        if self._eval_dataloader is None or self._evaluated_at == state.batch:
            return
        where = f"batch {state.batch}"
        if self._max_duration.unit is Unit.EPOCHS:
            where = f"epoch {state.epoch}/{self._max_duration.value}, {where}"
        self._evaluation.run(
            self._eval_dataloader, state.eval, progress, name="eval_dataloader", where=where
        )
        self._evaluated_at = state.batch

    def _describe(self, cut: Cut) -> str:
        return batch_line(
            self._state,
            cut,
            max_duration=self._max_duration,
            num_batches=num_batches(self._train_dataloader),
            device=self._device,
            samples_per_second=self._speed.per_second(self._state),
            learning_rate=None if self._step is None else self._step.learning_rate,
        )

    def _where(self) -> str:
        state = self._state
        return (
            f"in training, epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
            f"({count_of(state.batch, 'batch')} done)"
        )
