"""From a dotted path to the class or function that it names."""

import builtins
import contextlib
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

from automicro.cli.places import is_users
from automicro.cli.suggestions import did_you_mean
from automicro.errors import ConfigError

# What people write of a path, as after their imports.
PARENTS = ("torch", "torch.nn", "torch.optim", "torch.utils", "torchmetrics", "automicro")
ALIASES = {"F": "torch.nn.functional", "T": "torchvision.transforms", "np": "numpy"}
# Where people mean the class to be whose name alone they write.
USUAL = (
    "torch.nn",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torchmetrics",
    "torchmetrics.classification",
)


def import_callable(path: str, *, key: str) -> Callable[..., Any]:
    """Return the class or function that a dotted path names.

    Errors that a module raises while it is imported pass through.

    Args:
        path: such as ``torch.optim.AdamW``.
        key: where in the config it stands, for messages.

    Raises:
        ConfigError: no dotted path, a part of it does not exist, or it cannot be called.

    >>> import_callable("torch.nn.Linear", key="model.call")
    <class 'torch.nn.modules.linear.Linear'>
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{key}={path!r} is not a dotted path: write names joined by dots, such as "
            f"torch.optim.AdamW"
        )
    if len(parts) == 1 and hasattr(builtins, path):
        raise ConfigError(f"{key}={path!r} is a builtin: say builtins.{path}")
    found = _import_top(path, key)
    for index, part in enumerate(parts[1:], start=1):
        found = _step(found, parts[:index], part, path, key)
    if not callable(found):
        kind = "module" if isinstance(found, ModuleType) else type(found).__name__
        hint = _class_of_that_name(found, path)
        raise ConfigError(
            f"{key}={path!r} is a {kind}, which cannot be called{hint}: name a class or a function"
        )
    return found  # type: ignore[no-any-return]


def _import_top(path: str, key: str) -> Any:
    top = path.partition(".")[0]
    try:
        return importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        # Nobody's model or data is in the standard library.
        known = {each.name for each in pkgutil.iter_modules()} - sys.stdlib_module_names
        meant = _whole_paths(top) if path == top else []
        if meant:
            raise ConfigError(
                f"{key}={path!r} is no dotted path: write the whole one, "
                f"{' or '.join(map(repr, meant))}"
            ) from None
        whole = _abbreviated(path)
        if whole is not None:
            raise ConfigError(
                f"{key}={path!r}: there is no module {top!r} (did you mean {whole!r}?): write the "
                f"whole path"
            ) from None
        raise ConfigError(
            f"{key}={path!r}: there is no module {top!r}{did_you_mean(top, known)}: install it, "
            f"or put it beside the config"
        ) from None


def _step(parent: Any, before: list[str], part: str, path: str, key: str) -> Any:
    if hasattr(parent, part):
        return getattr(parent, part)
    prefix = ".".join(before)
    if isinstance(parent, ModuleType):
        name = f"{prefix}.{part}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another name is missing inside a module that does exist.
            if error.name not in (name, prefix):
                raise
    known = {each for each in dir(parent) if not each.startswith("_")} | _submodules(parent)
    # Modules are often called like the class in them: torch.optim.adamw.
    classes = {name.lower() for name, each in _own(parent).items() if isinstance(each, type)}
    known = {
        name
        for name in known
        if name.lower() not in classes
        or not isinstance(_own(parent).get(name), ModuleType | NoneType)
    }
    meant = _usual_paths(part) if part == path.rpartition(".")[2] else []
    hint = f" (did you mean {meant[0]!r}?)" if meant else did_you_mean(part, known)
    raise ConfigError(
        f"{key}={path!r}: {prefix!r} exists, but has no {part!r}{hint}: correct the path"
    )


def _abbreviated(path: str) -> str | None:
    """The whole path that somebody means who writes ``nn.Linear``; None where there is none."""
    top, _, rest = path.partition(".")
    wholes = [f"{parent}.{path}" for parent in PARENTS]
    if top in ALIASES:
        wholes.insert(0, f"{ALIASES[top]}.{rest}")
    for whole in wholes:
        parent, _, name = whole.rpartition(".")
        try:
            module = importlib.import_module(parent)
        except ImportError:
            continue
        if not hasattr(module, name):
            near = did_you_mean(name, [each for each in dir(module) if not each.startswith("_")])
            name = near.partition("'")[2].partition("'")[0]
        if name:
            return f"{parent}.{name}"
    return None


def _own(parent: Any) -> Mapping[str, Any]:
    """What is in a module, without making one that is lazy import all it has."""
    return vars(parent) if isinstance(parent, ModuleType) else {}


def _whole_paths(name: str) -> list[str]:
    """Where a class or function of that name is: in modules that lie here, or in usual ones."""
    found = [
        f"{path.stem}.{name}"
        for folder in dict.fromkeys(sys.path)
        if folder and is_users(str(Path(folder) / "any.py"))
        for path in sorted(Path(folder).glob("*.py"))
        if re.search(rf"^(class|def) {name}\b", _read(path), re.MULTILINE)
    ]
    return list(dict.fromkeys(found)) or _usual_paths(name)


def _usual_paths(name: str) -> list[str]:
    """Where a class or function of that name is among usual modules; the first place counts."""
    for module in USUAL:
        with contextlib.suppress(ImportError):
            if callable(getattr(importlib.import_module(module), name, None)):
                return [f"{module}.{name}"]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _submodules(module: Any) -> set[str]:
    return {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}


def _class_of_that_name(found: Any, path: str) -> str:
    """A hint for modules that are named like the class in them: torch.optim.adamw, AdamW."""
    for name, value in vars(found).items() if isinstance(found, ModuleType) else ():
        if isinstance(value, type) and name.lower() == path.rpartition(".")[2].lower():
            return f" (did you mean '{path}.{name}'?)"
    return ""
