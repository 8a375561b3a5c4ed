"""From YAML files and overrides to a `RunConfig`, and back to YAML."""

import copy
import datetime
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from automicro.cli.config.check import OF_SECTIONS, read_typed
from automicro.cli.config.keys import KEYS, LISTS, TO_TRAIN, mistake
from automicro.cli.config.nodes import REFERENCE, leaves, mapped
from automicro.cli.config.schema import (
    EXAMPLES,
    SECTIONS,
    RunConfig,
    defaults,
    is_made,
)
from automicro.cli.config.sources import Sources, load_or_tell
from automicro.errors import ConfigError, about, suggestion
from automicro.memory.oom import first_line
from automicro.options import read_accumulation
from automicro.trainer.processes import agreed_time

RESOLVER = re.compile(r"\$\{([\w.]+):")


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """Return plain values, interpolations replaced by what they stand for.

    ``${now:%Y-%m-%d_%H-%M-%S}`` is when the process first asked; of several, rank 0, and the first
    time where torchrun starts them again.

    >>> resolve({"seed": 3, "model": {"args": {"seed": "${seed}"}}})["model"]
    {'args': {'seed': 3}}
    """
    if not _refers(tree):  # OmegaConf makes a node of each value
        return copy.deepcopy(tree)
    _register_now()
    # Without types: what an interpolation brings is checked afterwards, as if it had been written.
    config = OmegaConf.create(tree)
    try:
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    # OmegaConf may follow interpolations in a circle until Python's stack ends.
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None)
        with about(*filter(None, [key])):
            _refuse(error, key, tree)
        raise


def _refers(value: Any) -> bool:
    """Whether anything in a value is, or looks like, an interpolation."""
    if isinstance(value, Mapping):
        return any(map(_refers, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_refers, value))
    return isinstance(value, str) and "${" in value


def _refuse(error: Exception, key: str | None, tree: dict[str, Any]) -> None:
    """Say which interpolation stands for nothing, and why."""
    text = str(leaves(tree).get(key or ""))
    if isinstance(error, InterpolationToMissingValueError):
        wanted = next(name for name in REFERENCE.findall(text) if tree.get(name) == "???")
        raise ConfigError(
            f"{key} refers to ${{{wanted}}}, which is not set: write {wanted}: … at the top level"
        ) from error
    if isinstance(error, InterpolationKeyError):
        known = [*_prefixes(leaves(tree)), *KEYS]
        wanted = next(name for name in REFERENCE.findall(text) if name not in known)
        raise ConfigError(
            f"{key} refers to ${{{wanted}}}, which does not exist{suggestion(wanted, known)}: "
            f"use a key of the config, from its top level"
        ) from error
    if isinstance(error, UnsupportedInterpolationType):
        wanted = next(name for name in RESOLVER.findall(text) if not OmegaConf.has_resolver(name))
        raise ConfigError(
            f"{key} uses ${{{wanted}:…}}, which does not exist: use ${{key}}, ${{oc.env:NAME}} or "
            f"${{now:%Y-%m-%d}}"
        ) from error
    circle = _circle(tree)
    if circle:
        raise mistake(
            f"{' → '.join(circle)}: these refer to each other in a circle: give one of them a "
            f"value",
            *circle,
        ) from error
    if not isinstance(error, RecursionError):
        raise ConfigError(f"{key}: {first_line(error)}: correct it") from error


def _prefixes(keys: Iterable[str]) -> Iterator[str]:
    """Keys, and those that they lie in."""
    for key in keys:
        yield from (key[: end.start()] for end in re.finditer(r"\.|$", key))


def _circle(tree: dict[str, Any]) -> list[str]:
    """Keys that refer to each other, back to the first; empty where none do."""
    refers = {key: REFERENCE.findall(str(value)) for key, value in leaves(tree).items()}

    def follow(*way: str) -> list[str]:
        for each in refers.get(way[-1], ()):
            if each in way:
                return [*way[way.index(each) :], each]
            if found := follow(*way, each):
                return found
        return []

    return next(filter(None, map(follow, refers)), [])


@cache
def _started_at() -> datetime.datetime:
    # Cached, so that every ${now:…} of a config is the same moment.
    now = datetime.datetime.now().isoformat()
    return datetime.datetime.fromisoformat(agreed_time(now))


def _register_now() -> None:
    if not OmegaConf.has_resolver("now"):
        # OmegaConf 2.4 renamed it, and warns of the old name.
        name = "register_resolver"
        register = getattr(OmegaConf, name, None) or OmegaConf.register_new_resolver
        register("now", lambda form: _started_at().strftime(form))


def rows_to_load(
    rows: int,
    *,
    num_devices: int,
    accumulate_batches: int | str = 1,
    key: str = "global_batch_size",
) -> int:
    """Return how many rows each device loads at a time.

    Args:
        rows: of the whole batch.
        num_devices: by how many devices it is shared.
        accumulate_batches: how many loaded batches make one optimization batch.
        key: where the rows stand in the config.

    >>> rows_to_load(512, num_devices=4, accumulate_batches=2)
    64
    """
    if isinstance(accumulate_batches, str):
        size = read_accumulation(accumulate_batches)
        if not isinstance(size, int):
            raise ConfigError(
                f"{key}={rows} says how large a batch is, and so does accumulate_batches="
                f"{accumulate_batches!r}: leave one of them out"
            )
        accumulate_batches = size
    shares = num_devices * accumulate_batches
    if rows < 1:
        raise ConfigError(
            f"{key}={rows} has no rows: give the rows of a batch over all devices, at least "
            f"{shares}"
        )
    each, rest = divmod(rows, shares)
    if rest:
        nearest = [number * shares for number in (each, each + 1) if number]
        among = []
        if num_devices > 1 or accumulate_batches == 1:
            among.append(f"{num_devices} devices")
        if accumulate_batches > 1:
            among.append(f"accumulate_batches={accumulate_batches}")
        raise ConfigError(
            f"{key}={rows} cannot be shared by {' × '.join(among)}: {rest} of {rows} rows would "
            f"be left over; use {' or '.join(map(str, nearest))}"
        )
    return each


# An unset one is no null: what refers to it has nothing to stand for.
BATCH_SIZES = ("global_batch_size", "eval_global_batch_size")
OF_TRAINING = ("train_dataloader", "sampling_mode")
DATA = (*OF_TRAINING, "eval_dataloader")
# Stand for these keys while all else is resolved: no config holds them.
MARKS = {key: f"\0{key}\0" for key in (*BATCH_SIZES, "run_dir")}
_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config that was read, with every interpolation resolved.

    Attributes:
        config: every key, typed.
        sources: what it was read from.
        checked: what ``check`` of `read_config` gave.
        written: the keys that files and overrides set, in the order of the reference. The only
            interpolations left are the batch sizes in the arguments of the data, and ``run_dir``
            in what is made, so that they follow when these are changed. Read again, it is the
            same config.
    """

    config: RunConfig
    checked: Any
    written: Mapping[str, Any]
    sources: Sources

    @property
    def everything(self) -> dict[str, Any]:
        """Every key, with the default of those that are not written."""
        values = {**defaults(), **self.written}
        if values["checkpoint"] is not None:
            folder = {} if self.config.run_dir is None else {"folder": "${run_dir}/checkpoints"}
            values["checkpoint"] = {
                **folder,
                **defaults("checkpoint"),
                **values["checkpoint"],
            }
        return {key: values[key] for key in KEYS if key in values}


def read_config(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    required: Sequence[str] = TO_TRAIN,
    num_devices: int = 1,
    check: Callable[[RunConfig], object] = lambda config: None,
) -> LoadedConfig:
    """Read files, merge them, apply overrides, check it all and resolve interpolations.

    Nothing is made, and nothing imported but by ``check``. In the arguments of the data, the batch
    sizes are what one device loads at a time.

    Args:
        paths: YAML files; later ones win.
        overrides: ``key=value`` each, applied in order after all files.
        required: the keys without which it is no config.
        num_devices: by how many devices an optimization batch is shared.
        check: what else to ask of the config, such as whether what it names exists.

    >>> sorted(read_config(["configs/digits.yaml"]).written)[:3]
    ['eval_dataloader', 'eval_interval', 'eval_microbatch_size']
    """
    sources = Sources(paths, overrides, _drop_nulls)

    def load(tree: dict[str, Any], without: Collection[str]) -> LoadedConfig:
        typed = read_typed(tree)
        _require(tree, [key for key in required if key not in without])
        config, written = _load(tree, typed, num_devices)
        checked = check(config)
        return LoadedConfig(config=config, checked=checked, written=written, sources=sources)

    return load_or_tell(sources, load)


def _load(
    tree: dict[str, Any], typed: DictConfig, num_devices: int
) -> tuple[RunConfig, dict[str, Any]]:
    # Interpolations are resolved with marks in the place of batch sizes and run_dir. These marks
    # become values for the run, and references again in what is written.
    # With the defaults: an interpolation may stand for a key that the file does not set.
    unresolved = cast(dict[str, Any], OmegaConf.to_container(typed))
    follows = [key for key in MARKS if tree.get(key) is not None]
    values = resolve(_with_marks(unresolved, follows))
    if any(MARKS[key] in str(values[key]) for key in follows):
        resolve(unresolved)  # in a circle
    values = {key: None if value == "???" else value for key, value in values.items()}
    whole = {key: values[key] for key in follows}
    # Again: what stood behind an interpolation is known only now. Escaped, because a ${ that is
    # left in a value is text from here on.
    typed = read_typed(escape(_fill(values, whole)))
    shares = _share_out(typed, num_devices)
    data = {key: _fill(values[key], {**whole, **shares[key]}) for key in DATA}
    typed = cast(DictConfig, OmegaConf.merge(typed, escape(data)))
    plain = cast(dict[str, Any], OmegaConf.to_container(typed, resolve=True))
    references = {key: f"${{{key}}}" for key in MARKS}
    written = {
        key: _fill(escape(brief(values[key])), references)
        if is_made(key) or key in SECTIONS
        else escape(plain[key])
        for key in KEYS
        if key in tree
    }
    config = cast(RunConfig, OmegaConf.to_object(typed))
    made: dict[str, Any] = {}
    for key, read in OF_SECTIONS.items():
        if getattr(config, key) is not None:
            with about(key):
                made[key] = _to_objects(read(escape(getattr(config, key))))
    if "checkpoint" in made and made["checkpoint"]["folder"] == "???":
        made["checkpoint"]["folder"] = config.run_dir and f"{config.run_dir}/checkpoints"
    return replace(config, **made), written


def _to_objects(typed: Any) -> Any:
    if isinstance(typed, DictConfig):
        return OmegaConf.to_object(typed)
    is_by_name = isinstance(typed, dict)
    return {name: _to_objects(each) for name, each in typed.items()} if is_by_name else typed


def _with_marks(tree: Mapping[str, Any], follows: Sequence[str]) -> dict[str, Any]:
    """A config with marks for those references that are kept when it is written."""

    def mark(value: Any, keys: Sequence[str]) -> Any:
        # Escaped and nested interpolations take more than a pattern to read: OmegaConf resolves
        # them.
        if not isinstance(value, str) or "\\" in value or re.search(r"\$\{[^}]*\$\{", value):
            return value
        return REFERENCE.sub(lambda found: MARKS[found[1]] if found[1] in keys else found[0], value)

    # Elsewhere a number may be computed from a batch size, so that it has to be resolved.
    of_made = [key for key in follows if key == "run_dir"]
    return {
        key: mapped(value, partial(mark, keys=follows if key in DATA else of_made))
        if is_made(key) or key in SECTIONS
        else value
        for key, value in tree.items()
    }


def _fill(value: Any, fillings: Mapping[str, Any]) -> Any:
    """A value with others in the place of marks."""

    def fill(leaf: Any) -> Any:
        for key, filling in fillings.items() if isinstance(leaf, str) else ():
            # A mark that stands alone is replaced by the value itself: a batch size stays a number.
            if leaf == MARKS[key]:
                return filling
            leaf = leaf.replace(MARKS[key], str(filling))
        return leaf

    return mapped(value, fill)


def _share_out(typed: DictConfig, num_devices: int) -> Mapping[str, Mapping[str, int]]:
    """How many rows of each batch size one device loads at a time, by the key of the data."""
    shares: dict[str, int] = {}
    for key in BATCH_SIZES:
        if not OmegaConf.is_missing(typed, key) and typed[key] is not None:
            with about(key):
                shares[key] = rows_to_load(typed[key], num_devices=num_devices, key=key)
    # An evaluation accumulates nothing: there global_batch_size is shared by devices alone.
    of_training = {}
    if "global_batch_size" in shares:
        with about("global_batch_size"):
            of_training["global_batch_size"] = rows_to_load(
                typed.global_batch_size,
                num_devices=num_devices,
                accumulate_batches=typed.accumulate_batches,
            )
    return {**dict.fromkeys(OF_TRAINING, of_training), "eval_dataloader": shares}


def _drop_nulls(tree: dict[str, Any]) -> None:
    """Take away what null stands for nothing in; None, as messages for Python have it, is null."""
    tree |= {key: _with_nulls(tree[key]) for key in KEYS if key in tree}
    for key in BATCH_SIZES:
        if key in tree and tree[key] is None:
            del tree[key]
    for key in ("metrics", *LISTS):
        if key in tree and tree[key] is None:
            tree[key] = {} if key == "metrics" else []
    if isinstance(tree.get("metrics"), dict):
        tree["metrics"] = _without_nulls(tree["metrics"])
    evaluation = tree.get("eval_dataloader")
    if isinstance(evaluation, dict) and not {"call", "data"} & evaluation.keys():  # by name
        tree["eval_dataloader"] = _without_nulls(evaluation) or None
    checkpoint = tree.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("folder", "") is None:
        del checkpoint["folder"]


def _with_nulls(value: Any) -> Any:
    """A value in which None is null, but for the arguments of nodes, which are not ours."""
    if isinstance(value, Mapping) and "call" not in value:
        return {name: _with_nulls(each) for name, each in value.items()}
    return None if isinstance(value, str) and value == "None" else value


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _require(tree: dict[str, Any], required: Sequence[str]) -> None:
    for key in required:
        if key not in tree or tree[key] is None:
            raise mistake(f"{key} is missing: write at the top level {key}: {EXAMPLES[key]}", key)
    open_keys = [key for key, value in leaves(tree).items() if value == "???"]
    if open_keys:
        are = "is" if len(open_keys) == 1 else "are"
        them = "it" if len(open_keys) == 1 else "them"
        raise mistake(
            f"{', '.join(open_keys)} {are} '???', to be filled in: write {them} there, or add "
            f"{' '.join(f'{key}=VALUE' for key in open_keys)}",
            *open_keys,
        )


def brief(made: Any) -> Any:
    """Return nodes without empty ``args``.

    >>> brief({"accuracy": {"call": "a.B", "args": {}}})
    {'accuracy': {'call': 'a.B'}}
    """
    if isinstance(made, list):
        return [brief(each) for each in made]
    if not isinstance(made, Mapping):
        return made
    return {
        name: brief(value) if "call" not in made else value
        for name, value in made.items()
        if name != "args" or value
    }


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    # PyYAML writes what occurs twice as &id001 and *id001.
    def ignore_aliases(self, data: Any) -> bool:
        return True

    # PyYAML would put the items of a list right below their key, without an indent.
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
    # Other quotes leave line breaks of Unicode as they are, which are read as spaces.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
# 1e-3 is text in YAML 1.1 and a number for OmegaConf.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9._]+[eE][-+]?[0-9]+$"), list("-+0123456789.")
)


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML, with lists and mappings of plain values on one line each.

    >>> print(to_yaml({"model": {"call": "a.B", "args": {"width": 4}}, "name": "1e-3"}), end="")
    model:
      call: a.B
      args: {width: 4}
    name: '1e-3'
    """
    return "".join(_key_to_yaml(key, value) for key, value in values.items())


def escape(value: Any) -> Any:
    r"""Return a value in which nothing is an interpolation any more.

    >>> print(escape({"name": ["${seed}"]})["name"][0])
    \${seed}
    """
    return mapped(
        value,
        lambda leaf: re.sub(r"(\\*)\$\{", r"\1\1\\${", leaf) if isinstance(leaf, str) else leaf,
    )


def _key_to_yaml(key: str, value: Any) -> str:
    text = yaml.dump(
        {key: value},
        Dumper=_Dumper,
        # None is one line for each collection of plain values, this outermost one included.
        default_flow_style=None if isinstance(value, dict | list) else False,
        sort_keys=False,
        width=_WIDTH,
        allow_unicode=True,
    )
    return cast(str, text)
