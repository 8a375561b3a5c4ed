"""Whether what stands under each key of a config has the shape that belongs there."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from automicro.cli.config import CallConfig
from automicro.cli.keys import HINTS, KEYS, alternatives, type_in_words
from automicro.cli.nodes import check_node, items_inside, show
from automicro.cli.suggestions import did_you_mean
from automicro.errors import ConfigError

OF_ANY_TYPE = {
    "batch_layout": (int, Mapping),
    "compile": (bool, Mapping),
    "loss_average": (str, Mapping),
}


def check_shapes(tree: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and values that are no nodes, lists or mappings where these belong.

    Interpolations and ??? are left for later.

    Raises:
        ConfigError: names key, value and remedy.

    >>> check_shapes({"model": {"call": "torch.nn.Linear"}, "compile": True})
    """
    for key, value in tree.items():
        if key not in HINTS:
            below = _places_of(key, tree)
            hint = did_you_mean(str(key), KEYS) if not below else f" (did you mean {below[0]!r}?)"
            raise ConfigError(
                f"unknown key {key!r}{hint}: "
                f"{'correct it' if hint else 'automicro config --keys lists all that there are'}"
            )
        if isinstance(value, str) and ("${" in value or value == "???"):
            continue
        if value is None and NoneType in alternatives(key):
            continue
        if CallConfig in alternatives(key):
            check_node(value, key)
        elif key == "metrics":
            _check_metrics(value)
        elif key == "parameter_groups":
            _check_groups(value)
        elif not _may_be(value, key):
            raise wrong_type(key, value)


def _places_of(name: object, value: Any, way: str = "") -> list[str]:
    """Where a name stands among arguments: people write ``lr`` for ``optimizer.args.lr``."""
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


def wrong_type(key: str, value: object) -> ConfigError:
    """Return the error for a value of a type that the key does not have.

    >>> print(wrong_type("seed", "many"))
    seed='many' (text): expected a whole number or null
    """
    return ConfigError(f"{key}={show(value)}: expected {type_in_words(key)}")


def _check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={show(metrics)} is not a mapping: write {{name: {{call: dotted.path, args: "
            f"{{…}}}}}}, or {{}} for none"
        )
    for name, node in metrics.items():
        check_node(node, f"metrics.{name}")


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
