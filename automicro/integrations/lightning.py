"""Lightning: ``Trainer(callbacks=[AutoMicrobatch()])``; `microbatcher` for loops with Fabric.

The callback replaces the closure that runs a training batch, and the three evaluation steps. The
host's own step runs for each microbatch, in the host's precision and strategy. The values that it
logs, returns and appends are deferred until the batch commits, and then emitted once for the whole
batch. See docs/integrations/lightning.md.
"""

import contextlib
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
    StepMetrics,
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
from automicro.step.results import EvalResult, StepResult
from automicro.transaction.rng import RandomState, devices_of

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_SUPPORTED = "2.5 or 2.6"


def _package() -> str:
    """The module path of the host: the package already imported, or else the one installed."""
    # Both packages may be installed, but a callback of one is not a callback of the other.
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
_OWN = dict.fromkeys(OURS, "the trainer or its module")
_OF_EVERY_MODULE = OF_EVERY_MODULE | frozenset(vars(LightningModule()))
_STRATEGIES = {
    "DeepSpeedStrategy": "keeps its own gradients, which cannot be rolled back. Use "
    "ModelParallelStrategy (FSDP2) or DDPStrategy",
    "FSDPStrategy": "is FSDP1, whose flat parameters cannot be rolled back. Use "
    "ModelParallelStrategy (FSDP2)",
    "XLAStrategy": "runs on devices that do not report when memory runs out. Use a GPU",
    "SingleDeviceXLAStrategy": "runs on devices that do not report when memory runs out. Use a GPU",
}


class AutoMicrobatch(Callback):
    """Run full batches in fit, validate, test and predict on a device too small for them.

    Gradients, losses and logged values equal those of whole batches, however the batches are split.
    Precision, strategy, clipping, accumulation, schedules and checkpoints stay the trainer's own.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[AutoMicrobatch()], logger=False, accelerator="cpu")

    Args:
        options: options of `Microbatcher`, such as ``microbatch_size``,
            ``loss_average="tokens"``, ``batch_layout`` or ``memory_limit``.

    Attributes:
        options: the options given.
        result: the result of the last batch, with its rows, microbatches and attempts; None before
            the first batch.

    Raises:
        TypeError: if an option does not exist or is set by the trainer itself.
    """

    def __init__(self, **options: Any) -> None:
        check_options("AutoMicrobatch", options, _OWN)
        self.options = options
        self._run: _Run | None = None
        self._sizes: dict[str, Any] | None = None
        self.result: StepResult | EvalResult | None = None

    @property
    def microbatcher(self) -> Microbatcher | None:
        """The Microbatcher of the current run; None before its first batch and outside of runs."""
        return None if self._run is None else self._run.microbatcher

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Replace methods of the host.

        Raises:
            ValueError: if the trainer or module does something that cannot be split or rolled back.
            ImportError: if this version of the host is not supported.
        """
        self._leave()
        if stage == "fit":
            _refuse_training(pl_module)
        _refuse(trainer, pl_module)
        self._run = _Run(self, trainer, pl_module)
        try:
            self._run.take_places(trains=stage == "fit")
        except BaseException:
            self._leave()
            raise

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Restore all methods of the host."""
        self._leave()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        """Restore all methods of the host if a run ends with an error or Ctrl-C."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the microbatch sizes found."""
        if self.microbatcher is not None:
            return self.microbatcher.state_dict()
        return self._sizes or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore microbatch sizes found earlier."""
        self._sizes = dict(state_dict)

    def make(self, **own: Any) -> Microbatcher:
        """Create a Microbatcher with the options given, the known sizes and more arguments."""
        made = microbatcher_of(options=self.options, **own)
        if self._sizes:
            try:
                made.load_state_dict(self._sizes)
            except ValueError as error:  # they were found with another microbatch_size=
                logger.info("sizes of an earlier run are not used (%s)", error)
        return made

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.places.close()
            if run.microbatcher is not None:
                self._sizes = run.microbatcher.state_dict()
                run.microbatcher.remove_parts()


def _seam(owner: Any, name: str, parameters: Sequence[str] = ()) -> Any:
    """Return a method of the host, or raise an error that names the supported versions."""
    host = _PLACE.partition(".")[0]
    return require_seam(owner, name, parameters, host=host, supported=f"{host} {_SUPPORTED}")


class _Run:
    """One call of fit, validate, test or predict."""

    def __init__(
        self, owner: AutoMicrobatch, trainer: "Trainer", module: "LightningModule"
    ) -> None:
        self._owner, self._module = owner, module
        self._trainer: Any = trainer
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
        self._metrics = StepMetrics(lambda: module, self._recorded, random)
        self._step: Callable[[Any], Any] = lambda batch: None
        self._log: Callable[..., None] = lambda *_, **__: None  # the host's own
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._optimizer: Any = None
        self._zero_grad: Callable[[], None] | None = None  # None if not needed, or once it has run
        self._trains = self._gives_outputs = self._knows_loss = self._is_in_hooks = False
        self._was_split = False  # whether the previous training batch was split
        self._num_rows = 0  # of the current batch
        self._given: Any = None  # the original value passed to the module's log
        self._returned: tuple[Tensor | None, Any] = None, None  # loss and output of the last step
        self.microbatcher: Microbatcher | None = None  # None before the first batch
        self.places = Replacements()  # replaced methods of the host

    def take_places(self, *, trains: bool) -> None:
        """Replace methods of the host until `places` are closed."""
        strategy = self._trainer.strategy
        self._trains = trains
        for hooks in ("_call_strategy_hook", "_call_callback_hooks", "_call_lightning_module_hook"):
            _seam(_calls, hooks, ("trainer", "hook_name"))
        if trains:
            # Check all methods before replacing any, so that an unsupported version raises an
            # error and leaves no half-replaced trainer.
            _seam(_automatic, "Closure", ("step_fn",))
            _seam(self._loop, "_make_closure", ("kwargs", "optimizer", "batch_idx"))
            _seam(self._loop, "_make_zero_grad_fn", ("batch_idx", "optimizer"))
            _seam(self._loop, "_training_step", ("kwargs",))
            # Only the closure runs forward, clearing and backward of a batch together. Everything
            # around it, such as clipping and accumulation, stays the host's own.
            self.places.put(self._loop, "_make_closure", self._make_closure)
        for name in _EVALUATIONS:
            own = _seam(strategy, name)
            self.places.put(strategy, name, functools.partial(self._evaluate, name, own))

    # Training

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Replace the host's closure, which runs forward, zero_grad and backward of a batch."""
        zero_grad = self._loop._make_zero_grad_fn(batch_idx, optimizer)
        step = functools.partial(self._train, kwargs, optimizer, zero_grad)
        return _automatic.Closure(step_fn=step)

    def _train(self, kwargs: Any, optimizer: Any, zero_grad: Callable[[], None] | None) -> Any:
        trainer = self._trainer
        self._optimizer, self._zero_grad = optimizer, zero_grad
        microbatcher = self._ready()
        # Hooks may communicate between ranks, which may have different numbers of microbatches.
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
            self._step = lambda batch: None  # release the batch that the closure holds
            # The closure runs inside the optimizer's step, after the hook that releases the memory
            # reserved for the optimizer.
            microbatcher.release_reservation()
        self._owner.result = result
        # A batch is probably split like the previous one. Clearing first saves an aborted attempt.
        self._was_split = result.num_microbatches > 1
        loss = result.rank_loss
        # The host divides the loss for its backward, but reports the undivided loss to callbacks.
        of_batch = loss * trainer.accumulate_grad_batches
        outputs = self._recorded.told(RETURNS, of_batch)
        self._recorded.tell(of_batch)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # For a whole batch, the hook before the backward has already run in the host's order.
        for name in _AROUND_BACKWARD[self._knows_loss :]:
            # The host passes its hook the scaled loss, as the backward gets it.
            shown = loss if scaler is None else scaler.scale(loss)
            given = (shown,) if name == "on_before_backward" else ()
            _calls._call_callback_hooks(trainer, name, *given)
            _calls._call_lightning_module_hook(trainer, name, *given)
        return self._loop.output_result_cls(loss, extra=outputs or {})

    def _attempt(self, kwargs: Any) -> StepResult:
        """Run forward and backward of a batch; raise _InPiecesError if gradients must go first."""
        # The host's hooks run between forward and backward of a whole batch; a failed attempt rolls
        # them back, and they run again. For a split batch, gradients are cleared before, and
        # `on_before_backward` runs afterwards with the loss of the whole batch.
        trainer, microbatcher = self._trainer, self._ready()
        self._knows_loss = False
        if self._zero_grad is not None and not self._has_own_clearing():
            microbatcher.release_gradients()  # a second set of gradients would take memory

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
            # Raise an exception, because no attempt may be committed for a skipped batch.
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
        """Clear gradients; refuse hooks around that which write to parameters or buffers."""
        zero_grad = self._zero_grad
        if zero_grad is None:
            return
        if is_over:
            self._zero_grad = None
        if not self._has_own_clearing():
            zero_grad()
            return
        # Include modules that a callback holds, such as a copy with averaged weights.
        modules = [self._module, *(m for each in self._hooked() for m in _modules_in(each))]
        tensors = [each for m in modules for each in (*m.parameters(), *m.buffers())]
        before = [seen_version(each) for each in tensors]
        zero_grad()
        if before != [seen_version(each) for each in tensors]:
            raise RollbackError(
                "on_before_zero_grad or optimizer_zero_grad writes to parameters or buffers. "
                "Lightning runs it between the step of a batch and its backward, so with "
                "microbatches the step would see the change too early. Write to them in "
                "on_train_batch_end, after the optimizer's step"
            )

    def _hooked(self) -> list[Any]:
        """Callbacks whose hooks run in attempts."""
        hooks = (*_CLEARING, "on_before_backward")
        return [c for c in self._trainer.callbacks if any(_is_own(c, n) for n in hooks)]

    def _has_own_clearing(self) -> bool:
        """Whether the module or a callback overrides a hook for clearing gradients."""
        owners = (self._module, *self._trainer.callbacks)
        return any(_is_own(owner, name) for owner in owners for name in _CLEARING)

    @contextlib.contextmanager
    def _in_hooks(self) -> Iterator[None]:
        """Mark hooks of the host, which run once for all microbatches."""
        self._is_in_hooks = True
        try:
            yield
        finally:
            self._is_in_hooks = False

    @contextlib.contextmanager
    def _keeping_from_hooks(self) -> Iterator[None]:
        """Keep hooks around the backward from running for each microbatch."""

        def before_backward(own: Callable[..., Any], *given: Any) -> None:
            # On one rank, a whole batch keeps the host's own order.
            if self._trainer.world_size == 1 and self._recorded.rows == [self._num_rows]:
                self._knows_loss = True
                with self._in_hooks():
                    own(*given)

        with Replacements() as replacements:
            for owner in (*self._trainer.callbacks, self._module):
                replacements.put(owner, "on_after_backward", lambda *_: None)
                hook = functools.partial(before_backward, owner.on_before_backward)
                replacements.put(owner, "on_before_backward", hook)
            yield

    def _backward(self, loss: Tensor) -> None:
        _calls._call_strategy_hook(self._trainer, "backward", loss, self._optimizer)

    def _skip(self, skipped: "_SkippedError", kwargs: Any) -> Any:
        """After the step returned None, run it once more for its logs and random numbers."""
        if skipped.rows < skipped.num_rows:
            raise LossError(
                f"training_step returned None for {skipped.rows} of {skipped.num_rows} rows, so "
                "its result for the whole batch is unknown. Return a loss of zero for rows that "
                "do not count (0.0 * outputs.sum()), or skip batches in the data loader"
            ) from None
        # The rolled-back attempt also discarded the values that the step had logged.
        result = self._loop._training_step(kwargs)
        if result.closure_loss is not None:
            raise LossError(
                "training_step returned None, and then a loss for the same batch. Let only the "
                "batch and torch's random numbers decide whether it skips"
            ) from None
        self._clear()
        return result

    # Evaluation

    def _evaluate(self, name: str, own: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Replace an evaluation step of the strategy."""
        microbatcher = self._ready()
        # A module may keep submodules in training mode during evaluation, but a Microbatcher sets
        # all modules to evaluation mode.
        modes = [module for module in self._module.modules() if module.training]

        def step(microbatch: Any) -> tuple[Tensor | None, None]:
            with contextlib.ExitStack() as stack:
                for each in modes:
                    each.training = True
                    stack.callback(setattr, each, "training", False)
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

    # Training and evaluation

    def _ready(self) -> Microbatcher:
        """The Microbatcher of this run, created at the first batch."""
        # Only when a run has started have strategies wrapped the model.
        if self.microbatcher is None:
            trainer = self._trainer
            optimizers = trainer.optimizers if self._trains else []
            if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
                raise ValueError(
                    "AutoMicrobatch: LBFGS runs a batch several times in one step and compares "
                    "the losses, so all runs must be cut in the same way. Use another optimizer"
                )
            # State that hooks inside an attempt change: counters, and attributes of callbacks.
            roots = dict(vars(self._loop.optim_progress.optimizer.zero_grad))
            for index, each in enumerate(self._hooked() if trainer.world_size == 1 else ()):
                roots[f"callbacks[{index}]"] = each
            own: dict[str, Any] = {
                "model": trainer.strategy.model,
                "forward": self._forward,
                "backward": self._backward,
                "optimizer": optimizers[0] if optimizers else None,
                # All of these commit before the logged values, which may need metrics, are emitted.
                "recorded": self._recorded,
                "state": [self._metrics, State(lambda: roots)],
            }
            self.microbatcher = self._owner.make(**own)
        return self.microbatcher

    def _took(self, loss: Tensor | None, output: Any) -> None:
        """Keep the loss and output of a step."""
        self._returned = loss, output
        self._gives_outputs |= any(each.dim() for _, each in tensor_leaves(output))

    def _forward(self, model: nn.Module, microbatch: Any) -> Any:
        recorded, rows = self._recorded, self._layout.num_rows(microbatch)
        with self._metrics.step(rows, self._num_rows):
            found = self._step(microbatch)
            (own, output), self._returned = self._returned, (None, None)
            loss = found[0] if isinstance(found, tuple) else found
            return recorded.came_to(loss, output, own=own) or found

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Record logged values in place of the host's results."""
        results = self._trainer._results
        with Replacements() as replacements:
            if results is not None:
                _seam(results, "log", ("fx", "name", "value", "batch_size"))
                self._log = replacements.put(results, "log", self._note)
                # Only the module's log gets the original object. The host copies it, and a copy
                # does not show which metric returned it.
                own = self._module.log
                replacements.put(self._module, "log", functools.partial(self._note_given, own))
                read = functools.partial(self._note_reading, results.metrics)
                replacements.put(results, "metrics", read)
            for each in self._trainer.loggers:
                send = functools.partial(self._send, each.log_metrics)
                replacements.put(each, "log_metrics", send)
                experiment = getattr(type(each), "experiment", None)
                if isinstance(experiment, property) and experiment.fget is not None:
                    write = functools.partial(self._note_writing, experiment.fget)
                    replacements.put(type(each), "experiment", property(write))
            yield

    def _note_given(self, own: Callable[..., None], *given: Any, **named: Any) -> None:
        """Replace the module's ``log``, which copies its argument."""
        self._given = given[1] if len(given) > 1 else named.get("value")
        try:
            own(*given, **named)
        finally:
            self._given = None

    def _note_reading(self, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Replace the host's ``metrics``, which ``trainer.callback_metrics`` reads."""
        if self._recorded.has_told and not self._is_in_hooks:
            self._recorded.name_once(
                "trainer.callback_metrics",
                "the step reads callback_metrics or logged_metrics of the trainer. They get the "
                "values of this batch only after its last attempt, so the step reads those of the "
                "previous batch. Read them in on_train_batch_end",
            )
        return own(*given, **named)

    def _note(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Replace the host's ``log``: defer the call until the batch commits."""
        # The host creates its tensors in the default dtype, which precision plugins change during
        # the step. The deferred call must use the same dtype.
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
        is_metric = not isinstance(value, Tensor)  # a metric combines microbatches itself
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
        """Replace a logger's ``log_metrics``, which a step may call directly."""
        if self._is_in_hooks:
            self._recorded.later(functools.partial(own, dict(metrics), step))
            return
        self._recorded.note_log("log_metrics", own, metrics, step)

    def _note_writing(self, read: Callable[[Any], Any], logger: Any) -> Any:
        """Replace a logger's ``experiment``, which cannot take back what a step writes to it."""
        if is_extra_pass() or self._recorded.rows[-1:] != [self._num_rows]:
            self._recorded.name_once(
                "logger.experiment",
                "the step writes to the experiment of a logger, which also gets the values of "
                "microbatches, failed attempts and checks. Use self.log or "
                "self.logger.log_metrics, or write in on_train_batch_end",
            )
        return read(logger)


class _SkippedError(Exception):
    """The module's step returned None, to skip training on its rows."""

    def __init__(self, rows: int, num_rows: int) -> None:
        super().__init__("training_step returned None")
        self.rows, self.num_rows = rows, num_rows


class _InPiecesError(Exception):
    """The batch is split, but the gradients of the previous batch are not cleared yet."""


def _name_of(reduction: Any) -> str:
    """The name of a reduction, given as a function or a string."""
    name = str(getattr(reduction, "__name__", reduction)).lower()
    return name.removeprefix("a") if name in ("amax", "amin") else name


def _is_value(value: Any) -> bool:
    """Whether a value consists only of numbers, strings, tensors and containers."""
    if isinstance(value, dict):
        return all(map(_is_value, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_value, value))
    return isinstance(value, Tensor | int | float | complex | str | bytes | None)


def _is_own(owner: Any, hook: str) -> bool:
    """Whether code outside the host defines a hook."""
    return hasattr(owner, hook) and not is_written_by(_PACKAGES, getattr(owner, hook))


def _is_of_a_user(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute of the module or trainer may belong to code outside the host."""
    if not isinstance(owner, LightningModule):
        return _is_value(value)
    # Values of excluded attributes are skipped everywhere, but the trainer itself is captured.
    return name not in _OF_EVERY_MODULE or name == "_trainer"


def _modules_in(callback: Any) -> list[nn.Module]:
    """The modules in a callback's attributes, except the trained LightningModule."""
    return [
        each
        for each in vars(callback).values()
        if isinstance(each, nn.Module) and not isinstance(each, LightningModule)
    ]


def _refuse(trainer: Any, module: "LightningModule") -> None:
    """Raise ValueError if batches cannot be split or failed attempts cannot be rolled back."""
    _refuse_strategy(trainer.strategy)
    for callback in trainer.callbacks:
        if any(kind.__name__ == "BatchSizeFinder" for kind in type(callback).__mro__):
            raise ValueError(
                "AutoMicrobatch: BatchSizeFinder searches the largest batch that fits, but with "
                "AutoMicrobatch every batch fits. Leave it out, and choose the batch size that "
                "trains best"
            )
    for name in ("training_step", *_EVALUATIONS):
        step = getattr(module, name, None)
        if callable(step) and "dataloader_iter" in inspect.signature(step).parameters:
            raise ValueError(
                f"AutoMicrobatch: {name}(dataloader_iter) takes its batches itself, so they "
                f"cannot be cut. Change it to {name}(batch, batch_idx)"
            )


def _refuse_strategy(strategy: Any) -> None:
    for kind in type(strategy).__mro__:
        if kind.__name__ in _STRATEGIES:
            raise ValueError(f"{kind.__name__} {_STRATEGIES[kind.__name__]}")


def _refuse_training(module: "LightningModule") -> None:
    """Raise ValueError if `fit` could not reproduce training on whole batches."""
    if not module.automatic_optimization:
        raise ValueError(
            f"AutoMicrobatch: {type(module).__name__} optimizes manually and calls backward "
            "itself. Use automicro.Microbatcher in its training_step, with "
            "backward=self.manual_backward, or automatic_optimization=True"
        )


def microbatcher(
    fabric: "Fabric", model: nn.Module, optimizer: Any = None, **options: Any
) -> Microbatcher:
    """Create a `Microbatcher` for a Fabric loop, with its precision, strategy and loss scale.

    In the loop, ``microbatcher.backward(batch)`` replaces the forward and ``fabric.backward``. The
    code after it (``fabric.clip_gradients``, the optimizer's step, ``zero_grad``) stays unchanged.

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
        fabric: the ``Fabric`` object that runs the loop.
        model: the model that ``fabric.setup`` returned.
        optimizer: the optimizer that ``fabric.setup`` returned; memory for its state is reserved.
        options: options of `Microbatcher`, such as ``loss_fn`` or ``forward``. ``forward(model,
            batch)`` gets the model that ``fabric.setup`` returned.

    Raises:
        ValueError: if Fabric has not set up the model, or if the strategy cannot be rolled back.
        TypeError: if an option is unknown or set by Fabric itself.
    """
    own = {"backward": "fabric.backward", "precision": "Fabric(precision=…)"}
    check_options("microbatcher", options, own)
    if "_FabricModule" not in [kind.__name__ for kind in type(model).__mro__]:
        raise ValueError(
            f"microbatcher(fabric, model, …) got a {type(model).__name__} that Fabric has not set "
            "up. Pass what fabric.setup(model, optimizer) returns"
        )
    _refuse_strategy(fabric.strategy)
    return microbatcher_of(model, options, backward=fabric.backward, optimizer=optimizer)
