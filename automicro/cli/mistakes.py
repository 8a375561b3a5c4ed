"""All mistakes of a config at once, each with the file or the override that brought it in."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from automicro.cli.keys_meant import keys_of
from automicro.cli.merging import merge
from automicro.cli.overrides import apply_override
from automicro.errors import ConfigError

T = TypeVar("T")
Tree = dict[str, Any]
# Keys that hold others which do not need each other.
OF_PARTS = ("metrics", "checkpoint", "eval_data")
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

    >>> from automicro.cli.keys_meant import about
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
    if rest[0] not in inside or (top == "eval_data" and set(NO_NAMES) & inside.keys()):
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
