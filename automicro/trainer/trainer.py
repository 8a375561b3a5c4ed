"""Training and evaluating with whole batches, on a device too small for them."""

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automicro.checkpoints.store import CheckpointConfig
from automicro.errors import DeterminismWarning, warn
from automicro.events.callback import Callback, Callbacks
from automicro.events.run import LoopState, PhaseState, Requests, Run
from automicro.features import answering_unknown, last_of
from automicro.files import write_whole
from automicro.lengths.unit import Cost
from automicro.loggers import Logger, LoggerGroup
from automicro.loss.averages import LossAverage
from automicro.nested.parts import NestedParts
from automicro.options import check_model, read_count, read_flag
from automicro.policy.explore import Explore
from automicro.policy.policy import Policy
from automicro.ranks.interface import announcing_failed_construction
from automicro.savers.levels import Savers
from automicro.step.feature import Feature, check_features
from automicro.trainer.context import RunContext
from automicro.trainer.data.loading import check_loader, check_passes
from automicro.trainer.device import seed_everything
from automicro.trainer.evaluation import EvaluationFactory, expected_values, predict_all
from automicro.trainer.evaluators import read_evaluators
from automicro.trainer.failed_batch import Failures
from automicro.trainer.metrics import MetricSet, model_metrics
from automicro.trainer.optimizer import (
    OptimizerMode,
    OptimizerOrFactory,
    SchedulerOrFactory,
    build_optimizer,
)
from automicro.trainer.parallel import whole_state_dict
from automicro.trainer.progress import count_of, describe_parameters
from automicro.trainer.report import FitSummary
from automicro.trainer.same_on_all_ranks import (
    announcing_once,
    require_same,
)
from automicro.trainer.setup import MicrobatcherFactory, PlacedModel, assemble_fit
from automicro.trainer.surroundings import RunSurroundings, noting, prepare_cublas
from automicro.units import Duration, parse_time, read_duration


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
        eval_dataloader: the same for evaluation; an `Evaluator` with a size, metrics or an
            interval of its own; or a mapping from names to these.
        loss_fn: see `Microbatcher`, as for ``forward``, ``loss_average``, ``batchnorm``,
            ``modules``, ``probe`` and ``batch_layout``. A loss that is a module is moved to the
            device.
        forward: see `Microbatcher`.
        optimizer: an optimizer, or a callable that makes one of a list of the model's
            parameters, which are on the device by then: ``torch.optim.AdamW``, or
            ``partial(torch.optim.AdamW, lr=0.01)``; or `ParameterGroups`, by which some
            parameters have options of their own. Where it has ``train()`` and ``eval()``, as
            schedule-free ones do, both are called: the model has the weights of ``eval()`` in
            evaluations, predictions and checkpoints, and after `fit`.
        scheduler: a learning rate scheduler, or a callable that makes one of the optimizer. One
            that steps on a measured value (ReduceLROnPlateau) is stepped by a callback of yours.
        scheduler_interval: after what it is stepped: ``"batch"`` for each optimizer step, or
            ``"epoch"`` for each pass over the data. Schedulers of torch do not say what they
            count, so it must be given with one; those of `automicro.schedules` know.
        metrics: a torchmetrics Metric, a MetricCollection, or a mapping from names to these.
            Training and evaluation update clones of their own.
        max_duration: ``"2ep"`` (epochs), ``"500ba"`` (optimization batches), ``"10000sp"``
            (samples), ``"1e6tok"`` (tokens) or ``"100h"`` (hours of data, also ``min`` and
            ``sec``; a limit in time is ``fit(max_time=…)``). Training ends after the batch that
            reaches it.
        accumulate_batches: how many batches of the loader make up an optimization batch, which is
            one optimizer step. Their loss has one denominator. The last ones of an epoch may be
            fewer. A size, such as ``"1024sp"`` or ``"5h"``, takes the fewest that reach it on
            average, over all devices, and says how many these are.
        microbatch_size: rows: an int, ``"auto"``, ``"explore"`` (the fastest that fits), None (the
            whole batch), or a policy.
        eval_microbatch_size: the same for evaluation, found on its own.
        microbatch_unit: what microbatch sizes are counted in: ``"rows"``, ``"tokens"``,
            ``"seconds"`` or a function from a row to its cost, by which the rows of each batch are
            then sorted and packed.
        nested: sizes of parts that need far smaller slices than the rest of the model, by their
            names: ``{"joint": "auto"}``; see `docs/levels.md`.
        when_too_large: what to do where not even the smallest size fits: ``"error"``,
            ``"recompute"``, ``"offload"``, ``"nested"``, a list of these in order, or ``"auto"``
            for what is fastest by measured seconds; see `docs/levels.md`.
        loss_average: what the loss is a mean over: ``"samples"``, ``"tokens"`` (targets that are
            not ignored), ``"none"`` (a sum), or a callable that counts what the loss was divided
            by.
        batchnorm: what to do where layers average over the batch.
        memory_limit: bytes, text such as ``"24MiB"``, or a share of a CUDA device (``"80%"``), for
            the whole of `fit` or `eval`, optimizer step included: a simulated device on a CPU.
        strict_divisible: refuse a batch that is not a multiple of the microbatch size.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast of the forward and the
            loss. With ``"fp16"`` the loss is scaled, and a step whose gradients overflow is
            skipped and the scale lowered.
        grad_clip_norm: the largest norm of the gradient of all the optimizer's parameters
            together; larger gradients are scaled down to it.
        compile: whether to compile the model, or the keyword arguments of ``torch.compile``.
            Other microbatch sizes do not compile anew; CUDA graphs are refused where they change.
        deterministic: whether to refuse operations that may give other results in every run.
        parallel: how the processes that torchrun started train one model: ``"ddp"`` (a whole
            model on each device) or ``"fsdp"`` (each has shards of it). Loaders have the batches
            of one rank then, and their rows are shared out. None for one process, or for a model
            that is wrapped already.
        device: ``"auto"`` (an accelerator where there is one, else the CPU), or a device.
        seed: seeds Python, NumPy and torch when the trainer is constructed, but no model or
            loader made before. A script that makes these from the same numbers gives the same ones
            each time: sizes are not remembered then unless asked for, and no clock decides them.
            What ``deterministic`` refuses, and memory that other processes take from a GPU, may
            still differ. Of several ranks, each goes on with ``seed + rank`` afterwards.
        progress: whether to write to stdout how it goes, and the summary at the end.
        eval_interval: how often `fit` evaluates: ``"1ep"``, ``"100ba"``, ``"10000sp"``,
            ``"1e6tok"``, or None for never. With an interval, it also does at the end.
        batch_layout: which dimension holds the rows, and what is shared.
        probe: see `Microbatcher`.
        rehearse: ``"worst"`` to run the costliest few batches of the data before the first step,
            and of each evaluation, without a trace but the sizes that they fit in; see
            ``docs/plan.md``. None for none.
        modules: further modules that take part in the forward.
        callbacks: told of every event of the run; see `Callback`.
        loggers: take down the numbers of the run; see ``automicro.loggers``.
        checkpoint: where and how often to save the run, and whether to go on from what is there.
        features: what stands beside the path of a batch, of `automicro.features`, or yours. Sizes
            are remembered where neither ``seed`` nor ``deterministic`` is given, unless
            ``RememberSizes(False)`` is among them; with ``deterministic`` never.

    Raises:
        TypeError, ValueError: arguments that make no sense, each with its remedy.
        DesyncError: ranks were given different arguments.
    """

    @answering_unknown
    @announcing_failed_construction
    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Iterable[Any] | None = None,
        *,
        eval_dataloader: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        optimizer: OptimizerOrFactory | None = None,
        scheduler: SchedulerOrFactory | None = None,
        scheduler_interval: str | None = None,
        metrics: Any = None,
        max_duration: str | Duration = "1ep",
        accumulate_batches: int | str | Duration = 1,
        microbatch_size: int | str | Policy | None = "auto",
        eval_microbatch_size: int | str | Policy | None = "auto",
        microbatch_unit: str | Cost = "rows",
        nested: NestedParts = None,
        when_too_large: Savers = "error",
        loss_average: LossAverage = "auto",
        batchnorm: str = "warn",
        memory_limit: str | int | float | None = None,
        strict_divisible: bool = False,
        precision: str = "fp32",
        grad_clip_norm: float | None = None,
        compile: bool | Mapping[str, Any] = False,
        deterministic: bool = False,
        parallel: str | None = None,
        device: torch.device | str = "auto",
        seed: int | None = None,
        progress: bool = True,
        eval_interval: str | Duration | None = "1ep",
        batch_layout: int | Mapping[str, Any] = 0,
        probe: bool = True,
        rehearse: str | None = None,
        modules: Iterable[nn.Module] = (),
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        checkpoint: CheckpointConfig | None = None,
        features: Iterable[Feature] = (),
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        given["features"] = features = check_features(features)
        if seed is not None:
            seed_everything(seed)
        check_model(model)
        check_loader("train_dataloader", train_dataloader)
        evaluators = read_evaluators("eval_dataloader", eval_dataloader)
        duration = read_duration("max_duration", max_duration)
        check_passes(train_dataloader, duration)
        every = None if eval_interval is None else read_duration("eval_interval", eval_interval)
        if read_flag("deterministic", deterministic):
            prepare_cublas(device)  # while nothing has asked for the device
        placed = PlacedModel(given)
        device, place, modules = placed.device, placed.place, placed.modules
        residents: list[nn.Module | torch.optim.Optimizer] = [*modules]
        self._session = RunSurroundings(
            shows_progress=progress,
            place=place,
            memory_limit=memory_limit,
            device=device,
            residents=residents,
            deterministic=deterministic,
        )
        placed.put_in_place()
        optimizer = build_optimizer(optimizer, placed.model, modules, loss_fn)
        residents += [] if optimizer is None else [optimizer]
        by_clock = _are_found_by_clock(
            microbatch_size,
            eval_microbatch_size,
            *(each.microbatch_size for each in evaluators.values()),
            deterministic=deterministic,
        )
        asked = last_of("RememberSizes", features)
        remembers = seed is None if asked is None else asked.wanted
        given |= {
            "eval_interval": every,
            "repeatable": not by_clock and (seed is not None or deterministic),
            "remember_sizes": (remembers and not deterministic) or None,
        }
        factory = MicrobatcherFactory(placed, given)
        state, callbacks = LoopState(), Callbacks(callbacks)
        self._run = Run(
            state=state,
            model=placed.model,
            modules=tuple(modules),
            optimizer=optimizer,
            device=device,
            rank=place.rank,
            world_size=place.world_size,
            requests=Requests(max_duration=duration),
            evaluations=list(evaluators),
            make_microbatcher=factory.make_for_callback,
        )
        of_callbacks = callbacks.features(self._run)
        self._microbatcher = factory.make(
            microbatch_size=microbatch_size,
            eval_microbatch_size=eval_microbatch_size,
            optimizer=optimizer,
            features=of_callbacks,
        )
        if by_clock and seed is not None:
            warn(
                f"{_BY_CLOCK}, so two runs with seed={seed} may differ by rounding; to repeat a "
                f"run, {_SIZE_FOUND}",
                DeterminismWarning,
            )
        self._context = RunContext(
            run=self._run,
            state=state,
            callbacks=callbacks,
            loggers=LoggerGroup(loggers if place.is_first else ()),
            ranks=self._microbatcher.ranks,
            failures=Failures(device=device, rank=place.rank),
            mode=OptimizerMode(optimizer),
        )
        share = placed.sharing()
        self._evaluating = EvaluationFactory(
            microbatcher=self._microbatcher,
            make_microbatcher=partial(factory.make, features=of_callbacks),
            metrics=model_metrics(model, is_train=False) if metrics is None else metrics,
            microbatch_size=eval_microbatch_size,
            interval=every,
            device=device,
            share=share,
        )
        self._evaluations = self._evaluating.make_all(evaluators)
        metrics = model_metrics(model, is_train=True) if metrics is None else metrics
        of_training = MetricSet(metrics, device)
        self._run.requests.expected = expected_values(
            of_training, self._evaluations, loss_fn=loss_fn
        )
        if train_dataloader is not None:
            train_dataloader = share(train_dataloader, "train_dataloader")
        self._fit = assemble_fit(
            train_dataloader,
            self._context,
            given,
            placed=placed,
            factory=factory,
            microbatcher=self._microbatcher,
            evaluations=self._evaluations,
            metrics=of_training,
        )
        placed.seed_apart()

    def __repr__(self) -> str:
        run, batches = self._run, self._run.state.batch
        return (
            f"Trainer({type(run.model).__name__}, {describe_parameters(run.model.parameters())}, "
            f"max_duration={str(run.max_duration)!r}, device={str(run.device)!r}, "
            f"{count_of(batches, 'batch')} done)"
        )

    @property
    def state(self) -> LoopState:
        """Where training stands, to be read: training goes by it."""
        return self._run.state

    @property
    def model(self) -> nn.Module:
        """The model that is trained, on its device, without a wrapper for several ranks."""
        return self._run.model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None in a trainer that only evaluates."""
        return self._run.optimizer

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights, for ``model.load_state_dict(torch.load(path))``.

        Whole where ranks hold shards; all ranks call it, and the first writes. A checkpoint
        (``checkpoint=…``) has the optimizer and the place in the data as well.

        Raises:
            OSError: the file cannot be written; an older one stays as it was.
        """
        weights = whole_state_dict(self._run.model)
        if self._run.rank == 0:
            write_whole(Path(path), lambda file: torch.save(weights, file))

    def fit(
        self, duration: str | Duration | None = None, *, max_time: str | timedelta | None = None
    ) -> FitSummary:
        """Train until ``max_duration``.

        With ``checkpoint``, it goes on from the newest checkpoint if there is one. Ctrl-C and
        SIGTERM end it after the batch that is running, once that is saved; a second Ctrl-C ends
        it at once.

        After an error it can be called again: the counts go on, and the epoch begins again, which a
        warning says where batches of it come once more. What it does::

            go on from the newest checkpoint                            # where there is one
            tell callbacks: fit_start
            run the costliest batches, and roll them back               # with rehearse="worst"
            while max_duration is not reached and nothing asks to stop:
                tell: epoch_start
                for batches in train_dataloader, accumulate_batches at a time:
                    transform them; tell: batch_start
                    until all rows fit:                                 # one transaction
                        cut; forward, loss and backward of each microbatch
                        out of memory: roll back, and cut smaller
                    tell: gradients_ready
                    unscale, clip, step the optimizer and the scheduler, clear gradients
                    log; tell: batch_end
                    evaluate where eval_interval is reached; agree with the other ranks
                    save where the checkpoint's interval is reached
                compute the metrics of the epoch; tell: epoch_end
                evaluate and save where that is due
            evaluate what has not seen the final weights; save
            tell: fit_end

        Args:
            duration: how much more to train than is done, such as ``"1ep"``, in place of
                ``max_duration``. Not of a run that is saved.
            max_time: how long this call may take, such as ``"2h30m"``: it ends after the batch that
                runs then, and saves.

        Raises:
            ValueError: no training data, it has trained for ``max_duration`` already, or another
                call has not returned.
            DataLoaderError: a pass over the data gave no batch.
            NonFiniteLossError: see `automicro.features.NonFinite`.
            OptimizerStepError: memory ran out inside the optimizer's step.
            SampleTooLargeError: not even one row fits.
            CheckpointError: the checkpoints are of another run, or all are damaged.
            KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM.

        Every exception carries a note that says in which epoch and batch it was raised.
        """
        if isinstance(duration, Iterable) and not isinstance(duration, str):
            raise TypeError(
                f"fit() takes how much more to train, such as '1ep', and was given a "
                f"{type(duration).__name__}; give a loader to the Trainer as train_dataloader=…"
            )
        more = None if duration is None else read_duration("duration", duration)
        max_seconds = None if max_time is None else parse_time(max_time)
        if self._fit is None:
            raise ValueError(
                "there is nothing to train on; pass train_dataloader=… and optimizer=… to the "
                "Trainer"
            )
        fit, ranks = self._fit, self._microbatcher.ranks
        with fit.alone():
            if more is not None:
                require_same(lambda: {"duration": str(more)}, what="durations")
                fit.extend(more)
            fit.require_more()
            with (
                announcing_once(ranks),
                ranks.guarding_calls(),
                self._session.open(self._context),
                noting(fit.where),
            ):
                return fit.run(max_seconds)

    def keep_failures_in(self, folder: str | os.PathLike[str]) -> None:
        """Where a batch is kept that does not fit even in the smallest microbatches.

        Unless called, that is the folder above the checkpoints', or without these a new one among
        the system's temporary files. The error says which; ``automicro replay`` reads the file.

        Args:
            folder: made when it is needed.
        """
        self._context.failures.folder = Path(folder)

    def eval(self, dataloader: Any = None, *, max_batches: int | None = None) -> dict[str, float]:
        """Evaluate, and return ``"loss"`` and the metrics by name.

        The loss is that of all rows together, whatever the batch size, and missing where the
        forward gives none; parts of it are ``"loss/name"``. Metrics count every row once. Where
        there are several evaluators, their names come first: ``"name/loss"``.

        Args:
            dataloader: ``eval_dataloader`` unless given; the same things.
            max_batches: how many batches of each loader to evaluate on, at most; None for what
                its `Evaluator` says.

        Raises:
            ValueError: there is no data to evaluate on.
            DataLoaderError: the pass over the data gave no batch.
            SampleTooLargeError: not even one row fits.
        """
        if max_batches is not None:
            read_count("max_batches", max_batches)
        evaluations = self._evaluations
        if dataloader is not None:
            evaluations = self._evaluating.make_given(dataloader)
        if not evaluations:
            raise ValueError(
                "there is nothing to evaluate on; pass eval_dataloader=… to the Trainer, or a "
                "loader to eval()"
            )
        phase, ranks = PhaseState(), self._microbatcher.ranks
        with (
            announcing_once(ranks),
            ranks.guarding_calls(),
            self._session.open(self._context),
        ):
            for evaluation in evaluations:
                evaluation.run(phase, self._context, max_batches=max_batches)
        return phase.metrics

    def predict(self, dataloader: Iterable[Any]) -> list[Any]:
        """The model's outputs, one entry for each batch of a loader, in the order of the data.

        Sizes are those of evaluation. Batches need no targets: with ``loss_fn``, a list of one or
        two is read as inputs and targets, and anything else as inputs.

        Raises:
            ValueError: the loader shuffles, or there are several ranks.
            DataLoaderError: the pass over the data gave no batch.
            SampleTooLargeError: not even one row fits.
        """
        if self._run.world_size > 1:
            raise ValueError(
                f"predict gives the outputs of all rows in order, and each of "
                f"{self._run.world_size} ranks has a part of the model or of the data; predict in "
                "one process with the weights that were saved"
            )
        with self._session.open(self._context), self._context.mode.evaluating():
            return predict_all(self._microbatcher, dataloader, self._context)


_BY_CLOCK = 'microbatch_size="explore" finds sizes by the clock'
_SIZE_FOUND = "give the size that it found, as in microbatch_size=16"


def _are_found_by_clock(*sizes: Any, deterministic: bool) -> bool:
    """Whether a size is found by the clock, so that a run does not have them alike each time.

    Raises:
        ValueError: it is, and bits are to be the same.
    """
    by_clock = any(each == "explore" or isinstance(each, Explore) for each in sizes)
    if by_clock and deterministic:
        raise ValueError(
            f"{_BY_CLOCK}, so with deterministic=True two runs would still differ by rounding; "
            f"{_SIZE_FOUND}"
        )
    return by_clock
