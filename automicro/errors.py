"""Errors and warnings that automicro raises.

::

    AutomicroError
    ├── BatchError (ValueError)                 a batch cannot be split into microbatches
    ├── LossError (ValueError)                  a forward returns no usable loss
    │   └── NonFiniteLossError                  the loss of a batch is NaN or infinite
    ├── UnsplittableModelError (ValueError)     BatchNorm, and batchnorm="error" forbids it
    ├── UntraceableModelError (ValueError)      a model cannot be planned without data
    ├── DataLoaderError (ValueError)            a loader yields no batch
    ├── ConfigError (ValueError)                a configuration cannot be read
    ├── SampleTooLargeError (torch.OutOfMemoryError)   not even one row fits
    ├── OptimizerStepError (RuntimeError)       out of memory inside optimizer.step()
    ├── RollbackError (RuntimeError)            the state before a step cannot be restored
    ├── RankError (RuntimeError)                several ranks cannot continue together
    │   ├── PeerStoppedError                    a peer ended the attempt; rolled back and retried
    │   ├── PeerFailedError                     another rank raised an exception
    │   ├── PeerLostError                       a peer is gone or does not answer
    │   └── DesyncError                         ranks are at different points of the program
    └── CheckpointError (RuntimeError)          a checkpoint cannot be written or loaded
        └── DamagedCheckpointError              a checkpoint is incomplete or was changed

    AutomicroWarning (UserWarning)
    ├── BatchNormWarning                        batch statistics cover fewer rows
    ├── BufferWarning                           other buffers depend on the microbatch size
    ├── StateWarning                            some state of the forward cannot be restored
    ├── GradientWarning                         code observes partial gradients
    ├── MetricWarning                           a metric or an output depends on the microbatch
    │                                           size, or a metric is added to the losses
    ├── LossAverageWarning                      the loss does not average as was assumed
    ├── PaddingWarning                          padding is kept, or labels count in it
    ├── DeterminismWarning                      runs might differ although they should not
    ├── CheckpointWarning                       a checkpoint was skipped, not written or not removed
    ├── LoggerWarning                           a logger failed; the run continues
    └── SizeCacheWarning                        a remembered size cannot be read or written

Other misuse raises a plain ``ValueError`` or ``TypeError``. Errors that do not come from automicro
(a bug in the model, Ctrl-C) pass through unchanged, with the state rolled back to before the step.

`text_of`, `describe_error` and `add_note` work for exceptions of any class. Notes are for people;
facts that automicro itself needs are stored by `remember` and read by `facts_of`.
"""

import contextlib
import difflib
import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


def text_of(error: BaseException) -> str:
    r"""Return the text of an exception as valid UTF-8; never raises.

    >>> text_of(ValueError("bad\udc80name"))
    'bad\\udc80name'
    """
    try:
        text = str(error)
    except Exception:
        return "<its text cannot be read>"
    return text.encode("utf-8", "backslashreplace").decode()


def describe_error(error: BaseException) -> str:
    """Return class and text of an exception, or where it was raised if it has no text.

    >>> describe_error(KeyError("x")), describe_error(MemoryError())
    ("KeyError: 'x'", 'MemoryError')
    """
    kind, text = type(error).__name__, text_of(error)
    if text:
        return f"{kind}: {text}"
    where = traceback.extract_tb(error.__traceback__)
    if not where:
        return kind
    last = where[-1]
    return f"{kind} in {last.name}, {last.filename}:{last.lineno}: {last.line}"


def nearest(name: object, known: Iterable[object]) -> str | None:
    """Return the known name that was most likely meant, ignoring case, or None if none is close.

    >>> nearest("linaer", ["linear", "Linear"]), nearest("colour", ["model"])
    ('Linear', None)
    """
    # A class is often meant when the name of its module is given. Reverse order keeps the
    # upper-case name: the class Linear rather than the module linear.
    spelled = {each.lower(): each for each in sorted(map(str, known), reverse=True)}
    near = difflib.get_close_matches(str(name).lower(), spelled, n=1)
    return spelled[near[0]] if near else None


def suggestion(name: object, known: Iterable[object]) -> str:
    """Return a hint to append to a wrong name, empty if no known name is close.

    >>> suggestion("optimzer", ["model", "optimizer"])
    " (did you mean 'optimizer'?)"
    """
    near = nearest(name, known)
    return "" if near is None else f" (did you mean {near!r}?)"


def removed(**instead: str) -> Callable[[F], F]:
    """Let a class or a function answer arguments that it does not take with what to do instead.

    >>> @removed(step="Use one per batch")
    ... class Schedule: ...
    >>> Schedule(step=1)
    Traceback (most recent call last):
    ...
    TypeError: Schedule has no argument step. Use one per batch
    """

    def decorate(target: F) -> F:
        is_class = isinstance(target, type)
        called: Any = target.__init__ if is_class else target
        name = target.__qualname__.rpartition("<locals>.")[2]

        # `functools.wraps` keeps the target's own signature for help() and configs.
        @functools.wraps(called)
        def answering(*args: Any, **kwargs: Any) -> Any:
            for each in instead.keys() & kwargs.keys():
                raise TypeError(f"{name} has no argument {each}. {instead[each]}")
            return called(*args, **kwargs)

        if not is_class:
            return cast(F, answering)
        target.__init__ = answering  # type: ignore[method-assign]
        return target

    return decorate


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless its class refuses changes."""
    with contextlib.suppress(Exception):
        error.add_note(note)


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that stopped in good order because it was asked to.

    >>> print(Stopped(by="Ctrl-C", where="after batch 12"))
    Ctrl-C: stopped after batch 12, without a checkpoint
    """

    by: str  # what asked: "Ctrl-C" or "SIGTERM"
    where: str  # how far training had come, such as "after batch 12"
    checkpoint: str | None = None  # path of the checkpoint saved then, or None
    remedy: str = ""  # how to continue; empty if unknown

    def __str__(self) -> str:
        saved = "without a checkpoint" if self.checkpoint is None else f"saved in {self.checkpoint}"
        text = f"{self.by}: stopped {self.where}, {saved}"
        return f"{text}: {self.remedy}" if self.remedy else text


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """A participant in a step other than the model, its loss and its optimizer."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}"


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Facts that automicro keeps about an exception of any class."""

    is_told: bool = False
    stopped: Stopped | None = None
    bystander: Bystander | None = None
    is_committed: bool = False
    keys: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    part: str | None = None


_FACTS = "__automicro_facts__"


def remember(error: BaseException, **facts: Any) -> None:
    """Store facts, which are attributes of `_Facts`, with an exception.

    >>> error = KeyboardInterrupt()
    >>> remember(error, is_told=True)
    >>> facts_of(error).is_told, facts_of(error).is_committed
    (True, False)
    """
    known = replace(facts_of(error), **facts)
    with contextlib.suppress(Exception):  # a failure here must not hide the error
        # Bypass the class's own __setattr__, which may refuse.
        BaseException.__setattr__(error, _FACTS, known)


def blame(error: BaseException, culprit: Bystander, doing: str) -> None:
    """Note which bystander raised an exception; the innermost one is kept.

    >>> error = MemoryError()
    >>> blame(error, Bystander(kind="metric", name="'f1'"), "while updating the metric 'f1'")
    >>> error.__notes__, str(facts_of(error).bystander)
    (["automicro: while updating the metric 'f1'"], "the metric 'f1'")
    """
    add_note(error, f"automicro: {doing}")
    if facts_of(error).bystander is None:
        remember(error, bystander=culprit)


def facts_of(error: BaseException) -> _Facts:
    """Return the facts stored with an exception."""
    # Bypass __getattr__, which may be user code.
    found = vars(error).get(_FACTS)
    return found if isinstance(found, _Facts) else _Facts()


@contextlib.contextmanager
def about(*keys: object) -> Iterator[None]:
    """Record with each error which keys it is about; the innermost keys are kept.

    >>> try:
    ...     with about("model"), about("model.args"):
    ...         raise ConfigError("no such argument")
    ... except ConfigError as error:
    ...     facts_of(error).keys
    ('model.args',)
    """
    try:
        yield
    except Exception as error:
        if not facts_of(error).keys:
            remember(error, keys=tuple(map(str, keys)))
        raise


class AutomicroError(Exception):
    """Base class of all errors that automicro raises."""


class BatchError(AutomicroError, ValueError):
    """The batch cannot be split into microbatches without guessing or dropping rows."""


class LossError(AutomicroError, ValueError):
    """The forward returned no loss, or a loss that cannot be differentiated."""


class LossAverageError(LossError):
    """A check of a few rows contradicts the assumed loss average (with ``probe="error"``)."""


class NonFiniteLossError(LossError):
    """The loss of a whole batch is NaN or infinite. Raised before the optimizer steps."""


class UnsplittableModelError(AutomicroError, ValueError):
    """The model computes batch statistics, and ``batchnorm="error"`` forbids splitting."""


class UntraceableModelError(AutomicroError, ValueError):
    """The model cannot run on tensors without data. The message names the line and a remedy."""


class DataLoaderError(AutomicroError, ValueError):
    """A data loader yielded no batch."""


class ConfigError(AutomicroError, ValueError):
    """A configuration or command line cannot be read. The message names key, value and remedy."""


class OptimizerStepError(AutomicroError, RuntimeError):
    """Out of memory in ``optimizer.step()`` or gradient clipping, which might be half applied.

    The message names the state that might have changed. If that includes parameters or optimizer
    state, resume from a checkpoint.
    """


class RollbackError(AutomicroError, RuntimeError):
    """The state before the step could not be restored. Resume from a checkpoint."""


class RankError(AutomicroError, RuntimeError):
    """Several ranks cannot continue together. All ranks are notified and raise."""


class PeerStoppedError(RankError):
    """Another rank ended the attempt. All ranks roll back; raised inside steps only."""

    culprit: int | None = None  # the lowest rank that did so, or None if unknown


class PeerFailedError(RankError):
    """Another rank failed permanently. The message names the rank and repeats its error."""


class PeerLostError(RankError):
    """A peer is gone or does not answer: killed, stopped, disconnected, or past a timeout."""


class DesyncError(RankError):
    """Ranks are at different points of the program, or have different options."""


class CheckpointError(AutomicroError, RuntimeError):
    """A checkpoint cannot be written or loaded. Older checkpoints are unchanged."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or was changed after saving. The message names the file."""


class AutomicroWarning(UserWarning):
    """Base class of all warnings that automicro emits."""


class BatchNormWarning(AutomicroWarning):
    """Layers that average over the batch now average over one microbatch at a time."""


class BufferWarning(AutomicroWarning):
    """A forward changes buffers or parameters, which then depend on the microbatch size."""


class StateWarning(AutomicroWarning):
    """A forward uses state that cannot be restored after a failed attempt."""


class GradientWarning(AutomicroWarning):
    """Other code reads or changes the gradients of single microbatches."""


class MetricWarning(AutomicroWarning):
    """A metric, an output or a logged number depends on the microbatch size.

    Also emitted if such a number is among the losses, and is therefore added to them.
    """


class LossAverageWarning(AutomicroWarning):
    """The loss does not average as was assumed, so splitting changes the gradient."""


class PaddingWarning(AutomicroWarning):
    """Padding is not trimmed because that would change results, or labels count in it."""


class DeterminismWarning(AutomicroWarning):
    """A run that should be reproducible bit for bit might not be."""


class CheckpointWarning(AutomicroWarning):
    """A checkpoint was skipped because it is damaged, not written, or not removed."""


class LoggerWarning(AutomicroWarning):
    """A logger failed, or a value cannot be logged. The run continues."""


class SizeCacheWarning(AutomicroWarning):
    """A remembered size cannot be read, written or removed. The run searches again."""


if TYPE_CHECKING:

    class SampleTooLargeError(AutomicroError, torch.OutOfMemoryError):
        """Even the smallest microbatch runs out of memory. The state is as before the step."""

else:

    def __getattr__(name: str) -> type[Exception]:
        # Created on first use: its base class needs torch, which takes a second to import, and a
        # mistyped command line must be answered without it.
        if name != "SampleTooLargeError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import torch

        doc = "Even the smallest microbatch runs out of memory. The state is as before the step."
        made = type(
            name, (AutomicroError, torch.OutOfMemoryError), {"__doc__": doc, "__module__": __name__}
        )
        # Except clauses compare classes, so two threads must get the same one.
        return globals().setdefault(name, made)


_PACKAGE = Path(__file__).parent


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line that called into automicro.

    ``warnings.warn`` shows a text once per line of code and process. This function shows it each
    time; callers count for themselves, so each object can warn once.

    Raises:
        Warning: filters turn the category into an error.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("default")
    ...     for _ in range(2):
    ...         warn("mind the gap", UserWarning)
    >>> len(caught)
    2
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    frame = frame or here
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry={},
    )


def _is_ours(frame: FrameType) -> bool:
    # A context manager that warns on exit is called from a frame of contextlib.
    path = frame.f_code.co_filename
    return path == contextlib.__file__ or _PACKAGE in Path(path).parents
