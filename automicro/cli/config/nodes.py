"""Nodes, ``{call: dotted.path, args: {…}}``: parsing, checks, and creation of their objects."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from automicro.cli.config.keys import OPTIONS, Option, as_override, mistake
from automicro.errors import ConfigError, about, add_note, facts_of, remember, suggestion

NODE_KEYS = ("call", "args")
FORM = "write {call: dotted.path, args: {name: value}}"
# Prefixes that people omit from a path, because their imports have them.
PLACES = (
    "builtins",
    "torch",
    "torch.nn",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torchmetrics",
    "torchmetrics.classification",
    "automicro",
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class CallConfig(TypedDict):
    """An object to be created: a class or a function by its dotted path, and its arguments.

    Attributes:
        call: the dotted import path of a class or a function, such as ``torch.optim.AdamW``. It is
            called once and has to return the object itself: the model, the DataLoader, the loss
            function.
        args: its arguments by name. Mappings with ``call`` at any depth are created first. To pass
            a function without calling it:
            ``{call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}``.
    """

    call: str
    args: dict[str, Any]


def read_node(node: object, key: str) -> CallConfig:
    """Return a well-formed node; nested nodes are checked, too."""
    if not isinstance(node, Mapping):
        raise mistake(f"{key}={show(node)} is not a mapping: {FORM}", key)
    for name, value in node.items():
        if name not in NODE_KEYS:
            hint = suggestion(str(name), NODE_KEYS)
            below = as_override(f"{key}.args.{name}", value)
            form = FORM if hint else f"arguments belong below it, as {below}"
            raise mistake(f"{key} has an unknown key {name!r}{hint}: {form}", f"{key}.{name}")
    # In YAML, args: without a value is null.
    call, args = node.get("call"), {} if node.get("args") is None else node["args"]
    if not isinstance(call, str):
        raise mistake(
            f"{key}.call={show(call)} is not a path: write the dotted path of a class or a "
            f"function, such as torch.optim.AdamW, directly under {key}",
            f"{key}.call",
        )
    if not isinstance(args, Mapping) or not all(isinstance(each, str) for each in args):
        raise mistake(
            f"{key}.args={show(args)} is not a mapping of names: write {{name: value}} with the "
            f"names of arguments of {call}",
            f"{key}.args",
        )
    _read_inside(args, f"{key}.args")
    return {"call": call, "args": {**args}}


def _read_inside(value: Any, key: str) -> None:
    for name, inner in items_inside(value):
        if is_node(inner):
            read_node(inner, f"{key}.{name}")
        else:
            _read_inside(inner, f"{key}.{name}")


def show(value: object) -> str:
    """Return a value in the notation of YAML, with its kind.

    >>> show(None), show(True), show(1.5), show([1]), show("many")
    ('null', 'true', '1.5 (a decimal number)', '[1] (a list)', "'many' (text)")
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {int: "a whole number", float: "a decimal number", str: "text", list: "a list"}
    kind = kinds.get(type(value), "a mapping" if isinstance(value, Mapping) else "")
    return f"{value!r} ({kind})" if kind else repr(value)


def is_node(value: object) -> bool:
    """Return whether a value in a config describes an object to be created."""
    return isinstance(value, Mapping) and "call" in value


def prepare(
    node: Mapping[str, Any] | CallConfig, key: str, *, first: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return a function that creates the object of a node.

    Imports and signatures, including those of nested nodes, are checked at once, so that mistakes
    are found before any object is created.

    >>> node = {"call": "torch.nn.Linear", "args": {"in_features": 4, "out_features": 2}}
    >>> prepare(node, "model")()
    Linear(in_features=4, out_features=2, bias=True)
    """
    node = read_node(node, key)
    call, args = node["call"], node["args"]
    with about(f"{key}.call"), _noting(f"while importing {key}.call ({call})"):
        target = _import_callable(call, key=f"{key}.call")
    with about(key):
        _check_arguments(target, call, args, key, first)
    values = {name: prepare_value(value, f"{key}.args.{name}") for name, value in args.items()}
    return functools.partial(_make, target, values, key, call)


def prepare_value(value: Any, key: str) -> Callable[..., Any]:
    """Return a function that creates a value, which can contain nodes at any depth.

    >>> prepare_value([{"call": "fractions.Fraction"}, 1], "values")()
    [Fraction(0, 1), 1]
    """
    if is_node(value):
        return prepare(value, key)
    inner = {name: prepare_value(each, f"{key}.{name}") for name, each in items_inside(value)}
    if isinstance(value, Mapping):
        return lambda: {name: make() for name, make in inner.items()}
    if isinstance(value, list):
        return lambda: [make() for make in inner.values()]
    return lambda: value


def items_inside(value: Any) -> list[tuple[Any, Any]]:
    """Return names and values of a mapping, indices and values of a list, or nothing."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with a function applied to each leaf of its mappings and lists.

    >>> mapped({"sizes": [1, 2]}, str)
    {'sizes': ['1', '2']}
    """
    if isinstance(value, Mapping):
        return {name: mapped(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(each, change) for each in value]
    return change(value)


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of mappings and lists by dotted key; empty ones are leaves, too.

    >>> leaves({"model": {"args": {"sizes": [1, 2]}}, "metrics": {}})
    {'model.args.sizes.0': 1, 'model.args.sizes.1': 2, 'metrics': {}}
    """
    inside = items_inside(value)
    if not inside:
        return {key: value} if key else {}
    return {
        name: leaf
        for part, each in inside
        for name, leaf in leaves(each, f"{key}.{part}" if key else str(part)).items()
    }


def _make(
    target: Callable[..., Any],
    values: Mapping[str, Callable[[], Any]],
    key: str,
    call: str,
    *first: Any,
) -> Any:
    args = {name: value() for name, value in values.items()}
    try:
        with _noting(f"while making {key} ({call})"):
            return target(*first, **args)
    except Exception as error:
        # If the error names the wrong arguments, it is attributed to their lines of the config.
        wrong = [f"{key}.args.{name}" for name in facts_of(error).keys if name in args]
        remember(error, keys=tuple(wrong or [key]))
        raise


@contextmanager
def _noting(doing: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        add_note(error, doing)
        raise


def _import_callable(path: str, *, key: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path."""
    if not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{key}={path!r} is not a dotted path: write names joined by dots, such as "
            f"torch.optim.AdamW"
        )
    found: Any = None
    before = ""
    # Part by part, not with pkgutil.resolve_name(), so that an error can name the wrong part.
    for part in path.split("."):
        whole = f"{before}.{part}" if before else part
        try:
            is_inside = bool(before) and hasattr(found, part)
            found = getattr(found, part) if is_inside else importlib.import_module(whole)
        except ModuleNotFoundError as error:
            # An import inside an existing module failed.
            if error.name not in (whole, before):
                raise
            raise ConfigError(f"{key}={path!r}: {_missing(found, before, part, path)}") from None
        before = whole
    if not callable(found):
        # Modules are often named like a class in them: torch.optim.adamw, AdamW.
        last = path.rpartition(".")[2]
        hint = suggestion(last, [each for each in dir(found) if each.lower() == last])
        raise ConfigError(
            f"{key}={path!r} is a {type(found).__name__}, which cannot be called{hint}: name a "
            "class or a function"
        )
    return found  # type: ignore[no-any-return]


def _missing(parent: Any, before: str, part: str, path: str) -> str:
    """Return which part of a path is missing, with a suggestion."""
    if before:
        known = {each for each in dir(parent) if not each.startswith("_")}
        known |= {each.name for each in pkgutil.iter_modules(getattr(parent, "__path__", []))}
        return f"{before!r} has no {part!r}{suggestion(part, known)}: correct the path"
    for place in PLACES:
        # Some libraries of PLACES might not be installed.
        with contextlib.suppress(ImportError, AttributeError):
            if callable(pkgutil.resolve_name(f"{place}.{path}")):
                return (
                    f"there is no module {part!r} (did you mean '{place}.{path}'?): write the "
                    "whole path"
                )
    hint = suggestion(part, [each.name for each in pkgutil.iter_modules()])
    return f"there is no module {part!r}{hint}: install it, or put it next to the config"


def _is_decimal(target: Callable[..., Any], name: str) -> bool:
    """Return whether an argument is annotated as a decimal number that cannot be a bool."""
    owner = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        hint = typing.get_type_hints(owner).get(name)
    except Exception:  # annotations that only a type checker can resolve
        return False
    kinds = {hint, *typing.get_args(hint)}
    return float in kinds and not kinds & {bool, object, Any}


def _check_arguments(
    target: Callable[..., Any],
    call: str,
    args: Mapping[str, Any],
    key: str,
    first: Sequence[str],
) -> None:
    """Refuse arguments that a class or function does not take, and missing ones."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # some builtins have no signature to read
    parameters = [each for each in signature.parameters.values() if each.kind in _NAMED]
    names = [each.name for each in parameters[len(first) :]]
    known = f"it takes {', '.join(names)}" if names else "it takes no arguments"
    for each in parameters:
        if isinstance(args.get(each.name), bool) and _is_decimal(target, each.name):
            raise mistake(
                f"{key}.args.{each.name} is {show(args[each.name])}, but {call} expects a "
                "number. Write a number; YAML reads yes, no, on and off as true or false",
                f"{key}.args.{each.name}",
            )
    try:
        signature.bind(*first, **args)
    except TypeError as error:
        kinds = {each.kind for each in signature.parameters.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        unknown = [] if takes_any else [name for name in args if name not in names]
        hints = ", ".join(f"{name!r}{suggestion(name, names)}" for name in unknown)
        why = f"takes no argument {hints}" if unknown else f"cannot be called like this ({error})"
        handed = f" after {first[0]}" if first else ""
        said = f"{key}: {call} {why}: {known}{handed}"
        option = OPTIONS.get(key.partition(".")[0], Option())
        if not isinstance(target, type) and option.made == "function":
            said += (
                f"; call has to return the function. To use {call} itself, write {key}: {{call: "
                f"pkgutil.resolve_name, args: {{name: {call}}}}}"
            )
        where = [f"{key}.args.{name}" for name in unknown] or [f"{key}.call"]
        raise mistake(said, *where) from None
