"""The one form in which a config names things: ``{call: dotted.path, args: {…}}``."""

import functools
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from automicro.cli.dotted import import_callable
from automicro.cli.keys_meant import about
from automicro.cli.signatures import check_arguments
from automicro.cli.suggestions import as_override, did_you_mean
from automicro.errors import ConfigError, add_note

NODE_KEYS = ("call", "args")
FORM = "write {call: dotted.path, args: {name: value}}"


def check_node(node: object, key: str) -> None:
    """Refuse what is not a well-formed node. Interpolations are left for later.

    Raises:
        ConfigError: no mapping, unknown keys, no ``call``, or ``args`` that are not by name.

    >>> check_node({"call": "torch.nn.Linear", "args": {"in_features": 4}}, "model")
    """
    if is_interpolation(node):
        return
    if not isinstance(node, Mapping):
        form = FORM
        if isinstance(node, str) and "." in node:
            form = FORM.replace("dotted.path", node)
        raise ConfigError(f"{key}={show(node)} is not a mapping: {form}")
    for name, value in node.items():
        if name not in NODE_KEYS:
            hint = did_you_mean(str(name), NODE_KEYS)
            below = as_override(f"{key}.args.{name}", value)
            form = FORM if hint else f"arguments belong below it, as {below}"
            raise ConfigError(f"{key} has an unknown key {name!r}{hint}: {form}")
    if "call" not in node:
        raise ConfigError(
            f"{key}.call is missing: write call: and the dotted path of a class or a function "
            f"directly under {key}:"
        )
    call, args = node["call"], node.get("args")
    if not isinstance(call, str):
        raise ConfigError(
            f"{key}.call={show(call)} is not a dotted path: write one such as torch.optim.AdamW"
        )
    if args is None or is_interpolation(args):
        return
    if not isinstance(args, Mapping):
        raise ConfigError(
            f"{key}.args={show(args)} is not a mapping: write {{name: value}}, the names being "
            f"those of the arguments of {call}"
        )
    for name, value in args.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"{key}.args has the name {show(name)}, which is not text: use the name of an "
                f"argument of {call}"
            )
        _check_inside(value, f"{key}.args.{name}")


def prepare(node: Mapping[str, Any], key: str, *, first: Sequence[str] = ()) -> Callable[..., Any]:
    """Return what makes the thing that a node describes, once it is called.

    Imports and signatures are checked now, those of nested nodes too, so that a mistake is found
    before anything is made.

    Args:
        node: a well-formed one, interpolations resolved.
        key: where in the config it stands.
        first: what the caller will hand over first, in words: ``["the model's parameters"]``.

    Raises:
        ConfigError: a path that names nothing, or arguments that do not fit.

    >>> node = {"call": "torch.nn.Linear", "args": {"in_features": 4, "out_features": 2}}
    >>> prepare(node, "model")()
    Linear(in_features=4, out_features=2, bias=True)
    """
    check_node(node, key)
    call, args = node["call"], node.get("args") or {}
    with about(f"{key}.call"), _noting(f"while importing {key}.call ({call})"):
        target = import_callable(call, key=f"{key}.call")
    with about(key):
        check_arguments(target, call, args, key, first)
    values = {name: prepare_value(value, f"{key}.args.{name}") for name, value in args.items()}
    return functools.partial(_make, target, values, key, call)


def show(value: object) -> str:
    """Write a value of a config as YAML has it, and say what it is.

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
    """Tell whether a value inside a config describes something to be made."""
    return isinstance(value, Mapping) and "call" in value


def is_interpolation(value: object) -> bool:
    """Tell whether something else stands for a value, so that it is known only later."""
    return isinstance(value, str) and "${" in value


def _check_inside(value: Any, key: str) -> None:
    if is_node(value):
        check_node(value, key)
        return
    for name, inner in items_inside(value):
        _check_inside(inner, f"{key}.{name}")


def prepare_value(value: Any, key: str) -> Callable[[], Any]:
    """Return what makes a value in which nodes may stand anywhere, or nowhere.

    Args:
        value: a node, a list or a mapping with nodes inside, or anything else.
        key: where in the config it stands.

    Raises:
        ConfigError: as `prepare`.

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
    """The names and values of a mapping, the places and values of a list, else nothing."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _make(
    target: Callable[..., Any],
    values: Mapping[str, Callable[[], Any]],
    key: str,
    call: str,
    *first: Any,
) -> Any:
    args = {name: value() for name, value in values.items()}
    doing = f"while making {key} ({call}){_describe_arguments(args)}{_hint_of_numbers(args)}"
    with about(key), _noting(doing):
        return target(*first, **args)


def _describe_arguments(args: Mapping[str, Any]) -> str:
    """What was handed over by name: plain values as they are, what was made by its type."""
    shown = [f"{name}={_brief(value)}" for name, value in args.items()]
    return f" with {', '.join(shown)}" if shown else ""


def _hint_of_numbers(args: Mapping[str, Any]) -> str:
    """Text may be meant: it counts as a possible reason only once something failed."""
    texts = [name for name, value in args.items() if isinstance(value, str) and _is_number(value)]
    if not texts:
        return ""
    are = "is" if len(texts) == 1 else "are"
    return (
        f"; {' and '.join(texts)} {are} text: write a number without quotes, or one from the "
        f"environment as ${{oc.decode:${{oc.env:NAME}}}}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _brief(value: object) -> str:
    if value is None or isinstance(value, bool):
        return show(value)
    if isinstance(value, str | int | float | list | dict):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"


@contextmanager
def _noting(doing: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        add_note(error, doing)
        raise
