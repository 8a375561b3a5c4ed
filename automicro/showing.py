"""Representations of objects: as one line, as text in notebooks, and as JSON values."""

import dataclasses
import functools
import html
import inspect
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from automicro.durations import Duration

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60
_SHORT.maxlist = _SHORT.maxtuple = 2
_MISSING = object()


def one_line(subject: object) -> str:
    """Return the call that would create an object, with arguments that differ from defaults.

    Arguments must be stored under their names, with or without an underscore.

    >>> class Patient:
    ...     def __init__(self, monitor, *, patience=3, mode="min"):
    ...         self._monitor, self._patience, self._mode = monitor, patience, mode
    >>> one_line(Patient("eval/loss", patience=5))
    "Patient(monitor='eval/loss', patience=5)"
    """
    told = []
    for name, parameter in inspect.signature(type(subject).__init__).parameters.items():
        value = getattr(subject, f"_{name}", getattr(subject, name, _MISSING))
        # A method with an argument's name does not hold the argument.
        if name == "self" or value is _MISSING or inspect.ismethod(value):
            continue
        if not _is_same(value, parameter.default):
            told.append(f"{name}={short(value)}")
    return f"{type(subject).__name__}({', '.join(told)})"


def short(value: object) -> str:
    """Return a short representation of a value on one line."""
    return " ".join(_SHORT.repr(value).split())


def _is_same(value: object, default: object) -> bool:
    try:
        return bool(value == default)
    except Exception:  # tensors and arrays compare element by element
        return False


def html_text(text: str) -> str:
    r"""Return text as HTML for a notebook, with its first line as a heading.

    >>> html_text("exact\n\n  1 × 2 < 3")
    '<strong>exact</strong><pre>  1 × 2 &lt; 3</pre>'
    """
    first, _, rest = text.partition("\n")
    heading = f"<strong>{html.escape(first)}</strong>"
    rest = rest.strip("\n")
    return f"{heading}<pre>{html.escape(rest)}</pre>" if rest else heading


def json_values(value: Any, read_constant: Callable[[str], Any] = str) -> Any:
    """Return a value in which anything that JSON lacks is text, and NaN what a function returns.

    >>> json_values({"lr": (0.1, float("nan")), 3: {True}, (1, 2): None})
    {'lr': [0.1, 'NaN'], '3': [True], '(1, 2)': None}
    """
    return json.loads(json.dumps(_plain(value)), parse_constant=read_constant)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        # JSON itself turns a number, a bool or None into a name.
        names = [each if isinstance(each, _PLAIN) else str(each) for each in value]
        return dict(zip(names, map(_plain, value.values()), strict=True))
    if isinstance(value, list | tuple | set | frozenset):
        return list(map(_plain, value))
    return value if isinstance(value, _PLAIN) else str(value)


_PLAIN = (str, int, float, NoneType)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def as_text(value: Any) -> str:
    """Return a value as text that is the same in each process, without addresses.

    >>> as_text({"lr": [0.1, None]}), as_text(dict()), as_text(json.dumps)
    ("{'lr': [0.1, None]}", '{}', 'dumps')
    """
    # Imported here, because the command line shows values without torch.
    from torch import nn

    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, Duration | Path):
        return repr(str(value))
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        return "{" + ", ".join(f"{as_text(k)}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, functools.partial):
        options = as_text(value.keywords) if value.keywords else ""
        return f"partial({', '.join([as_text(value.func), *map(as_text, value.args), options])})"
    if type(value).__module__.startswith("automicro."):
        return _ADDRESS.sub("", repr(value))
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name
