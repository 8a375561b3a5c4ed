"""Conversion of YAML files and overrides to a `RunConfig`, and back to YAML."""

import datetime
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.config.keys import KEYS, TO_TRAIN, mistake
from automicro.cli.config.nodes import REFERENCE, is_node, leaves, mapped
from automicro.cli.config.schema import (
    BATCH_SIZES,
    EXAMPLES,
    SECTIONS,
    At,
    Reader,
    RunConfig,
    defaults,
    is_made,
    unknown_key,
)
from automicro.cli.config.sources import Sources, Tree
from automicro.compilation import check_compile
from automicro.errors import ConfigError, suggestion
from automicro.memory.oom import first_line
from automicro.trainer.data.loading import read_accumulation
from automicro.trainer.device import choose_device
from automicro.trainer.processes import agreed_time

OF_TRAINING = ("train_dataloader", "sampling_mode")
DATA = (*OF_TRAINING, "eval_dataloader")
# Placeholders for these keys while others are resolved; they occur in no config.
MARKS = {key: f"\0{key}\0" for key in (*BATCH_SIZES, "run_dir")}
_WIDTH = 100


class _Interpolations:
    """The values of a config, with interpolations replaced.

    References that should remain in the written config become marks: those to batch sizes in the
    data, and those to ``run_dir`` in nodes. Elsewhere a number might be computed from a batch size,
    so its value is needed.
    """

    def __init__(self, tree: Tree) -> None:
        # Including defaults, because an interpolation can refer to a key that no file sets.
        self._tree = {**defaults(), **tree}
        marks = {key: mark for key, mark in MARKS.items() if key in tree and tree[key] is not None}
        of_made = {key: mark for key, mark in marks.items() if key == "run_dir"}
        _register_now()
        self._plain, self._made, self._data = (
            OmegaConf.create({**self._tree, **each}) for each in ({}, of_made, marks)
        )

    def resolved(self, key: str) -> Any:
        """Return the resolved value of a key."""
        if "${" not in str(self._tree[key]):
            return self._tree[key]
        config = self._made if is_made(key) or key in SECTIONS else self._plain
        config = self._data if key in DATA else config
        try:
            value = config[key]
            is_held = OmegaConf.is_config(value)
            return OmegaConf.to_container(value, resolve=True) if is_held else value
        # Older versions of OmegaConf follow a cycle until the stack overflows.
        except (OmegaConfBaseException, RecursionError) as error:
            raise self._refusal(error, getattr(error, "full_key", None) or key) from error

    def _refusal(self, error: Exception, key: str) -> ConfigError:
        """Return an error that names the interpolation that failed, and the reason."""
        values = leaves(self._tree)
        known = [*_prefixes(values)]
        # Its own references come first, because a key that it refers to might contain the unset
        # one.
        for leaf, value in [(key, values.get(key)), *values.items()]:
            for name in REFERENCE.findall(str(value)):
                if name not in known:
                    hint = "" if name in KEYS else suggestion(name, [*known, *KEYS])
                    return mistake(
                        f"{leaf} refers to ${{{name}}}, which is not set{hint}: use a key of the "
                        f"config, from its top level",
                        leaf,
                    )
        return mistake(
            f"{key}={values.get(key)}: {first_line(error)}: correct it; there are ${{key}}, "
            f"${{oc.env:NAME,default}} and ${{now:%Y-%m-%d}}",
            key,
        )


def _prefixes(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys, and the keys that contain them."""
    for key in keys:
        yield from (key[: end.start()] for end in re.finditer(r"\.|$", key))


@cache
def _started_at() -> datetime.datetime:
    # Cached, so that every ${now:…} of a config is the same moment.
    return datetime.datetime.fromisoformat(agreed_time(datetime.datetime.now().isoformat()))


def _register_now() -> None:
    if not OmegaConf.has_resolver("now"):
        with warnings.catch_warnings():
            # OmegaConf 2.4 renamed this function and warns; in 2.3 the new name is a deprecated
            # function.
            warnings.simplefilter("ignore", UserWarning)
            OmegaConf.register_new_resolver("now", lambda form: _started_at().strftime(form))


def rows_to_load(
    rows: int,
    *,
    num_devices: int,
    accumulate_batches: int | str = 1,
    key: str = "global_batch_size",
) -> int:
    """Return the number of rows that each device loads at a time.

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
    each, rest = divmod(rows, shares)
    if rest or each < 1:
        raise ConfigError(
            f"{key}={rows} cannot give each of {num_devices} × {accumulate_batches} shares "
            "(devices × accumulate_batches) as many rows, at least 1: give a multiple of "
            f"{shares}, such as {max(each, 1) * shares}"
        )
    return each


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config that was read, with all interpolations resolved."""

    config: RunConfig
    checked: Any  # result of ``check`` of `read_config`
    # Keys set by files and overrides, in the order of the reference. Two kinds of interpolations
    # remain, so that they follow later changes: batch sizes in the arguments of the data, and
    # run_dir in nodes. Reading it again gives the same config.
    written: Mapping[str, Any]
    sources: Sources

    @property
    def everything(self) -> dict[str, Any]:
        """All keys, including defaults of keys that are not set."""
        values = {**defaults(), **self.written}
        if values["checkpoint"] is not None:
            folder = {} if self.config.run_dir is None else {"folder": "${run_dir}/checkpoints"}
            values["checkpoint"] = {**folder, **defaults("checkpoint"), **values["checkpoint"]}
        return {key: values[key] for key in KEYS if key in values}


def read_config(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    required: Sequence[str] = TO_TRAIN,
    num_devices: int = 1,
    check: Callable[[RunConfig, At], object] = lambda config, at: None,
) -> LoadedConfig:
    """Read and merge files, apply overrides, resolve interpolations and check the result.

    No objects are created, and only ``check`` imports their modules. In the arguments of the data,
    batch sizes are those of one device. All mistakes are reported together.

    >>> sorted(read_config(["configs/digits.yaml"]).written)[:3]
    ['eval_dataloader', 'eval_interval', 'eval_microbatch_size']
    """
    sources = Sources(paths, overrides)
    # An unset batch size is removed and not null, because references to it have no value.
    unset = [key for key in BATCH_SIZES if sources.tree.get(key) in (None, "None")]
    tree = {key: value for key, value in sources.tree.items() if key not in unset}
    for key in tree:
        with sources.at(key):
            if key not in KEYS:
                raise unknown_key(key, tree)
    open_keys = [key for key, value in leaves(tree).items() if value == "???"]
    with sources.at(*open_keys):
        _refuse_open(open_keys)
    is_open = {key.partition(".")[0] for key in open_keys}
    keys = [key for key in KEYS if key in tree and key not in is_open]
    values, written = _read(tree, keys, sources.at, num_devices)
    for key in required:
        with sources.at(key):
            if key not in tree or values.get(key, ...) is None:
                raise ConfigError(
                    f"{key} is missing: write at the top level {key}: {EXAMPLES[key]}"
                )
    config = RunConfig(**{**dict.fromkeys(KEYS), **defaults(), **values})
    with sources.at("compile"):
        _check_compile(config)
    checked = check(config, sources.at)
    sources.tell()
    return LoadedConfig(config=config, checked=checked, written=written, sources=sources)


def _read(
    tree: Tree, keys: Sequence[str], at: At, num_devices: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the keys for the run, and the values to be written."""
    interpolations, reader = _Interpolations(tree), Reader(at)
    values: dict[str, Any] = {}
    written: dict[str, Any] = {}
    shares: Mapping[str, Mapping[str, int]] | None = None
    references = {key: f"${{{key}}}" for key in MARKS}
    # Nodes come last, because they can refer to batch sizes and run_dir.
    for key in sorted(keys, key=lambda key: is_made(key) or key in SECTIONS):
        if shares is None and (is_made(key) or key in SECTIONS):
            shares = _share_out(values, num_devices, at)
        with at(key):
            resolved = interpolations.resolved(key)
            known = {**values, **(shares or {}).get(key, {})}
            values[key] = reader.read(_fill(resolved, known), key)
            is_plain = values[key] is None or isinstance(values[key], bool | int | float | str)
            written[key] = _fill(escape(values[key] if is_plain else resolved), references)
    checkpoint, run_dir = values.get("checkpoint"), values.get("run_dir")
    if checkpoint is not None:
        checkpoint.setdefault("folder", run_dir and f"{run_dir}/checkpoints")
    return values, {key: written[key] for key in keys if key in written}


def _check_compile(config: RunConfig) -> None:
    sizes = (config.microbatch_size, config.eval_microbatch_size)
    try:
        check_compile(
            config.compile,
            # A policy might change sizes, and it does not exist yet.
            sizes_change=any(size in ("auto", "explore") or is_node(size) for size in sizes),
            device=choose_device(config.device),
            memory_limit=config.memory_limit,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _refuse_open(keys: Sequence[str]) -> None:
    if keys:
        are, them = ("is", "it") if len(keys) == 1 else ("are", "them")
        raise ConfigError(
            f"{', '.join(keys)} {are} '???', to be filled in: write {them} there, or add "
            f"{' '.join(f'{key}=VALUE' for key in keys)}"
        )


def _fill(value: Any, fillings: Mapping[str, Any]) -> Any:
    """Replace the marks in a value."""

    def fill(leaf: Any) -> Any:
        for key, mark in MARKS.items() if isinstance(leaf, str) else ():
            # If a mark is the whole text, the value itself replaces it, so a batch size remains a
            # number.
            if leaf == mark:
                return fillings.get(key)
            leaf = leaf.replace(mark, str(fillings.get(key)))
        return leaf

    return mapped(value, fill)


def _share_out(
    values: Mapping[str, Any], num_devices: int, at: At
) -> Mapping[str, Mapping[str, int]]:
    """Return, for each key of data, the rows of each batch size that one device loads."""
    shares: dict[str, int] = {}
    of_training: dict[str, int] = {}
    for key in BATCH_SIZES:
        with at(key):
            if values.get(key) is not None:
                shares[key] = rows_to_load(values[key], num_devices=num_devices, key=key)
    with at("global_batch_size"):
        # Evaluations do not accumulate, so only devices share their batches.
        if "global_batch_size" in shares:
            of_training["global_batch_size"] = rows_to_load(
                values["global_batch_size"],
                num_devices=num_devices,
                accumulate_batches=values.get("accumulate_batches", 1),
            )
    return {**dict.fromkeys(OF_TRAINING, of_training), "eval_dataloader": shares}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    # PyYAML would write repeated values as &id001 and *id001.
    def ignore_aliases(self, data: Any) -> bool:
        return True

    # PyYAML would not indent the items of a list.
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
    # Other quotes keep Unicode line breaks, which are read back as spaces.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
# 1e-3 is text in YAML 1.1, but a number in OmegaConf.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9._]+[eE][-+]?[0-9]+$"), list("-+0123456789.")
)


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML, with one line for each list or mapping of plain values.

    >>> print(to_yaml({"model": {"call": "a.B", "args": {"width": 4}}, "name": "1e-3"}), end="")
    model:
      call: a.B
      args: {width: 4}
    name: '1e-3'
    """
    return "".join(_key_to_yaml(key, value) for key, value in values.items())


def escape(value: Any) -> Any:
    r"""Return a value with all interpolations escaped.

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
        # None would also put the outermost mapping on one line if its values are plain.
        default_flow_style=None if isinstance(value, dict | list) else False,
        sort_keys=False,
        width=_WIDTH,
        allow_unicode=True,
    )
    return cast(str, text)
