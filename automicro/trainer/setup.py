"""Putting together what trains: the model on its device, the step, the data, the loop, checkpoints.

The `Microbatcher` of a trainer, and further ones of the same model and options.

A model on its device, and shared with other ranks where there are any.

Putting together what trains: the step, the data, the loop, checkpoints.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from automicro.checkpoints.peers import open_peers
from automicro.checkpoints.store import CheckpointConfig
from automicro.compilation import compile_model
from automicro.events.callback import Callbacks
from automicro.events.run import LoopState, Run
from automicro.microbatcher import Microbatcher
from automicro.modules import is_parallel
from automicro.optimizer.scaling import GradientScaler
from automicro.options import (
    check_choice,
    in_tokens,
    read_count,
    read_norm,
    read_time,
    resolve_device,
    unwrapped,
)
from automicro.policy.choose import make_policy
from automicro.policy.policy import Policy
from automicro.trainer.composer import read_schedule
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.loading import num_batches
from automicro.trainer.data.sharing import LoaderSharing, SharedAlready
from automicro.trainer.device import choose_device, seed_everything
from automicro.trainer.evaluation import Evaluation, EvaluationPlan
from automicro.trainer.fit import Fit, FitLoop
from automicro.trainer.metrics import MetricSet
from automicro.trainer.optimizer import (
    SchedulerOrFactory,
    build_scheduler,
    gather_modules,
    place_modules,
)
from automicro.trainer.parallel import check_parallel, read_parallel, splits_layers, wrap
from automicro.trainer.processes import Place, meet, own_device, place_here, said_by_first
from automicro.trainer.progress import RunSettings
from automicro.trainer.recording import Recorder
from automicro.trainer.resume.checkpointer import Checkpointer, check_best_metric, read_checkpoint
from automicro.trainer.resume.fits import HOST_PART
from automicro.trainer.resume.snapshot import Snapshot
from automicro.trainer.same_on_all_ranks import outline_given, outline_options, require_alike
from automicro.trainer.step import (
    NON_FINITE_MODES,
    SCHEDULER_INTERVALS,
    FinitenessGuard,
    TokenCounter,
    TrainingStep,
)
from automicro.units import Duration


class Primitives:
    """Makes microbatchers of one model, compiled where that is asked for.

    Args:
        modules: the model, then further modules that take part.
        device: where they are.
        microbatch_size: of training.
        eval_microbatch_size: of evaluation.
        compile: whether to compile the model, or how.
        memory_limit: of the device, which on a CPU rules compiling out.
        options: of `Microbatcher`, for all.

    Raises:
        TypeError, ValueError: options that make no sense, each with its remedy.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        device: torch.device,
        microbatch_size: int | str | Policy | None,
        eval_microbatch_size: int | str | Policy | None,
        compile: bool | Mapping[str, Any],
        memory_limit: str | int | float | None,
        options: Mapping[str, Any],
    ) -> None:
        self.policies = (
            make_policy(microbatch_size),
            make_policy(eval_microbatch_size, name="eval_microbatch_size"),
        )
        compile_model(
            unwrapped(modules[0]),
            compile,
            sizes_change=any(policy.adapts for policy in self.policies),
            device=device,
            memory_limit=memory_limit,
        )
        self.scaler: GradientScaler | None = None  # made with the first microbatcher
        self._device = device
        self._is_scaled = options["precision"] == "fp16"
        self._model = modules[0]
        self._options = {
            **options,
            "modules": modules[1:],
            "device": device,
            "backward": self._backward if self._is_scaled else None,
        }

    def make_for_callback(self, **options: Any) -> Microbatcher:
        """A microbatcher for passes of a callback's own: unscaled, and nobody remembers its sizes.

        Args:
            options: of `Microbatcher`, in place of the trainer's.
        """
        return self.make(**{"backward": Tensor.backward, "remember_sizes": False, **options})

    def make(self, **options: Any) -> Microbatcher:
        """A microbatcher of the model.

        Args:
            options: of `Microbatcher`, in place of the trainer's.
        """
        microbatcher = Microbatcher(self._model, **{**self._options, **options})
        if self._is_scaled and self.scaler is None:
            self.scaler = GradientScaler(self._device, ranks=microbatcher.ranks)
        return microbatcher

    def _backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        self.scaler.backward(loss)


class Arrangement:
    """Where a model is, who else has it, and what of the data is for this rank.

    Args:
        model: bare, or wrapped already.
        modules: further ones that take part.
        loss_fn: may be one, too.
        parallel: how to wrap the model; None to take it as it is.
        device: that was asked for.
        compiles: whether the model is to be compiled.
        channels_last: whether weights of convolutions get the channels last in memory.
        optimizer: of the run, or what makes it.

    Raises:
        ValueError: what cannot be trained like this, each with its remedy.

    Attributes:
        place: of this process among the ranks.
        device: of this process.
        model: bare; its parameters have the names that they had before.
        called: what a step calls: the model, or the wrapper around it.
        modules: the bare model, then further ones.
        is_shared: whether other ranks train the same model.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module],
        loss_fn: Callable[..., Any] | None,
        *,
        parallel: str | None,
        device: torch.device | str,
        compiles: bool,
        channels_last: bool,
        optimizer: object,
    ) -> None:
        self._channels_last = channels_last
        self._parallel = read_parallel(parallel)
        everything = gather_modules(model, modules, loss_fn)
        is_wrapped = is_parallel(everything)
        self.place: Place = place_here()
        check_parallel(
            self._parallel,
            everything,
            self.place,
            compiles=compiles,
            channels_last=channels_last,
            loss_fn=loss_fn,
            optimizer=optimizer,
        )
        self.is_shared = is_wrapped or parallel is not None
        if self._parallel is not None:
            device = own_device(device, self.place)
        elif is_wrapped and device == "auto":
            device = resolve_device(None, model)
        self.device = choose_device(device)
        self.called = model
        self.model = unwrapped(model)
        self.modules = [self.model, *everything[1:]]

    @property
    def name(self) -> str | None:
        """In how many processes, in a few words; None for one that is alone."""
        if not self.is_shared:
            return None
        size = self.place.world_size
        ranks = "1 rank, start more with torchrun" if size == 1 else f"{size} ranks"
        return f"{self._parallel or 'wrapped by the caller'}, {ranks}"

    def put_in_place(self, given: Mapping[str, Any]) -> None:
        """Move the model, let the processes meet, and wrap it. All ranks call it.

        Args:
            given: the trainer's arguments by name, which are to be alike on all ranks.

        Raises:
            ValueError: nothing in the model has channels, or the processes cannot meet.
            DesyncError: ranks were given different things.
        """
        resolve_device(None, self.model)  # refuses a model without data, which cannot be moved
        place_modules(self.modules, self.device, channels_last=self._channels_last)
        if self._parallel is not None:
            meet(self.device, self.place)
        # Before anything else that ranks do together, and where those would wait that differ.
        require_alike(self.device, partial(outline_options, given))
        if self._parallel is not None:
            self.called = wrap(self._parallel, self.modules, self.device, self.place)

    def sharing(self, seed: int | None) -> LoaderSharing | SharedAlready:
        """What gives this rank its part of a loader. All ranks call it.

        Args:
            seed: of the run, which decides the order of rows where no generator does.
        """
        if not self.is_shared:
            return SharedAlready()
        order = torch.initial_seed() if seed is None else seed
        order = said_by_first(order % 2**32, self.device)
        return LoaderSharing(
            self.place,
            seed=order,
            device=self.device,
            has_parted_layers=splits_layers(self.modules),
        )

    def seed_apart(self, seed: int | None) -> None:
        """Let ranks draw random numbers of their own, now that all have the same weights.

        Args:
            seed: of the run; this rank's is ``seed + rank``. None leaves all as it is.
        """
        if self.is_shared and seed is not None and not self.place.is_first:
            seed_everything((seed + self.place.rank) % 2**32)


def assemble_fit(
    loader: Iterable[Any] | None,
    *,
    microbatcher: Microbatcher,
    primitives: Primitives,
    scheduler: SchedulerOrFactory | None,
    scheduler_interval: str,
    grad_clip_norm: float | None,
    non_finite: str,
    count_tokens: Callable[[Any], int] | None,
    accumulate_batches: int,
    state: LoopState,
    run: Run,
    callbacks: Callbacks,
    recorder: Recorder,
    evaluations: Sequence[Evaluation],
    interval: Duration | None,
    metrics: MetricSet,
    checkpoint: CheckpointConfig | None,
    max_time: str | timedelta | None,
    settings: RunSettings,
) -> Fit | None:
    """Put together what trains. All options are looked at, whether there are data or not.

    Args:
        loader: of the data to train on; None for none.
        microbatcher: gives the gradient.
        primitives: has the scaler.
        scheduler: steps once per optimizer step or per epoch, or makes what does.
        scheduler_interval: which of the two.
        grad_clip_norm: the largest norm of the gradient.
        non_finite: what to do about losses that are not.
        count_tokens: of a batch.
        accumulate_batches: how many of the loader's make up an optimization batch.
        state: where training stands.
        run: as callbacks see it.
        callbacks: told of every event.
        recorder: logs the numbers.
        evaluations: what to evaluate on.
        interval: how often.
        metrics: of training.
        checkpoint: where and how often to save; None for never.
        max_time: how long one call may take; None for as long as it takes.
        settings: what runs.

    Raises:
        TypeError, ValueError: options that make no sense, or data and no optimizer.
    """
    optimizer, ranks = run.optimizer, microbatcher.ranks
    accumulate_batches = read_count("accumulate_batches", accumulate_batches)
    scheduler_interval = check_choice("scheduler_interval", scheduler_interval, SCHEDULER_INTERVALS)
    scheduler = read_schedule(
        scheduler,
        scheduler_interval,
        state=state,
        run=run,
        count_batches=partial(_count_steps, loader, accumulate_batches),
    )
    schedule = build_scheduler(scheduler, optimizer)
    require_alike(run.device, partial(outline_given, optimizer, schedule), what="optimizers")
    grad_clip_norm = read_norm("grad_clip_norm", grad_clip_norm)
    guard = FinitenessGuard(check_choice("non_finite", non_finite, NON_FINITE_MODES))
    tokens = TokenCounter(count_tokens)
    if loader is None:
        return None
    if optimizer is None:
        raise ValueError(
            "there is a train_dataloader and no optimizer; pass optimizer=torch.optim.AdamW, "
            "another callable from a list of parameters to an optimizer, or an optimizer of "
            "the model"
        )
    step = TrainingStep(
        microbatcher,
        metrics=metrics,
        modules=run.modules,
        optimizer=optimizer,
        scheduler=schedule,
        scheduler_interval=scheduler_interval,
        grad_clip_norm=grad_clip_norm,
        scaler=primitives.scaler,
        guard=guard,
        tokens=tokens,
        token_durations=in_tokens(max_duration=run.max_duration, eval_interval=interval),
        device=run.device,
        ranks=ranks,
    )
    feed = Feed(loader, "train_dataloader", has_peers=ranks.world_size > 1)
    plan = EvaluationPlan(evaluations, state=state, callbacks=callbacks, recorder=recorder, run=run)
    config = read_checkpoint(checkpoint)
    check_best_metric(config, run.expected)
    checkpointer = None
    if config is not None:
        parts = {
            "scheduler": schedule,
            "scaler": primitives.scaler,
            "sizes": microbatcher,
            "metrics": metrics,
            **{f"sizes of {each.name}": each.microbatcher for each in evaluations if each.name},
            **{f"metrics of {each.name or 'eval'}": each.metrics for each in evaluations},
            "evaluations": plan,
            HOST_PART: feed,
        }
        peers = open_peers()
        snapshot = Snapshot(
            run,
            rank=peers.rank,
            world_size=peers.world_size,
            parts={name: part for name, part in parts.items() if part is not None},
            callbacks=callbacks,
            state=state,
            scheduler_interval=scheduler_interval,
        )
        checkpointer = Checkpointer(config, snapshot, callbacks=callbacks, run=run, peers=peers)
    loop = FitLoop(
        step,
        feed,
        count_batches=partial(_count_steps, loader, accumulate_batches),
        accumulate_batches=accumulate_batches,
        evaluations=plan,
        metrics=metrics,
        state=state,
        callbacks=callbacks,
        run=run,
        recorder=recorder,
        ranks=ranks,
        checkpointer=checkpointer,
        best_metric=config.best_metric if config and config.keep_best else None,
    )
    return Fit(
        loop,
        step=step,
        state=state,
        run=run,
        recorder=recorder,
        ranks=ranks,
        checkpointer=checkpointer,
        max_seconds=read_time("max_time", max_time),
        settings=settings,
    )


def _count_steps(loader: Iterable[Any] | None, accumulate_batches: int) -> int | None:
    """Optimization batches of a pass, where the loader knows."""
    loaded = num_batches(loader)
    return None if loaded is None else -(-loaded // accumulate_batches)
