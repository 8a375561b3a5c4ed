"""How errors are shown, and with which exit code each kind ends."""

import os
import select
import sys
import traceback

from automicro.cli.nodes import as_yaml
from automicro.cli.results import complain
from automicro.errors import AutomicroError, ConfigError
from automicro.oom import is_out_of_memory
from automicro.passes import METRIC_NOTE

OK, FAILED, MISUSED, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141
OUR_NOTE = "automicro: "


def show_failure(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong, and return the exit code.

    Args:
        error: what a command raised.
        debug: whether to show the traceback of any error.

    >>> show_failure(ConfigError("no model"), debug=False)  # says it on stderr
    2
    """
    code, text, needs_traceback = _describe(error)
    if debug or needs_traceback:
        traceback.print_exception(error)
    complain(text)
    if code != INTERRUPTED and not (debug or needs_traceback):
        print("(--debug shows the traceback)", file=sys.stderr)
    return code


def summarize_error(error: BaseException) -> str:
    """An error that is not ours, in words: its type, what it says, and its notes.

    >>> summarize_error(KeyError("x"))
    "KeyError: 'x'"
    """
    return "\n  ".join([f"{type(error).__name__}: {error}", *_notes(error)])


def is_closed_pipe(error: BaseException) -> bool:
    """Tell whether nobody reads stdout any more, as behind ``| head``.

    >>> is_closed_pipe(BrokenPipeError())  # of something else
    False
    """
    # Rich turns it into an exit.
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if not isinstance(cause, BrokenPipeError):
        return False
    if isinstance(error, SystemExit):
        return True
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no such call here, or no file behind stdout
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def forget_stdout() -> None:
    """Let what is still to be written to a closed pipe vanish, when Python ends too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _describe(error: BaseException) -> tuple[int, str, bool]:
    """The exit code, the text, and whether nobody could find the mistake without a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, " ".join(["interrupted", *_notes(error)]), False
    if isinstance(error, ConfigError):
        # It may quote somebody else's error: nothing in it is rewritten.
        return MISUSED, _with_notes(error), False
    if isinstance(error, AutomicroError) or is_out_of_memory(error):
        return FAILED, as_yaml(_with_notes(error)), False
    if any(note.startswith(METRIC_NOTE) for note in getattr(error, "__notes__", [])):
        said = " ".join(str(error).split())
        lines = [f"the run failed: {type(error).__name__}: {said}", *_notes(error)]
        return FAILED, "\n  ".join(lines), False
    return FAILED, f"the run failed: {summarize_error(error)}", True


def _with_notes(error: BaseException) -> str:
    return "\n  ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return [note.removeprefix(OUR_NOTE) for note in getattr(error, "__notes__", [])]
