"""Whether what stands under each key of a config has the shape that belongs there."""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from automicro.cli.config import CallConfig
from automicro.cli.key_names import KEYS
from automicro.cli.keys import LISTS, alternatives, keys_inside, wrong_type
from automicro.cli.keys_meant import about
from automicro.cli.nodes import check_node, items_inside, show
from automicro.cli.sections import check_checkpoint, check_eval_data, check_metrics, check_size
from automicro.cli.suggestions import as_override, did_you_mean
from automicro.errors import ConfigError
from automicro.migration import synonym_of

OF_ANY_TYPE = {
    "batch_layout": (int, Mapping),
    "compile": (bool, Mapping),
    "loss_average": (str, Mapping),
}
OF_SECTIONS: Mapping[str, Callable[[object], None]] = {
    "eval_data": check_eval_data,
    "checkpoint": check_checkpoint,
}
SIZES = ("microbatch_size", "eval_microbatch_size")

NO_KEYS_OF_ITS_OWN = (
    "a config has no keys of its own, and automicro config --keys lists all that there are; refer "
    "to a value where it stands, as ${model.args.width}, or take it from the environment with "
    "${oc.env:NAME}"
)


def check_shapes(tree: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and values that are no nodes, lists or mappings where these belong.

    Interpolations and ??? are left for later.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_shapes({"model": {"call": "torch.nn.Linear"}, "compile": True})
    """
    for key, value in tree.items():
        with about(key):
            if key not in KEYS:
                raise ConfigError(_unknown_key(key, tree))
            _check_shape(value, key)


def _check_shape(value: Any, key: str) -> None:
    if isinstance(value, str) and ("${" in value or value == "???"):
        return
    if value is None and (NoneType in alternatives(key) or key in OF_SECTIONS):
        return
    if CallConfig in alternatives(key):
        check_node(value, key)
    elif key in SIZES:
        check_size(value, key)
    elif key == "metrics":
        check_metrics(value, key)
    elif key in LISTS:
        _check_list(value, key)
    elif key in OF_SECTIONS:
        OF_SECTIONS[key](value)
    elif key == "parameter_groups":
        _check_groups(value)
    elif not _may_be(value, key):
        raise wrong_type(key, value)


def _unknown_key(key: object, tree: Mapping[str, Any]) -> str:
    value = tree[key]  # type: ignore[index]
    meant = synonym_of(key)
    if meant is not None:
        meant = meant.with_value(value)
        return f"unknown key {key!r} (did you mean {meant.key!r}?): {meant.config}"
    below = [f"{each}.{key}" for each in OF_SECTIONS if key in keys_inside(each)]
    below = below or _places_of(key, tree)
    if below:
        said = f"unknown key {key!r} (did you mean {below[0]!r}?)"
        return f"{said}: write {as_override(below[0], value)}"
    hint = did_you_mean(str(key), KEYS)
    return f"unknown key {key!r}{hint}: {'correct it' if hint else NO_KEYS_OF_ITS_OWN}"


def _places_of(name: object, value: Any, way: str = "") -> list[str]:
    """Where a name stands among arguments: people write ``width`` for ``model.args.width``."""
    places = []
    for part, inner in items_inside(value):
        here = f"{way}.{part}" if way else str(part)
        if part == name and way.endswith("args"):
            places.append(here)
        places += _places_of(name, inner, here)
    return places


def _may_be(value: object, key: str) -> bool:
    if Any in alternatives(key):
        return isinstance(value, OF_ANY_TYPE[key])
    # Which plain value it may be is for OmegaConf to tell: it reads numbers as text, and so on.
    return not isinstance(value, Mapping | list)


def _check_list(nodes: object, key: str) -> None:
    if not isinstance(nodes, list | tuple):
        raise ConfigError(
            f"{key}={show(nodes)} is not a list: write [{{call: dotted.path, args: {{name: "
            f"value}}}}], or [] for none"
        )
    for place, node in enumerate(nodes):
        check_node(node, f"{key}.{place}")


def _check_groups(groups: object) -> None:
    form = "write {params: '*.bias', weight_decay: 0.0}: names of parameters, then options"
    if not isinstance(groups, list | tuple):
        raise ConfigError(
            f"parameter_groups={show(groups)} is not a list: write [] for none, or a list in "
            f"which each group is a mapping such as {{params: '*.bias', weight_decay: 0.0}}"
        )
    for place, group in enumerate(groups):
        key = f"parameter_groups.{place}"
        if not isinstance(group, Mapping):
            raise ConfigError(f"{key}={show(group)} is not a mapping: {form}")
        if "params" not in group:
            raise ConfigError(f"{key}={show(group)} has no params: {form}")
        params = group["params"]
        patterns = params if isinstance(params, list) else [params]
        if not patterns or not all(isinstance(each, str) and each for each in patterns):
            raise ConfigError(
                f"{key}.params={show(params)} is no pattern of names: write text such as "
                f"'*.bias', or a list of such"
            )
