"""Assembly of the parts of training: the model on its device, the step, the data, the loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.checkpoints.peers import open_peers
from automicro.compilation import compile_model
from automicro.data import LengthBatchSampler
from automicro.durations import Duration, Unit
from automicro.events.run import GlobalBatch
from automicro.features import (
    WORDS,
    CountData,
    NonFinite,
    Optimization,
    TrainerFeature,
    last_of,
    with_features,
)
from automicro.lengths.unit import unit_name
from automicro.microbatcher import Microbatcher
from automicro.modules import is_parallel
from automicro.optimizer.step import GradientScaler
from automicro.options import resolve_device, unwrapped
from automicro.policy.policy import make_policy
from automicro.ranks.interface import Ranks
from automicro.step.feature import Feature
from automicro.trainer.context import RunContext
from automicro.trainer.counting import Counter
from automicro.trainer.data import loading
from automicro.trainer.data.feed import Feed
from automicro.trainer.data.sharing import LoaderSharing, shared_sampler
from automicro.trainer.device import choose_device, seed_everything
from automicro.trainer.evaluation import Evaluation, EvaluationPlan
from automicro.trainer.fit import Fit
from automicro.trainer.metrics import MetricSet
from automicro.trainer.optimizer import (
    Update,
    build_scheduler,
    gather_modules,
    read_scheduler_interval,
)
from automicro.trainer.parallel import check_parallel, splits_layers, wrap
from automicro.trainer.processes import Process, meet, own_device, process_here
from automicro.trainer.progress import RunSettings
from automicro.trainer.rehearsal import Rehearsal
from automicro.trainer.resume.checkpointer import Checkpointer, check_best_metric, read_checkpoint
from automicro.trainer.resume.snapshot import Part, Scope, Snapshot
from automicro.trainer.same_on_all_ranks import outline_given, outline_options, require_same
from automicro.trainer.step import FinitenessGuard, TrainingStep


class PlacedModel:
    """A model on its device and among its ranks."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._parallel: str | None = options["parallel"]
        model, device = options["model"], options["device"]
        everything = gather_modules(model, options["modules"], options["loss_fn"])
        compiled = last_of("Compile", options["features"])
        self.compiles = False if compiled is None else compiled.options
        is_wrapped = is_parallel(everything)
        self.place: Process = process_here()
        check_parallel(
            self._parallel,
            everything,
            self.place,
            compiles=bool(self.compiles),
            **{name: options[name] for name in ("loss_fn", "optimizer")},
        )
        self.is_shared = is_wrapped or self._parallel is not None
        if self._parallel is not None:
            device = own_device(device, self.place)
        elif is_wrapped and device == "auto":
            device = resolve_device(None, model)
        self.device = choose_device(device)
        self.called: nn.Module = model  # with its wrapper, as steps call it
        self.model: nn.Module = unwrapped(model)
        self.modules = [self.model, *everything[1:]]

    @property
    def name(self) -> str | None:
        """Description of the parallel mode and the ranks; None for a single process."""
        if not self.is_shared:
            return None
        size = self.place.world_size
        ranks = "1 rank (start more with torchrun)" if size == 1 else f"{size} ranks"
        return f"{self._parallel or 'wrapped by the caller'}, {ranks}"

    def put_in_place(self) -> None:
        """Move the model, create the process group, and wrap it; all ranks must call this."""
        resolve_device(None, self.model)  # raises an error for a model on the meta device
        for module in self.modules:  # before an optimizer is built from the parameters
            module.to(self.device)
        if self._parallel is not None:
            meet(self.device, self.place)
        # Before any other collective, in which ranks with different arguments would hang.
        require_same(partial(outline_options, self._options))
        if self._parallel is not None:
            self.called = wrap(self._parallel, self.modules, self.device, self.place)

    def sharing(self, ranks: Ranks) -> Callable[..., Any]:
        """Return the function that shares a loader among ranks; all ranks must call this."""
        if not self.is_shared:
            return lambda loader, name, is_evaluated=False: loader
        seed = self._options["seed"]
        own = torch.initial_seed() if seed is None else seed
        order = int(ranks.from_first([float(own % 2**32)])[0])
        has_parted_layers = splits_layers(self.modules)
        return LoaderSharing(self.place, seed=order, has_parted_layers=has_parted_layers).share

    def seed_apart(self) -> None:
        """Seed ranks differently, once all of them have the same weights."""
        seed = self._options["seed"]
        if self.is_shared and seed is not None and not self.place.is_first:
            seed_everything((seed + self.place.rank) % 2**32)


# All other options of a step stand for features.
_OF_STEPS = (
    "loss_fn",
    "forward",
    "loss_average",
    "batchnorm",
    "precision",
    "batch_layout",
    "probe",
    "repeatable",
)


class MicrobatcherFactory:
    """Creates microbatchers of one model, which it compiles if requested."""

    def __init__(self, placed: PlacedModel, options: Mapping[str, Any]) -> None:
        # RememberSizes is not passed on, because each microbatcher gets it as an option.
        passed = [f for f in options["features"] if not isinstance(f, TrainerFeature)]
        self._features = [f for f in passed if last_of("RememberSizes", [f]) is None]
        sized = last_of("MicrobatchUnit", self._features)
        unit = unit_name("rows" if sized is None else sized.unit)
        self.policies = (
            make_policy(options["microbatch_size"], unit=unit),
            make_policy(options["eval_microbatch_size"], name="eval_microbatch_size", unit=unit),
        )
        compile_model(
            placed.model,
            placed.compiles,
            sizes_change=any(policy.adapts for policy in self.policies),
            device=placed.device,
            memory_limit=options["memory_limit"],
        )
        self.scaler: GradientScaler | None = None  # made with the first microbatcher
        self._device, self._model = placed.device, placed.called
        self._is_scaled = options["precision"] == "fp16"
        self._options = {
            **{name: options[name] for name in (*WORDS, *_OF_STEPS) if name in options},
            "modules": placed.modules[1:],
            "device": placed.device,
            "backward": self._backward if self._is_scaled else None,
        }

    def make_for_callback(self, **options: Any) -> Microbatcher:
        """Create a microbatcher for a callback, without loss scaling or remembered sizes."""
        return self.make(**{"backward": Tensor.backward, "remember_sizes": None, **options})

    def make(self, *, features: Sequence[Feature] = (), **options: Any) -> Microbatcher:
        """Create a microbatcher with the features of the run and additional ones."""
        given = {**self._options, **options, "features": [*self._features, *features]}
        microbatcher = Microbatcher(self._model, **with_features(given))
        if self._is_scaled and self.scaler is None:
            self.scaler = GradientScaler(self._device, ranks=microbatcher.ranks)
        return microbatcher

    def _backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        self.scaler.backward(loss)


def _expected(loader: object, num_devices: int, accumulate_batches: int) -> GlobalBatch | None:
    """Return the average optimization batch if batches differ and lengths are known."""
    average = loading.average_batch(loader)
    if average is None or not isinstance(shared_sampler(loader), LengthBatchSampler):
        return None
    return GlobalBatch(
        rows_per_device=average.rows,
        tokens_per_device=average.tokens,
        seconds_per_device=average.seconds,
        num_devices=num_devices,
        accumulation=accumulate_batches,
    )


def assemble_fit(
    loader: Iterable[Any] | None,
    context: RunContext,
    options: Mapping[str, Any],
    *,
    placed: PlacedModel,
    factory: MicrobatcherFactory,
    microbatcher: Microbatcher,
    evaluations: Sequence[Evaluation],
    metrics: MetricSet,
) -> Fit | None:
    """Assemble the training loop; None without training data."""
    # All options are checked, even without training data.
    run, ranks, every = context.run, context.ranks, options["eval_interval"]
    optimizer, scaler = run.optimizer, factory.scaler
    size = loading.read_accumulation(options["accumulate_batches"])
    accumulate_batches, chosen = size if isinstance(size, int) else 1, None
    if not isinstance(size, int) and loader is not None:
        accumulate_batches = loading.choose_accumulation(size, loader, ranks.world_size)
        chosen = f"accumulate_batches {accumulate_batches} (reaches '{size}')"
    features = options["features"]
    optimization = last_of("Optimization", features) or Optimization()
    schedule = build_scheduler(optimization.scheduler, optimizer)
    scheduler_interval = read_scheduler_interval(schedule, optimization.scheduler_interval)
    require_same(partial(outline_given, optimizer, schedule), what="optimizers")
    non_finite = last_of("NonFinite", features) or NonFinite()
    counts = last_of("CountData", features) or CountData()
    durations = {"max_duration": run.max_duration, "eval_interval": every}
    tokens = Counter(Unit.TOKENS, counts.tokens, **durations)
    sampler = shared_sampler(loader)
    is_known = isinstance(sampler, LengthBatchSampler) and "seconds" in sampler.units
    seconds = Counter(Unit.SECONDS, counts.seconds, is_known=is_known, **durations)
    if loader is None:
        return None
    if optimizer is None:
        raise ValueError(
            "train_dataloader was given, but no optimizer. Pass optimizer=torch.optim.AdamW, "
            "another callable from a list of parameters to an optimizer, or an optimizer of the "
            "model"
        )
    update = Update(
        optimizer=optimizer,
        modules=run.modules,
        scaler=scaler,
        grad_clip_norm=optimization.grad_clip_norm,
        scheduler=schedule,
        scheduler_interval=scheduler_interval,
        device=run.device,
        ranks=ranks,
    )
    feed = Feed(loader, "train_dataloader", accumulate_batches=accumulate_batches)
    plan = EvaluationPlan(evaluations, context)
    config = read_checkpoint(options["checkpoint"])
    checkpointer = None
    if config is not None:
        context.failures.folder = Path(config.folder).parent
        check_best_metric(config, run.expected)
        if config.interval is not None:
            seconds.require_for("checkpoint interval", Duration.parse(config.interval))
        metrics_of = {f"metrics of {each.name or 'eval'}": each.metrics for each in evaluations}
        parts = {
            "scheduler": Part(owner=schedule),
            "scaler": Part(owner=scaler),
            "sizes": Part(owner=microbatcher),
            "metrics": Part(owner=metrics, scope=Scope.EPOCH),
            **{
                f"sizes of {each.name}": Part(owner=each.microbatcher)
                for each in evaluations
                if each.name
            },
            **{name: Part(owner=each, scope=Scope.RANK) for name, each in metrics_of.items()},
            "evaluations": Part(owner=plan, scope=Scope.RANK, is_on_host=True),
            "data": Part(owner=feed, scope=Scope.EPOCH, is_on_host=True),
        }
        snapshot = Snapshot(
            context,
            peers=open_peers(),
            parts={name: part for name, part in parts.items() if part.owner is not None},
            scheduler_interval=scheduler_interval,
        )
        checkpointer = Checkpointer(config, snapshot, context)
    step = TrainingStep(
        microbatcher=microbatcher,
        update=update,
        metrics=metrics,
        guard=FinitenessGuard(non_finite.mode),
        tokens=tokens,
        seconds=seconds,
        context=context,
    )
    rehearsal = None
    if last_of("Rehearse", features) is not None:
        count_rows = BatchLayout(options["batch_layout"]).num_rows
        rehearsal = Rehearsal(step=step, feed=feed, evaluations=plan, count_rows=count_rows)
    return Fit(
        step=step,
        feed=feed,
        context=context,
        evaluations=plan,
        checkpointer=checkpointer,
        rehearsal=rehearsal,
        settings=RunSettings(
            run=run,
            options=options,
            parallel=placed.name,
            expected=_expected(loader, ranks.world_size, accumulate_batches),
            accumulation=chosen,
        ),
    )
