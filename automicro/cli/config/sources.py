"""YAML files and ``key=value``: what they hold together, and which of them brought a mistake."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.arguments import no_such_file
from automicro.cli.config.keys import KEYS, keys_of
from automicro.cli.config.nodes import NODE_KEYS, show
from automicro.cli.config.schema import CallConfig, alternatives, type_in_words
from automicro.errors import ConfigError

# What YAML 1.1 takes for true or false besides these two themselves.
BOOLEAN_WORDS = ("on", "off", "yes", "no")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file as plain values, interpolations left as they are.

    Raises:
        ConfigError: there is no such file, it is not YAML, or it holds no keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise no_such_file(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a YAML file") from error
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        lines = text.splitlines()
        line = lines[min(mark.line, len(lines) - 1)] if mark and lines else ""
        raise ConfigError(
            f"{place}: not valid YAML: {problem}; {_remedy(problem, line)}"
        ) from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        where = f"{key}: " if key else ""
        what = str(error).partition("\n")[0]
        raise ConfigError(
            f"{path}: {where}{what}: correct it; an interpolation is written ${{name}}"
        ) from error
    # OmegaConf reads a lone word as a key without a value.
    if not isinstance(tree, dict) or (tree and ":" not in text):
        raise ConfigError(
            f"{path} holds {'a list' if isinstance(tree, list) else 'text'} and not a mapping: "
            f"write keys at its top level, such as model: {{call: my_package.MyModel}}"
        )
    tree = cast(dict[str, Any], tree)
    _refuse_nodes_without_a_key(path, tree)
    for key, value in tree.items():
        typed = re.search(rf"^{re.escape(str(key))}\s*:\s*(\w+)", text, re.MULTILINE)
        try:
            refuse_boolean(str(key), value, typed[1] if typed else "")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return tree


def refuse_boolean(key: str, value: object, typed: str) -> None:
    """Refuse a word that YAML takes for true or false, where the key holds neither.

    Args:
        key: at the top level of a config.
        value: what was read.
        typed: from what.

    Raises:
        ConfigError: names the word.

    >>> refuse_boolean("batchnorm", False, "off")
    Traceback (most recent call last):
        ...
    automicro.errors.ConfigError: batchnorm=off: YAML reads off as false: expected warn, error, ...
    """
    word = typed.strip()
    if not isinstance(value, bool) or key not in KEYS or word.lower() not in BOOLEAN_WORDS:
        return
    if not {bool, Any, CallConfig} & set(alternatives(key)):
        raise ConfigError(
            f"{key}={word}: YAML reads {word} as {show(value)}: expected {type_in_words(key)}"
        )


def read_value(text: str) -> Any:
    """Read the value of an override.

    Raises:
        ValueError: it is not YAML; the message says why.

    >>> read_value("1e-3"), read_value("[1, two]"), read_value("null")
    (0.001, [1, 'two'], None)
    """
    try:
        # OmegaConf's YAML reads 1e-3 as a number, which plain YAML 1.1 does not.
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ValueError(why) from error
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


T = TypeVar("T")
Tree = dict[str, Any]
# Keys that hold others which do not need each other.
OF_PARTS = ("metrics", "checkpoint", "eval_dataloader")
NO_NAMES = ("call", "args", "data", "metrics", "microbatch_size", "max_batches", "interval")


class ElsewhereError(ConfigError):
    """What a module of the user's raised while it was imported: it is imported once."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a config comes from.

    Attributes:
        files: the values of each, by its path; later ones win.
        overrides: ``key=value`` each, applied in order after all files.

    >>> Sources(files=(("a.yaml", {"seed": 1}),), overrides=("seed=2",)).merged()
    ({'seed': 2}, [])
    """

    files: tuple[tuple[str, Tree], ...]
    overrides: tuple[str, ...] = ()

    def merged(
        self, tidy: Callable[[Tree], None] = lambda tree: None
    ) -> tuple[Tree, list[ConfigError]]:
        """All in one, and what is wrong with overrides themselves, which are left out then.

        Args:
            tidy: called after each step.
        """
        tree: Tree = {}
        wrong = []
        for _, values in self.files:
            tree = merge(tree, _copy(values))
            tidy(tree)
        for override in self.overrides:
            try:
                apply_override(tree, override)
            except ConfigError as error:
                wrong.append(error)
            tidy(tree)
        return tree, wrong

    def touching(self, keys: Collection[str]) -> str:
        """The files, and the overrides of some keys, of what lies in them and what they lie in."""
        theirs = {each: _key_of(each) for each in self.overrides}
        whole = [each for each, key in theirs.items() if any(_lies_in(one, key) for one in keys)]
        parts = [each for each, key in theirs.items() if any(_lies_in(key, one) for one in keys)]
        files = [] if whole else [path for path, _ in self.files]
        return " + ".join([*files, *map(name_override, dict.fromkeys([*whole, *parts]))])


def read_sources(
    paths: Sequence[Any], overrides: Sequence[str], read: Callable[[Any], Tree]
) -> Sources:
    """Read all files.

    Raises:
        ConfigError: those that cannot be read, all of them.

    >>> read_sources(["a.yaml"], (), lambda path: {"seed": 1}).files
    (('a.yaml', {'seed': 1}),)
    """
    files, wrong = [], []
    for path in paths:
        try:
            files.append((str(path), read(path)))
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise _all_in_one(wrong, [str(each) for each in wrong])
    return Sources(files=tuple(files), overrides=tuple(overrides))


def load_or_tell(
    sources: Sources,
    load: Callable[[Tree, Collection[str]], T],
    tidy: Callable[[Tree], None] = lambda tree: None,
) -> T:
    """Load a config, or tell all that is wrong with it.

    After a mistake, the key that it is about is left out, and the rest looked at.

    Args:
        sources: what it comes from.
        load: takes the merged values, and the keys that were left out: nobody misses these.
        tidy: is called after each file and override was merged.

    Raises:
        ConfigError: every mistake, with the file or the override without which it would not be.

    >>> from automicro.cli.config.keys import about
    >>> def load(tree, without):
    ...     for key in tree:
    ...         with about(key):
    ...             raise ConfigError(f"no key {key!r}")
    >>> files = (("a.yaml", {"sede": 1}),)
    >>> load_or_tell(Sources(files=files, overrides=("lr=0.1",)), load)
    Traceback (most recent call last):
        ...
    automicro.errors.ConfigError: 2 mistakes:
      a.yaml: no key 'sede'
      the override 'lr=0.1': no key 'lr'
    """
    search = _Search(load, tidy)
    found = search.of(sources)
    if not found:
        return search.loaded[0]
    raise _all_in_one(found, [search.with_origin(each, sources) for each in found])


def name_override(override: str) -> str:
    """How messages call an override.

    >>> name_override("seed=1")
    "the override 'seed=1'"
    """
    return f"the override {override!r}"


class _Search(Generic[T]):
    """Looks for mistakes, with all sources and with some.

    Attributes:
        loaded: what came of sources without any.
    """

    def __init__(self, load: Callable[[Tree, Collection[str]], T], tidy: Callable[[Tree], None]):
        self._load = load
        self._tidy = tidy
        self.loaded: list[T] = []
        self._found: dict[tuple[Any, ...], list[ConfigError]] = {}

    def of(self, sources: Sources) -> list[ConfigError]:
        """The mistakes in what was loaded from some sources."""
        tree, found = sources.merged(self._tidy)
        without: set[str] = set()
        while True:
            rest = _without(tree, without)
            try:
                loaded = self._load(rest, without)
            except ConfigError as error:
                parts = {_part(key, tree) for key in keys_of(error)}
                if not _follows_from(parts, without, tree):
                    found.append(error)
                if parts <= without or isinstance(error, ElsewhereError):
                    return found
                without |= parts
            else:
                self.loaded += [] if found else [loaded]
                return found

    def with_origin(self, error: ConfigError, sources: Sources) -> str:
        """What an error says, with what brought it in."""
        text = str(error)
        if isinstance(error, ElsewhereError):
            return f"{sources.touching(keys_of(error))}: {text}"
        if text.startswith("the override "):
            return text
        return f"{self._origin(error, sources)}: {text}"

    def _origin(self, error: ConfigError, sources: Sources) -> str:
        files = [path for path, _ in sources.files]
        keys = keys_of(error)
        setting = [
            each
            for each in sources.overrides
            if keys and all(_lies_in(key, _key_of(each)) for key in keys)
        ]
        if setting:
            return name_override(setting[-1])
        changed = []
        for place, override in reversed(list(enumerate(sources.overrides))):
            fewer = _leave_out(sources.overrides, place)
            others = self._mistakes(replace(sources, overrides=fewer))
            if _is_among(error, others):
                continue
            if not any(set(keys) & set(keys_of(each)) for each in others):
                return name_override(override)
            changed.append(name_override(override))
        if changed:
            return " + ".join([*files, *reversed(changed)])
        for place, path in reversed(list(enumerate(files))):
            rest = replace(sources, files=_leave_out(sources.files, place))
            if len(files) > 1 and not _is_among(error, self._mistakes(rest)):
                return path
        return " + ".join(files)

    def _mistakes(self, sources: Sources) -> list[ConfigError]:
        key = (tuple(path for path, _ in sources.files), sources.overrides)
        if key not in self._found:
            self._found[key] = self.of(sources)
        return self._found[key]


def _all_in_one(found: Sequence[ConfigError], texts: Sequence[str]) -> ConfigError:
    said = list(dict.fromkeys(texts))
    if len(said) > 1:
        lines = [each.replace("\n", "\n  ") for each in said]
        text = "\n  ".join([f"{len(said)} mistakes:", *lines])
    else:
        text = said[0]
    error = ConfigError(text)
    error.__cause__ = next((each for each in found if each.__cause__ is not None), found[0])
    return error


def _is_among(error: ConfigError, others: Sequence[ConfigError]) -> bool:
    return any(str(each) == str(error) for each in others)


def _leave_out(values: tuple[T, ...], place: int) -> tuple[T, ...]:
    return values[:place] + values[place + 1 :]


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _lies_in(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _part(key: str, tree: Mapping[str, Any]) -> str:
    """As little of a config as can be left out for a key, so that the rest is whole."""
    top, *rest = key.split(".")
    inside = tree.get(top)
    if top not in OF_PARTS or not rest or not isinstance(inside, Mapping):
        return top
    if rest[0] not in inside or (top == "eval_dataloader" and set(NO_NAMES) & inside.keys()):
        return top
    return f"{top}.{rest[0]}"


def _without(tree: Mapping[str, Any], parts: Collection[str]) -> Tree:
    """A copy with some parts left out."""
    rest = {key: _copy(value) for key, value in tree.items() if str(key) not in parts}
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
    held = str([tree.get(part.partition(".")[0]) for part in parts])
    return any(re.search(rf"\$\{{{re.escape(top)}\b", held) for top in tops)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(each) for name, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value
