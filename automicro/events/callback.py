"""The events of a run, as the methods of a listener."""

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
    """Does something of its own at events of a run. Override the methods of those.

    What an event hands over is to be read and not to be changed; what a callback may ask for is
    in `Run`. An exception ends the run, with a note that names the callback and the event.

    ``fit_start`` · [``rehearsal_end``] · ``epoch_start`` · ``batch_start`` · [``attempt_start`` ·
    [``microbatch_start`` · ``forward_start`` · ``forward_end`` · ``loss_start`` · ``loss_end`` ·
    ``backward_start`` · ``backward_end`` · ``microbatch_end``] for each microbatch ·
    ``attempt_end``] · ``gradients_ready`` · ``batch_end`` · ``epoch_end`` · ``fit_end``. Gradients
    are there at ``gradients_ready`` alone; they are cleared before ``batch_end``. Where memory runs
    out, ``attempt_end`` is missing, ``oom`` and ``resize`` follow, and the next ``attempt_start``
    has the number 2. An evaluation is ``eval_start`` · [``eval_batch_start`` · the same attempts,
    with no backward · ``eval_batch_end``] · ``eval_end``.

    Inside an attempt, what happens may be undone: count and keep at ``batch_end``. A forward and
    backward of one's own goes through a `Microbatcher` (`Run.microbatcher`), which survives
    running out of memory, at ``batch_start``, ``batch_end`` or later ones. Where memory runs out in
    an event outside of attempts, in one process, memory is given back and the method is called once
    more, so it changes what it keeps last; `transform` and ``gradients_ready`` are not, for what
    they have changed already would change twice.

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
        """Training begins, or goes on after an interruption."""

    def rehearsal_end(self, run: Run, report: Any) -> None:
        """The costliest batches went through; ``report`` is a `RehearsalReport`.

        With ``rehearse="worst"``, before the first epoch. No event tells of the batches themselves.
        """

    def fit_end(self, run: Run) -> None:
        """Training has ended, after the last evaluation. Not called after an error."""

    def epoch_start(self, run: Run) -> None:
        """A pass over the data begins."""

    def epoch_end(self, run: Run) -> None:
        """A pass over the data is complete; its metrics are in ``run.state.train.metrics``."""

    def transform(self, run: Run, batch: Any) -> Any:
        """The batch to train on in place of this one, before anything else sees it."""
        return batch

    def batch_start(self, run: Run, batch: Any) -> None:
        """An optimization batch is about to be trained on.

        With ``accumulate_batches`` it is a list of what the loader gave. Of several ranks, one
        whose data have run out is not told, so a collective belongs into `batch_end`.
        """

    def batch_end(self, run: Run, result: StepResult) -> None:
        """The optimizer has stepped, or the batch was skipped; gradients are cleared."""

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        """``.grad`` holds the whole batch's gradient, unscaled; clipping comes next."""

    def attempt_start(self, run: Run, attempt: Attempt) -> None:
        """A try at a batch begins."""

    def attempt_end(self, run: Run, attempt: Attempt) -> None:
        """All microbatches of a try went through; it is about to be committed."""

    def microbatch_start(self, run: Run, microbatch: Microbatch) -> None:
        """A microbatch is on the device."""

    def microbatch_end(self, run: Run, microbatch: Microbatch) -> None:
        """A microbatch is done."""

    def forward_start(self, run: Run, microbatch: Microbatch) -> None:
        """The model is about to be called."""

    def forward_end(self, run: Run, microbatch: Microbatch) -> None:
        """The model has been called."""

    def loss_start(self, run: Run, microbatch: Microbatch) -> None:
        """The loss is about to be computed; where the model computes it, it has been."""

    def loss_end(self, run: Run, microbatch: Microbatch) -> None:
        """``microbatch.loss`` is the microbatch's share of the batch's loss."""

    def backward_start(self, run: Run, microbatch: Microbatch) -> None:
        """The backward is about to run."""

    def backward_end(self, run: Run, microbatch: Microbatch) -> None:
        """The microbatch's gradient has been added."""

    def oom(self, run: Run, failure: OutOfMemory) -> None:
        """A try ran out of memory and was undone."""

    def resize(self, run: Run, resize: Resize) -> None:
        """The microbatch size changes."""

    def eval_start(self, run: Run) -> None:
        """An evaluation begins; the model is still as in training."""

    def eval_batch_start(self, run: Run, batch: Any) -> None:
        """A batch is about to be evaluated."""

    def eval_batch_end(self, run: Run, result: EvalResult) -> None:
        """A batch has been evaluated."""

    def eval_end(self, run: Run, values: Mapping[str, float]) -> None:
        """An evaluation is complete: loss and metrics by name, as they are logged."""

    def checkpoint_start(self, run: Run) -> None:
        """A checkpoint is about to be made of the state as it is."""

    def checkpoint_end(self, run: Run, path: Path) -> None:
        """A checkpoint was made."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps of this callback: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned. Called before ``fit_start``."""


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
"""Those inside the step of a batch, which a `Microbatcher` tells of."""

_NO_EVENTS = ("transform", "state_dict", "load_state_dict")
EVENTS = tuple(
    name for name in vars(Callback) if not name.startswith("_") and name not in _NO_EVENTS
)
"""All of them."""

_CALLED_ONCE = (*STEP_EVENTS, "gradients_ready")


class Callbacks:
    """Several callbacks, told one after the other in the order in which they were given.

    Only methods that are overridden are called, so that an event without a listener costs nothing.

    Raises:
        TypeError: something else.

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
        # Without this, the mistake would show as one of iteration, inside of automicro.
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
                    f"callbacks holds {callback!r} (a {kind}), which is not an automicro.Callback; "
                    "pass instances of subclasses of it"
                )
            _refuse_foreign_events(callback)
        self._listeners: dict[str, list[tuple[Callback, Callable[..., Any]]]] = {
            event: [
                (callback, getattr(callback, event))
                for callback in self._callbacks
                # On the class, or on the instance, where some set a method of one object.
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
        """Of each callback: its class, numbered where there are several of one."""
        names: list[str] = []
        for callback in self._callbacks:
            name = type(callback).__name__
            # The order of the list tells two of a class apart, as nothing else of them outlasts the
            # process.
            same = sum(each.partition(" ")[0] == name for each in names)
            names.append(f"{name} {same + 1}" if same else name)
        return names

    @property
    def transforming(self) -> Sequence[Callback]:
        """Those that put other batches in the place of the loader's."""
        return [callback for callback, _ in self._listeners["transform"]]

    def listens(self, *events: str) -> bool:
        """Whether anybody listens to any of these events."""
        return any(self._listeners[event] for event in events)

    def fire(self, event: str, run: Run, *subject: Any) -> None:
        """Tell of an event.

        Raises:
            Exception: of a callback, with a note that names it and the event.
        """
        for callback, method in self._listeners[event]:
            call = partial(method, run, *subject)
            with _blaming(callback, f"at {event}", explains=event not in STEP_EVENTS) as where:
                if event in _CALLED_ONCE or run.world_size > 1:  # peers would wait
                    call()
                else:
                    once_more(call, run.device, doing=f"calling {where}")

    def transform(self, run: Run, batch: Any) -> Any:
        """The batch as all callbacks leave it, one after the other."""
        for callback, method in self._listeners["transform"]:
            with _blaming(callback, "transform"):
                batch = method(run, batch)
            if batch is None:
                raise TypeError(
                    f"{type(callback).__name__}.transform returned None in place of a batch; "
                    "return the batch"
                )
        return batch

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """The state of each callback, by its name; those that keep nothing are left out.

        Raises:
            Exception: of a callback, with a note that names it.
        """
        states: dict[str, dict[str, Any]] = {}
        for name, callback in zip(self.names, self._callbacks, strict=True):
            with _blaming(callback, "at state_dict", explains=False):
                state = callback.state_dict()
            if state:
                states[name] = state
        return states

    def features(self, run: Run) -> list[Feature]:
        """Features that emit the events inside a step; none where no callback listens to them."""
        # Telling of each forward costs something even if nothing listens.
        if not self.listens(*STEP_EVENTS):
            return []

        def observe(event: str, subject: Subject) -> None:
            self.fire(event, run, subject)

        return [Observing(observe)]


@contextlib.contextmanager
def _blaming(callback: Callback, at: str, *, explains: bool = True) -> Iterator[str]:
    """Name the callback in what it raises, and say what to do where memory ran out in it."""
    where = f"{type(callback).__name__}, {at}"
    try:
        yield where
    except BaseException as error:
        blame(error, Bystander(kind="callback", name=where), f"in the callback {where}")
        if explains and is_out_of_memory(error):
            add_note(
                error,
                "automicro: let the callback need less of the device, or go through "
                "run.microbatcher(), which finds a size that fits",
            )
        raise


def _refuse_foreign_events(callback: Callback) -> None:
    """Refuse methods named as other trainers name their events, which are never called.

    Raises:
        ValueError: there are such.
    """
    for name in dir(type(callback)):
        # Names of Lightning and Hugging Face: on_train_batch_start, on_step_end, on_epoch_begin.
        event = name.removeprefix("on_").replace("train_batch", "batch").replace("step", "batch")
        event = event.replace("train_epoch", "epoch").replace("begin", "start")
        if name.startswith("on_") and event in EVENTS and callable(getattr(callback, name)):
            raise ValueError(
                f"{type(callback).__name__}.{name} would never be called: the event is called "
                f"{event}; rename the method"
            )
    if misspelt := misspelt_hook(type(callback), Callback, EVENTS):
        raise ValueError(
            f"{type(callback).__name__}.{misspelt} would never be called: the events are "
            f"{', '.join(EVENTS)}. Rename it, or let a name of your own begin with _"
        )
