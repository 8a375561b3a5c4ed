"""Every error and warning that automicro raises on its own account.

::

    AutomicroError
    ├── BatchError (ValueError)                 a batch that cannot be cut into microbatches
    ├── LossError (ValueError)                  a forward that gives no usable loss
    │   └── NonFiniteLossError                  the loss of a batch is NaN or infinite
    ├── UnsplittableModelError (ValueError)     BatchNorm, where batchnorm="error" forbids it
    ├── UntraceableModelError (ValueError)      a model that cannot be planned without data
    ├── DataLoaderError (ValueError)            a loader that gives no batch
    ├── ConfigError (ValueError)                a configuration that cannot be read
    ├── SampleTooLargeError (torch.OutOfMemoryError)   not even one row fits
    ├── OptimizerStepError (RuntimeError)       memory ran out inside optimizer.step()
    ├── RollbackError (RuntimeError)            the state before a step cannot be put back
    ├── RankError (RuntimeError)                several ranks cannot go on together
    │   ├── PeerStoppedError                    a peer ended the attempt; rolled back and retried
    │   ├── PeerFailedError                     an exception on another rank, which it names
    │   ├── PeerLostError                       a peer is gone or does not answer
    │   └── DesyncError                         ranks are at different points of the program
    └── CheckpointError (RuntimeError)          a checkpoint that cannot be written or loaded
        └── DamagedCheckpointError              one that is incomplete, or was changed since

    AutomicroWarning (UserWarning)
    ├── BatchNormWarning                        statistics over the batch see fewer rows
    ├── BufferWarning                           other buffers depend on the microbatch size
    ├── StateWarning                            something a forward reaches cannot be put back
    ├── GradientWarning                         something sees the parts of a gradient
    ├── MetricWarning                           a metric or an output depends on the microbatch
    │                                           size, or a metric is added to the losses
    ├── LossAverageWarning                      the loss is not the average it was taken for
    ├── PaddingWarning                          padding stays, or labels count in it
    ├── DeterminismWarning                      runs may differ although they should not
    ├── CheckpointWarning                       a checkpoint skipped, not written or not removed
    ├── LoggerWarning                           a logger failed; the run goes on
    └── SizeCacheWarning                        a remembered size cannot be read or written

Misuse that needs no name of its own is a plain ``ValueError`` or ``TypeError``. Errors that are
not automicro's (a bug in the model, Ctrl-C) pass through unchanged, with the state as it was
before the step. Their texts are quoted by `text_of` and `describe_error`, and notes are added by
`add_note`, which work for errors of any class. Notes are for people: what
automicro itself has to know of an exception, such as that the other ranks were told of it, is set
by `remember` and read by `facts_of`.
"""

import contextlib
import difflib
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def text_of(error: BaseException) -> str:
    r"""The text of an exception, which can be written anywhere; never raises.

    ``__str__`` may be anybody's, and a file name with a lone surrogate is no UTF-8.

    >>> text_of(ValueError("bad\udc80name"))
    'bad\\udc80name'
    """
    try:
        text = str(error)
    except Exception:
        return "<its text cannot be read>"
    return text.encode("utf-8", "backslashreplace").decode()


def describe_error(error: BaseException) -> str:
    """Class and text of an exception; where it was raised, if it has no text.

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
    """The known name that was most likely meant, whatever its case; None where none is near.

    >>> nearest("linaer", ["linear", "Linear"]), nearest("colour", ["model"])
    ('Linear', None)
    """
    # Classes are often meant by the name of the module that they are in.
    # In reverse, so that the last to be kept is the upper case: Linear, and not the module linear.
    spelled = {each.lower(): each for each in sorted(map(str, known), reverse=True)}
    near = difflib.get_close_matches(str(name).lower(), spelled, n=1)
    return spelled[near[0]] if near else None


def suggestion(name: object, known: Iterable[object]) -> str:
    """A hint to be put behind a wrong name; empty where nothing is near.

    >>> suggestion("optimzer", ["model", "optimizer"])
    " (did you mean 'optimizer'?)"
    """
    near = nearest(name, known)
    return "" if near is None else f" (did you mean {near!r}?)"


def add_note(error: BaseException, note: str) -> None:
    """Add a note where the exception's class allows it: some refuse to be changed.

    >>> error = ValueError("x")
    >>> add_note(error, "automicro: seen")
    >>> error.__notes__
    ['automicro: seen']
    """
    with contextlib.suppress(Exception):
        error.add_note(note)


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that was asked to end, and ended in order.

    Attributes:
        by: what asked: ``"Ctrl-C"`` or ``"SIGTERM"``.
        where: training stood, in words.
        checkpoint: that was saved there; None for none.
        remedy: how to go on; empty where it is not known.

    >>> print(Stopped(by="Ctrl-C", where="after batch 12"))
    Ctrl-C: stopped after batch 12, without a checkpoint
    """

    by: str
    where: str
    checkpoint: str | None = None
    remedy: str = ""

    def __str__(self) -> str:
        saved = "without a checkpoint" if self.checkpoint is None else f"saved in {self.checkpoint}"
        text = f"{self.by}: stopped {self.where}, {saved}"
        return f"{text}: {self.remedy}" if self.remedy else text


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """A participant of a step beside the model, its loss and its optimizer.

    Attributes:
        kind: ``"callback"``, ``"feature"``, ``"metric"``, or ``"joining of"`` outputs.
        name: which.

    >>> print(Bystander(kind="metric", name="'f1'"))
    the metric 'f1'
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}"


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Facts about an exception, of any class."""

    is_told: bool = False
    stopped: Stopped | None = None
    bystander: Bystander | None = None
    is_committed: bool = False
    keys: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    part: str | None = None


_FACTS = "__automicro_facts__"


def remember(error: BaseException, **facts: Any) -> None:
    """Keep with an exception what is known of it: some of the attributes of `_Facts`.

    >>> error = KeyboardInterrupt()
    >>> remember(error, is_told=True)
    >>> facts_of(error).is_told, facts_of(error).is_committed
    (True, False)
    """
    known = replace(facts_of(error), **facts)
    with contextlib.suppress(Exception):  # it is no reason for another error
        # Past the class's own __setattr__, which may refuse.
        BaseException.__setattr__(error, _FACTS, known)


def blame(error: BaseException, culprit: Bystander, doing: str) -> None:
    """Note what beside the step an exception was raised in; what lies inside of it knows better.

    >>> error = MemoryError()
    >>> blame(error, Bystander(kind="metric", name="'f1'"), "while updating the metric 'f1'")
    >>> error.__notes__, bystander(error)
    (["automicro: while updating the metric 'f1'"], "the metric 'f1'")
    """
    add_note(error, f"automicro: {doing}")
    if facts_of(error).bystander is None:
        remember(error, bystander=culprit)


def bystander(error: BaseException) -> str | None:
    """The participant beside the step that raised an exception, in words; None if none did.

    >>> bystander(MemoryError()) is None
    True
    """
    found = facts_of(error).bystander
    return None if found is None else str(found)


def facts_of(error: BaseException) -> _Facts:
    """The facts about an exception; none unless `remember` was called.

    >>> facts_of(ValueError()) == _Facts()
    True
    """
    # Past __getattr__, which may be a user's.
    found = vars(error).get(_FACTS)
    return found if isinstance(found, _Facts) else _Facts()


def keys_of(error: BaseException) -> tuple[str, ...]:
    """The arguments, or the dotted keys of a config, that an error is about; none if unknown.

    >>> keys_of(ValueError())
    ()
    """
    return facts_of(error).keys


@contextlib.contextmanager
def about(*keys: object) -> Iterator[None]:
    """Remember of each error which keys it is about; what lies inside knows better.

    >>> try:
    ...     with about("model"), about("model.args"):
    ...         raise ConfigError("no such argument")
    ... except ConfigError as error:
    ...     keys_of(error)
    ('model.args',)
    """
    try:
        yield
    except Exception as error:
        if not keys_of(error):
            remember(error, keys=tuple(map(str, keys)))
        raise


class AutomicroError(Exception):
    """Base of all errors that automicro raises."""


class BatchError(AutomicroError, ValueError):
    """A batch cannot be cut into microbatches without guessing or dropping rows."""


class LossError(AutomicroError, ValueError):
    """A forward gave no loss, or one that cannot be differentiated."""


class LossAverageError(LossError):
    """A few rows have shown another average than the loss was taken for, with ``probe="error"``."""


class NonFiniteLossError(LossError):
    """The loss of a whole batch is NaN or infinite. Raised before the optimizer steps."""


class UnsplittableModelError(AutomicroError, ValueError):
    """The model computes statistics over the batch and ``batchnorm="error"`` forbids to split."""


class UntraceableModelError(AutomicroError, ValueError):
    """The model cannot be run on tensors without data. The message has its line, and what to do."""


class DataLoaderError(AutomicroError, ValueError):
    """A data loader gave no batch."""


class ConfigError(AutomicroError, ValueError):
    """A configuration or a command line cannot be read. The message names key, value, remedy."""


class OptimizerStepError(AutomicroError, RuntimeError):
    """Memory ran out inside ``optimizer.step()`` or gradient clipping, which may be half applied.

    The message says what may have changed. Of parameters or optimizer state, continue from a
    checkpoint.
    """


class RollbackError(AutomicroError, RuntimeError):
    """The state before the step could not be put back. Continue from a checkpoint."""


class RankError(AutomicroError, RuntimeError):
    """Several ranks cannot go on together. The others are told, and raise too."""


class PeerStoppedError(RankError):
    """Another rank ended the attempt. All ranks roll back; it is raised inside steps only.

    Attributes:
        culprit: the lowest rank that did, where it is known.
    """

    culprit: int | None = None


class PeerFailedError(RankError):
    """Another rank failed for good. The message names it and repeats its error."""


class PeerLostError(RankError):
    """A peer is gone or does not answer: killed, stopped, cut off, or late by a timeout."""


class DesyncError(RankError):
    """Ranks are at different points of the program, or were given different options."""


class CheckpointError(AutomicroError, RuntimeError):
    """A checkpoint cannot be written or loaded. Older ones are as they were."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or was changed since. The message names the file."""


class AutomicroWarning(UserWarning):
    """Base of all warnings that automicro gives."""


class BatchNormWarning(AutomicroWarning):
    """Layers that average over the batch now see one microbatch at a time."""


class BufferWarning(AutomicroWarning):
    """A forward changes buffers or sets parameters, which then depend on the microbatch size."""


class StateWarning(AutomicroWarning):
    """A forward reaches something that cannot be put back after a failed attempt."""


class GradientWarning(AutomicroWarning):
    """Something sees, or adds to, the gradients of microbatches one by one."""


class MetricWarning(AutomicroWarning):
    """A metric, an output or a number beside the loss depends on the microbatch size.

    Or it stands among the losses, and is added to them.
    """


class LossAverageWarning(AutomicroWarning):
    """The loss is not the average that it was taken for, so splitting changes the gradient."""


class PaddingWarning(AutomicroWarning):
    """Padding is not cut, because rows would compute something else, or labels count in it."""


class DeterminismWarning(AutomicroWarning):
    """A run was asked to give the same bits each time, and may not."""


class CheckpointWarning(AutomicroWarning):
    """A checkpoint was skipped because it is damaged, not written, or not removed."""


class LoggerWarning(AutomicroWarning):
    """A logger failed, or a value cannot be logged. The run goes on."""


class SizeCacheWarning(AutomicroWarning):
    """A remembered size cannot be read, written or removed. The run finds its sizes anew."""


if TYPE_CHECKING:

    class SampleTooLargeError(AutomicroError, torch.OutOfMemoryError):
        """Even the smallest microbatch runs out of memory. The state is as before the step."""

else:

    def __getattr__(name: str) -> type[Exception]:
        # Made when it is first asked for: torch, whose class is its base, takes a second to import,
        # and a mistyped command line needs another error.
        if name != "SampleTooLargeError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import torch

        doc = "Even the smallest microbatch runs out of memory. The state is as before the step."
        made = type(
            name, (AutomicroError, torch.OutOfMemoryError), {"__doc__": doc, "__module__": __name__}
        )
        # One class for all who ask, also of two threads at once: except clauses compare classes.
        return globals().setdefault(name, made)


_PACKAGE = Path(__file__).parent


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line that called into automicro.

    ``warnings.warn`` shows one text once per line of code in a process. The caller keeps
    count for an object of its own, so a second object with the same trouble is heard too.

    Raises:
        Warning: filters turn the category into an error.

    Example:
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
    # A context that warns when it is left does so in a frame of contextlib's.
    path = frame.f_code.co_filename
    return path == contextlib.__file__ or _PACKAGE in Path(path).parents
