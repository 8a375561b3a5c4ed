"""Training and evaluation with whole batches on a device that is too small for them."""

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automicro.checkpoints.store import CheckpointConfig
from automicro.durations import Duration, parse_time, read_duration
from automicro.errors import DeterminismWarning, removed, warn
from automicro.events.callback import Callback, Callbacks
from automicro.events.run import ExpectedValues, LoopState, PhaseState, Requests, Run
from automicro.features import TrainerFeature, last_of, taking_words
from automicro.files import write_whole
from automicro.loggers import Logger, LoggerGroup
from automicro.loss.averages import LossAverage
from automicro.microbatcher import answering_unknown
from automicro.options import check_model
from automicro.policy.explore import Explore
from automicro.policy.policy import Policy
from automicro.ranks.interface import announcing_failed_construction, announcing_failure
from automicro.savers.levels import Savers
from automicro.step.feature import Feature, check_features
from automicro.trainer.context import RunContext
from automicro.trainer.data.loading import check_loader, check_passes
from automicro.trainer.device import seed_everything
from automicro.trainer.evaluation import make_evaluations, predict_all
from automicro.trainer.evaluators import read_evaluators
from automicro.trainer.failed_batch import Failures
from automicro.trainer.metrics import MetricSet, model_metrics
from automicro.trainer.optimizer import OptimizerMode, OptimizerOrFactory, build_optimizer
from automicro.trainer.parallel import whole_state_dict
from automicro.trainer.progress import describe_parameters
from automicro.trainer.report import FitSummary
from automicro.trainer.same_on_all_ranks import outline_evaluations, require_same
from automicro.trainer.setup import MicrobatcherFactory, PlacedModel, assemble_fit
from automicro.trainer.surroundings import RunSurroundings, noting, prepare_cublas
from automicro.units import count_of


class Trainer:
    """Trains a model on full optimization batches, whatever the memory of the device.

    For each batch, it runs forward and backward with a `Microbatcher`, clips, steps the optimizer,
    clears the gradients and steps the scheduler. Batches, steps and schedule are the same on any
    device.

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

    Submodules that are in evaluation mode when `fit` begins, such as a frozen BatchNorm, stay in
    it. Only if the model itself is in evaluation mode is all of it put into training mode.

    Args:
        model: the model; it is moved to the device.
        train_dataloader: an iterable of full optimization batches that is iterated over once per
            epoch. ``set_epoch`` of its samplers is called with the epoch.
        eval_dataloader: an iterable of full batches for evaluation, an `Evaluator` with its own
            size, metrics or interval, or a mapping from names to these.
        loss_fn: see `Microbatcher`, also for ``forward``, ``loss_average``, ``batchnorm``,
            ``modules``, ``probe`` and ``batch_layout``. A loss that is a module is moved to the
            device.
        forward: see `Microbatcher`.
        optimizer: an optimizer, or a callable that builds one from the list of the model's
            parameters on the device, such as ``torch.optim.AdamW`` or
            ``partial(torch.optim.AdamW, lr=0.01)``, or `ParameterGroups` with separate options for
            some parameters. If it has ``train()`` and ``eval()``, like schedule-free optimizers,
            both are called: evaluations, predictions and checkpoints use the weights of
            ``eval()``, and the model keeps them after `fit`.
        metrics: a torchmetrics Metric, a MetricCollection, or a mapping from names to these.
            Training and evaluation update separate clones.
        max_duration: ``"2ep"`` (epochs), ``"500ba"`` (optimization batches), ``"10000sp"``
            (samples), ``"1e6tok"`` (tokens) or ``"100h"`` (hours of data, also ``min`` and
            ``sec``; for a time limit use ``fit(max_time=…)``). Training ends after the batch that
            reaches it.
        accumulate_batches: number of loader batches in an optimization batch, which is one
            optimizer step with one denominator of the loss. The last optimization batch of an
            epoch can have fewer. A size, such as ``"1024sp"`` or ``"5h"``, chooses the smallest
            number that reaches it on average over all devices, and prints it.
        microbatch_size: rows per microbatch: an int, ``"auto"``, ``"explore"`` (the fastest size
            that fits), None (the whole batch), or a policy.
        eval_microbatch_size: rows per microbatch in evaluation, found separately.
        when_too_large: memory savers to use if not even the smallest size fits: ``"error"``,
            ``"recompute"``, ``"offload"``, ``"nested"``, a list of these in order, or ``"auto"``
            for the fastest by measured seconds; see `docs/levels.md`.
        loss_average: what the loss is averaged over: ``"samples"``, ``"tokens"`` (targets that are
            not ignored), ``"none"`` (a sum), or a callable that returns the denominator of the
            loss.
        batchnorm: how to handle layers that average over the batch.
        memory_limit: bytes, text such as ``"24MiB"``, or a share of a CUDA device (``"80%"``), for
            all of `fit` or `eval`, including the optimizer step. On a CPU, it simulates a device.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast of the forward and the
            loss. With ``"fp16"`` the loss is scaled; if gradients overflow, the step is skipped
            and the scale is lowered.
        parallel: how the processes of torchrun train one model: ``"ddp"`` (a whole model on each
            device) or ``"fsdp"`` (shards on each device). Give loaders with the batch size of one
            rank; their rows are shared among ranks. None for one process, or for a model that is
            already wrapped.
        device: a device, or ``"auto"`` for an accelerator if there is one, else the CPU.
        seed: seed of Python, NumPy and torch, set when the trainer is constructed; it does not
            affect a model or loader made before. With a seed, sizes are not remembered by default
            and no measured time decides them, so a script that seeds its model and data repeats
            its run. Operations that ``deterministic`` refuses, and GPU memory that other processes
            take, can still change results. Each rank then continues with ``seed + rank``.
        progress: whether to print progress and the summary to stdout.
        eval_interval: duration between evaluations in `fit`: ``"1ep"``, ``"100ba"``,
            ``"10000sp"``, ``"1e6tok"``, or None for no evaluations. With an interval, `fit` also
            evaluates at the end.
        batch_layout: the dimension of the rows, and the values that rows share.
        probe: see `Microbatcher`.
        modules: additional modules that take part in the forward.
        callbacks: objects that handle the events of the run; see `Callback`.
        loggers: objects that record the values of the run; see ``automicro.loggers``.
        checkpoint: where and how often to save the run, and whether to resume.
        features: additional features from `automicro.features`, such as `Optimization` (learning
            rates, clipping), or your own. As in a config, a word can stand for its feature:
            ``scheduler``, ``scheduler_interval``, ``grad_clip_norm``, ``compile``, ``rehearse``,
            ``deterministic``, ``microbatch_unit``, ``nested``, ``strict_divisible`` and others.
            Sizes are remembered by default if neither ``seed`` nor `Deterministic` is given.
            ``RememberSizes`` overrides this, but `Deterministic` never remembers sizes.

    Raises:
        TypeError, ValueError: an argument is invalid.
        DesyncError: ranks were given different arguments.
    """

    @taking_words
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
        metrics: Any = None,
        max_duration: str | Duration = "1ep",
        accumulate_batches: int | str | Duration = 1,
        microbatch_size: int | str | Policy | None = "auto",
        eval_microbatch_size: int | str | Policy | None = "auto",
        when_too_large: Savers = "error",
        loss_average: LossAverage = "auto",
        batchnorm: str = "warn",
        memory_limit: str | int | float | None = None,
        precision: str = "fp32",
        parallel: str | None = None,
        device: torch.device | str = "auto",
        seed: int | None = None,
        progress: bool = True,
        eval_interval: str | Duration | None = "1ep",
        batch_layout: int | Mapping[str, Any] = 0,
        probe: bool = True,
        modules: Iterable[nn.Module] = (),
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        checkpoint: CheckpointConfig | None = None,
        features: Iterable[Feature] = (),
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        given["features"] = features = check_features(features)
        kinds = [type(each).__mro__ for each in features if isinstance(each, TrainerFeature)]
        of_the_loop = [kind[kind.index(TrainerFeature) - 1].__name__ for kind in kinds]
        for name in of_the_loop:
            if of_the_loop.count(name) > 1:
                raise ValueError(
                    f"features has several {name}(…), of which only one would count. Give all "
                    f"arguments to one {name}(…)"
                )
        if seed is not None:
            seed_everything(seed)
        check_model(model)
        check_loader("train_dataloader", train_dataloader)
        evaluators = read_evaluators("eval_dataloader", eval_dataloader)
        duration = read_duration("max_duration", max_duration)
        check_passes("train_dataloader", train_dataloader, duration)
        every = None if eval_interval is None else read_duration("eval_interval", eval_interval)
        deterministic = last_of("Deterministic", features) is not None
        if deterministic:
            prepare_cublas(device)  # before anything uses the device
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
        sizes = [microbatch_size, eval_microbatch_size]
        sizes += [each.microbatch_size for each in evaluators.values()]
        by_clock = any(each == "explore" or isinstance(each, Explore) for each in sizes)
        if by_clock and deterministic:
            raise ValueError(f"deterministic was given, but {_BY_CLOCK}")
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
            warn(_BY_CLOCK, DeterminismWarning)
        self._context = RunContext(
            run=self._run,
            state=state,
            callbacks=callbacks,
            loggers=LoggerGroup(loggers if place.is_first else ()),
            ranks=self._microbatcher.ranks,
            failures=Failures(device=device, rank=place.rank),
            mode=OptimizerMode(optimizer),
        )
        share = placed.sharing(self._microbatcher.ranks)
        self._make_evaluations = partial(
            make_evaluations,
            microbatcher=self._microbatcher,
            make_microbatcher=partial(factory.make, features=of_callbacks),
            inherited={
                "metrics": model_metrics(model, is_train=False) if metrics is None else metrics,
                "microbatch_size": eval_microbatch_size,
                "interval": every,
            },
            device=device,
            share=share,
        )
        self._evaluations = self._make_evaluations(evaluators)
        metrics = model_metrics(model, is_train=True) if metrics is None else metrics
        of_training = MetricSet(metrics, device)
        at_end = [each for each in self._evaluations if each.happens_at_end]
        self._run.requests.expected = ExpectedValues(
            evaluations={each.name: each.metrics.names for each in at_end},
            training=of_training.names,
            has_one_loss=type(loss_fn).__module__ == nn.MSELoss.__module__,
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
        """State of training, to be read only, because training depends on it."""
        return self._run.state

    @property
    def model(self) -> nn.Module:
        """The model on its device, without a wrapper for several ranks."""
        return self._run.model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None in a trainer that only evaluates."""
        return self._run.optimizer

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights, for ``model.load_state_dict(torch.load(path))``.

        Shards are gathered: all ranks must call this, and rank 0 writes. A checkpoint
        (``checkpoint=…``) also has the optimizer and the position in the data.

        Args:
            path: the file to write.

        Raises:
            OSError: the file cannot be written; an older file is unchanged.
        """
        weights = whole_state_dict(self._run.model)
        if self._run.rank == 0:
            write_whole(Path(path), lambda file: torch.save(weights, file))

    def fit(
        self, duration: str | Duration | None = None, *, max_time: str | timedelta | None = None
    ) -> FitSummary:
        """Train until ``max_duration``.

        With ``checkpoint``, training resumes from the newest checkpoint if there is one. Ctrl-C
        and SIGTERM end it after the current batch and a checkpoint; a second Ctrl-C ends it
        immediately.

        After an error, `fit` can be called again. Counts continue and the epoch starts again, with
        a warning if batches of it are repeated. The order of events is::

            resume from the newest checkpoint                           # if any
            emit fit_start
            run the costliest batches and roll them back                # with Rehearse("worst")
            while max_duration is not reached and no stop is requested:
                emit epoch_start
                for batches in train_dataloader, accumulate_batches at a time:
                    transform them; emit batch_start
                    until all rows fit:                                 # one transaction
                        split; forward, loss and backward of each microbatch
                        out of memory: roll back and split smaller
                    emit gradients_ready
                    unscale, clip, step the optimizer and the scheduler, clear gradients
                    log; emit batch_end
                    evaluate if eval_interval is reached; agree with the other ranks
                    save if the checkpoint's interval is reached
                compute the metrics of the epoch; emit epoch_end
                evaluate and save if due
            run evaluations that have not run with the final weights; save
            emit fit_end

        Args:
            duration: duration of additional training, such as ``"1ep"``, instead of
                ``max_duration``; not allowed with ``checkpoint``.
            max_time: time limit of this call, such as ``"2h30m"``. Training ends after the batch
                that reaches it, and a checkpoint is saved.

        Returns:
            The summary of the run.

        Raises:
            ValueError: there is no training data, training has already reached ``max_duration``,
                or another call has not returned.
            DataLoaderError: a pass over the data yielded no batch.
            NonFiniteLossError: see `automicro.features.NonFinite`.
            OptimizerStepError: the optimizer step ran out of memory.
            SampleTooLargeError: not even one row fits.
            CheckpointError: the checkpoints belong to another run, or all are damaged.
            KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM.

        Every exception has a note with the epoch and the batch in which it was raised.
        """
        if isinstance(duration, Iterable) and not isinstance(duration, str):
            raise TypeError(
                "fit() takes a duration to add, such as '1ep', but got a "
                f"{type(duration).__name__}. Pass a loader to the Trainer as train_dataloader=…"
            )
        more = None if duration is None else read_duration("duration", duration)
        max_seconds = float("inf") if max_time is None else parse_time(max_time)
        if self._fit is None:
            raise ValueError(
                "there is no data to train on. Pass train_dataloader=… and optimizer=… to the "
                "Trainer"
            )
        fit, ranks = self._fit, self._microbatcher.ranks
        with fit.alone():
            if more is not None:
                require_same(lambda: {"duration": str(more)}, what="durations")
                fit.extend(more)
            fit.require_more()
            with (
                announcing_failure(ranks),
                ranks.guarding_calls(),
                self._session.open(self._context),
                noting(fit.where),
            ):
                return fit.run(max_seconds)

    def keep_failures_in(self, folder: str | os.PathLike[str]) -> None:
        """Set the folder for batches that do not fit even in the smallest microbatches.

        By default, it is the parent of the checkpoint folder, or a new temporary folder without
        checkpoints. The error names the file, which ``automicro replay`` reads.

        Args:
            folder: the folder, created when needed.
        """
        self._context.failures.folder = Path(folder)

    @removed(max_batches="Pass eval(Evaluator(dataloader=…, max_batches=3))")
    def eval(self, dataloader: Any = None) -> dict[str, float]:
        """Evaluate the model.

        Args:
            dataloader: data in any form of ``eval_dataloader``, which is the default; an
                `Evaluator` can limit the batches.

        Returns:
            ``"loss"`` and the metrics by name. The loss is that of all rows, whatever the batch
            size, and missing if the forward returns none; its parts are ``"loss/name"``. Metrics
            count every row once. Values of named evaluators are ``"name/loss"``.

        Raises:
            ValueError: there is no data to evaluate.
            DataLoaderError: the pass over the data yielded no batch.
            SampleTooLargeError: not even one row fits.
        """
        evaluations = self._evaluations
        if dataloader is not None:
            given = read_evaluators("dataloader", dataloader)
            self._microbatcher.ranks.ready("evaluating on a loader of its own")
            require_same(partial(outline_evaluations, "dataloader", dataloader))
            evaluations = self._make_evaluations(given, loader_name="dataloader")
        if not evaluations:
            raise ValueError(
                "there is no data to evaluate on. Pass eval_dataloader=… to the Trainer, or a "
                "loader to eval()"
            )
        phase, ranks = PhaseState(), self._microbatcher.ranks
        with announcing_failure(ranks), ranks.guarding_calls(), self._session.open(self._context):
            for evaluation in evaluations:
                evaluation.run(phase, self._context)
        return phase.metrics

    def predict(self, dataloader: Iterable[Any]) -> list[Any]:
        """Predict the model's outputs with the microbatch sizes of evaluation.

        Args:
            dataloader: batches without shuffling. They need no targets: with ``loss_fn``, a list
                of one or two elements is read as inputs and targets, and anything else as inputs.

        Returns:
            One entry for each batch of the loader, in the order of the data.

        Raises:
            ValueError: the loader shuffles, or there are several ranks.
            DataLoaderError: the pass over the data yielded no batch.
            SampleTooLargeError: not even one row fits.
        """
        if self._run.world_size > 1:
            raise ValueError(
                "predict returns the outputs of all rows in order, but each of "
                f"{self._run.world_size} ranks has a part of the model or of the data. Predict in "
                "one process with the saved weights"
            )
        with self._session.open(self._context), self._context.mode.evaluating():
            return predict_all(self._microbatcher, dataloader, self._context)


_BY_CLOCK = (
    'microbatch_size="explore" chooses sizes by measured time, so two runs may differ by rounding. '
    "To repeat a run, pass the size that it found, such as microbatch_size=16"
)
