"""YAML files and ``key=value``: their merged values, and the source of each mistake.

OmegaConf only reads them. Its ``merge`` would keep the arguments of a call that another file
replaces, its ``update`` would replace a number by a mapping if a key goes below it, and neither
records the line that a value comes from.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.arguments import no_such_file
from automicro.cli.config.nodes import leaves
from automicro.cli.errors import summarize_error
from automicro.errors import ConfigError, facts_of
from automicro.memory.oom import first_line

Tree = dict[str, Any]


class Sources:
    """Sources of a config: files, of which later ones win, then overrides. ``tree`` is the result.

    >>> sources = Sources(["configs/digits.yaml"], ["seed=2"])
    >>> sources.tree["seed"], sources.origin(["seed"]), sources.origin(["model.call"])
    (2, "the override 'seed=2'", 'configs/digits.yaml:15')
    """

    def __init__(self, paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> None:
        self.tree: Tree = {}
        self._lines: dict[str, Mapping[str, int]] = {}
        self._order: dict[str, None] = {}  # sources in order
        self._set_by: dict[str, str] = {}  # the last source that set each leaf
        for path in map(str, paths):
            values, self._lines[path] = read_file(Path(path))
            self.tree = merge(self.tree, values)
            self._note(path, leaves(values))
        for override in overrides:
            key, value = _apply_override(self.tree, override)
            self._note(name_override(override), leaves(value, key))

    def _note(self, name: str, keys: Collection[str]) -> None:
        self._order.pop(name, None)  # a repeated source counts at its last position
        self._order[name] = None
        self._set_by |= dict.fromkeys(keys, name)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn errors into config errors that begin with the lines and overrides behind them."""
        try:
            yield
        except Exception as error:
            text = str(error) if isinstance(error, ConfigError) else summarize_error(error)
            raise ConfigError(f"{self.origin(facts_of(error).keys)}: {text}") from error

    def origin(self, keys: Collection[str]) -> str:
        """Return the lines of files, and the overrides, from which keys have their values."""
        found: dict[str, set[int]] = {}
        for key in keys:
            for name in self._names(key):
                lines = self._lines.get(name, {})
                line = next((lines[each] for each in _with_parents(key) if each in lines), None)
                found.setdefault(name, set()).update([] if line is None else [line])
        found = found or {path: set() for path in self._lines}
        return " + ".join(
            ":".join(filter(None, [name, ",".join(map(str, sorted(found[name])))]))
            for name in sorted(found, key=[*self._order].index)
        )

    def _names(self, key: str) -> set[str]:
        """Return the last sources of the values in a key, or else of the value that contains it."""
        for each in _with_parents(key):
            inside = [leaf for leaf in leaves(self.tree) if f"{leaf}.".startswith(f"{each}.")]
            if inside:
                return {self._set_by[leaf] for leaf in inside if leaf in self._set_by}
        return set()


def _with_parents(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def name_override(override: str) -> str:
    """Return the name of an override in messages."""
    return f"the override {override!r}"


def read_file(path: Path) -> tuple[Tree, Mapping[str, int]]:
    """Return a YAML file as plain values, interpolations unresolved, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise no_such_file(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a YAML file") from error
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.YAMLError as error:
        raise ConfigError(_describe_yaml_error(error, path)) from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        where = f"{key}: " if key else ""
        raise ConfigError(
            f"{path}: {where}{first_line(error)}: correct it; an interpolation is written ${{name}}"
        ) from error
    # OmegaConf reads a single word as a key without a value.
    if not isinstance(tree, dict) or (tree and ":" not in text):
        raise ConfigError(
            f"{path} holds {'a list' if isinstance(tree, list) else 'text'} and not a mapping: "
            f"write keys at its top level, such as model: {{call: my_package.MyModel}}"
        )
    # OmegaConf does not keep line numbers.
    return cast(Tree, tree), dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader)))


def _lines(node: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted key and the line of each node of a YAML file."""
    inside: list[tuple[Any, Any, Any]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(place, value, value) for place, value in enumerate(node.value)]
    for name, start, value in inside:
        here = f"{key}.{name}" if key else str(name)
        yield here, start.start_mark.line + 1
        yield from _lines(value, here)


def _describe_yaml_error(error: Exception, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error)
    return (
        f"{place}: not valid YAML: {problem}: correct this line or the one above it; indent with "
        "spaces, and quote ${…} inside of braces"
    )


def read_value(text: str) -> Any:
    """Return the value of YAML text.

    >>> read_value("1e-3"), read_value("[1, two]"), read_value("null")
    (0.001, [1, 'two'], None)
    """
    try:
        # OmegaConf's YAML reads 1e-3 as a number, which plain YAML 1.1 does not.
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(getattr(error, "problem", None) or first_line(error)) from error
    return cast(dict[str, Any], tree)["value"]


def merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key; otherwise the later value wins.

    A node with a different ``call`` replaces the earlier node completely, because the arguments
    there belong to the other call. So does a value that is not a node.

    >>> base = {"optimizer": {"call": "torch.optim.SGD", "args": {"lr": 0.1, "momentum": 0.9}}}
    >>> merge(base, {"optimizer": {"args": {"lr": 0.2}}})["optimizer"]["args"]
    {'lr': 0.2, 'momentum': 0.9}
    >>> merge(base, {"optimizer": {"call": "torch.optim.Adam"}})["optimizer"]
    {'call': 'torch.optim.Adam'}
    """
    merged = dict(earlier)
    for key, value in later.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = dict(value) if _is_another(before, value) else merge(before, value)
        else:
            merged[key] = value
    return merged


def _is_another(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    if "call" in value and "call" in before:
        return bool(value["call"] != before["call"])
    # A single evaluation and several by name cannot be merged.
    if "call" not in value and "call" not in before:
        return False
    return not any("args" in each or not each for each in (before, value) if "call" not in each)


def _apply_override(tree: Tree, override: str) -> tuple[str, Any]:
    """Set one key of a config in place, creating mappings on the way; return key and value.

    >>> tree = {"optimizer": {"call": "torch.optim.AdamW"}}
    >>> _apply_override(tree, "optimizer.args.lr=1e-3")
    ('optimizer.args.lr', 0.001)
    >>> tree
    {'optimizer': {'call': 'torch.optim.AdamW', 'args': {'lr': 0.001}}}
    """
    key, _, text = override.partition("=")
    key = key.strip()
    name = name_override(override)
    *way, last = key.split(".")
    if not all([*way, last, text.strip()]):
        raise ConfigError(
            f"{name} is not of the form key=value: write it like optimizer.args.lr=0.001, "
            "seed=null for none, or 'run_dir=\"\"' for an empty text"
        )
    try:
        value = read_value(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} has a value that is not YAML ({error}): quote the whole argument for the "
            f"shell, as in 'optimizer.args={{lr: 0.1}}'"
        ) from error
    target: Any = tree
    for depth, part in enumerate([*way, last]):
        place: Any = part
        if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            place = int(part)
        elif not isinstance(target, dict):
            here = ".".join(way[:depth])
            raise ConfigError(
                f"{name} cannot be set, because {here} is {target!r} and has no {part!r} in it. "
                f"Replace all of it with {here}=VALUE"
            )
        if depth == len(way):
            target[place] = value
            break
        inner = target.get(place) if isinstance(target, dict) else target[place]
        if inner is None:
            inner = target[place] = {}
        target = inner
    return key, value
