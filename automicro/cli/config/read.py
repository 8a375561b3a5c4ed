"""Each value of a config: whether it belongs under its key, in the type of that key."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from inspect import signature
from pkgutil import resolve_name
from types import NoneType
from typing import Any

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.config.keys import KEYS, OPTIONS, Option, as_override, mistake
from automicro.cli.config.nodes import (
    FORM,
    NODE_KEYS,
    REFERENCE,
    CallConfig,
    is_node,
    items_inside,
    leaves,
    read_node,
    show,
)
from automicro.cli.config.schema import (
    SECTIONS,
    alternatives,
    choices,
    defaults,
    keys_inside,
    one_of,
    wrong_type,
)
from automicro.cli.config.sources import read_value
from automicro.errors import ConfigError, about, nearest, suggestion
from automicro.options import check_choice
from automicro.units import duration_meant, parse_bytes, parse_share, parse_time

At = Callable[..., AbstractContextManager[None]]
"""Entered around what is about some keys: `about` lets the first mistake out, others collect."""

LOSS_AVERAGES = ("auto", "samples", "tokens", "none")
NO_KEYS_OF_ITS_OWN = (
    "a config has no keys of its own, and automicro config --keys lists all that there are; refer "
    "to a value where it stands, as ${model.args.width}, or take it from the environment with "
    "${oc.env:NAME}"
)
SECTION_FORMS = {
    "checkpoint": "{interval: 500ba, keep_last: 2}, {} for the defaults, or null for none",
    "sampling_mode": "{mode: duration, lengths: seconds, batch_length: 600.0}, or fixed",
}
NODES_FORMS = {
    "list": "[{call: dotted.path, args: {name: value}}], or [] for none",
    "mapping": "{name: {call: dotted.path, args: {…}}}, or {} for none",
}


class Reader:
    """Reads values, interpolations resolved, in the types of their keys. Nothing is made.

    Args:
        at: entered around each key inside of another.

    >>> Reader().read("3", "seed")
    3
    """

    def __init__(self, at: At = about) -> None:
        self._at = at

    def read(self, value: Any, key: str, kind: str = "") -> Any:
        """A value as the key may have it; ``kind`` is the key whose values are meant."""
        kind = kind or key
        found, option = alternatives(kind), OPTIONS.get(kind, Option())
        # Messages for Python have None, which people copy.
        value = None if value == "None" else value
        if _is_default(value, kind) or (value is None and {NoneType, Any} & {*found}):
            return value
        if kind == "eval_dataloader":
            return self._evaluations(value, key)
        if kind in SECTIONS:
            return self._section(value, key, kind)
        if option.made in NODES_FORMS:
            return self._nodes(value, key, option.made)
        # A mapping is a node, unless the key may hold a plain one: there it is one if it has call.
        is_plain = isinstance(value, Mapping) and Mapping in found and not is_node(value)
        only_nodes = {*found} <= {CallConfig, NoneType}
        if CallConfig in found and (only_nodes or isinstance(value, Mapping)) and not is_plain:
            return read_node(value, key)
        typed = _typed(value, key, kind)
        try:
            if option.choices:
                check_choice(key, typed, choices(kind))
            elif option.read and not is_node(typed):
                read = resolve_name(option.read)
                names = [*signature(read).parameters]
                given = {"name": key} if "name" in names else {}
                read(**{next(each for each in names if each != "name"): typed}, **given)
        except (TypeError, ValueError) as error:
            said = str(error) if str(error).startswith(key) else f"{key}: {error}"
            raise mistake(said, key) from error
        return typed

    def _nodes(self, value: Any, key: str, made: str) -> Any:
        """A list of nodes, or a mapping from names to these."""
        if value is None:
            return [] if made == "list" else {}
        if not isinstance(value, list if made == "list" else Mapping):
            raise ConfigError(f"{key}={show(value)} is not a {made}: write {NODES_FORMS[made]}")
        nodes = {}
        for name, node in items_inside(value):
            with self._at(f"{key}.{name}"):
                if made == "list" or node not in (None, "None"):
                    nodes[name] = read_node(node, f"{key}.{name}")
        return [*nodes.values()] if made == "list" else nodes

    def _evaluations(self, value: Any, key: str) -> Any:
        """A node, an evaluation with options, or a mapping from names to these."""
        if not _is_by_name(value):
            known = keys_inside("eval_dataloader")
            has_options = isinstance(value, Mapping) and not {*known}.isdisjoint(value)
            if has_options and not is_node(value):
                return self._section(value, key, "eval_dataloader")
            return read_node(value, key)
        found = {}
        for name, each in value.items():
            with self._at(f"{key}.{name}"):
                if not isinstance(name, str) or not name or "/" in name:
                    raise ConfigError(
                        f"{key} has the name {show(name)}: names are text without '/', because "
                        f"values are logged as eval/name/loss"
                    )
                if each not in (None, "None"):
                    found[name] = self._evaluations(each, f"{key}.{name}")
        return found or None

    def _section(self, values: Any, key: str, section: str) -> Any:
        """An object of the class that says what the section holds; a dict for checkpoints."""
        known, given = keys_inside(section), defaults(section)
        if section == "sampling_mode" and isinstance(values, str):
            values = {"mode": values}
        if not isinstance(values, Mapping):
            form = SECTION_FORMS[section]
            raise ConfigError(f"{key}={show(values)} is not a mapping: write {form}")
        for name, value in values.items():
            where = f"{key}.{name}"
            with self._at(where):
                if name not in known:
                    raise ConfigError(
                        f"{key} has an unknown key {name!r}{suggestion(name, known)}: use some of "
                        f"{', '.join(known)}"
                    )
                # The folder has a place of its own only with a run_dir, which is known later.
                if (section, name, value) != ("checkpoint", "folder", None):
                    given[name] = self.read(value, where, f"{section}.{name}")
                    if section == "checkpoint":
                        check_checkpoint(name, given[name])
        missing = [name for name in known if name not in {"folder", *given, *values}]
        if missing:
            words = choices(f"{section}.{missing[0]}")
            remedy = one_of(words) if words else FORM.removeprefix("write ")
            raise ConfigError(f"{key}.{missing[0]} is missing: write {missing[0]}: {remedy}")
        if section == "checkpoint":
            return given
        return SECTIONS[section](**given) if {*known} <= {*given} else None


def _typed(value: Any, key: str, kind: str) -> Any:
    """A value in a type of its key: numbers and words may be written as text, and the reverse."""
    found = {*alternatives(kind)} - {NoneType}
    is_held = isinstance(value, Mapping | list)
    if Any in found or type(value) in found or (Mapping in found and isinstance(value, Mapping)):
        return value
    if type(value) is int and float in found:
        return float(value)
    if len(found) == 1 and not is_held and value is not None:
        if found == {str} and not isinstance(value, bool):
            return str(value)
        if found == {bool} and type(value) is int and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            with suppress(ValueError):
                typed = read_value(value)
                if type(typed) in found or (type(typed) is int and float in found):
                    return next(iter(found))(typed)
    raise wrong_type(key, value, kind)


def _is_default(value: object, kind: str) -> bool:
    section, _, name = kind.rpartition(".")
    default = defaults(section).get(name, ...)
    # By type, too: for Python True is 1, and False is 0.
    return type(value) is type(default) and value == default


def _is_by_name(value: object) -> bool:
    """Whether this maps names to evaluations, and is not one itself, mistyped perhaps."""
    if not isinstance(value, Mapping) or not value:
        return False
    if any(name in value for name in (*NODE_KEYS, *keys_inside("eval_dataloader"))):
        return False
    # {clal: torch.nn.Linear} is a mistyped node, and no evaluation that is called clal.
    return all(isinstance(value[name], Mapping) or not nearest(name, NODE_KEYS) for name in value)


def check_checkpoint(name: str, value: Any) -> None:
    """Refuse a value that `CheckpointConfig` would refuse, alone."""
    try:
        CheckpointConfig(**{"folder": "checkpoints", name: value})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checkpoint.{error}") from error


def unknown_key(key: str, tree: Mapping[str, Any]) -> ConfigError:
    """The error for a key that there is not, with the one that was meant."""
    value = tree[key]
    duration = duration_meant(value, str(key))
    below = ["max_duration"] if duration else [*_places_of(key, tree)]
    below += [f"{each}.{key}" for each in SECTIONS if key in keys_inside(each)]
    if below:
        # An argument that only refers to a key is set by that key.
        other = REFERENCE.fullmatch(str(leaves(tree).get(below[0])))
        meant = other[1] if other else below[0]
        said = f"unknown key {key!r} (did you mean {meant!r}?)"
        return ConfigError(f"{said}: write {as_override(meant, duration or value)}")
    hint = suggestion(str(key), KEYS)
    remedy = "correct it" if hint else NO_KEYS_OF_ITS_OWN
    return ConfigError(f"unknown key {key!r}{hint}: {remedy}")


def _places_of(name: object, tree: Mapping[str, Any]) -> Iterator[str]:
    """Where a name stands among arguments: people write ``width`` for ``model.args.width``."""
    for leaf in leaves(tree):
        place, _, _ = f"{leaf}.".partition(f".args.{name}.")
        if place != f"{leaf}.":
            yield f"{place}.args.{name}"


def _read_limit(limit: Any) -> None:
    """Refuse what is no amount of memory, and no share of a device."""
    if parse_share(limit) is None:
        parse_bytes(limit)


def _read_time(time: str) -> None:
    """Refuse what is no time."""
    try:
        parse_time(time)
    except ValueError as error:
        # YAML reads 1:30:00 as a number, counted in sixties.
        quote = "; in YAML, put quotes around colons" if time.isdecimal() else ""
        raise ConfigError(f"{error}{quote}") from error


def _read_loss_average(name: str, value: Any) -> None:
    """Refuse what says nothing of the loss, by the names of losses perhaps."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            if not is_node(each):
                _read_loss_average(f"{name}.{inner}", each)
        return
    try:
        check_choice(name, value, LOSS_AVERAGES)
    except ValueError as error:
        raise ConfigError(
            f"{error}, or a function of yours from a microbatch to what its loss was divided by: "
            "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
        ) from None
