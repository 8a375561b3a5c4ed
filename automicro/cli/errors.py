"""Display of errors and warnings: exit codes, and the line of user code that failed."""

import contextlib
import os
import select
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from automicro.cli.output import complain, has_peers, warn
from automicro.errors import (
    AutomicroError,
    AutomicroWarning,
    ConfigError,
    DesyncError,
    PeerFailedError,
    PeerLostError,
    RankError,
    facts_of,
)

FAILED, MISUSED, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
TERMINATED = 128 + signal.SIGTERM
OUR_NOTE = "automicro: "
_SHORT = 300  # characters
DEBUG_HINT = "(--debug shows the traceback)"
PACKAGE = Path(__file__).parent.parent
# Models and data for demonstrations, whose errors are shown like those of user code.
DEMO = PACKAGE / "demo"
STANDARD_LIBRARY = Path(os.__file__).parent
INSTALLED = ("site-packages", "dist-packages")


def show_failure(error: BaseException, *, debug: bool) -> int:
    """Print an error to stderr, and return the exit code."""
    code, text = _describe(error)
    said = _share(error, text) if has_peers() else text
    if said != text and not debug:
        if said:
            complain(said)
        return code
    if debug:
        traceback.print_exception(error)
    complain(text)
    _leave_for_torchrun(error)
    if not debug and _has_more_to_show(error):
        print(DEBUG_HINT, file=sys.stderr)
    return code


def summarize_error(error: BaseException) -> str:
    """Describe an error with its notes; errors of other code with their type and place, too."""
    if isinstance(error, AutomicroError) or _is_refusal(error):
        return _with_notes(error)
    return _in_words(error, _users_place(error))


def _leave_for_torchrun(error: BaseException) -> None:
    """Write the error to the file that torchrun shows in its summary."""
    is_cause = isinstance(error, Exception) and not isinstance(error, RankError)
    if "TORCHELASTIC_ERROR_FILE" in os.environ and is_cause and not _is_most_likely_of_all(error):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):  # the error was already printed
            get_error_handler().record_exception(error)


def is_sigterm(error: BaseException) -> bool:
    """Return whether training ended because of SIGTERM."""
    return isinstance(error, SystemExit) and error.code == TERMINATED


def is_closed_pipe(error: BaseException) -> bool:
    """Return whether stdout is closed by its reader, as with ``| head``."""
    # Rich turns a BrokenPipeError into SystemExit.
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        sys.stdout.flush()
        # It might come from any pipe of user code; POLLERR shows whether it is stdout.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no poll here, or stdout is not a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def forget_stdout() -> None:
    """Discard output that is still buffered for a closed pipe, also when Python exits."""
    # Python flushes stdout once more at exit, which would fail again without a reader.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _share(error: BaseException, text: str) -> str:
    """Return the text that one of several ranks prints; empty if another rank prints it."""
    from automicro.trainer.processes import leave, place_for_output

    place = place_for_output()
    # The error is caught, so Python would exit normally: it would destroy the process group and
    # wait there for ranks that are gone.
    leave()
    if isinstance(error, PeerLostError):
        # Every remaining rank prints it.
        return "; ".join(line.strip() for line in text.splitlines())
    is_shared = _is_most_likely_of_all(error) or isinstance(error, KeyboardInterrupt | SystemExit)
    is_of_another = isinstance(error, PeerFailedError)
    if not is_of_another and (place.is_first or not is_shared):
        return text
    if facts_of(error).stopped is not None:
        return ""  # stopped in order, which the first rank reports
    # One line, because it is one rank's part of the same error. Our own errors name the rank.
    line = text if is_of_another else f"rank {place.rank} of {place.world_size}: {text}"
    return textwrap.shorten(line, _SHORT, placeholder=" …")


def _is_most_likely_of_all(error: BaseException) -> bool:
    """Return whether the same error most likely occurs on all ranks."""
    from automicro.errors import SampleTooLargeError

    return isinstance(error, ConfigError | SampleTooLargeError | DesyncError)


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, _describe_end("interrupted", error)
    if is_sigterm(error):
        return TERMINATED, _describe_end("ended by SIGTERM", error)
    if isinstance(error, ConfigError):
        return MISUSED, _with_notes(error)
    from automicro.memory.oom import is_out_of_memory

    if isinstance(error, AutomicroError) or is_out_of_memory(error) or _is_refusal(error):
        return FAILED, _with_notes(error)
    return FAILED, f"the run failed: {_in_words(error, _users_place(error))}"


def _in_words(error: BaseException, place: str | None) -> str:
    # The place of a SyntaxError is reported separately.
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line for line in f"{type(error).__name__}: {said}".splitlines() if line.strip()]
    at = [] if place is None else [f"at {place}"]
    # Messages of several lines are indented to distinguish them from notes.
    return "\n  ".join(["\n    ".join(lines), *_notes(error), *at])


def _has_more_to_show(error: BaseException) -> bool:
    """Return whether a traceback adds to the message; never for a mistake in a config itself."""
    # Config errors wrap each other, so the first cause of another kind counts.
    cause: BaseException | None = error
    while isinstance(cause, ConfigError):
        cause = cause.__cause__
    is_shown = cause is error or bool(cause and (_notes(cause) or _users_place(cause)))
    return isinstance(cause, Exception) and is_shown


def _describe_end(what: str, error: BaseException) -> str:
    """Describe the end of a run, in one line if it was orderly."""
    stopped = facts_of(error).stopped
    first, *more = _notes(error) or [""]
    return str(stopped) if stopped is not None else "; ".join([f"{what} {first}".strip(), *more])


def _with_notes(error: BaseException) -> str:
    return "\n  ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", [])
    return list(dict.fromkeys(note.removeprefix(OUR_NOTE) for note in notes))


def _users_place(error: BaseException) -> str | None:
    """Return the innermost line of user code that an error passed through.

    >>> try:
    ...     compile("1 +", "my_models.py", "exec")
    ... except SyntaxError as error:
    ...     _users_place(error)
    'my_models.py:1: 1 +'
    """
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        code = f": {error.text.strip()}" if error.text else ""
        return f"{shorten(error.filename)}:{error.lineno}{code}"
    for place in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(place.filename):
            return _describe_place(place)
    return None


def _is_refusal(error: BaseException) -> bool:
    """Return whether automicro itself raised an error to refuse a value."""
    if not isinstance(error, TypeError | ValueError):
        return False
    places = traceback.extract_tb(error.__traceback__)
    # Only a raise statement counts: a TypeError in one of our expressions refuses nothing.
    return bool(places) and _is_ours(places[-1].filename) and _is_raised_in(places[-1])


def is_users(filename: str) -> bool:
    """Return whether a file belongs neither to automicro nor to an installed package.

    >>> import torch
    >>> is_users("my_models.py"), is_users(torch.__file__), is_users("<string>")
    (True, False, False)
    """
    # Code without a file, such as <string> and <frozen importlib._bootstrap>, has no line to show.
    path = Path(filename).absolute()
    if filename.startswith("<") or path.suffix != ".py":
        return False
    if _is_ours(filename) or any(part in INSTALLED for part in path.parts):
        return False
    return STANDARD_LIBRARY not in path.parents


def shorten(filename: str) -> str:
    """Return a path relative to the current folder, or to the folder of installed packages.

    >>> shorten("/somewhere/site-packages/torch/nn/functional.py")
    'torch/nn/functional.py'
    """
    path = Path(filename)
    for name in INSTALLED:
        if name in path.parts:
            return str(Path(*path.parts[path.parts.index(name) + 1 :]))
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return filename


def _describe_place(place: traceback.FrameSummary) -> str:
    text = f"{shorten(place.filename)}:{place.lineno}"
    if place.name != "<module>":
        text += f", in {place.name}"
    # The text of a raise statement would only repeat the message.
    return text if _is_raised_in(place) else f"{text}: {place.line}"


def _is_raised_in(place: traceback.FrameSummary) -> bool:
    return (place.line or "").startswith("raise ")


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return PACKAGE in path.parents and DEMO not in path.parents


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings as ``automicro: warning: …``, those of other packages with their place.

    Filters decide which warnings are shown; none is shown twice.
    """
    shown: set[tuple[object, ...]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: object,
        **__: object,
    ) -> None:
        text = " ".join(str(message).split())
        is_ours = issubclass(category, AutomicroWarning)
        # If a line of another package warns about each shape, the second warning adds nothing.
        key = (category, text) if is_ours else (category, filename, lineno)
        if key in shown:
            return
        shown.add(key)
        place = "" if is_ours else f" ({shorten(filename)}:{lineno})"
        warn(f"warning: {'' if is_ours else f'{category.__name__}: '}{text}{place}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
