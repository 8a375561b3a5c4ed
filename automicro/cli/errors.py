"""How errors and warnings are shown: exit codes, and the line of the user's own code."""

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
_SHORT = 300  # letters
DEBUG_HINT = "(--debug shows the traceback)"
PACKAGE = Path(__file__).parent.parent
# Models and data to try things with: reporting a bug there mends nothing.
DEMO = PACKAGE / "demo"
STANDARD_LIBRARY = Path(os.__file__).parent
INSTALLED = ("site-packages", "dist-packages")
# A worker process of a DataLoader sends its traceback as text.
WORKER_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
IN_WORKER = "Original Traceback (most recent call last):"


def show_failure(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong, and return the exit code.

    >>> show_failure(ConfigError("no model"), debug=False)  # says it on stderr
    2
    """
    code, text = _describe(error)
    said = _share(error, text) if has_peers() else text
    if said != text and not debug:
        if said:
            complain(said)
        return code
    if debug:
        traceback.print_exception(error)
    complain(text)
    _leave_for_torchrun(error, text)
    if not debug and _has_more_to_show(error):
        print(DEBUG_HINT, file=sys.stderr)
    return code


def summarize_error(error: BaseException) -> str:
    """An error in words: what it says, its notes, and of one that is not ours its type and place.

    >>> summarize_error(KeyError("x"))
    "KeyError: 'x'"
    """
    if isinstance(error, AutomicroError) or is_refusal(error):
        return _with_notes(error)
    return _in_words(error, _users_place(error))


def _leave_for_torchrun(error: BaseException, text: str) -> None:
    """Write what went wrong where torchrun looks for it, so that its summary says it."""
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
    """Tell whether stdout is no longer read, as behind ``| head``.

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
        # A BrokenPipeError may come from any pipe of the user's: POLLERR tells that it is that of
        # stdout.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # no such call here, or no file behind stdout
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def forget_stdout() -> None:
    """Let what is still to be written to a closed pipe vanish, when Python ends too."""
    # Python flushes stdout once more at its end, which would fail again where there is no reader.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _share(error: BaseException, text: str) -> str:
    """The text that one process among several says; empty where another one says it."""
    from automicro.trainer.processes import leave, place_for_output

    place = place_for_output()
    # The error is caught, so Python does not know of it: at its exit it would end the process group
    # in order, and wait there for ranks that are gone.
    leave()
    if isinstance(error, PeerLostError):
        # Any rank that is left says it.
        return "; ".join(line.strip() for line in text.splitlines())
    is_shared = _is_most_likely_of_all(error) or isinstance(error, KeyboardInterrupt | SystemExit)
    is_of_another = isinstance(error, PeerFailedError)
    if not is_of_another and (place.is_first or not is_shared):
        return text
    if facts_of(error).stopped is not None:
        return ""  # in order, which the first one says
    # As much of it as one line holds: the other ranks' share of one error. Ours name the rank.
    line = text if is_of_another else f"rank {place.rank} of {place.world_size}: {text}"
    return textwrap.shorten(line, _SHORT, placeholder=" …")


def _is_most_likely_of_all(error: BaseException) -> bool:
    """Whether all ranks most likely come to the same error."""
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

    if isinstance(error, AutomicroError) or is_out_of_memory(error) or is_refusal(error):
        return FAILED, _with_notes(error)
    return FAILED, f"the run failed: {_in_words(error, _users_place(error))}"


def _headline(error: BaseException) -> str:
    kind, said = type(error).__name__, str(error)
    if isinstance(error, SyntaxError):  # its place is told apart
        said = error.msg
    if IN_WORKER in said:  # the traceback of another process, as text
        last = next(line for line in reversed(said.splitlines()) if line.strip())
        return f"{last} (in a worker process of the DataLoader)"
    # Some tell a story over several lines, which are told apart from notes by their indent.
    return "\n    ".join(line for line in f"{kind}: {said}".splitlines() if line.strip())


def _in_words(error: BaseException, place: str | None) -> str:
    at = [] if place is None else [f"at {place}"]
    return "\n  ".join([_headline(error), *_notes(error), *at])


def _has_more_to_show(error: BaseException) -> bool:
    """Whether a traceback says more than the message: never of a mistake in a config itself."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    if not isinstance(error, ConfigError):
        return True
    # Errors of a config wrap one another: what counts is the first cause of another kind.
    cause: BaseException | None = error
    while isinstance(cause, ConfigError):
        cause = cause.__cause__
    return cause is not None and bool(_notes(cause) or _users_place(cause))


def _describe_end(what: str, error: BaseException) -> str:
    """Describe the end of a run, an orderly one in one line."""
    stopped = facts_of(error).stopped
    first, *more = _notes(error) or [""]
    return str(stopped) if stopped is not None else "; ".join([f"{what} {first}".strip(), *more])


def _with_notes(error: BaseException) -> str:
    return "\n  ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", [])
    return list(dict.fromkeys(note.removeprefix(OUR_NOTE) for note in notes))


def _users_place(error: BaseException) -> str | None:
    """The innermost line of the user's own code that an error passed through.

    >>> try:
    ...     compile("1 +", "my_models.py", "exec")
    ... except SyntaxError as error:
    ...     _users_place(error)
    'my_models.py:1: 1 +'
    """
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        code = f": {error.text.strip()}" if error.text else ""
        return f"{shorten(error.filename)}:{error.lineno}{code}"
    # Lines of a worker process lie further inside than those that passed its error on.
    for place in reversed([*traceback.extract_tb(error.__traceback__), *_places_in_worker(error)]):
        if is_users(place.filename):
            return _describe_place(place)
    return None


def is_refusal(error: BaseException) -> bool:
    """Tell whether automicro raised an error itself, to say what is wrong with what it was given.

    >>> from automicro.policy.choose import make_policy
    >>> try:
    ...     make_policy(0)
    ... except ValueError as error:
    ...     is_refusal(error)
    True
    """
    if not isinstance(error, TypeError | ValueError):
        return False
    places = traceback.extract_tb(error.__traceback__)
    # By a raise statement: a TypeError that an expression of ours ran into refuses nothing.
    return bool(places) and _is_ours(places[-1].filename) and _is_raised_in(places[-1])


def is_users(filename: str) -> bool:
    """Tell whether a file is neither automicro's nor that of something installed.

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
    """Return a path as short as it can be: from where we are, or from where libraries lie.

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


def _places_in_worker(error: BaseException) -> list[traceback.FrameSummary]:
    text = str(error).partition(IN_WORKER)[2]
    return [
        traceback.FrameSummary(name, int(line), function)
        for name, line, function in WORKER_FRAME.findall(text)
    ]


def _describe_place(place: traceback.FrameSummary) -> str:
    text = f"{shorten(place.filename)}:{place.lineno}"
    if place.name != "<module>":
        text += f", in {place.name}"
    # What it raises is the message already.
    return text if _is_raised_in(place) else f"{text}: {place.line}"


def _is_raised_in(place: traceback.FrameSummary) -> bool:
    return (place.line or "").startswith("raise ")


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return PACKAGE in path.parents and DEMO not in path.parents


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Show warnings as ``automicro: warning: …`` meanwhile, those of others with their place.

    Which warnings are shown is left to the filters; one that was shown is not shown again.

    >>> with warnings.catch_warnings(), warnings_in_one_line():
    ...     warnings.simplefilter("default")
    ...     warnings.warn("mind the gap", AutomicroWarning)  # says it on stderr
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
        # A line of torch's that warns of every shape anew says nothing new with the second.
        key = (category, text) if is_ours else (category, filename, lineno)
        if key in shown:
            return
        shown.add(key)
        place = "" if is_ours else f" ({shorten(filename)}:{lineno})"
        warn(f"warning: {'' if is_ours else f'{category.__name__}: '}{text}{place}")

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        # What was installed meanwhile stays.
        if warnings.showwarning is show:
            warnings.showwarning = before
