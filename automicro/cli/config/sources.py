"""YAML files and ``key=value``: what they hold together, and which of them brought a mistake.

OmegaConf reads both. What they do to each other is done here: its ``merge`` would keep the
arguments of a call that another file replaces, its ``update`` would put a mapping where a key goes
below a number, and neither tells afterwards which line of which file a value is from.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.arguments import no_such_file
from automicro.cli.config.keys import KEYS
from automicro.cli.config.nodes import NODE_KEYS, REFERENCE, CallConfig, leaves, show
from automicro.cli.config.schema import alternatives, keys_inside, type_in_words
from automicro.errors import ConfigError, keys_of
from automicro.memory.oom import first_line

T = TypeVar("T")
Tree = dict[str, Any]
# What YAML 1.1 takes for true or false besides these two themselves.
BOOLEAN_WORDS = ("on", "off", "yes", "no")
# Keys that hold others which do not need each other.
OF_PARTS = ("metrics", "checkpoint", "eval_dataloader")


class ElsewhereError(ConfigError):
    """An error of a user's module at its import, which is tried once."""


class Sources:
    """The sources of a config: files, of which later ones win, then ``key=value`` in order.

    Args:
        paths: of the files.
        overrides: ``key=value`` each.
        tidy: called with the values after each of them.

    Attributes:
        tree: the values of all together.
        wrong: what is wrong with overrides themselves, which are left out.

    >>> sources = Sources(["configs/digits.yaml"], ["seed=2"])
    >>> sources.tree["seed"], sources.origin(["seed"]), sources.origin(["model.call"])
    (2, "the override 'seed=2'", 'configs/digits.yaml:15')
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        overrides: Sequence[str] = (),
        tidy: Callable[[Tree], None] = lambda tree: None,
    ) -> None:
        self.tree: Tree = {}
        self.wrong: list[ConfigError] = []
        self._lines: dict[str, Mapping[str, int]] = {}
        self._origins: dict[str, str] = {}  # of each leaf
        unreadable = []
        for path in map(str, paths):
            try:
                values, self._lines[path] = read_file(Path(path))
            except ConfigError as error:
                # The others are read all the same: one run tells of all that cannot be.
                unreadable.append(error)
                continue
            self.tree = merge(self.tree, values)
            tidy(self.tree)
            self._take_down(path, leaves(values))
        if unreadable:
            raise _all_in_one(unreadable, list(map(str, unreadable)))
        for override in overrides:
            try:
                key = _apply_override(self.tree, override)
            except ConfigError as error:
                self.wrong.append(error)
                continue
            tidy(self.tree)
            self._take_down(name_override(override), [key])

    def origin(self, keys: Collection[str]) -> str:
        """The files with their lines, and the overrides, that some keys have their values from.

        Args:
            keys: dotted; where none is known, all files are named.
        """
        lines: dict[str, set[int]] = {}
        for key in keys:
            for name in self._origins_of(key):
                lines.setdefault(name, set()).update(self._line_of(key, name))
        lines = lines or {path: set() for path in self._lines}
        order = list(dict.fromkeys([*self._lines, *self._origins.values()]))
        return " + ".join(
            ":".join(filter(None, [name, ",".join(map(str, sorted(lines[name])))]))
            for name in sorted(lines, key=order.index)
        )

    def borrowed(self, keys: Collection[str]) -> str:
        """A clause that says what to set where one of the keys has another key's value.

        >>> sources = Sources(["configs/speech.yaml"])
        >>> sources.borrowed(["scheduler.args.total"])
        '; scheduler.args.total is ${max_duration}: set max_duration, or scheduler.args.total alone'
        """
        values = leaves(self.tree)
        for key in keys:
            other = REFERENCE.fullmatch(str(values.get(key)))
            if other:
                return f"; {key} is {other[0]}: set {other[1]}, or {key} alone"
        return ""

    def _origins_of(self, key: str) -> Collection[str]:
        names = {name for leaf, name in self._origins.items() if _lies_in(leaf, key)}
        above = key.rpartition(".")[0]
        return self._origins_of(above) if above and not names else names

    def _line_of(self, key: str, path: str) -> list[int]:
        """The line of a key in a file, or of what it lies in; none in an override."""
        lines = self._lines.get(path, {})
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return [lines[key]] if key else []

    def _take_down(self, name: str, set_now: Collection[str]) -> None:
        """Remember from where each leaf is, after another source was taken up."""
        self._origins = {
            leaf: name
            if leaf not in self._origins or any(_lies_in(leaf, key) for key in set_now)
            else self._origins[leaf]
            for leaf in leaves(self.tree)
        }


def load_or_tell(sources: Sources, load: Callable[[Tree, Collection[str]], T]) -> T:
    """Load a config, or tell all that is wrong with it.

    After a mistake, the key that it is about is left out, and the rest looked at.

    Args:
        sources: what it comes from.
        load: takes the merged values, and the keys that were left out: these are not missing.

    >>> from automicro.errors import about
    >>> def load(tree, without):
    ...     for key in tree:
    ...         with about(key):
    ...             raise ConfigError(f"no key {key!r}")
    >>> load_or_tell(Sources([], ["sede=1", "lr=0.1"]), load)
    Traceback (most recent call last):
        ...
    automicro.errors.ConfigError: 2 mistakes:
      the override 'sede=1': no key 'sede'
      the override 'lr=0.1': no key 'lr'
    """
    found = list(sources.wrong)
    texts = list(map(str, found))
    without: set[str] = set()
    while True:
        try:
            loaded = load(_without(sources.tree, without), without)
        except ConfigError as error:
            parts = {_part(key, sources.tree) for key in keys_of(error)}
            if not _follows_from(parts, without, sources.tree):
                found.append(error)
                texts.append(f"{sources.origin(keys_of(error))}: {error}")
            # A mistake in what was left out already would come up for ever. A module that failed to
            # import has run in part, and is not run again.
            if parts <= without or isinstance(error, ElsewhereError):
                break
            without |= parts
        else:
            if not found:
                return loaded
            break
    raise _all_in_one(found, texts)


def _all_in_one(found: Sequence[ConfigError], texts: Sequence[str]) -> ConfigError:
    """One error that says all that was found, each once."""
    said = list(dict.fromkeys(texts))
    text = said[0]
    if len(said) > 1:
        lines = [each.replace("\n", "\n  ") for each in said]
        text = "\n  ".join([f"{len(said)} mistakes:", *lines])
    error = ConfigError(text)
    # One traceback can be shown: that of a real cause, where any mistake has one.
    error.__cause__ = next((each for each in found if each.__cause__ is not None), found[0])
    return error


def name_override(override: str) -> str:
    """How messages call an override.

    >>> name_override("seed=1")
    "the override 'seed=1'"
    """
    return f"the override {override!r}"


def _lies_in(key: str, other: str) -> bool:
    """Tell whether a dotted key is another, or lies in it.

    >>> _lies_in("model.args", "model"), _lies_in("models", "model")
    (True, False)
    """
    return f"{key}.".startswith(f"{other}.")


def read_file(path: Path) -> tuple[Tree, Mapping[str, int]]:
    """A YAML file as plain values, interpolations left as they are, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise no_such_file(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a YAML file") from error
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.YAMLError as error:
        raise ConfigError(_describe_yaml_error(error, path, text)) from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        where = f"{key}: " if key else ""
        raise ConfigError(
            f"{path}: {where}{first_line(error)}: correct it; an interpolation is written ${{name}}"
        ) from error
    # OmegaConf reads a lone word as a key without a value.
    if not isinstance(tree, dict) or (tree and ":" not in text):
        raise ConfigError(
            f"{path} holds {'a list' if isinstance(tree, list) else 'text'} and not a mapping: "
            f"write keys at its top level, such as model: {{call: my_package.MyModel}}"
        )
    tree = cast(Tree, tree)
    _refuse_nodes_without_a_key(path, tree)
    # OmegaConf keeps no lines, and has turned off into False: these nodes have the words as typed.
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    lines = _lines(root)
    for name, node in root.value if tree else ():
        wrong = _wrong_boolean(name.value, tree.get(name.value), str(node.value))
        if wrong:
            raise ConfigError(f"{path}:{lines[name.value]}: {wrong}")
    return tree, lines


def _lines(node: Any, key: str = "") -> dict[str, int]:
    """The line of each key, dotted, in a file as YAML composes it."""
    found: dict[str, int] = {}
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        here = f"{key}.{name.value}" if key else str(name.value)
        found |= {here: name.start_mark.line + 1} | _lines(value, here)
    for place, value in enumerate(node.value if isinstance(node, yaml.SequenceNode) else ()):
        here = f"{key}.{place}"
        found |= {here: value.start_mark.line + 1} | _lines(value, here)
    return found


def _describe_yaml_error(error: Exception, path: Path, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error)
    lines = text.splitlines()
    line = lines[min(mark.line, len(lines) - 1)] if mark and lines else ""
    return f"{place}: not valid YAML: {problem}; {_remedy(problem, line)}"


def _wrong_boolean(key: str, value: object, typed: str) -> str:
    """The mistake in a word that YAML takes for true or false, where the key holds neither.

    >>> _wrong_boolean("batchnorm", False, "off")
    'batchnorm=off: YAML reads off as false: expected warn, error, disable, ignore or exact'
    """
    word = typed.strip()
    if not isinstance(value, bool) or key not in KEYS or word.lower() not in BOOLEAN_WORDS:
        return ""
    if {bool, Any, CallConfig} & {*alternatives(key)}:
        return ""
    return f"{key}={word}: YAML reads {word} as {show(value)}: expected {type_in_words(key)}"


def _read_value(text: str) -> Any:
    """Read the value of an override.

    >>> _read_value("1e-3"), _read_value("[1, two]"), _read_value("null")
    (0.001, [1, 'two'], None)
    """
    try:
        # OmegaConf's YAML reads 1e-3 as a number, which plain YAML 1.1 does not.
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(getattr(error, "problem", None) or first_line(error)) from error
    return cast(dict[str, Any], tree)["value"]


def _remedy(problem: str, line: str) -> str:
    if "\\t" in problem or "\t" in line[: len(line) - len(line.lstrip())]:
        return "indent with spaces in place of tabs"
    unquoted = re.search(r"""(?<!['"\w])\$\{[^{}]*\}""", line)
    if unquoted and re.search(r"[{\[]", line[: unquoted.start()]):
        return f"inside of braces and brackets quote an interpolation, as '{unquoted[0]}'"
    if problem.startswith("found duplicate key") and problem.split()[-1] in NODE_KEYS:
        return f"indent {problem.split()[-1]}: below the key that it belongs to"
    return "correct this line or the one above it"


def _refuse_nodes_without_a_key(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse call: at the top level: people forget to indent it."""
    stray = [name for name in NODE_KEYS if name in tree]
    if not stray:
        return
    before = list(tree)[: list(tree).index(stray[0])]
    key = before[-1] if before and tree[before[-1]] is None else "its key"
    raise ConfigError(
        f"{path}: {' and '.join(stray)} at the top level: indent "
        f"{'it' if len(stray) == 1 else 'them'} below {key}, or write "
        f"{key if key in KEYS else 'model'}: {{call: dotted.path, args: {{name: value}}}}"
    )


def merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return both: mappings are merged key by key, everything else of the later one wins.

    A node whose ``call`` is another one replaces the earlier node as a whole, because the
    arguments there belong to the other call. So does one that is no node any more.

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
    # One evaluation, or several by name: neither has a place in the other.
    if "call" not in value and "call" not in before:
        return False
    return not any("args" in each or not each for each in (before, value) if "call" not in each)


def _apply_override(tree: Tree, override: str) -> str:
    """Set one key of a config in place; what lies on the way to it is made. Return the key.

    >>> tree = {"optimizer": {"call": "torch.optim.AdamW"}}
    >>> _apply_override(tree, "optimizer.args.lr=1e-3")
    'optimizer.args.lr'
    >>> tree
    {'optimizer': {'call': 'torch.optim.AdamW', 'args': {'lr': 0.001}}}
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    name = name_override(override)
    if not equals:
        raise ConfigError(f"{name} has no '=': write key=value, such as max_duration=2ep")
    *way, last = key.split(".")
    if not all([*way, last]):
        raise ConfigError(
            f"{name} has no key before '=', or an empty part in it: write key=value, such as "
            f"optimizer.args.lr=0.001"
        )
    if not text.strip():
        raise ConfigError(
            f"{name} has no value: write {key}=null for none, or '{key}=\"\"' for an empty text"
        )
    target: Any = tree
    for depth, part in enumerate(way):
        place = _place(target, part, ".".join(way[:depth]), name)
        inner = target.get(place) if isinstance(target, dict) else target[place]
        if inner is None:
            inner = target[place] = {}
        if not isinstance(inner, dict | list):
            here = ".".join(way[: depth + 1])
            raise ConfigError(
                f"{name} goes below {here}, which is {inner!r} and holds no keys: replace it as a "
                f"whole with {here}=VALUE"
            )
        target = inner
    try:
        value = _read_value(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} has a value that is not YAML ({error}): quote it as a whole for the shell, "
            f"such as 'optimizer.args={{lr: 0.1}}'"
        ) from error
    if not way and (wrong := _wrong_boolean(key, value, text)):
        raise ConfigError(f"{name}: {wrong}")
    target[_place(target, last, ".".join(way), name)] = value
    return key


def _place(target: Any, part: str, key: str, name: str) -> Any:
    if isinstance(target, dict):
        return part
    if not part.isdecimal() or int(part) >= len(target):
        choice = f"use a number from 0 to {len(target) - 1}, or replace" if target else "replace"
        raise ConfigError(
            f"{name} asks for {part!r} in {key}, a list of {len(target)}: {choice} the list with "
            f"'{key}=[…]'"
        )
    return int(part)


def _part(key: str, tree: Mapping[str, Any]) -> str:
    """As little of a config as can be left out for a key, so that the rest is whole."""
    not_names = {*NODE_KEYS, *keys_inside("eval_dataloader")}
    top, *rest = key.split(".")
    inside = tree.get(top)
    if top not in OF_PARTS or not rest or not isinstance(inside, Mapping):
        return top
    # Of a single evaluation no key can be left out alone: the rest would not be one.
    if rest[0] not in inside or (top == "eval_dataloader" and not_names & inside.keys()):
        return top
    return f"{top}.{rest[0]}"


def _without(tree: Mapping[str, Any], parts: Collection[str]) -> Tree:
    """A copy with some parts left out."""
    rest = {key: copy.deepcopy(value) for key, value in tree.items() if str(key) not in parts}
    for part in parts:
        top, _, name = part.partition(".")
        if name and top in rest:
            rest[top] = {each: value for each, value in rest[top].items() if str(each) != name}
            if not rest[top]:
                del rest[top]
    return rest


def _follows_from(parts: Collection[str], without: Collection[str], tree: Tree) -> bool:
    """Whether a mistake is only that something else with a mistake was left out."""
    tops = {part.partition(".")[0] for part in without}
    # An interpolation to what was left out finds nothing.
    held = str([tree.get(part.partition(".")[0]) for part in parts])
    return any(re.search(rf"\$\{{{re.escape(top)}\b", held) for top in tops)
