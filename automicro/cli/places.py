"""Where in the code an error was raised, for somebody who wrote only some of that code."""

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parent.parent
# Models and data to try things with: nobody mends a bug there by reporting it.
DEMO = PACKAGE / "demo"
STANDARD_LIBRARY = Path(os.__file__).parent
INSTALLED = ("site-packages", "dist-packages")
# Torch calls back into automicro with every operation: what is below is torch again.
BELOW_TORCH = ("__torch_dispatch__", "__torch_function__")
PRIVATE_OF_TORCH = f"torch{os.sep}_"
# Nobody but who wrote the line can have meant these.
SLIPS = (AssertionError, AttributeError, KeyError, NameError)
# A worker process of a DataLoader sends its traceback as text.
WORKER_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
IN_WORKER = "Original Traceback (most recent call last):"


def users_place(error: BaseException) -> str | None:
    """The innermost line of the user's own code that an error passed through.

    Returns:
        Such as ``my_models.py:8, in forward: self.head(x)``; None where there is no such line.

    >>> try:
    ...     compile("1 +", "my_models.py", "exec")
    ... except SyntaxError as error:
    ...     users_place(error)
    'my_models.py:1: 1 +'
    """
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        code = f": {error.text.strip()}" if error.text else ""
        return f"{shorten(error.filename)}:{error.lineno}{code}"
    for place in reversed([*_places(error), *_places_in_worker(error)]):
        if is_users(place.filename):
            return _describe(place)
    return None


def librarys_place(error: BaseException) -> str | None:
    """The innermost line of a library that an error passed through, and what was called there.

    Returns:
        Such as ``torch/nn/functional.py:4294, in mse_loss, called by the loss MSELoss``; None
        where automicro called no library.

    >>> import torch
    >>> try:
    ...     torch.nn.Linear(2, 2)(torch.zeros(3))
    ... except RuntimeError as error:
    ...     librarys_place(error)
    'torch/nn/modules/linear.py:..., in forward, called by Linear'
    """
    frames = list(_frames(error))
    first = next((frame for frame, _ in reversed(frames) if _role(frame)), None)
    innermost = None
    for place in _places(error):
        if PRIVATE_OF_TORCH not in place.filename:
            innermost = None if _is_ours(place.filename) else place
    if innermost is None or is_users(innermost.filename):
        return None
    text = f"{shorten(innermost.filename)}:{innermost.lineno}, in {innermost.name}"
    return text if first is None else f"{text}, called by {_role(first)}"


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
    places = list(_places(error))
    return bool(places) and _is_ours(places[-1].filename) and _is_raised_in(places[-1])


def is_bug_of_ours(error: BaseException) -> bool:
    """Tell whether an error looks like a slip in a line of automicro, and nobody else's.

    >>> is_bug_of_ours(NameError("not raised at all"))
    False
    """
    places = list(_places(error))
    if not places or not isinstance(error, SLIPS) or not _is_ours(places[-1].filename):
        return False
    if isinstance(error, AssertionError | NameError):
        return True
    from automicro.step.events import WHILE_UPDATING

    is_metrics = any(note.startswith(WHILE_UPDATING) for note in getattr(error, "__notes__", ()))
    return users_place(error) is None and not is_metrics and not _is_of_users_object(error)


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


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        is_below = frame.f_code.co_name in BELOW_TORCH and _is_ours(frame.f_code.co_filename)
        if is_below and not isinstance(error, SLIPS):
            return
        yield frame, line


def _places(error: BaseException) -> list[traceback.FrameSummary]:
    wanted = sum(1 for _ in _frames(error))
    return list(traceback.extract_tb(error.__traceback__, limit=wanted)) if wanted else []


def _places_in_worker(error: BaseException) -> list[traceback.FrameSummary]:
    text = str(error).partition(IN_WORKER)[2]
    return [
        traceback.FrameSummary(name, int(line), function)
        for name, line, function in WORKER_FRAME.findall(text)
    ]


def _describe(place: traceback.FrameSummary) -> str:
    text = f"{shorten(place.filename)}:{place.lineno}"
    if place.name != "<module>":
        text += f", in {place.name}"
    # What it raises is the message already.
    return text if _is_raised_in(place) else f"{text}: {_code(place)}"


def _code(place: traceback.FrameSummary) -> str:
    """The expression that failed, or its line where Python does not know."""
    line = linecache.getline(place.filename, place.lineno or 0)
    start, end = getattr(place, "colno", None), getattr(place, "end_colno", None)
    if start is not None and end is not None:
        if getattr(place, "end_lineno", None) == place.lineno:
            return line.encode()[start:end].decode(errors="replace").strip() or line.strip()
        return f"{line.encode()[start:].decode(errors='replace').strip()}…"
    return line.strip()


def _is_of_users_object(error: BaseException) -> bool:
    """Whether something that the user wrote lacks what automicro asks of it."""
    module = sys.modules.get(type(getattr(error, "obj", None)).__module__)
    return is_users(getattr(module, "__file__", None) or "<none>")


def _is_raised_in(place: traceback.FrameSummary) -> bool:
    return (place.line or "").startswith("raise ")


def _role(frame: FrameType) -> str | None:
    """What automicro called, where it says what it is."""
    import torch

    roles: tuple[tuple[type, str], ...] = (
        (torch.nn.Module, ""),
        (torch.optim.lr_scheduler.LRScheduler, "the scheduler"),
        (torch.optim.Optimizer, "the optimizer"),
    )
    one = frame.f_locals.get("self")
    if _is_ours(frame.f_code.co_filename):
        return None
    words = next((words for kind, words in roles if isinstance(one, kind)), None)
    if words is None:
        return None
    # Losses have no public class of their own.
    is_loss = type(one).__module__ == torch.nn.MSELoss.__module__
    return f"{'the loss' if is_loss else words} {type(one).__name__}".strip()


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return PACKAGE in path.parents and DEMO not in path.parents
