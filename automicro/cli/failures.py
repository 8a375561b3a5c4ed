"""How errors are shown, and with which exit code each kind ends."""

import contextlib
import json
import os
import re
import select
import signal
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from automicro.cli.peers import has_peers
from automicro.cli.places import IN_WORKER, is_bug_of_ours, is_refusal, librarys_place, users_place
from automicro.cli.results import complain
from automicro.cli.wording import as_yaml
from automicro.errors import AutomicroError, ConfigError, DesyncError, PeerLostError, RankError

if TYPE_CHECKING:
    from automicro.trainer.processes import Place

FAILED, MISUSED, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
TERMINATED = 128 + signal.SIGTERM
OUR_NOTE = "automicro: "
_SHORT = 300  # letters
DEBUG_HINT = "(--debug shows the traceback)"


def show_failure(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong, and return the exit code.

    Args:
        error: what a command raised.
        debug: whether to show the traceback of any error.

    >>> show_failure(ConfigError("no model"), debug=False)  # says it on stderr
    2
    """
    code, text = _describe(error)
    if has_peers() and _is_told_as_one_of_many(error, text, debug=debug):
        return code
    is_ours = is_bug_of_ours(error)
    if debug or is_ours:
        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = None  # they come with the message
        print("".join(shown.format()), end="", file=sys.stderr)
    complain(text)
    leave_for_torchrun(error, text)
    if not (debug or is_ours) and _has_more_to_show(error):
        print(DEBUG_HINT, file=sys.stderr)
    return code


def summarize_error(error: BaseException) -> str:
    """An error in words: what it says, its notes, and of one that is not ours its type and place.

    >>> summarize_error(KeyError("x"))
    "KeyError: 'x'"
    """
    if isinstance(error, AutomicroError) or is_refusal(error):
        return as_yaml(_with_notes(error))
    return "\n  ".join([_headline(error), *_notes(error), *_at(users_place(error))])


def leave_for_torchrun(error: BaseException, text: str) -> None:
    """Write what went wrong where torchrun looks for it, so that its summary says it.

    Args:
        error: nothing is written of one that only followed another rank's, or that all ranks have.
        text: the message.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or isinstance(error, RankError | KeyboardInterrupt | SystemExit):
        return
    if _is_most_likely_of_all(error):
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # it is said already
        Path(path).write_text(
            json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8"
        )


def is_sigterm(error: BaseException) -> bool:
    """Tell whether training ended because SIGTERM asked it to.

    >>> is_sigterm(SystemExit(143)), is_sigterm(SystemExit(1))
    (True, False)
    """
    return isinstance(error, SystemExit) and error.code == TERMINATED


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


def _is_told_as_one_of_many(error: BaseException, text: str, *, debug: bool) -> bool:
    """Say of one process among several what concerns it; whether that is all there is to say."""
    from automicro.trainer.processes import is_said_by_first, leave, place_for_output

    place = place_for_output()
    leave()
    if debug:
        return False
    if _is_most_likely_of_all(error):
        is_said = is_said_by_first(text)
        if place.is_first:
            return False  # it tells all of it
        if is_said:
            return True
        if is_said is False and isinstance(error, ConfigError):  # a mistake on this host alone
            complain(f"rank {place.rank} of {place.world_size}: {text}")
            return True
    elif not isinstance(error, RankError) and not _is_end(error, place):
        return False
    if isinstance(error, PeerLostError):
        # Whoever is left has it to say: nobody knows who that will be.
        text = "; ".join(line.strip() for line in text.splitlines())
        named = f"rank {place.rank} of {place.world_size} "
        complain(re.sub(rf"^rank {place.rank} (of {place.world_size} )?", named, text))
        return True
    if " stopped after batch " in text and not place.is_first:
        return True  # in order, which the first one says
    said = _in_one_line(text)
    short = said.removeprefix(f"rank {place.rank}")  # "rank 1 stops because …"
    between = "" if short != said else ": "
    complain(f"rank {place.rank} of {place.world_size}{between}{short}")
    leave_for_torchrun(error, text)
    return True


def _is_most_likely_of_all(error: BaseException) -> bool:
    """Whether all ranks most likely come to the same error."""
    from automicro.errors import SampleTooLargeError

    return isinstance(error, ConfigError | SampleTooLargeError | DesyncError)


def _is_end(error: BaseException, place: "Place") -> bool:
    """Whether the run was asked to end, which the first rank tells all of."""
    return not place.is_first and isinstance(error, KeyboardInterrupt | SystemExit)


def _in_one_line(text: str) -> str:
    """As much of a message as one line holds: the other ranks' share of one error."""
    return textwrap.shorten(text, _SHORT, placeholder=" …")


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, _describe_end("interrupted", error)
    if is_sigterm(error):
        return TERMINATED, _describe_end("ended by SIGTERM", error)
    if isinstance(error, ConfigError):
        # It may quote somebody else's error: nothing in it is rewritten.
        return MISUSED, _with_notes(error)
    from automicro.memory.oom import is_out_of_memory

    if isinstance(error, AutomicroError) or is_out_of_memory(error) or is_refusal(error):
        return FAILED, as_yaml(_with_notes(error))
    if is_bug_of_ours(error):
        bug = "this is a bug of automicro and no mistake of yours: report it with what is above"
        return FAILED, "\n  ".join([_headline(error), *_notes(error), bug])
    where = users_place(error) or librarys_place(error)
    lines = [f"the run failed: {_headline(error)}", *_notes(error), *_at(where)]
    return FAILED, "\n  ".join(lines)


def _headline(error: BaseException) -> str:
    kind, said = type(error).__name__, str(error)
    if isinstance(error, SyntaxError):  # its place is told apart
        said = error.msg
    if IN_WORKER in said:  # the traceback of another process, as text
        last = next(line for line in reversed(said.splitlines()) if line.strip())
        return f"{last} (in a worker process of the DataLoader)"
    # Some tell a story over several lines, which are told apart from notes by their indent.
    return "\n    ".join(line for line in f"{kind}: {said}".splitlines() if line.strip())


def _at(place: str | None) -> list[str]:
    return [] if place is None else [f"at {place}"]


def _has_more_to_show(error: BaseException) -> bool:
    """Whether a traceback says more than the message: never of a mistake in a config itself."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    if not isinstance(error, ConfigError):
        return True
    cause: BaseException | None = error
    while isinstance(cause, ConfigError):
        cause = cause.__cause__
    return cause is not None and bool(_notes(cause) or users_place(cause))


def _describe_end(what: str, error: BaseException) -> str:
    """What ended a run; where it ended in order, its note says so in one line."""
    in_order = [note for note in _notes(error) if ": stopped " in note]
    return in_order[0] if in_order else " ".join([what, *_notes(error)])


def _with_notes(error: BaseException) -> str:
    return "\n  ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", [])
    return list(dict.fromkeys(note.removeprefix(OUR_NOTE) for note in notes))
