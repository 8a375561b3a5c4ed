"""Putting together what trains: the step, the data, the loop, checkpoints."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from automicro.checkpoints import CheckpointConfig, open_peers
from automicro.checks import check_choice
from automicro.duration import Duration
from automicro.events import Callbacks, LoopState, Run
from automicro.microbatcher import Microbatcher
from automicro.trainer.alike import require_alike
from automicro.trainer.arguments import in_tokens, read_count, read_norm, read_time
from automicro.trainer.building import SchedulerOrFactory, build_scheduler
from automicro.trainer.checkpointing import Checkpointer, check_best_metric, read_checkpoint
from automicro.trainer.composer_schedules import read_schedule
from automicro.trainer.evaluation import Evaluation
from automicro.trainer.evaluation_plan import EvaluationPlan
from automicro.trainer.feed import Feed
from automicro.trainer.finiteness import NON_FINITE_MODES, FinitenessGuard
from automicro.trainer.fit import Fit
from automicro.trainer.lines import RunSettings
from automicro.trainer.loading import num_batches
from automicro.trainer.loop import FitLoop
from automicro.trainer.metric_set import MetricSet
from automicro.trainer.outline import outline_given
from automicro.trainer.primitives import Primitives
from automicro.trainer.recording import Recorder
from automicro.trainer.snapshot import HOST_PART, Snapshot
from automicro.trainer.step import SCHEDULER_INTERVALS, TrainingStep
from automicro.trainer.tokens import TokenCounter


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
