"""What every integration does to its host: take a method's place, and give it back."""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MISSING = object()


def import_host(name: str, *, extra: str) -> ModuleType:
    """A module of a host's.

    Args:
        name: of the module.
        extra: of automicro, which installs it.

    Raises:
        ImportError: it is not there; the message says how to get it.

    Example:
        >>> import_host("json", extra="json").__name__
        'json'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # it is there, and lacks something else
        raise ImportError(
            f"automicro.integrations.{extra} works inside {name.partition('.')[0]}, which is not "
            f"installed; pip install 'automicro[{extra}]'",
            name=error.name,
        ) from error


def require_seam(
    owner: Any, name: str, parameters: Sequence[str] = (), *, host: str, supported: str
) -> Any:
    """A method of the host's that an integration stands on.

    Args:
        owner: the object or module that has it.
        name: of the method.
        parameters: that it has to take by these names.
        host: the package, as it is installed.
        supported: which versions are, in words.

    Raises:
        ImportError: this version of the host has it no more, or it takes other parameters.

    Example:
        >>> import json
        >>> require_seam(json, "dumps", ["obj"], host="json", supported="json 2") is json.dumps
        True
    """
    found: Any = getattr(owner, name, None)
    place = getattr(owner, "__name__", type(owner).__name__)
    lacks = [] if callable(found) else [f"{place}.{name}"]
    if not lacks:
        taken = inspect.signature(found).parameters
        lacks = [f"the parameter {each!r} of {name}" for each in parameters if each not in taken]
    if not lacks:
        return found
    try:
        version = importlib.metadata.version(host)
    except importlib.metadata.PackageNotFoundError:
        version = "of no known version"
    raise ImportError(
        f"{host} {version} lacks {', '.join(lacks)}, which automicro stands on; use {supported}, "
        "or tell automicro's developers",
        name=host,
    )


class Replacements:
    """Methods of one object or another that stand in for the host's own, until they are undone.

    On the instance, so that subclasses keep theirs and other objects of the class are left alone.

    Example:
        >>> class Host:
        ...     def step(self):
        ...         return "the host's"
        >>> host, replacements = Host(), Replacements()
        >>> own = replacements.put(host, "step", lambda: "ours, around " + own())
        >>> host.step()
        "ours, around the host's"
        >>> replacements.undo()
        >>> host.step(), vars(host)
        ("the host's", {})
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> Any:
        """Let a function stand in the place of a method; returns that."""
        own = getattr(owner, name)
        earlier = vars(owner).get(name, _MISSING)
        self._undo.append(functools.partial(_put_back, owner, name, earlier))
        setattr(owner, name, function)
        return own

    def undo(self) -> None:
        """Give every place back, the last first."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Replacements":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _put_back(owner: Any, name: str, earlier: Any) -> None:
    if earlier is _MISSING:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, earlier)
