"""What ``key=value`` on the command line does to a config."""

from typing import Any

from automicro.cli.reading import read_value, refuse_boolean
from automicro.errors import ConfigError


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key of a config in place; what lies on the way to it is made.

    The value is YAML and replaces what was there: ``scheduler=null`` drops the scheduler,
    ``optimizer.args={lr: 0.1}`` drops the other arguments. A number is the place in a list.

    Raises:
        ConfigError: no ``key=value``, a value that is not YAML, or a key below a plain value.

    >>> tree = {"optimizer": {"call": "torch.optim.AdamW"}}
    >>> apply_override(tree, "optimizer.args.lr=1e-3")
    >>> tree
    {'optimizer': {'call': 'torch.optim.AdamW', 'args': {'lr': 0.001}}}
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(
            f"the override {override!r} has no '=': write key=value, such as max_duration=2ep"
        )
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(
            f"the override {override!r} has no key before '=', or an empty part in it: write "
            f"key=value, such as optimizer.args.lr=0.001"
        )
    if not text.strip():
        raise ConfigError(
            f"the override {override!r} has no value: write {key}=null for none, or "
            f"'{key}=\"\"' for an empty text"
        )
    *way, last = parts
    target: Any = tree
    for depth, part in enumerate(way, start=1):
        target = _descend(target, part, ".".join(parts[:depth]), override)
    try:
        value = read_value(text)
    except ValueError as error:
        raise ConfigError(
            f"the override {override!r} has a value that is not YAML ({error}): quote it as a "
            f"whole for the shell, such as 'optimizer.args={{lr: 0.1}}'"
        ) from error
    if not way:
        refuse_boolean(key, value, text)
    if isinstance(target, list):
        target[_place(target, last, ".".join(way), override)] = value
    else:
        target[last] = value


def _descend(target: Any, part: str, key: str, override: str) -> Any:
    if isinstance(target, list):
        place = _place(target, part, key.rpartition(".")[0], override)
        inner = target[place]
    else:
        place = part
        inner = target.get(part)
    if inner is None:
        inner = target[place] = {}
    if not isinstance(inner, dict | list):
        raise ConfigError(
            f"the override {override!r} goes below {key}, which is {inner!r} and holds no keys: "
            f"replace it as a whole with {key}=VALUE"
        )
    return inner


def _place(target: list[Any], part: str, key: str, override: str) -> Any:
    if not part.isdecimal() or int(part) >= len(target):
        choice = f"use a number from 0 to {len(target) - 1}, or replace" if target else "replace"
        raise ConfigError(
            f"the override {override!r} asks for {part!r} in {key}, a list of {len(target)}: "
            f"{choice} the list with '{key}=[…]'"
        )
    return int(part)
