"""Lightning: ``Trainer(callbacks=[AutoMicrobatch()])``; `microbatcher` for loops with Fabric.

The callback stands in the place of the closure that runs a batch, and of the three steps of
evaluation. The host's own step runs for each microbatch, in its precision and strategy; what it
logs, returns and appends is kept until the batch is certain, and then told once, as of the whole
batch. See docs/integrations/lightning.md.
"""

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import tensor_leaves
from automicro.errors import LossError, RollbackError
from automicro.integrations.host import (
    OURS,
    RETURNS,
    Recorded,
    Replacements,
    check_options,
    detached,
    import_host,
    is_written_by,
    microbatcher_of,
    require_seam,
)
from automicro.loss.passes import is_extra_pass
from automicro.microbatcher import Microbatcher
from automicro.reach import OF_EVERY_MODULE
from automicro.state.part import State
from automicro.state.tensors import seen_version
from automicro.step.feature import Feature, MicrobatchRun
from automicro.step.metrics import MetricGuard, Metrics
from automicro.step.results import EvalResult, StepResult
from automicro.transaction.rng import RandomState, devices_of
from automicro.transaction.transaction import Part

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_SUPPORTED = "2.5 or 2.6"


def _package() -> str:
    """Where the host lies: what the program has imported already, else what is installed."""
    # Both packages may be installed, and a callback of one is none of the other.
    found = [name for name in _PACKAGES if name in sys.modules]
    found += [name for name in _PACKAGES if importlib.util.find_spec(name)]
    return _PACKAGES[found[0]] if found else "lightning.pytorch"


_PLACE = _package()
if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = import_host(_PLACE, extra="lightning").Callback
    LightningModule = import_host(_PLACE, extra="lightning").LightningModule

_calls: Any = importlib.import_module(f"{_PLACE}.trainer.call")
_automatic: Any = importlib.import_module(f"{_PLACE}.loops.optimization.automatic")
logger = logging.getLogger(__name__)

_EVALUATIONS = ("validation_step", "test_step", "predict_step")
_CLEARING = ("on_before_zero_grad", "optimizer_zero_grad")
_AROUND_BACKWARD = ("on_before_backward", "on_after_backward")
_OWN = dict.fromkeys(OURS, "the trainer's to say, or its module's")
_OF_EVERY_MODULE = OF_EVERY_MODULE | frozenset(vars(LightningModule()))
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
        check_options("AutoMicrobatch", options, _OWN)
        self.options = options
        self._run: _Run | None = None
        self._sizes: dict[str, Any] | None = None
        self.result: StepResult | EvalResult | None = None

    @property
    def microbatcher(self) -> Microbatcher | None:
        """The Microbatcher of the run; None outside of a run, and before its first batch."""
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
        made = microbatcher_of(options=self.options, **own)
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


def _seam(owner: Any, name: str, parameters: Sequence[str] = ()) -> Any:
    """A method of the host's, or an error that names its version."""
    host = _PLACE.partition(".")[0]
    return require_seam(owner, name, parameters, host=host, supported=f"{host} {_SUPPORTED}")


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
        layout = owner.options.get("batch_layout", 0)
        unit = owner.options.get("microbatch_unit", "rows")
        self._layout = BatchLayout(layout)
        self._recorded = Recorded(
            lambda: {"self": module, "trainer": trainer},
            _is_of_a_user,
            tuple(_PACKAGES),
            dims=list(dict.fromkeys((0, layout) if isinstance(layout, int) else (0,))),
            sorted_by=None if unit == "rows" else unit,
        )
        random = functools.partial(RandomState, devices_of([module], trainer.strategy.root_device))
        self._metrics = _StepMetrics(module, self._recorded, random)
        self._step: Callable[[Any], Any] = lambda batch: None
        self._log: Callable[..., None] = lambda *_, **__: None  # the host's own
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._optimizer: Any = None
        self._zero_grad: Callable[[], None] | None = None  # where it is still to come
        self._trains = self._gives_outputs = self._knows_loss = self._is_in_hooks = False
        self._was_split = False  # the training batch before
        self._num_rows = 0  # of the batch
        self._given: Any = None  # to the module's log
        self._returned: tuple[Tensor | None, Any] = None, None  # by the last step
        self._is_filler = trainer.world_size > 1  # unless a feature says that it is none
        self.microbatcher: Microbatcher | None = None
        self.places = Replacements()

    def take_places(self, *, trains: bool) -> None:
        """Stand in for the host's methods, until `places` are undone."""
        strategy = self._trainer.strategy
        self._trains = trains
        for hooks in ("_call_strategy_hook", "_call_callback_hooks", "_call_lightning_module_hook"):
            _seam(_calls, hooks, ("trainer", "hook_name"))
        if trains:
            # Looked for before anything is replaced: a version that lacks one is an error, and no
            # half-replaced trainer.
            _seam(_automatic, "Closure", ("step_fn",))
            _seam(self._loop, "_make_closure", ("kwargs", "optimizer", "batch_idx"))
            _seam(self._loop, "_make_zero_grad_fn", ("batch_idx", "optimizer"))
            _seam(self._loop, "_training_step", ("kwargs",))
            # The one place that has a batch's forward, clearing and backward together: everything
            # around it, such as clipping and accumulation, stays the host's.
            self.places.put(self._loop, "_make_closure", self._make_closure)
        for name in _EVALUATIONS:
            own = _seam(strategy, name)
            self.places.put(strategy, name, functools.partial(self._evaluate, name, own))

    # Training

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """In place of the host's: forward, zero_grad and backward of a batch."""
        zero_grad = self._loop._make_zero_grad_fn(batch_idx, optimizer)
        step = functools.partial(self._train, kwargs, optimizer, zero_grad)
        return _automatic.Closure(step_fn=step)

    def _train(self, kwargs: Any, optimizer: Any, zero_grad: Callable[[], None] | None) -> Any:
        trainer = self._trainer
        self._optimizer, self._zero_grad = optimizer, zero_grad
        microbatcher = self._ready()
        # On several ranks hooks may communicate, and ranks may have other numbers of microbatches.
        if trainer.world_size > 1 or self._was_split:
            self._clear()
        self._num_rows = self._layout.num_rows(kwargs["batch"])
        try:
            try:
                result = self._attempt(kwargs)
            except _InPiecesError:
                self._clear()
                result = self._attempt(kwargs)
        except _SkippedError as skipped:
            return self._skip(skipped, kwargs)
        finally:
            self._step = lambda batch: None  # it holds the batch
            # The closure runs inside the optimizer's step, past the place that would give it back.
            microbatcher.release_reservation()
        self._owner.result = result
        # A batch is most likely cut as the one before: clearing first saves an attempt that is
        # given up.
        self._was_split = result.num_microbatches > 1
        loss = result.rank_loss
        # The host divides the loss for its backward, and tells callbacks of it undivided.
        of_batch = loss * trainer.accumulate_grad_batches
        outputs = self._recorded.told(RETURNS, of_batch)
        self._recorded.tell(of_batch)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # Of a whole batch, the hook before the backward has run where it belongs.
        for name in _AROUND_BACKWARD[self._knows_loss :]:
            # The host's own hook sees the loss as it goes into the backward.
            shown = loss if scaler is None else scaler.scale(loss)
            given = (shown,) if name == "on_before_backward" else ()
            _calls._call_callback_hooks(trainer, name, *given)
            _calls._call_lightning_module_hook(trainer, name, *given)
        return self._loop.output_result_cls(loss, extra=outputs or {})

    def _attempt(self, kwargs: Any) -> StepResult:
        """Forward and backward of a batch, with the host's hooks between where it stays whole.

        A failed attempt takes back what they did, and they run again. Of a batch in several pieces
        no step is the batch's: gradients are cleared before, and ``on_before_backward`` comes
        after, with the loss of all.

        Raises:
            _InPiecesError: it has to be cut, so that gradients have to be cleared before.
        """
        trainer, microbatcher = self._trainer, self._ready()
        self._knows_loss = False
        if self._zero_grad is not None and not self._has_own_clearing():
            microbatcher.release_gradients()  # a second set of them would take memory

        def step(microbatch: Any) -> Tensor:
            rows = self._recorded.rows[-1] if self._recorded.rows else self._num_rows
            is_whole, is_extra = rows == self._num_rows, is_extra_pass()
            if self._zero_grad is not None and not (is_extra or is_whole):
                raise _InPiecesError
            given = {**kwargs, "batch": microbatch}
            output = _calls._call_strategy_hook(trainer, "training_step", *given.values())
            trainer.strategy.post_training_step()
            read = self._loop.output_result_cls.from_training_step_output(
                output, trainer.accumulate_grad_batches
            )
            # By an exception, as no attempt may be committed for a batch that is skipped.
            if read.closure_loss is None:
                raise _SkippedError(rows, self._num_rows)
            own = output["loss"] if isinstance(output, Mapping) else output
            self._took(own, read.extra or None)
            if is_whole and self._zero_grad is not None and not is_extra:
                with self._in_hooks():
                    self._clear(is_over=False)
            loss: Tensor = read.closure_loss
            return loss

        self._step = step
        microbatcher.know_state(vars(self._module).keys() - _OF_EVERY_MODULE)
        with self._listening(), self._keeping_from_hooks():
            return microbatcher.backward(kwargs["batch"])

    def _clear(self, *, is_over: bool = True) -> None:
        """Clear gradients, with the hooks around that, which may move nothing that steps use.

        Raises:
            RollbackError: they write to parameters.
        """
        zero_grad = self._zero_grad
        if zero_grad is None:
            return
        if is_over:
            self._zero_grad = None
        if not self._has_own_clearing():
            zero_grad()
            return
        # Also those that a callback holds, such as the copy that it averages into.
        modules = [self._module, *(m for each in self._hooked() for m in _modules_in(each))]
        tensors = [each for m in modules for each in (*m.parameters(), *m.buffers())]
        before = [seen_version(each) for each in tensors]
        zero_grad()
        if before != [seen_version(each) for each in tensors]:
            raise RollbackError(
                "on_before_zero_grad or optimizer_zero_grad writes to parameters or buffers, which "
                "the trainer has between the step of a batch and its backward: with microbatches "
                "the step would see them too early; do that in on_train_batch_end, where averages "
                "of weights come after the optimizer's step"
            )

    def _hooked(self) -> list[Any]:
        """Callbacks whose hooks run in attempts."""
        hooks = (*_CLEARING, "on_before_backward")
        return [c for c in _callbacks_of(self._trainer) if any(_is_own(c, n) for n in hooks)]

    def _has_own_clearing(self) -> bool:
        """Whether the module or a callback has a hook for it that is not the host's own."""
        owners = (self._module, *_callbacks_of(self._trainer))
        return any(_is_own(owner, name) for owner in owners for name in _CLEARING)

    @contextlib.contextmanager
    def _in_hooks(self) -> Iterator[None]:
        """Around hooks of the host's, which run once for all microbatches."""
        self._is_in_hooks = True
        try:
            yield
        finally:
            self._is_in_hooks = False

    @contextlib.contextmanager
    def _keeping_from_hooks(self) -> Iterator[None]:
        """Keep hooks around the backward from running for each microbatch."""

        def before_backward(own: Callable[..., Any], *given: Any) -> None:
            # On one rank, a batch that stays whole runs in the host's own order.
            if self._trainer.world_size == 1 and self._recorded.rows == [self._num_rows]:
                self._knows_loss = True
                with self._in_hooks():
                    own(*given)

        with Replacements() as replacements:
            for owner in (*_callbacks_of(self._trainer), self._module):
                replacements.put(owner, "on_after_backward", lambda *_: None)
                hook = functools.partial(before_backward, owner.on_before_backward)
                replacements.put(owner, "on_before_backward", hook)
            yield

    def _backward(self, loss: Tensor) -> None:
        _calls._call_strategy_hook(self._trainer, "backward", loss, self._optimizer)

    def _skip(self, skipped: "_SkippedError", kwargs: Any) -> Any:
        """The step returned None: the host's own, once more, for what it logs and draws."""
        if skipped.rows < skipped.num_rows:
            raise LossError(
                f"training_step returned None for {skipped.rows} of {skipped.num_rows} rows, and "
                "what it would have returned for the whole batch cannot be known; return a loss "
                "of zero for rows that do not count (0.0 * outputs.sum()), or skip batches in the "
                "data loader"
            ) from None
        # The attempt was rolled back, and with it what the step had logged.
        result = self._loop._training_step(kwargs)
        if result.closure_loss is not None:
            raise LossError(
                "training_step returned None, and then a loss for the same batch; let it decide by "
                "the batch and by torch's random numbers alone"
            ) from None
        self._clear()
        return result

    # Evaluation

    def _evaluate(self, name: str, own: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """In place of a step of the strategy's."""
        microbatcher = self._ready()
        # A user's own evaluation may leave a part in training mode, and the forward of a
        # Microbatcher's evaluation ends that for all.
        modes = [module for module in self._module.modules() if module.training]

        def step(microbatch: Any) -> tuple[Tensor | None, None]:
            with _training(modes):
                output = own(microbatch, *rest)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
            loss = loss if is_loss and name != "predict_step" else None
            self._took(loss, output)
            return loss, None

        self._step = step
        self._num_rows = self._layout.num_rows(batch)
        try:
            with self._listening():
                gives = name == "predict_step" or self._gives_outputs
                result = microbatcher.evaluate(batch, compares_outputs=gives)
        finally:
            self._step = lambda batch: None
        self._owner.result = result
        outputs = self._recorded.told(RETURNS, result.loss)
        self._recorded.tell(result.loss)
        return outputs

    # Both

    def _ready(self) -> Microbatcher:
        """The Microbatcher of this run; strategies have wrapped the model only by its start."""
        if self.microbatcher is None:
            trainer = self._trainer
            optimizers = trainer.optimizers if self._trains else []
            if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
                raise ValueError(
                    "AutoMicrobatch: LBFGS runs a batch several times in one step and compares "
                    "the losses, which must not differ by how it was cut; use another optimizer"
                )
            features = [*self._owner.options.get("features", ())]
            if trainer.world_size > 1:  # fillers of other ranks run the step as well
                features.append(_Announcing(self))
            # What changes in hooks that run inside of an attempt: counts, and their attributes.
            roots = dict(vars(self._loop.optim_progress.optimizer.zero_grad))
            for index, each in enumerate(self._hooked() if trainer.world_size == 1 else ()):
                roots[f"callbacks[{index}]"] = each
            own: dict[str, Any] = {
                "model": trainer.strategy.model,
                "forward": self._forward,
                "backward": self._backward,
                "optimizer": optimizers[0] if optimizers else None,
                # The metrics first, which have to be whole when what was logged is told.
                "state": [self._recorded, self._metrics, State(lambda: roots)],
                "features": features,
            }
            self.microbatcher = self._owner.make(**own)
        return self.microbatcher

    def _took(self, loss: Tensor | None, output: Any) -> None:
        """The result of the step of some rows."""
        self._returned = loss, output
        self._gives_outputs |= any(each.dim() for _, each in tensor_leaves(output))

    def _forward(self, model: nn.Module, microbatch: Any) -> Any:
        recorded, rows = self._recorded, self._layout.num_rows(microbatch)
        if not is_extra_pass():
            if self._is_filler:
                found, self._returned = self._step(microbatch), (None, None)
                return found
            self._is_filler = self._trainer.world_size > 1
        with recorded.step(rows), self._metrics.heard(rows < self._num_rows):
            found = self._step(microbatch)
            (own, output), self._returned = self._returned, (None, None)
            loss = found[0] if isinstance(found, tuple) else found
            return recorded.came_to(loss, output, own=own) or found

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear what is logged, in place of the host's results."""
        results = self._trainer._results
        with Replacements() as replacements:
            if results is not None:
                _seam(results, "log", ("fx", "name", "value", "batch_size"))
                self._log = replacements.put(results, "log", self._note)
                # The object that was given is seen here alone: below, the host has a copy of it,
                # and whose value it was is lost.
                own = self._module.log
                replacements.put(self._module, "log", functools.partial(self._note_given, own))
                read = functools.partial(self._note_reading, results.metrics)
                replacements.put(results, "metrics", read)
            for each in self._trainer.loggers:
                send = functools.partial(self._send, each.log_metrics)
                replacements.put(each, "log_metrics", send)
            yield

    def _note_given(self, own: Callable[..., None], *given: Any, **named: Any) -> None:
        """In place of the module's ``log``, which copies what it is given."""
        self._given = given[1] if len(given) > 1 else named.get("value")
        try:
            own(*given, **named)
        finally:
            self._given = None

    def _note_reading(self, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """In place of the host's, which the trainer's ``callback_metrics`` asks."""
        if self._recorded.has_told and not self._is_in_hooks:
            self._recorded.name_once(
                "trainer.callback_metrics",
                "the step reads callback_metrics or logged_metrics of the trainer, and what it has "
                "logged is in there only once the batch is certain, so it reads those of the batch "
                "before; read them in on_train_batch_end",
            )
        return own(*given, **named)

    def _note(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """In place of the host's ``log``, which is told once the batch is certain."""
        # While the step runs, in which the host makes what it keeps: precisions change it.
        dtype = torch.get_default_dtype()

        def tell(value: Any, weight: Any) -> None:
            now = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                self._log(fx, name, value, **{**options, "batch_size": weight})
            finally:
                torch.set_default_dtype(now)

        if self._is_in_hooks:
            kept, weight = detached(value), options.get("batch_size")
            self._recorded.later(lambda: tell(kept, weight))
            return
        is_metric = not isinstance(value, Tensor)  # which counts by itself
        whole = (lambda: value) if is_metric else self._metrics.whole_of(self._given)
        self._recorded.note(
            f"log({name!r})",
            value,
            weight=options.get("batch_size"),
            reduce=_name_of(options.get("reduce_fx", "mean")),
            tell=tell,
            whole=whole,
        )

    def _send(
        self, own: Callable[..., None], metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """In place of a logger's own, where the step goes past the host to it."""
        if self._is_in_hooks:
            self._recorded.later(functools.partial(own, dict(metrics), step))
            return

        def tell(joined: Any, _: Any) -> None:
            for each in joined if isinstance(joined, list) else [joined]:
                own(each, step)

        self._recorded.note("what the step sends to a logger", dict(metrics), tell=tell)


class _SkippedError(Exception):
    """The module's step wants no training on these rows of a batch."""

    def __init__(self, rows: int, num_rows: int) -> None:
        super().__init__("training_step returned None")
        self.rows, self.num_rows = rows, num_rows


class _InPiecesError(Exception):
    """The batch is cut, and gradients of the one before are still to be cleared."""


class _Announcing(Feature):
    """Says which forwards are of the batch, and no fillers for other ranks."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def before(self, run: MicrobatchRun) -> None:
        self._run._is_filler = False


class _StepMetrics(Metrics):
    """Metrics of torchmetrics that a step calls: a part of its transaction.

    Each microbatch updates them with its rows. A value without rows, such as the loss, updates them
    once, with that of the batch; and what a call returns is the batch's where it is logged.

    Args:
        module: whose step it is.
        recorded: notes what metrics are given.
        random_state: gives what undoes what an update may draw.
    """

    def __init__(
        self, module: nn.Module, recorded: Recorded, random_state: Callable[[], Part]
    ) -> None:
        super().__init__(())
        self._module, self._recorded = module, recorded
        self._guard = MetricGuard(self._check, _OF_A_CALL, random_state, is_callers=False)
        self._own: Callable[..., Any] | None = None  # that a check calls
        self._forget()

    def _forget(self) -> None:
        self._shadows: list[tuple[Any, Any]] = []
        # By id of what a metric returned: that, as ids are used again, and whose it is.
        self._returned: dict[int, tuple[Any, Any, Any]] = {}
        self._of_batch: dict[int, Any] = {}  # by the metric's id
        self._places = Replacements()

    def _found(self) -> dict[str, Any]:
        found = {name: each for name, each in self._module.named_modules() if _is_metric(each)}
        known = set(map(id, found.values()))
        # Those in dictionaries and objects are no modules of the module's.
        held = (each for each in self._recorded.held() if _is_metric(each.value))
        return found | {each.what: each.value for each in held if id(each.value) not in known}

    def begin(self) -> None:
        self._forget()
        self._metrics = list(self._found().values())
        super().begin()

    def _check(self, metric: Any, call: Any, same: Any, name: str) -> None:
        assert self._own is not None
        self._own(*call[0], **call[1])

    def _listen(self, metric: Any, what: str, *, counts: bool) -> None:
        """Listen to what a metric is given, and returns, from here on.

        Args:
            metric: that.
            what: it is, in words.
            counts: True for a batch of several microbatches. In a check metrics get their values
                as they come.
        """
        shadow: Any = None
        of_batch = self._of_batch  # the next batch may have begun with another when it is used

        def waits(call: Any, own: Callable[..., Any]) -> bool:
            """Whether it is given nothing of rows: it then gets the batch's, once."""
            is_one = len(call[0]) == 1 and not call[1]
            value = call[0][0] if is_one else call
            if not self._recorded.is_single(what, value):
                return False

            def tell(joined: Any, _: Any) -> None:
                given, named = ([joined], {}) if is_one else joined
                of_batch[id(metric)] = own(*given, **named)

            reduce = _REDUCED.get(type(metric).__name__, "mean")
            self._recorded.note(what, value, reduce=reduce, tell=tell)
            return counts

        def called(own: Callable[..., Any], is_forward: bool, /, *given: Any, **named: Any) -> Any:
            nonlocal shadow
            # In a check of this one, or of another that holds it, it counts as it always does.
            if self._own is not None:
                return own(*given, **named)
            value, call = None, (given, named)
            if not waits(call, own):
                if is_forward and counts and shadow is None:
                    shadow = _emptied(metric)
                    self._shadows.append((metric, shadow))
                self._look(metric, call, own, what)
                # A forward updates, too.
                with contextlib.nullcontext() if is_forward else self._guard.reading(metric, what):
                    value = own(*given, **named)
                if shadow is not None and is_forward:
                    named = {key: detached(each) for key, each in named.items()}
                    shadow.update(*map(detached, given), **named)
            elif is_forward:  # of the microbatch, by one that has counted nothing
                value = _emptied(metric)(*given, **named)
            for key, part in value.items() if isinstance(value, Mapping) else [(None, value)]:
                self._returned[id(part)] = part, metric, key
            return value

        for name in ("update", "forward"):
            own = getattr(metric, name)
            self._places.put(metric, name, functools.partial(called, own, name == "forward"))

    def _look(self, metric: Any, call: Any, own: Callable[..., Any], what: str) -> None:
        self._own = own
        try:
            self._guard.look(metric, call, call, what)
        finally:
            self._own = None

    @contextlib.contextmanager
    def heard(self, is_split: bool) -> Iterator[None]:
        """Around a step: what metrics are told, and return; for a batch, until all have run."""
        is_extra = is_extra_pass()
        if is_extra or (is_split and len(self._recorded.rows) == 1):
            self._guard.expect(is_split=not is_extra)
            for name, metric in self._found().items():
                if hasattr(metric, "_forward_cache"):
                    what = f"{type(metric).__name__} ({name})"
                    self._listen(metric, what, counts=not is_extra)
        try:
            yield
        finally:
            if is_extra:
                self._places.undo()
                self._returned.clear()

    def whole_of(self, value: Any) -> Callable[[], Any] | None:
        """Gives for the batch what a metric's call has returned; None for another value."""
        found = self._returned.get(id(value))
        if found is None or found[0] is not value:
            return None
        (_, metric, key), of_batch = found, self._of_batch
        return lambda: of_batch[id(metric)] if key is None else of_batch[id(metric)][key]

    def prepare(self) -> None:
        self._places.undo()
        self._returned.clear()
        for metric, shadow in self._shadows:
            metric._forward_cache = self._of_batch[id(metric)] = shadow.compute()
        super().prepare()

    def commit(self) -> None:
        self._forget()

    def roll_back(self) -> None:
        self._places.undo()
        super().roll_back()
        self._forget()


_OF_A_CALL = BatchLayout({"0": "fields"})  # what is given by place, each with all rows
_REDUCED = {"SumMetric": "sum", "MaxMetric": "max", "MinMetric": "min"}


def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # code that made one has imported it
    kinds = () if torchmetrics is None else (torchmetrics.Metric, torchmetrics.MetricCollection)
    return isinstance(module, kinds)


def _emptied(metric: Any) -> Any:
    """A metric like this one that has counted nothing; its states are not copied for that."""
    # What it has returned may hold a graph, which nothing copies.
    metric._forward_cache = metric._computed = None
    # Counted rows may fill the device, as curves keep all of them.
    states = [getattr(metric, name) for name in metric._defaults]
    memo = {id(each): [] if isinstance(each, list) else each for each in states}
    shadow = copy.deepcopy(metric, memo)
    for each in shadow.modules():  # those in a wrapper, too, which lead to the metric's own
        vars(each).pop("forward", None)
    shadow.reset()
    shadow._to_sync = metric.dist_sync_on_step  # as a forward's own value is computed
    return shadow


def _name_of(reduction: Any) -> str:
    """How values are reduced, by a function or a word."""
    name = str(getattr(reduction, "__name__", reduction)).lower()
    return name.removeprefix("a") if name in ("amax", "amin") else name


def _is_value(value: Any) -> bool:
    """Whether it is made of numbers, texts, tensors and containers alone."""
    if isinstance(value, dict):
        return all(map(_is_value, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_value, value))
    return isinstance(value, Tensor | int | float | complex | str | bytes | None)


def _callbacks_of(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)  # which no class of Lightning declares


def _is_own(owner: Any, hook: str) -> bool:
    """Whether other code than the host wrote a hook."""
    return hasattr(owner, hook) and not is_written_by(_PACKAGES, getattr(owner, hook))


def _is_of_a_user(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute of the module, or of the trainer, may be of other code than the host."""
    if not isinstance(owner, LightningModule):
        return _is_value(value)
    # The trainer is captured by itself, so that it must not be left out of all.
    return name not in _OF_EVERY_MODULE or name == "_trainer"


def _modules_in(callback: Any) -> list[nn.Module]:
    """The modules that a callback holds; not the one that is trained, which is the host's."""
    return [
        each
        for each in vars(callback).values()
        if isinstance(each, nn.Module) and not isinstance(each, LightningModule)
    ]


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
                f"AutoMicrobatch: {name}(dataloader_iter) takes its batches itself, so they cannot "
                f"be cut; let it be {name}(batch, batch_idx)"
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
    own = {"backward": "fabric.backward", "precision": "Fabric(precision=…)"}
    check_options("microbatcher", options, own)
    if "_FabricModule" not in [kind.__name__ for kind in type(model).__mro__]:
        raise ValueError(
            f"microbatcher(fabric, model, …) got a {type(model).__name__} that Fabric has not set "
            "up; pass what fabric.setup(model, optimizer) returns"
        )
    _refuse_strategy(fabric.strategy)
    return microbatcher_of(model, options, backward=fabric.backward, optimizer=optimizer)
