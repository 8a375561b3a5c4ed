"""Events of a run, as the methods of a callback."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from automicro.errors import Bystander, add_note, blame
from automicro.events.run import Run
from automicro.memory.oom import is_out_of_memory, once_more
from automicro.showing import one_line
from automicro.step.events import Microbatch, Observing, OutOfMemory, Resize, Subject
from automicro.step.feature import Attempt, Feature, misspelt_hook
from automicro.step.results import EvalResult, StepResult


class Callback:
    """Base class of objects that act on events of a run. Override the methods of these events.

    Callbacks read the objects passed to an event, but must not change them; `Run` has the requests
    that a callback can make. An exception ends the run, with a note that names the callback and the
    event.

    Events come in this order: ``fit_start`` · [``rehearsal_end``] · ``epoch_start`` ·
    ``batch_start`` · [``attempt_start`` · [``microbatch_start`` · ``forward_start`` ·
    ``forward_end`` · ``loss_start`` · ``loss_end`` · ``backward_start`` · ``backward_end`` ·
    ``microbatch_end``] for each microbatch · ``attempt_end``] · ``gradients_ready`` · ``batch_end``
    · ``epoch_end`` · ``fit_end``. Gradients exist only at ``gradients_ready``; they are cleared
    before ``batch_end``. If an attempt runs out of memory, ``oom`` and ``resize`` replace its
    ``attempt_end``, and the next ``attempt_start`` has number 2. An evaluation is ``eval_start`` ·
    [``eval_batch_start`` · the same attempts without a backward · ``eval_batch_end``] ·
    ``eval_end``.

    An attempt might be rolled back, so count and store values at ``batch_end``. Run additional
    forwards and backwards through a `Microbatcher` (`Run.microbatcher`), which recovers from
    running out of memory, at ``batch_start``, at ``batch_end`` or between batches. If an event
    outside attempts runs out of memory in a single process, automicro frees memory and calls the
    method once more, so methods should change their own state last. `transform` and
    ``gradients_ready`` are never repeated, because their changes would be applied twice.

    Example:
        >>> class CountRetries(Callback):
        ...     retries = 0
        ...
        ...     def batch_end(self, run, result):
        ...         self.retries += result.ooms
    """

    def __repr__(self) -> str:
        return one_line(self)

    def fit_start(self, run: Run) -> None:
        """Called when training starts or resumes."""

    def rehearsal_end(self, run: Run, report: Any) -> None:
        """Called after a rehearsal of the costliest batches, before the first epoch.

        Only with ``rehearse="worst"``. ``report`` is a `RehearsalReport`; the rehearsed batches
        emit no events.
        """

    def fit_end(self, run: Run) -> None:
        """Called when training ends, after the last evaluation. Not called after an error."""

    def epoch_start(self, run: Run) -> None:
        """Called when a pass over the data starts."""

    def epoch_end(self, run: Run) -> None:
        """Called after a pass over the data; its metrics are in ``run.state.train.metrics``."""

    def transform(self, run: Run, batch: Any) -> Any:
        """Return the batch to train on instead of this one. Called before any use of the batch."""
        return batch

    def batch_start(self, run: Run, batch: Any) -> None:
        """Called before training on an optimization batch.

        With ``accumulate_batches``, ``batch`` is a list of batches of the data loader. A rank whose
        data has run out does not get this event, so collectives belong in `batch_end`.
        """

    def batch_end(self, run: Run, result: StepResult) -> None:
        """Called after the optimizer step, or after a skipped batch; gradients are cleared."""

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        """Called before clipping, with the unscaled gradient of the whole batch in ``.grad``."""

    def attempt_start(self, run: Run, attempt: Attempt) -> None:
        """Called when an attempt at a batch starts."""

    def attempt_end(self, run: Run, attempt: Attempt) -> None:
        """Called after the last microbatch of an attempt, before the attempt is committed."""

    def microbatch_start(self, run: Run, microbatch: Microbatch) -> None:
        """Called when a microbatch is on the device."""

    def microbatch_end(self, run: Run, microbatch: Microbatch) -> None:
        """Called at the end of a microbatch."""

    def forward_start(self, run: Run, microbatch: Microbatch) -> None:
        """Called before the model is called."""

    def forward_end(self, run: Run, microbatch: Microbatch) -> None:
        """Called after the model was called."""

    def loss_start(self, run: Run, microbatch: Microbatch) -> None:
        """Called before the loss is computed, or after that if the model computes it."""

    def loss_end(self, run: Run, microbatch: Microbatch) -> None:
        """Called with the microbatch's share of the batch's loss in ``microbatch.loss``."""

    def backward_start(self, run: Run, microbatch: Microbatch) -> None:
        """Called before the backward."""

    def backward_end(self, run: Run, microbatch: Microbatch) -> None:
        """Called after the gradient of the microbatch was accumulated."""

    def oom(self, run: Run, failure: OutOfMemory) -> None:
        """Called after an attempt ran out of memory and was rolled back."""

    def resize(self, run: Run, resize: Resize) -> None:
        """Called when the microbatch size changes."""

    def eval_start(self, run: Run) -> None:
        """Called when an evaluation starts; the model is still in training mode."""

    def eval_batch_start(self, run: Run, batch: Any) -> None:
        """Called before a batch is evaluated."""

    def eval_batch_end(self, run: Run, result: EvalResult) -> None:
        """Called after a batch was evaluated."""

    def eval_end(self, run: Run, values: Mapping[str, float]) -> None:
        """Called after an evaluation, with loss and metrics under their logged names."""

    def checkpoint_start(self, run: Run) -> None:
        """Called before a checkpoint of the current state is saved."""

    def checkpoint_end(self, run: Run, path: Path) -> None:
        """Called after a checkpoint was saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback for checkpoints, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Called before ``fit_start``."""


STEP_EVENTS = (
    "attempt_start",
    "microbatch_start",
    "forward_start",
    "forward_end",
    "loss_start",
    "loss_end",
    "backward_start",
    "backward_end",
    "microbatch_end",
    "attempt_end",
    "oom",
    "resize",
)
"""Events inside the step of a batch, which a `Microbatcher` emits."""

_NO_EVENTS = ("transform", "state_dict", "load_state_dict")
EVENTS = tuple(
    name for name in vars(Callback) if not name.startswith("_") and name not in _NO_EVENTS
)
"""All of them."""

_CALLED_ONCE = (*STEP_EVENTS, "gradients_ready")


class Callbacks:
    """Several callbacks, called in the order in which they were given.

    >>> class Shout(Callback):
    ...     def gradients_ready(self, run, result):
    ...         raise KeyError("no")
    >>> callbacks = Callbacks([Shout()])
    >>> try:
    ...     callbacks.fire("gradients_ready", None, None)
    ... except KeyError as error:
    ...     error.__notes__
    ['automicro: in the callback Shout, at gradients_ready']
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        # Without this check, the error would come from a loop inside automicro.
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            raise TypeError(
                f"callbacks is a {type(callbacks).__name__} and not a list; pass a list of "
                "callbacks, such as callbacks=[EarlyStopping()]"
            )
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                kind = "class" if inspect.isclass(callback) else type(callback).__name__
                raise TypeError(
                    f"callbacks holds {callback!r} (a {kind}), which is not an automicro.Callback. "
                    "Pass instances of its subclasses"
                )
            _refuse_foreign_events(callback)
        self._listeners: dict[str, list[tuple[Callback, Callable[..., Any]]]] = {
            event: [
                (callback, getattr(callback, event))
                for callback in self._callbacks
                # Overridden on the class, or on one instance. Unused events cost nothing.
                if getattr(type(callback), event) is not getattr(Callback, event)
                or event in vars(callback)
            ]
            for event in (*EVENTS, "transform")
        }

    def __iter__(self) -> Any:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    @property
    def names(self) -> Sequence[str]:
        """Class name of each callback, numbered if a class occurs more than once."""
        names: list[str] = []
        for callback in self._callbacks:
            name = type(callback).__name__
            # Two callbacks of a class are distinguished by their order, because nothing else about
            # them is the same in another process.
            same = sum(each.partition(" ")[0] == name for each in names)
            names.append(f"{name} {same + 1}" if same else name)
        return names

    @property
    def transforming(self) -> Sequence[Callback]:
        """Callbacks that replace batches of the data loader."""
        return [callback for callback, _ in self._listeners["transform"]]

    def listens(self, *events: str) -> bool:
        """Return whether any callback listens to any of these events."""
        return any(self._listeners[event] for event in events)

    def fire(self, event: str, run: Run, *subject: Any) -> None:
        """Call all listeners of an event; exceptions get a note that names callback and event."""
        for callback, method in self._listeners[event]:
            call = partial(method, run, *subject)
            with _blaming(callback, f"at {event}", explains=event not in STEP_EVENTS) as where:
                # A repeated call could leave peers waiting.
                if event in _CALLED_ONCE or run.world_size > 1:
                    call()
                else:
                    once_more(call, run.device, doing=f"calling {where}")

    def transform(self, run: Run, batch: Any) -> Any:
        """Apply the transforms of all callbacks in turn."""
        for callback, method in self._listeners["transform"]:
            with _blaming(callback, "transform"):
                batch = method(run, batch)
            if batch is None:
                raise TypeError(
                    f"{type(callback).__name__}.transform returned None instead of a batch; return "
                    "the batch"
                )
        return batch

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """Return the state of each callback by name, without those that have no state."""
        states: dict[str, dict[str, Any]] = {}
        for name, callback in zip(self.names, self._callbacks, strict=True):
            with _blaming(callback, "at state_dict", explains=False):
                state = callback.state_dict()
            if state:
                states[name] = state
        return states

    def features(self, run: Run) -> list[Feature]:
        """Return features that emit the events inside a step, or none if no callback listens."""
        # Emitting an event for each forward has a cost even without a listener.
        if not self.listens(*STEP_EVENTS):
            return []

        def observe(event: str, subject: Subject) -> None:
            self.fire(event, run, subject)

        return [Observing(observe)]


@contextlib.contextmanager
def _blaming(callback: Callback, at: str, *, explains: bool = True) -> Iterator[str]:
    """Name the callback in its exceptions, with a remedy if it ran out of memory."""
    where = f"{type(callback).__name__}, {at}"
    try:
        yield where
    except BaseException as error:
        blame(error, Bystander(kind="callback", name=where), f"in the callback {where}")
        if explains and is_out_of_memory(error):
            add_note(
                error,
                "automicro: reduce the memory that the callback needs, or use run.microbatcher(), "
                "which finds a size that fits",
            )
        raise


def _refuse_foreign_events(callback: Callback) -> None:
    """Refuse methods named like the events of other trainers, which would never be called."""
    for name in dir(type(callback)):
        # Names of Lightning and Hugging Face: on_train_batch_start, on_step_end, on_epoch_begin.
        event = name.removeprefix("on_").replace("train_batch", "batch").replace("step", "batch")
        event = event.replace("train_epoch", "epoch").replace("begin", "start")
        if name.startswith("on_") and event in EVENTS and callable(getattr(callback, name)):
            raise ValueError(
                f"{type(callback).__name__}.{name} would never be called: the event is called "
                f"{event}. Rename the method"
            )
    if misspelt := misspelt_hook(type(callback), Callback, EVENTS):
        raise ValueError(
            f"{type(callback).__name__}.{misspelt} would never be called: the events are "
            f"{', '.join(EVENTS)}. Rename it, or begin the name with _ if it is not an event"
        )
