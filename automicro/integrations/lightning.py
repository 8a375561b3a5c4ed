"""Lightning: ``Trainer(callbacks=[AutoMicrobatch()])``; `microbatcher` for loops with Fabric.

The callback stands in the place of the closure that runs a batch, and of the three steps of
evaluation. The host's own step runs for each microbatch, in its precision and strategy; what it
logs, returns and appends is kept until the batch is certain, and then told once, as of the whole
batch. See docs/integrations/lightning.md.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout
from automicro.batch.structure import concat_rows
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.checking.draws import HeldDraws
from automicro.checking.reading import LOSS, Reading
from automicro.errors import BatchError, LossError, MetricWarning, RollbackError, warn
from automicro.features import WORDS, with_features
from automicro.integrations.host import (
    AccumulationReport,
    Group,
    Replacements,
    import_host,
    require_seam,
    seen_of,
)
from automicro.loss.conventions import Output
from automicro.loss.passes import is_extra_pass
from automicro.microbatcher import Microbatcher
from automicro.reach import OF_EVERY_MODULE
from automicro.state.part import State
from automicro.state.tensors import seen_version
from automicro.step.feature import Feature, MicrobatchRun
from automicro.step.metrics import TAKES_EITHER, Asking, Metrics, Readings, warn_of_metric
from automicro.step.results import EvalResult, StepResult

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_SUPPORTED = "2.5 or 2.6"


def _package() -> str:
    """Where the host lies: what the program has imported already, else what is installed."""
    for name, place in _PACKAGES.items():
        if name in sys.modules:
            return place
    installed = [place for name, place in _PACKAGES.items() if importlib.util.find_spec(name)]
    return installed[0] if installed else "lightning.pytorch"


if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = import_host(_package(), extra="lightning").Callback
    LightningModule = import_host(_package(), extra="lightning").LightningModule

logger = logging.getLogger(__name__)

_EVALUATIONS = ("validation_step", "test_step", "predict_step")
_CLEARING = ("on_before_zero_grad", "optimizer_zero_grad")
_AROUND_BACKWARD = ("on_before_backward", "on_after_backward")
# What the integration says itself; everything else of a Microbatcher's is an option.
_OURS = frozenset(
    (
        *("model", "loss_fn", "forward", "backward", "optimizer", "precision", "state"),
        *("scales_for_ranks", "carry_layout", "update_metric", "device"),
    )
)
_OPTIONS = (frozenset(inspect.signature(Microbatcher).parameters) | frozenset(WORDS)) - _OURS
_OF_EVERY_LIGHTNING_MODULE = frozenset(vars(LightningModule()))
_STRATEGIES = {
    "DeepSpeedStrategy": "keeps gradients of its own, which cannot be rolled back; use "
    "ModelParallelStrategy (FSDP2) or DDPStrategy",
    "FSDPStrategy": "is FSDP1, whose flat parameters cannot be rolled back; use "
    "ModelParallelStrategy (FSDP2)",
    "XLAStrategy": "runs on devices that do not say when memory runs out; use a GPU",
    "SingleDeviceXLAStrategy": "runs on a device that does not say when memory runs out; use a GPU",
}


class AutoMicrobatch(Callback):
    """Full batches in fit, validate, test and predict, on a device too small for them.

    The gradient, the loss and what is logged are those of whole batches, however they are cut.
    Precision, strategy, clipping, accumulation, schedules and checkpoints stay the trainer's own.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[AutoMicrobatch()], logger=False, accelerator="cpu")

    Args:
        options: those of `Microbatcher` that say how, such as ``microbatch_size``,
            ``loss_average="tokens"``, ``batch_layout`` or ``memory_limit``.

    Attributes:
        options: as given.
        result: of the last batch: rows, microbatches, attempts; None before the first.

    Raises:
        TypeError: an option that does not exist, or that the trainer says itself.
    """

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name in _OURS:
                raise TypeError(
                    f"AutoMicrobatch({name}=…): that comes from the trainer and its module; leave "
                    f"it out. Options are {', '.join(sorted(_OPTIONS))}"
                )
            if name not in _OPTIONS:
                raise TypeError(
                    f"AutoMicrobatch({name}=…) is not known; options are "
                    f"{', '.join(sorted(_OPTIONS))}"
                )
        self.options = options
        self._run: _Run | None = None
        self._sizes: dict[str, Any] | None = None
        self.result: StepResult | EvalResult | None = None

    @property
    def microbatcher(self) -> Microbatcher | None:
        """What runs the batches; None outside of a run, and before its first batch."""
        return None if self._run is None else self._run.microbatcher

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Take the places of the host's methods; refuse what cannot be right.

        Raises:
            ValueError: the trainer or the module does what cannot be cut, or cannot be undone.
            ImportError: this version of the host lacks what this stands on.
        """
        self._leave()
        if stage == "fit":
            _refuse_training(pl_module)
        _refuse(self, trainer, pl_module)
        self._run = _Run(self, trainer, pl_module)
        try:
            self._run.take_places(trains=stage == "fit")
        except BaseException:
            self._leave()
            raise

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Give all places back."""
        self._leave()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        """Give all places back, where a run ends by an error or by Ctrl-C."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found."""
        if self.microbatcher is not None:
            return self.microbatcher.state_dict()
        return self._sizes or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with sizes that were found earlier."""
        self._sizes = dict(state_dict)

    def make(self, **own: Any) -> Microbatcher:
        """A Microbatcher with the options, and the sizes that are known.

        Args:
            own: arguments of the integration's.
        """
        options = {"probe": "error", **self.options}
        made = Microbatcher(**with_features({**options, **own}))
        if self._sizes:
            try:
                made.load_state_dict(self._sizes)
            except ValueError as error:  # of another microbatch_size=: it finds its own
                logger.info("sizes of an earlier run are not used (%s)", error)
        return made

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.places.undo()
            if run.microbatcher is not None:
                self._sizes = run.microbatcher.state_dict()
                run.microbatcher.remove_parts()


class _Host:
    """The modules of the package that a trainer is of."""

    def __init__(self, trainer: "Trainer") -> None:
        kinds = [kind.__module__ for kind in type(trainer).__mro__]
        self.name, place = next(
            (name, place)
            for kind in kinds
            for name, place in _PACKAGES.items()
            if kind.startswith(f"{place}.")
        )
        self.call: Any = importlib.import_module(f"{place}.trainer.call")
        automatic = importlib.import_module(f"{place}.loops.optimization.automatic")
        # A method of the host's, or an error that names its version.
        self.seam = functools.partial(
            require_seam, host=self.name, supported=f"{self.name} {_SUPPORTED}"
        )
        self.Closure: Any = self.seam(automatic, "Closure", ("step_fn",))
        for hooks in ("_call_strategy_hook", "_call_callback_hooks", "_call_lightning_module_hook"):
            self.seam(self.call, hooks, ("trainer", "hook_name"))


class _Run:
    """One call of fit, validate, test or predict.

    Args:
        owner: the callback.
        trainer: the host.
        module: what it trains.

    Attributes:
        microbatcher: None before the first batch.
        places: of the host's methods, to be given back.
    """

    def __init__(
        self, owner: AutoMicrobatch, trainer: "Trainer", module: "LightningModule"
    ) -> None:
        self._owner, self._trainer, self._module = owner, trainer, module
        self._host = _Host(trainer)
        unit = owner.options.get("microbatch_unit", "rows")
        self._told = _Told(
            module,
            owner.options.get("batch_layout", 0),
            sorted_by=None if unit == "rows" else unit,
        )
        self._told.is_by_rows = self._eval_average() in ("samples", "auto")
        self._step: Callable[[Any], Any] = lambda batch: None
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._optimizer: Any = None
        self._trains = self._has_warned = False
        self._was_split = False  # the training batch before
        self._hooks_write = False  # to parameters
        self._hooked: Sequence[Any] = ()  # callbacks whose hooks run in attempts
        self.microbatcher: Microbatcher | None = None
        self.places = Replacements()

    def take_places(self, *, trains: bool) -> None:
        """Stand in for the host's methods, until `places` are undone."""
        host, strategy = self._host, self._trainer.strategy
        self._trains = trains
        if trains:
            host.seam(self._loop, "_make_closure", ("kwargs", "optimizer", "batch_idx"))
            host.seam(self._loop, "_make_zero_grad_fn", ("batch_idx", "optimizer"))
            host.seam(self._loop, "_training_step", ("kwargs",))
            self.places.put(self._loop, "_make_closure", self._make_closure)
        for name in _EVALUATIONS:
            own = host.seam(strategy, name)
            self.places.put(strategy, name, functools.partial(self._evaluate, name, own))

    # Training

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """In place of the host's: forward, zero_grad and backward of a batch."""
        zero_grad = self._loop._make_zero_grad_fn(batch_idx, optimizer)
        return self._host.Closure(
            step_fn=functools.partial(self._train, kwargs, optimizer, zero_grad)
        )

    def _train(self, kwargs: Any, optimizer: Any, zero_grad: Callable[[], None] | None) -> Any:
        trainer, told, call = self._trainer, self._told, self._host.call
        self._optimizer = optimizer
        microbatcher = self._ready()
        parts = trainer.accumulate_grad_batches
        if zero_grad is not None and self._clears_first(optimizer):
            zero_grad()
            zero_grad = None
        told.expect(kwargs["batch"])
        try:
            try:
                result, knows_loss = self._attempt(kwargs, zero_grad)
            except _InPiecesError:
                assert zero_grad is not None
                zero_grad()
                result, knows_loss = self._attempt(kwargs, None)
        except _SkippedError as skipped:
            return self._skip(skipped, kwargs, zero_grad)
        finally:
            self._step = lambda batch: None  # it holds the batch
            # The closure runs inside the optimizer's step, past the place that would give it back.
            microbatcher.release_reservation()
        self._owner.result = result
        self._was_split = result.num_microbatches > 1
        outputs = told.tell(result.rank_loss, scale=parts)
        loss = result.rank_loss
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for name in _AROUND_BACKWARD[knows_loss:]:
            shown = loss if scaler is None else scaler.scale(loss)
            given = (shown,) if name == "on_before_backward" else ()
            call._call_callback_hooks(trainer, name, *given)
            call._call_lightning_module_hook(trainer, name, *given)
        return self._loop.output_result_cls(loss, extra=outputs or {})

    def _attempt(
        self, kwargs: Any, zero_grad: Callable[[], None] | None
    ) -> tuple[StepResult, bool]:
        """Forward and backward of a batch, and whether ``on_before_backward`` has run.

        Raises:
            _InPiecesError: it has to be cut, so that ``zero_grad`` has to come before.
        """
        trainer, told, call = self._trainer, self._told, self._host.call
        microbatcher = self._ready()
        if zero_grad is not None:
            if self._has_own_clearing():
                zero_grad = functools.partial(self._watch, zero_grad)
            else:
                microbatcher.release_gradients()  # a second set of them would take memory
        between = _Between(told, self._loop, zero_grad)

        def step(microbatch: Any) -> Tensor:
            between.before_step()
            given = {**kwargs, "batch": microbatch}
            output = call._call_strategy_hook(trainer, "training_step", *given.values())
            trainer.strategy.post_training_step()
            read = self._loop.output_result_cls.from_training_step_output(
                output, trainer.accumulate_grad_batches
            )
            if read.closure_loss is None:
                raise _SkippedError(told.rows, told.num_rows)
            told.took(output["loss"] if isinstance(output, Mapping) else output, read.extra or None)
            between.after_step()
            loss: Tensor = read.closure_loss
            return loss

        self._step = step
        microbatcher.know_state(told.kept.mended())
        with self._listening(), self._keeping_from_hooks(between):
            return microbatcher.backward(kwargs["batch"]), between.knows_loss

    def _clears_first(self, optimizer: Any) -> bool:
        """Whether ``zero_grad`` comes before the step, once for all attempts, and not inside one.

        On several ranks hooks may communicate, and ranks may have different numbers of
        microbatches. Of a batch in several microbatches the first step is none of the batch. And
        what hooks write to parameters that are not trained (averages of weights) stays.
        """
        if self._trainer.world_size > 1 or self._was_split:
            return True
        if not self._has_own_clearing():
            return False
        if self._hooks_write:
            return True
        trained = {
            id(each)
            for group in optimizer.param_groups
            for each in group["params"]
            if each.requires_grad
        }
        modules = [self._module, *(m for each in self._hooked for m in _modules_in(each))]
        return any(id(each) not in trained for module in modules for each in module.parameters())

    def _watch(self, zero_grad: Callable[[], None]) -> None:
        """Run hooks that may write to parameters.

        In the first batch these are copied, as nobody knows yet. Where they are written to, hooks
        come before the step from then on.
        """
        if self._hooks_write:
            raise RollbackError(
                "on_before_zero_grad or optimizer_zero_grad has written to parameters in an "
                "attempt that ran out of memory, which earlier batches had not shown, and would do "
                "so once more for the same batch; continue from a checkpoint, and let "
                "configure_optimizers take only the parameters that are trained, or keep averages "
                "of weights in on_train_batch_end"
            )
        assert self.microbatcher is not None
        parameters = list(self._module.parameters())
        copies: list[Tensor] = []
        if self._owner.result is None:
            with on_host():
                copies = [each.detach().to("cpu", copy=True) for each in parameters]
        before = [seen_version(each) for each in parameters]
        with self.microbatcher.allowing_writes():
            zero_grad()
        self._hooks_write = before != [seen_version(each) for each in parameters]
        if self._hooks_write and copies:
            self._told.undo = functools.partial(self._unwrite, parameters, copies)

    def _unwrite(self, parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        assert self.microbatcher is not None
        with self.microbatcher.allowing_writes(), torch.no_grad():
            for parameter, copy_of_it in zip(parameters, copies, strict=True):
                parameter.copy_(copy_of_it)
        self._hooks_write = False

    def _has_own_clearing(self) -> bool:
        """Whether the module or a callback has a hook for it that is not the host's own."""
        owners = (self._module, *_callbacks_of(self._trainer))
        return any(_is_own(owner, name) for owner in owners for name in _CLEARING)

    @contextlib.contextmanager
    def _keeping_from_hooks(self, between: "_Between") -> Iterator[None]:
        """Keep hooks around the backward from running for each microbatch."""
        is_alone = self._trainer.world_size == 1
        with Replacements() as replacements:
            for owner in (*_callbacks_of(self._trainer), self._module):
                replacements.put(owner, "on_after_backward", _nothing)
                own = owner.on_before_backward
                hook = functools.partial(between.before_backward, own) if is_alone else _nothing
                replacements.put(owner, "on_before_backward", hook)
            yield

    def _backward(self, loss: Tensor) -> None:
        self._host.call._call_strategy_hook(self._trainer, "backward", loss, self._optimizer)

    def _skip(
        self, skipped: "_SkippedError", kwargs: Any, zero_grad: Callable[[], None] | None
    ) -> Any:
        """The step returned None: the host's own, once more, for what it logs and draws."""
        if skipped.is_split:
            raise LossError(
                f"training_step returned None for {skipped.rows} of {skipped.num_rows} rows, and "
                "what it would have returned for the whole batch cannot be known; return a loss "
                "of zero for rows that do not count (0.0 * outputs.sum()), or skip batches in the "
                "data loader"
            ) from None
        result = self._loop._training_step(kwargs)
        if result.closure_loss is not None:
            raise LossError(
                "training_step returned None, and then a loss for the same batch; let it decide by "
                "the batch and by torch's random numbers alone"
            ) from None
        if zero_grad is not None:
            zero_grad()
        return result

    # Evaluation

    def _evaluate(self, name: str, own: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """In place of a step of the strategy's."""
        told = self._told
        microbatcher = self._ready()
        modes = [module for module in self._module.modules() if module.training]

        def step(microbatch: Any) -> tuple[Tensor | None, None]:
            with _training(modes):
                output = own(microbatch, *rest)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
            loss = loss if is_loss and name != "predict_step" else None
            told.took(loss, output)
            return loss, None

        self._step = step
        try:
            told.expect(batch)
            with self._listening():
                gives = name == "predict_step" or told.gives_outputs
                result = microbatcher.evaluate(batch, compares_outputs=gives)
        finally:
            self._step = lambda batch: None
        self._owner.result = result
        self._warn_of_rows(told, result)
        return told.tell(result.loss)

    def _warn_of_rows(self, told: "_Told", result: EvalResult) -> None:
        """Warn, once, where means were weighted by rows although losses are means of others."""
        average = self._eval_average()
        is_known = told.is_by_rows or result.loss is not None
        if is_known or self._has_warned or result.num_microbatches == 1 or not told.has_means:
            return
        self._has_warned = True
        warn(
            "a step of evaluation returns no loss, and the means that it logs are weighted by rows "
            f"although losses were declared means of others (loss_average={average!r}); return the "
            "loss, so that values that are it are the batch's, or give self.log(batch_size=…)",
            MetricWarning,
        )

    def _eval_average(self) -> Any:
        options = self._owner.options
        return options.get("eval_loss_average") or options.get("loss_average", "samples")

    # Both

    def _ready(self) -> Microbatcher:
        """The Microbatcher of this run; strategies have wrapped the model only by its start."""
        if self.microbatcher is None:
            trainer, told = self._trainer, self._told
            optimizers = trainer.optimizers if self._trains else []
            if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
                raise ValueError(
                    "AutoMicrobatch: LBFGS runs a batch several times in one step and compares "
                    "the losses, which must not differ by how it was cut; use another optimizer"
                )
            state: list[Any] = [told]
            if trainer.world_size == 1:
                hooks = (*_CLEARING, "on_before_backward")
                self._hooked = hooked = [
                    c for c in _callbacks_of(trainer) if any(_is_own(c, n) for n in hooks)
                ]
                roots = {f"callbacks[{index}]": each for index, each in enumerate(hooked)}
                state.append(State(lambda: roots))
            own: dict[str, Any] = {
                "model": trainer.strategy.model,
                "forward": self._forward,
                "backward": self._backward,
                "optimizer": optimizers[0] if optimizers else None,
                "state": state,
                "scales_for_ranks": False,  # the mean of each rank's mean, as the host has it
            }
            if trainer.world_size > 1:  # fillers of other ranks run the step as well
                own["features"] = [*self._owner.options.get("features", ()), _Announcing(told)]
                told.is_announced = True
            self.microbatcher = self._owner.make(**own)
        return self.microbatcher

    def _forward(self, model: nn.Module, microbatch: Any) -> Any:
        with self._told.microbatch(microbatch):
            if not is_extra_pass():
                return self._step(microbatch)
            with self._told.overhearing(microbatch):
                found = self._step(microbatch)
                return self._told.seen(found[0] if isinstance(found, tuple) else found)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear what is logged, in place of the host's results."""
        results = self._trainer._results
        with Replacements() as replacements:
            if results is not None:
                log = self._host.seam(results, "log", ("fx", "name", "value", "batch_size"))
                replacements.put(results, "log", self._told.log)
                self._told.host_log = log
                of_module = functools.partial(self._told.log_of_module, self._module.log)
                replacements.put(self._module, "log", of_module)
            for each in self._trainer.loggers:
                send = functools.partial(self._told.log_metrics, each.log_metrics)
                replacements.put(each, "log_metrics", send)
            yield


class _SkippedError(Exception):
    """The module's step wants no training on these rows.

    Args:
        rows: of the microbatches of this batch so far.
        num_rows: of the batch.
    """

    def __init__(self, rows: Sequence[int], num_rows: int) -> None:
        super().__init__("training_step returned None")
        self.rows, self.num_rows = rows[-1] if rows else 0, num_rows
        self.is_split = self.rows < num_rows


class _InPiecesError(Exception):
    """The batch is cut, and gradients of the one before are still to be cleared."""


class _Between:
    """What the host does between forward and backward of a batch in one piece, inside an attempt.

    A failed attempt takes it back, and so it is done again. Of a batch in several pieces no step
    is the batch's: there gradients are cleared before all attempts, and ``on_before_backward``
    follows the last piece, with the loss of all.

    Args:
        told: of the batch.
        loop: of the host's optimization.
        zero_grad: clears gradients, and runs the hooks around that; None where that is done.

    Attributes:
        knows_loss: whether ``on_before_backward`` has run.
    """

    def __init__(self, told: "_Told", loop: Any, zero_grad: Callable[[], None] | None) -> None:
        self._told = told
        self._zero_grad = zero_grad
        self._progress = loop.optim_progress.optimizer.zero_grad
        self._counted = self._progress.state_dict()
        self.knows_loss = False

    def before_step(self) -> None:
        """The step of a microbatch comes next.

        Raises:
            _InPiecesError: clear gradients before the next attempt.
        """
        if self._told.is_split:
            self.knows_loss = False
            if self._zero_grad is not None:
                self._progress.load_state_dict(self._counted)
                raise _InPiecesError

    def after_step(self) -> None:
        """The step of a microbatch is over, and its backward comes next."""
        if self._told.is_whole and self._zero_grad is not None:
            self._progress.load_state_dict(self._counted)  # a failed attempt may have counted
            with self._told.in_hooks():
                self._zero_grad()

    def before_backward(self, own: Callable[..., Any], *given: Any) -> Any:
        """In place of a hook."""
        if not self._told.is_whole:
            return None
        self.knows_loss = True
        with self._told.in_hooks():
            return own(*given)


# What microbatches logged, returned and appended, told as of their whole batch


Source = tuple[int, str | None]


class Logged(NamedTuple):
    """One call of ``log``: in which microbatch, and how.

    Attributes:
        value: a tensor, or a metric.
        options: of the call.
        microbatch: its index.
        source: the metric whose call has returned the value; None for another value.
        number: the value, where it was a plain number.
    """

    value: Any
    options: dict[str, Any]
    microbatch: int
    source: Source | None = None
    number: float | None = None


class Joined:
    """Values of microbatches as the one that the whole batch would have given.

    Args:
        rows: of each microbatch.
        losses: of each, where the step gave any.
        dims: where tensors may have rows.
        sorted_by: what rows were sorted by the cost of, in the plural; None for rows in order.

    Raises:
        LossError: by `join` and `extends`: there is a value for each row, and rows were sorted.

    Example:
        >>> joined = Joined([2, 1], [None, None])
        >>> given = [{"n": 2, "rows": torch.ones(2)}, {"n": 1, "rows": torch.zeros(1)}]
        >>> joined.join("what the step returns", given)
        {'n': 3, 'rows': tensor([1., 1., 0.])}
    """

    def __init__(
        self,
        rows: Sequence[int],
        losses: Sequence[Tensor | None],
        dims: Sequence[int] = (0,),
        *,
        sorted_by: str | None = None,
    ) -> None:
        self._rows, self._losses, self._dims = rows, losses, dims
        self._sorted_by = sorted_by
        self._may_be_loss: list[tuple[Tensor, Tensor]] = []
        self.is_split = len(rows) > 1

    def extends(self, pieces: Sequence[Sequence[Any]]) -> bool:
        """Whether a list that got so many entries got one for each row."""
        is_one_each = self._are_rows(pieces) and max(map(len, pieces)) > 1
        if is_one_each:
            self._refuse_rows("a list that the step appends to")
        return is_one_each

    def _are_rows(self, pieces: Sequence[Sequence[Any]]) -> bool:
        """Whether each microbatch has an entry for each of its rows.

        Two tensors of two rows are as many by chance: they have the rows in them.
        """
        if [len(each) for each in pieces] != list(self._rows):
            return False
        rows = self._rows[0]
        return (
            rows == 1
            or any(each != rows for each in self._rows)
            or not all(
                isinstance(entry, Tensor)
                and any(entry.shape[dim : dim + 1] == (rows,) for dim in self._dims)
                for piece in pieces
                for entry in piece
            )
        )

    def _refuse_rows(self, what: str) -> None:
        if self._sorted_by is not None:
            raise LossError(
                f"{what} has a value for each row, and microbatch_unit={self._sorted_by!r} sorts "
                "rows: they would come in another order; let it have none (a mean, or a metric), "
                "or count microbatch_unit='rows'"
            )

    def counts_microbatches(self, more: int) -> bool:
        """Whether there is one more of something for each microbatch."""
        return more == len(self._rows) < sum(self._rows)

    def settle(self, loss: Tensor) -> None:
        """Let values that were each microbatch's loss be the batch's.

        What a loss averages over need not be rows, so its mean over rows would be another number.
        """
        for value, is_loss in self._may_be_loss:
            value.copy_(torch.where(is_loss, loss.to(value), value))
        self._may_be_loss.clear()

    def logged(
        self, name: str, said: Sequence[Logged], value_of: Callable[[Source], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Value and options of a call of ``log``, from those in each microbatch.

        Args:
            name: that it is logged under.
            said: of each.
            value_of: what a metric comes to for the whole batch.
        """
        value, options, _, source, _ = said[-1]
        if not self.is_split:
            return value, options
        indices = [each.microbatch for each in said]
        weights = [self._rows[index] for index in indices]
        given = [each.options.get("batch_size") for each in said]
        counts = [int(each) for each in given if each is not None]
        if len(counts) == len(said):
            if _is_constant(counts, weights):
                options = {**options, "batch_size": counts[0]}
            else:
                weights = counts
                options = {**options, "batch_size": sum(counts)}
        if not isinstance(value, Tensor):  # a metric, which counts by itself
            return value, options
        if source is not None and all(each.source == source for each in said):
            whole = value_of(source)
            if isinstance(whole, Tensor) and whole.shape == value.shape:
                return whole.to(value.dtype), options
        values = [each.value for each in said]
        kind = _name_of(options.get("reduce_fx", "mean"))
        if kind == "sum":
            return torch.stack(values).sum(0), options
        if kind in ("max", "min"):
            return getattr(torch.stack(values), f"a{kind}")(0), options
        if self._is_count(name, said, value):
            several = torch.stack(values)
            is_constant = (several == several[0]).all() & (said[0].number is None)
            return torch.where(is_constant, several[0], several.sum(0)), options
        return self._mean(values, weights, indices), options

    def _is_count(self, name: str, said: Sequence[Logged], value: Tensor) -> bool:
        """Whether a value that is logged as a mean counts something of its microbatch."""
        rows = [self._rows[each.microbatch] for each in said]
        if [each.number for each in said] == rows and max(rows) > 1:
            is_sure = len(set(rows)) > 1
            what = "the number of rows"
        elif value.is_floating_point() or value.dtype in (torch.bool, torch.complex64):
            return False
        else:
            is_sure, what = False, "a whole number"
        if not is_sure:
            warn(
                f"self.log({name!r}) is given {what} of each microbatch, and these are added up, "
                "as counts are, or kept where all whole tensors are the same; say reduce_fx='sum' "
                "where it is a count, and log a float of the step's own where it is none",
                MetricWarning,
            )
        return True

    def join(self, what: str, values: Sequence[Any]) -> Any:
        """Several values of one kind, one for each microbatch, as one.

        Args:
            what: they are, in words.
            values: as many as microbatches.

        Warns:
            MetricWarning: nobody can say how; the list of them is given.
        """
        if not values:
            return None
        first = values[0]
        if not self.is_split:
            if self._sorted_by is not None and _holds_rows(first, sum(self._rows)):
                self._refuse_rows(what)
            return first
        if all(each is None for each in values):
            return first
        if len(values) < len(self._rows) or any(type(e) is not type(first) for e in values):
            return self._as_they_are(what, values)
        if isinstance(first, Tensor):
            return self._join_tensors(what, values)
        if isinstance(first, float):
            total = sum(self._rows)
            return sum(value * rows for value, rows in zip(values, self._rows, strict=True)) / total
        if isinstance(first, int) and not isinstance(first, bool):
            if list(values) == list(self._rows):
                return sum(values)
            return first if _are_equal(values) else self._summed(what, values)
        if isinstance(first, Mapping) and all(each.keys() == first.keys() for each in values):
            joined = {
                key: self.join(f"{what}[{key!r}]", [each[key] for each in values]) for key in first
            }
            kind: Any = type(first)
            return joined if kind is dict else kind(**joined)
        if isinstance(first, list | tuple):
            return self._join_sequences(what, values)
        if isinstance(first, str | bytes | bool) and _are_equal(values):
            return first
        with contextlib.suppress(BatchError, TypeError):
            together = concat_rows(list(values))
            self._refuse_rows(what)
            return together
        return self._as_they_are(what, values)

    def _join_tensors(self, what: str, values: Sequence[Tensor]) -> Any:
        first = values[0]
        if first.dim() == 0:
            if first.is_floating_point():
                return self._mean(values, self._rows, range(len(values)))
            return self._summed(what, values)
        for dim in self._dims:
            if all(
                v.dim() > dim and v.shape[dim] == n for v, n in zip(values, self._rows, strict=True)
            ) and _are_equal([(*v.shape[:dim], *v.shape[dim + 1 :]) for v in values]):
                self._refuse_rows(what)
                return torch.cat(list(values), dim)
        return self._as_they_are(what, values)

    def _join_sequences(self, what: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if type(first) is list and self._are_rows(values):
            self._refuse_rows(what)
            return [each for value in values for each in value]
        if not all(len(value) == len(first) for value in values):
            return self._as_they_are(what, values)
        parts = [
            self.join(f"{what}[{index}]", list(each))
            for index, each in enumerate(zip(*values, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    def _mean(
        self, values: Sequence[Tensor], weights: Sequence[int], indices: Sequence[int]
    ) -> Tensor:
        first = values[0]
        wide = first.dtype if first.dtype is torch.float64 else torch.float32
        several = torch.stack(list(values)).to(wide)
        shares = torch.tensor(weights, dtype=wide).to(first.device) / sum(weights)
        mean = torch.where((several == several[0]).all(), several[0], (several * shares).sum(0))
        losses = [self._losses[index] for index in indices if index < len(self._losses)]
        known = [each for each in losses if each is not None]
        if len(known) == len(self._rows) and mean.dim() == 0:
            same = torch.stack([each.to(first.device, wide) for each in known]) == several
            self._may_be_loss.append((mean, same.all()))
        return mean

    def _summed(self, what: str, values: Sequence[Any]) -> Any:
        warn(
            f"{what} is a whole number in each microbatch, and they are added up, as counts are; "
            "where it is no count, return a float, which is averaged over rows, or a value for "
            "each row",
            MetricWarning,
        )
        return sum(values[1:], values[0])

    def _as_they_are(self, what: str, values: Sequence[Any]) -> Any:
        warn(
            f"{what} is a {type(values[0]).__name__} in each microbatch, and nothing says how the "
            f"{len(values)} of a batch become one: they are given as a list. Values with a row for "
            "each of the batch, and numbers, are joined; or keep batches whole with "
            "microbatch_size=None, eval_microbatch_size=None",
            MetricWarning,
        )
        return list(values)


def is_mean(reduction: Any) -> bool:
    """Whether values are averaged, and neither added up nor compared.

    >>> is_mean("avg"), is_mean(torch.mean), is_mean(max)
    (True, True, False)
    """
    return _name_of(reduction) not in ("sum", "max", "min")


def _name_of(reduction: Any) -> str:
    return str(getattr(reduction, "__name__", reduction)).lower()


def _holds_rows(value: Any, num_rows: int) -> bool:
    """Whether a value of one microbatch of several rows may have one thing for each of them."""
    if num_rows < 2:
        return False
    if isinstance(value, list) and len(value) == num_rows:
        return True
    return any(num_rows in tensor.shape for _, tensor in tensor_leaves(value))


def _is_constant(counts: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether ``batch_size=`` is the same number whatever a batch has, and counts nothing of it.

    >>> _is_constant([32, 32], [16, 16]), _is_constant([80, 40], [16, 8])
    (True, False)
    """
    if list(counts) == list(rows) or len(set(counts)) > 1:
        return False
    return counts[0] == sum(rows) or any(counts[0] % each for each in rows)


def _are_equal(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)


def detached(value: Any) -> Any:
    """Without the graph, which holds the memory of the forward."""
    if isinstance(value, Tensor):
        return value.detach()
    return map_tensors(value, Tensor.detach) if isinstance(value, Mapping | list | tuple) else value


class Kept:
    """What a step appends to lists of its module, and what its metrics return.

    Of a batch in several microbatches a list gets one entry where each of them appended one, and a
    metric's value of the last step is that of the batch.

    Args:
        module: whose step it is.
        apart_from: attributes that are the host's own.
    """

    def __init__(self, module: nn.Module, *, apart_from: Iterable[str] = ()) -> None:
        self._module = module
        self._hosts = OF_EVERY_MODULE | frozenset(apart_from)
        self._warned: set[str] = set()
        self._asking = Asking()
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, int] = {}
        self._counted: Metrics | None = None
        self._lists: list[tuple[str, list[Any], int, list[int]]] = []
        self._shadows: list[tuple[Any, Any]] = []
        # By id of what a metric returned: that, as ids are used again, and whose it is.
        self._returned: dict[int, tuple[Any, Source]] = {}
        self._readings: list[tuple[Any, Readings]] = []
        self._places = Replacements()

    def begin(self) -> None:
        self._clear()
        self._metrics = [each for each in self._module.modules() if _is_metric(each)]
        self._counted = Metrics(self._metrics)
        self._counted.begin()
        for name, value in self._of_its_own():
            if type(value) is int:
                self._counts[name] = value
            for key, each in value.items() if isinstance(value, dict) else [("", value)]:
                if type(each) is list:
                    label = f"{name}[{key!r}]" if key != "" else name
                    self._lists.append((label, each, len(each), []))

    def _of_its_own(self) -> list[tuple[str, Any]]:
        """The module's attributes that are the caller's, and neither torch's nor the host's."""
        return [
            (name, each) for name, each in vars(self._module).items() if name not in self._hosts
        ]

    def mended(self) -> list[str]:
        """Attributes of the module that hold lists, which get one entry for a batch."""
        return [
            name
            for name, value in self._of_its_own()
            if type(value) is list
            or (type(value) is dict and value and all(type(v) is list for v in value.values()))
        ]

    def begin_microbatch(self, *, is_split: bool, is_first: bool) -> None:
        """The step of a microbatch begins."""
        if is_split and is_first:
            for metric in self._metrics:
                if hasattr(metric, "_forward_cache"):
                    if self._asking.may(metric):
                        self._watch(metric)
                    self._shadow(metric)

    def _watch(self, metric: Any) -> None:
        """Note what each update takes its numbers for."""
        own, readings = metric.update, Readings()

        def update(*arguments: Any, **named: Any) -> None:
            with readings:
                own(*arguments, **named)

        self._places.put(metric, "update", update)
        self._readings.append((metric, readings))

    def _shadow(self, metric: Any) -> None:
        own, shadow = metric.forward, None

        def forward(*arguments: Any, **named: Any) -> Any:
            nonlocal shadow
            value = own(*arguments, **named)
            if shadow is None:
                shadow = _emptied(metric)
                self._shadows.append((metric, shadow))
            shadow.update(*arguments, **named)
            self._note_returned(metric, value)
            return value

        self._places.put(metric, "forward", forward)

    def _note_returned(self, metric: Any, value: Any) -> None:
        parts = value.items() if isinstance(value, Mapping) else [(None, value)]
        for key, part in parts:
            self._returned[id(part)] = part, (id(metric), key)

    @contextlib.contextmanager
    def knowing_sources(self) -> Iterator[None]:
        """Let `source_of` know what metrics return meanwhile, in a look."""

        def noting(metric: Any, own: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*arguments: Any, **named: Any) -> Any:
                value = own(*arguments, **named)
                self._note_returned(metric, value)
                return value

            return forward

        with Replacements() as replacements:
            for metric in self._module.modules():
                if _is_metric(metric) and hasattr(metric, "_forward_cache"):
                    replacements.put(metric, "forward", noting(metric, metric.forward))
            try:
                yield
            finally:
                self._returned.clear()

    def source_of(self, value: Any) -> Source | None:
        """The metric whose call in this microbatch has returned a value; None for another."""
        found = self._returned.get(id(value))
        return None if found is None or found[0] is not value else found[1]

    def value_of(self, source: Source) -> Any:
        """What a metric comes to for all microbatches."""
        number, key = source
        whole = next(shadow for metric, shadow in self._shadows if id(metric) == number).compute()
        return whole if key is None else whole[key]

    def end_microbatch(self) -> None:
        """The step of a microbatch is over."""
        self._returned.clear()
        for _, values, _, lengths in self._lists:
            lengths.append(len(values))

    def prepare(self, joined: Joined) -> None:
        self._places.undo()
        if joined.is_split:
            for metric, shadow in self._shadows:
                metric._forward_cache = shadow.compute()
            for name, values, start, lengths in self._lists:
                self._join_list(joined, name, values, [start, *lengths])
            self._warn_of_counters(joined)
            for metric, readings in self._readings:
                self._asking.learn(metric, readings)
                if readings.differ:
                    warn_of_metric(metric, TAKES_EITHER, self._warned)
        if self._counted is not None:
            self._counted.prepare()

    def _join_list(
        self, joined: Joined, name: str, values: list[Any], lengths: Sequence[int]
    ) -> None:
        pieces = [values[one:other] for one, other in itertools.pairwise(lengths)]
        counts = [len(each) for each in pieces]
        if len(values) != lengths[-1] or not any(counts) or joined.extends(pieces):
            return
        if len(set(counts)) > 1:
            self._warn(name, f"got {counts} entries from the microbatches of one batch")
            return
        what = f"what the step appends to self.{name}"
        values[lengths[0] :] = [joined.join(what, list(each)) for each in zip(*pieces, strict=True)]

    def _warn_of_counters(self, joined: Joined) -> None:
        for name, then in self._counts.items():
            now = vars(self._module).get(name)
            if type(now) is int and joined.counts_microbatches(now - then):
                self._warn(name, "was counted up by each microbatch of one batch")

    def _warn(self, name: str, did: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warn(
                f"self.{name} {did}, so it depends on the microbatch size; change it in "
                "on_train_batch_end (or on_validation_batch_end), which runs once for each batch",
                MetricWarning,
            )

    def commit(self) -> None:
        if self._counted is not None:
            self._counted.commit()
        self._clear()

    def roll_back(self) -> None:
        self._places.undo()
        if self._counted is not None:
            self._counted.roll_back()
        self._clear()


def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # whoever made one has imported it
    kinds = () if torchmetrics is None else (torchmetrics.Metric, torchmetrics.MetricCollection)
    return isinstance(module, kinds)


def _emptied(metric: Any) -> Any:
    """A metric like this one that has counted nothing; its states are not copied for that."""
    states = [getattr(metric, name) for name in metric._defaults]
    memo = {id(each): [] if isinstance(each, list) else each for each in states}
    shadow = copy.deepcopy(metric, memo)
    vars(shadow).pop("forward", None)
    shadow.reset()
    shadow._to_sync = metric.dist_sync_on_step  # as a forward's own value is computed
    return shadow


class _Announcing(Feature):
    """Says which forwards are of the batch, and no fillers for other ranks."""

    def __init__(self, told: "_Told") -> None:
        self._told = told

    def before(self, run: MicrobatchRun) -> None:
        self._told.is_next_real = True


class _Told:
    """What the step of one batch logged, gave back and appended: a part of its transaction.

    Args:
        module: whose step it is.
        layout: where batches have their rows; see `split_batch`.

    Attributes:
        kept: what the step appends to lists, and what metrics return.
        host_log: the host's own ``log``.
        is_announced: whether a feature says which forwards are of the batch, and no fillers.
        is_next_real: it has said so of the next.
        undo: takes back what hooks wrote to parameters.
        is_by_rows: whether losses are means over rows, as far as was said.
        gives_outputs: whether steps were seen to return more than a number.
        is_whole: whether the last microbatch was the batch, all of it.
        num_rows: of the batch.
    """

    def __init__(
        self,
        module: "LightningModule",
        layout: int | Mapping[str, Any],
        *,
        sorted_by: str | None,
    ) -> None:
        self._sorted_by = sorted_by
        self.kept = Kept(module, apart_from=_OF_EVERY_LIGHTNING_MODULE)
        self._layout = BatchLayout(layout)
        self._dims = dict.fromkeys((0, layout) if isinstance(layout, int) else (0,))
        self.host_log: Callable[..., None] = lambda *_, **__: None
        self.is_announced = self.is_next_real = self.is_whole = False
        self.num_rows = 0
        self.gives_outputs, self.is_by_rows = False, True
        self._heard: dict[str, Any] | None = None  # numbers that are logged, in a look
        self._heard_rows = 0
        self._returned: tuple[Tensor | None, Any] = None, None  # in a look, too
        self._is_open = self._counts = self._is_in_hooks = False
        self._source: Source | None = None  # of the value that is being logged
        self._number: float | None = None  # that value, where it is one
        self._dtype = torch.get_default_dtype()  # while the step runs: precisions change it
        self._forget()

    def _forget(self) -> None:
        self.rows: list[int] = []  # of each microbatch
        self._losses: list[Tensor | None] = []
        self._outputs: list[Any] = []
        self._logged: dict[tuple[str, str, int], list[Logged]] = {}
        self._times: dict[tuple[str, str], int] = {}  # in this microbatch
        self._joined: Joined | None = None
        self._together: list[tuple[str, str, Any, dict[str, Any]]] = []
        self._sent: dict[int, list[tuple[Callable[..., None], Any, Any]]] = {}
        self._sending: list[Callable[[], None]] = []
        self._in_hooks: list[Callable[[], None]] = []  # what they logged and sent
        self._output: Any = None
        self.undo: Callable[[], None] = _nothing

    # As a part of the transaction

    def begin(self) -> None:
        self._forget()
        self._is_open = True
        self.kept.begin()

    def prepare(self) -> None:
        """Put together what the microbatches told: only here may it take memory."""
        self._is_open = False
        self._joined = joined = Joined(
            self.rows, self._losses, list(self._dims), sorted_by=self._sorted_by
        )
        self._output = joined.join("what the step returns", self._outputs)
        for (fx, name, _), said in self._logged.items():
            self._together.append((fx, name, *joined.logged(name, said, self.kept.value_of)))
        for calls in self._sent.values():
            send, _, step = calls[0]
            metrics = joined.join("what the step sends to a logger", [each[1] for each in calls])
            for each in metrics if isinstance(metrics, list) else [metrics]:
                self._sending.append(functools.partial(send, each, step))
        self.kept.prepare(joined)

    def commit(self) -> None:
        self._is_open = False
        self.kept.commit()

    def roll_back(self) -> None:
        self._is_open = False
        self.undo()
        self.kept.roll_back()
        self._forget()

    # While it runs

    def expect(self, batch: Any) -> None:
        """A batch comes next."""
        self.num_rows = self._layout.num_rows(batch)

    @contextlib.contextmanager
    def microbatch(self, microbatch: Any) -> Iterator[None]:
        """Around the step of a microbatch; of a filler, or of a look, nothing is kept."""
        self._counts = self._is_open and (self.is_next_real or not self.is_announced)
        self.is_next_real = self.is_whole = False
        self._times.clear()
        try:
            if not self._counts:
                yield
                return
            self.rows.append(self._layout.num_rows(microbatch))
            self.is_whole = not self.is_split
            self.kept.begin_microbatch(is_split=self.is_split, is_first=len(self.rows) == 1)
            yield
            self.kept.end_microbatch()
            if self.is_split:
                self._pack()
        finally:
            self._counts = False

    def _pack(self) -> None:
        """Let the numbers of a microbatch share one block of memory: there may be many of both."""
        index = len(self.rows) - 1
        for dtype in (torch.float32, torch.float64):
            places = [
                place
                for place in self._logged.values()
                if place[-1].microbatch == index and _is_number(place[-1].value, dtype)
            ]
            if len(places) > 1:
                packed = torch.stack([place[-1].value for place in places])
                for place, value in zip(places, packed.unbind(), strict=True):
                    place[-1] = place[-1]._replace(value=value)

    @contextlib.contextmanager
    def in_hooks(self) -> Iterator[None]:
        """Around hooks of the host's, which run once for all microbatches."""
        self._is_in_hooks = True
        try:
            yield
        finally:
            self._is_in_hooks = False

    @property
    def is_split(self) -> bool:
        """Whether the microbatch is less than the batch."""
        return self._counts and self.rows[-1] < self.num_rows

    @property
    def has_means(self) -> bool:
        """Whether a mean was logged whose weight was not given."""
        return any(
            isinstance(value, Tensor)
            and options.get("batch_size") is None
            and is_mean(options.get("reduce_fx", "mean"))
            for _, _, value, options in self._together
        )

    def log_of_module(self, own: Callable[..., None], *given: Any, **named: Any) -> None:
        """In place of the module's ``log``, which copies what it is given."""
        value = given[1] if len(given) > 1 else named.get("value")
        self._source = self.kept.source_of(value)
        self._number = value if type(value) in (int, float) else None
        try:
            own(*given, **named)
        finally:
            self._source = self._number = None

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """In place of the host's, which is told once the batch is certain."""
        if self._is_in_hooks:
            say = functools.partial(self.host_log, fx, name, detached(value), **options)
            self._in_hooks.append(say)
            return
        if not self._counts:
            self._hear(name, value, options)
            return
        self._dtype = torch.get_default_dtype()
        if self.is_split:
            value = detached(value)
        time = self._times[fx, name] = self._times.get((fx, name), -1) + 1
        said = Logged(value, options, len(self.rows) - 1, self._source, self._number)
        self._logged.setdefault((fx, name, time), []).append(said)

    def log_metrics(
        self, own: Callable[..., None], metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """In place of a logger's own, where the step goes past the host to it."""
        if self._is_in_hooks:
            self._in_hooks.append(functools.partial(own, dict(metrics), step))
        elif self._counts:
            time = self._times["", ""] = self._times.get(("", ""), -1) + 1
            self._sent.setdefault(time, []).append((own, dict(metrics), step))

    def took(self, loss: Tensor | None, output: Any) -> None:
        """What the step of a microbatch came to."""
        if self._counts:
            self._losses.append(None if loss is None else loss.detach())
            self._outputs.append(detached(output))
            self.gives_outputs |= any(each.dim() for _, each in tensor_leaves(output))
        elif self._heard is not None:
            self._returned = loss, output

    # In a look

    @contextlib.contextmanager
    def overhearing(self, microbatch: Any) -> Iterator[None]:
        """Around the step of a look, of which nobody is told."""
        self._heard, self._heard_rows = {}, self._layout.num_rows(microbatch)
        try:
            with self.kept.knowing_sources():
                yield
        finally:
            self._heard, self._returned = None, (None, None)

    def _hear(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Take note of a number that would be a mean over rows."""
        weight = options.get("batch_size")
        if (
            self._heard is None
            or not isinstance(value, Tensor)
            or not value.is_floating_point()
            or self._source is not None
            or self._number == self._heard_rows  # a count, which is added up
            or weight not in (None, self._heard_rows)
            or not is_mean(options.get("reduce_fx", "mean"))
        ):
            return
        self._heard[name] = value

    def seen(self, loss: Tensor | None) -> Output:
        """What a look sees of a step that has run: what is told as a mean, or joined by rows.

        Args:
            loss: that is trained on.
        """
        assert self._heard is not None
        own, output = self._returned
        rows = self._heard_rows
        outputs = {}
        for path, each in tensor_leaves(output):
            sizes = dict(enumerate(each.shape))
            dim = next((dim for dim in self._dims if sizes.get(dim) == rows), None)
            if dim is not None:
                outputs[path] = each.movedim(dim, 0)
            elif each.dim() == 0 and each.is_floating_point():
                outputs[path] = each
        # Elsewhere `_warn_of_rows` says that means are weighted by rows.
        logged = self._heard if self.is_by_rows or loss is not None else {}
        seen = seen_of(own, outputs, logged, rows=rows)
        return dataclasses.replace(seen, loss=loss)

    # Afterwards

    def tell(self, loss: Tensor | None, *, scale: int = 1) -> Any:
        """Log what was logged, as of the whole batch; returns what the step returned.

        Args:
            loss: of the batch.
            scale: of how many batches it is a part.
        """
        assert self._joined is not None
        if loss is not None:
            self._joined.settle(loss * scale if scale > 1 else loss)
        with _default_dtype(self._dtype):
            for fx, name, value, options in self._together:
                self.host_log(fx, name, value, **options)
        for say in (*self._sending, *self._in_hooks):
            say()
        output = self._output
        self._forget()
        return output


def _is_number(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype is dtype


def _callbacks_of(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)  # which no class of Lightning declares


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _is_own(owner: Any, hook: str) -> bool:
    """Whether somebody else than the host wrote a hook."""
    found = getattr(owner, hook, None)
    package = str(getattr(found, "__module__", "")).partition(".")[0]
    return found is not None and package not in _PACKAGES


def _modules_in(callback: Any) -> list[nn.Module]:
    """The modules that a callback holds; not the one that is trained, which is the host's."""
    return [
        each
        for each in vars(callback).values()
        if isinstance(each, nn.Module) and not isinstance(each, LightningModule)
    ]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The type of new tensors, in which the host keeps what is logged."""
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules be in training mode that the host left in it for evaluation."""
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


def _refuse(owner: AutoMicrobatch, trainer: "Trainer", module: "LightningModule") -> None:
    """Raise ValueError where nothing can be cut, or no failed attempt undone."""
    _refuse_strategy(trainer.strategy)
    for callback in _callbacks_of(trainer):
        if isinstance(callback, AutoMicrobatch) and callback is not owner:
            raise ValueError("AutoMicrobatch was given to this trainer twice; leave one out")
        if any(kind.__name__ == "BatchSizeFinder" for kind in type(callback).__mro__):
            raise ValueError(
                "AutoMicrobatch: BatchSizeFinder looks for the largest batch that fits, and with "
                "AutoMicrobatch every batch does; leave it out, and choose the batch size that "
                "trains best"
            )
    for name in ("training_step", *_EVALUATIONS):
        step = getattr(module, name, None)
        if callable(step) and "dataloader_iter" in inspect.signature(step).parameters:
            raise ValueError(
                f"AutoMicrobatch: {name}(dataloader_iter) takes its batches itself, so nobody can "
                f"cut them; let it be {name}(batch, batch_idx)"
            )


def _refuse_strategy(strategy: Any) -> None:
    for kind in type(strategy).__mro__:
        if kind.__name__ in _STRATEGIES:
            raise ValueError(f"{kind.__name__} {_STRATEGIES[kind.__name__]}")


def _refuse_training(module: "LightningModule") -> None:
    """Raise ValueError where `fit` would not be that of whole batches."""
    if not module.automatic_optimization:
        raise ValueError(
            f"AutoMicrobatch: {type(module).__name__} optimizes manually and calls backward "
            "itself; use automicro.Microbatcher in its training_step, with "
            "backward=self.manual_backward, or automatic_optimization=True"
        )


def microbatcher(
    fabric: "Fabric", model: nn.Module, optimizer: Any = None, **options: Any
) -> Microbatcher:
    """A `Microbatcher` for a loop that Fabric runs, with its precision, strategy and loss scale.

    In the loop ``microbatcher.backward(batch)`` stands for forward and ``fabric.backward``; what
    comes after, ``fabric.clip_gradients``, the step, ``zero_grad``, stays as it is.

    Example:
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu")
        >>> model = nn.Linear(8, 2)
        >>> model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
        >>> step = microbatcher(fabric, model, optimizer, loss_fn=nn.CrossEntropyLoss())
        >>> result = step.backward((torch.randn(32, 8), torch.randint(2, (32,))))
        >>> _ = optimizer.step()
        >>> optimizer.zero_grad()
        >>> result.num_samples
        32

    Args:
        fabric: that runs the loop.
        model: as ``fabric.setup`` gave it.
        optimizer: likewise; memory for its state is reserved.
        options: of `Microbatcher`, such as ``loss_fn`` or ``forward``. ``forward(model, batch)``
            gets the model as Fabric has set it up.

    Raises:
        ValueError: the model was not set up, or the strategy cannot be undone.
        TypeError: an option that Fabric says itself.
    """
    ours = {"backward": "fabric.backward", "precision": "Fabric(precision=…)"}
    for name in options.keys() & ours.keys():
        raise TypeError(f"microbatcher({name}=…): that is {ours[name]} here; leave it out")
    if "_FabricModule" not in [kind.__name__ for kind in type(model).__mro__]:
        raise ValueError(
            f"microbatcher(fabric, model, …) got a {type(model).__name__} that Fabric has not set "
            "up; pass what fabric.setup(model, optimizer) returns"
        )
    _refuse_strategy(fabric.strategy)
    given = {"probe": "error", "scales_for_ranks": False, **options}
    return Microbatcher(
        model, backward=fabric.backward, optimizer=optimizer, **with_features(given)
    )


_REMEDY = (
    "Let the data loader give the full batch, leave accumulate_grad_batches at 1, and add "
    'AutoMicrobatch() (with loss_average="tokens" where the loss is a mean over tokens)'
)


def verify(
    trainer: "Trainer", module: "LightningModule", train_dataloader: Any = None
) -> AccumulationReport:
    """Compare the gradient that a trainer accumulates with that of the same rows in one batch.

    It is the trainer's own loop that runs, twice, without automicro: on a copy of the module, in
    this process, with the same precision and accumulation, and with dropout that lets everything
    through. Neither the trainer nor the module is changed.

    Args:
        trainer: with the ``accumulate_grad_batches`` in question.
        module: as it would be given to ``fit``.
        train_dataloader: of batches; ``module.train_dataloader()`` unless given. Its first batches
            are taken, and as many as the last step of an epoch has.

    Raises:
        ValueError: a loader without a batch, or no accumulation that could be wrong.
        BatchError: the batches do not fit together, as those of other lengths do not.

    Example:
        >>> import lightning.pytorch as pl
        >>> class Module(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.linear(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> trainer = pl.Trainer(accumulate_grad_batches=2, accelerator="cpu", logger=False)
        >>> report = verify(trainer, Module(), torch.utils.data.DataLoader(torch.randn(20, 4), 8))
        >>> report.is_exact, [group.rows for group in report.groups]
        (False, [(8, 8), (4,)])
    """
    parts = trainer.accumulate_grad_batches
    loader = module.train_dataloader() if train_dataloader is None else train_dataloader
    layout = BatchLayout()
    batches = list(itertools.islice(iter(loader), parts))
    if not batches:
        raise ValueError("verify: the data loader gave no batch; pass one that has some")
    last = _last_of_an_epoch(loader, batches, parts, layout)
    groups = [("the first", batches)]
    if [layout.num_rows(each) for each in last] != [layout.num_rows(each) for each in batches]:
        groups.append(("the last", last))
    if len(groups) == len(batches) == 1:
        raise ValueError(
            "verify: accumulate_grad_batches is 1, and every step is of one batch, whose gradient "
            "is its own; set accumulate_grad_batches, or use automicro.verify for microbatches"
        )
    compared = []
    for place, each in groups:
        found = _gradient(trainer, module, each, parts)
        whole = _gradient(trainer, module, [_as_one(each, layout)], 1)
        compared.append(
            Group.of(
                place,
                found,
                whole,
                rows=tuple(layout.num_rows(batch) for batch in each),
                divisor=parts,
            )
        )
    precision = str(trainer.precision)
    tolerance = 1e-9 if "64" in precision else 3e-2 if "16" in precision else 1e-4
    return AccumulationReport(groups=tuple(compared), tolerance=tolerance, remedy=_REMEDY)


def _last_of_an_epoch(
    loader: Any, batches: Sequence[Any], parts: int, layout: BatchLayout
) -> list[Any]:
    """As many batches as the last step of an epoch has, the last with as few rows."""
    try:
        num_batches, num_rows = len(loader), len(loader.dataset)
    except (TypeError, AttributeError):
        return list(batches)
    last = list(batches[: num_batches % parts or parts])
    rest = num_rows % (loader.batch_size or num_rows)
    if rest and not loader.drop_last and rest < layout.num_rows(last[-1]):
        last[-1] = layout.take_rows(last[-1], range(rest))
    return last


def _as_one(batches: Sequence[Any], layout: BatchLayout) -> Any:
    rows = [layout.num_rows(each) for each in batches]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", MetricWarning)
            return Joined(rows, []).join("the batch", batches)
    except MetricWarning as error:
        raise BatchError(
            f"verify: the {len(batches)} batches do not fit together ({error}); give batches of "
            "one form and length, such as padded ones"
        ) from error


def _gradient(
    trainer: "Trainer", module: "LightningModule", batches: Sequence[Any], parts: int
) -> Reading:
    """The gradient of one optimizer step of the host's, on a copy."""
    place = _PACKAGES[_Host(trainer).name]
    host: Any = importlib.import_module(place)
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}

    class Watch(host.Callback):  # type: ignore[misc]
        """Takes the gradient before it is clipped."""

        def on_before_optimizer_step(self, _: Any, copied: nn.Module, optimizer: Any) -> None:
            for name, parameter in copied.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.detach().clone()

        def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *rest: Any) -> None:
            losses.append(outputs["loss"].detach())

    kind = trainer.strategy.root_device.type
    told = logging.getLogger(place)
    level = told.level
    with warnings.catch_warnings(), torch.random.fork_rng(), HeldDraws():
        warnings.simplefilter("ignore")
        told.setLevel(logging.ERROR)
        try:
            twin = host.Trainer(
                accelerator="gpu" if kind == "cuda" else kind,
                devices=1,
                plugins=[copy.deepcopy(trainer.precision_plugin)],
                accumulate_grad_batches=parts,
                max_epochs=1,
                limit_val_batches=0,
                logger=importlib.import_module(f"{place}.loggers.logger").DummyLogger(),
                callbacks=[Watch()],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            given: Any = torch.utils.data.DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]
            twin.fit(copy.deepcopy(module), given)
        finally:
            told.setLevel(level)
    return Reading(numbers={LOSS: float(torch.stack(losses).sum())}, gradients=gradients)
