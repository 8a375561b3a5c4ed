"""Telling callbacks what happens."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from automicro.errors import add_note
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.observer import IN_CALLBACK, Observer, Subject
from automicro.oom import is_out_of_memory

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

EVENTS = (
    "fit_start",
    "epoch_start",
    "batch_start",
    *STEP_EVENTS,
    "gradients_ready",
    "batch_end",
    "epoch_end",
    "eval_start",
    "eval_batch_start",
    "eval_batch_end",
    "eval_end",
    "checkpoint_start",
    "checkpoint_end",
    "fit_end",
)
"""All of them."""


class Callbacks:
    """Several callbacks, told one after the other in the order in which they were given.

    Only methods that are overridden are called, so that an event nobody listens to costs nothing.

    Args:
        callbacks: each a `Callback`.

    Raises:
        TypeError: something else.

    >>> class Shout(Callback):
    ...     def fit_start(self, run):
    ...         raise KeyError("no")
    >>> callbacks = Callbacks([Shout()])
    >>> try:
    ...     callbacks.fire("fit_start", run=None)
    ... except KeyError as error:
    ...     error.__notes__
    ['automicro: in the callback Shout, at fit_start']
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
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
                    f"callbacks holds {callback!r} (a {kind}), which is no automicro.Callback; "
                    "pass instances of subclasses of it"
                )
            _refuse_foreign_events(callback)
        self._listeners: dict[str, list[tuple[Callback, Callable[..., Any]]]] = {
            event: [
                (callback, getattr(callback, event))
                for callback in self._callbacks
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
            same = sum(each.partition(" ")[0] == name for each in names)
            names.append(f"{name} {same + 1}" if same else name)
        return names

    def listens(self, *events: str) -> bool:
        """Whether anybody listens to any of these events."""
        return any(self._listeners[event] for event in events)

    def fire(self, event: str, run: Run, *subject: Any) -> None:
        """Tell of an event.

        Raises:
            Exception: of a callback, with a note that names it and the event.
        """
        for callback, method in self._listeners[event]:
            try:
                method(run, *subject)
            except BaseException as error:
                add_note(error, f"{IN_CALLBACK}{type(callback).__name__}, at {event}")
                if event not in STEP_EVENTS:
                    _explain_shortage(error)
                raise

    def transform(self, run: Run, batch: Any) -> Any:
        """The batch as all callbacks leave it, one after the other."""
        for callback, method in self._listeners["transform"]:
            try:
                batch = method(run, batch)
            except BaseException as error:
                add_note(error, f"{IN_CALLBACK}{type(callback).__name__}, transform")
                _explain_shortage(error)
                raise
            if batch is None:
                raise TypeError(
                    f"{type(callback).__name__}.transform returned None in place of a batch; "
                    "return the batch"
                )
        return batch

    def observer(self, run: Run) -> Observer | None:
        """What tells of the events inside a step; None where nobody listens to them."""
        if not self.listens(*STEP_EVENTS):
            return None

        def observe(event: str, subject: Subject) -> None:
            self.fire(event, run, subject)

        return observe


def _explain_shortage(error: BaseException) -> None:
    if is_out_of_memory(error):
        add_note(
            error,
            "automicro: what a callback does outside of a step is not tried again, for nobody "
            "knows how far it came; let it need less of the device, or go through "
            "run.microbatcher(), which finds a size that fits",
        )


def _refuse_foreign_events(callback: Callback) -> None:
    """Refuse methods named as other trainers name their events, which nobody would call.

    Raises:
        ValueError: there are such.
    """
    for name in dir(type(callback)):
        event = name.removeprefix("on_").replace("train_batch", "batch").replace("step", "batch")
        event = event.replace("train_epoch", "epoch").replace("begin", "start")
        if name.startswith("on_") and event in EVENTS and callable(getattr(callback, name)):
            raise ValueError(
                f"{type(callback).__name__}.{name} would never be called: the event is called "
                f"{event}; rename the method"
            )
