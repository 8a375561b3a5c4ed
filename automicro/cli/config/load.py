"""Conversion of YAML files and overrides to a `RunConfig`, and back to YAML."""

import datetime
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.config.keys import KEYS, TO_TRAIN, mistake
from automicro.cli.config.nodes import leaves, mapped
from automicro.cli.config.schema import (
    BATCH_SIZES,
    EXAMPLES,
    RunConfig,
    defaults,
    read,
    unknown_key,
)
from automicro.cli.config.sources import Sources, Tree
from automicro.errors import ConfigError, about, suggestion
from automicro.memory.oom import first_line
from automicro.trainer.data.loading import read_accumulation
from automicro.trainer.processes import agreed_time

DATA = ("train_dataloader", "sampling_mode", "eval_dataloader")
# Replaced in the written config, because it would have another value when that is read again.
_RESOLVER = re.compile(r"(?<!\\)\$\{[\w.]+:")


def _resolved(tree: Tree, key: str) -> Any:
    """Return the value of a key with all interpolations replaced."""
    if "${" not in str(tree[key]):
        return tree[key]
    _register_now()
    try:
        # With defaults, because an interpolation can refer to a key that no file sets.
        config = OmegaConf.create({**defaults(), **tree})
        value = config[key]
        is_held = OmegaConf.is_config(value)
        return OmegaConf.to_container(value, resolve=True) if is_held else value
    # Older versions of OmegaConf follow a cycle until the stack overflows.
    except (OmegaConfBaseException, RecursionError) as error:
        where, values = getattr(error, "full_key", None) or key, leaves(tree)
        missing = re.search(r"'([\w.]+)' not found", str(error))
        unknown = missing[1] if missing and missing[1] not in KEYS else None
        hint = suggestion(unknown, [*values, *KEYS]) if unknown else ""
        raise mistake(
            f"{where}={values.get(where)}: {first_line(error)}{hint}: correct it. Use ${{key}} "
            f"from the top level, ${{oc.env:NAME,default}} or ${{now:%Y-%m-%d}}",
            where,
        ) from error


def _written(raw: Any, resolved: Any) -> Any:
    """Return a value as written, with the results of resolvers such as ``${now:…}``."""
    if isinstance(raw, Mapping):
        return {name: _written(each, resolved[name]) for name, each in raw.items()}
    if isinstance(raw, list):
        return [_written(*each) for each in zip(raw, resolved, strict=True)]
    return escape(resolved) if isinstance(raw, str) and _RESOLVER.search(raw) else raw


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
                f"{key}={rows} and accumulate_batches={accumulate_batches!r} both set the size "
                "of a batch: leave one of them out"
            )
        accumulate_batches = size
    shares = num_devices * accumulate_batches
    each, rest = divmod(rows, shares)
    if rest or each < 1:
        raise ConfigError(
            f"{key}={rows} cannot be divided into {num_devices} × {accumulate_batches} equal "
            "shares (devices × accumulate_batches) of at least 1 row: give a multiple of "
            f"{shares}, such as {max(each, 1) * shares}"
        )
    return each


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config that was read."""

    config: RunConfig  # with all interpolations resolved
    # Keys set by files and overrides, in the order of the reference. References to other keys
    # remain, so that they follow later changes. Reading it again gives the same config.
    written: Mapping[str, Any]
    sources: Sources

    @property
    def everything(self) -> dict[str, Any]:
        """All keys, including defaults of keys that are not set."""
        values = {**defaults(), **self.written}
        if isinstance(values["checkpoint"], Mapping):
            folder = {} if self.config.run_dir is None else {"folder": "${run_dir}/checkpoints"}
            values["checkpoint"] = {**folder, **defaults("checkpoint"), **values["checkpoint"]}
        return {key: values[key] for key in KEYS if key in values}


def read_config(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    required: Sequence[str] = TO_TRAIN,
    num_devices: int = 1,
) -> LoadedConfig:
    """Read and merge files, apply overrides, resolve interpolations and check the result.

    No objects are created, and no modules imported. In the arguments of the data, batch sizes are
    those of one device.

    >>> sorted(read_config(["configs/digits.yaml"]).written)[:3]
    ['eval_dataloader', 'eval_interval', 'eval_microbatch_size']
    """
    sources = Sources(paths, overrides)
    # An unset batch size is removed and not null, because references to it have no value.
    unset = [key for key in BATCH_SIZES if sources.tree.get(key) in (None, "None")]
    tree = {key: value for key, value in sources.tree.items() if key not in unset}
    with sources.explaining():
        for key in tree:
            if key not in KEYS:
                raise unknown_key(key, tree)
        open_keys = [key for key, value in leaves(tree).items() if value == "???"]
        if open_keys:
            raise mistake(
                f"{', '.join(open_keys)}: replace '???' by a value, or add "
                f"{' '.join(f'{key}=VALUE' for key in open_keys)}",
                *open_keys,
            )
        values, written = _read(tree, num_devices)
        for key in required:
            if key not in tree or values[key] is None:
                raise mistake(
                    f"{key} is missing: write at the top level {key}: {EXAMPLES[key]}", key
                )
    config = RunConfig(**{**dict.fromkeys(KEYS), **defaults(), **values})
    return LoadedConfig(config=config, written=written, sources=sources)


def _read(tree: Tree, num_devices: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the keys for the run, and the values to be written."""
    values: dict[str, Any] = {}
    written: dict[str, Any] = {}
    shares: dict[str, Tree] = {}
    keys = [key for key in KEYS if key in tree]
    # Loaders come last, because they can refer to batch sizes.
    for key in sorted(keys, key=lambda key: key in DATA):
        if key in DATA and not shares:
            shares = _share_out(values, num_devices)
        with about(key):
            value = _resolved({**tree, **shares.get(key, {})}, key)
            written[key] = _written(tree[key], value)
            values[key] = read(value, key)
    checkpoint, run_dir = values.get("checkpoint"), values.get("run_dir")
    if checkpoint is not None:
        checkpoint.setdefault("folder", run_dir and f"{run_dir}/checkpoints")
    return values, {key: written[key] for key in keys}


def _share_out(values: Mapping[str, Any], num_devices: int) -> dict[str, Tree]:
    """Return, for each key of data, the rows of each batch size that one device loads."""
    shares: dict[str, Tree] = {key: {} for key in DATA}
    for key in BATCH_SIZES:
        if values.get(key) is not None:
            with about(key):
                # Evaluations do not accumulate, so only devices share their batches.
                rows = rows_to_load(values[key], num_devices=num_devices, key=key)
                shares["eval_dataloader"][key] = rows
    if "global_batch_size" in shares["eval_dataloader"]:
        with about("global_batch_size"):
            rows = rows_to_load(
                values["global_batch_size"],
                num_devices=num_devices,
                accumulate_batches=values.get("accumulate_batches", 1),
            )
            for key in DATA[:2]:
                shares[key] = {"global_batch_size": rows}
    return shares


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML that reads back as the same values.

    >>> print(to_yaml({"model": {"call": "a.B", "args": {"width": 4}}, "name": "1e-3"}), end="")
    model:
      call: a.B
      args:
        width: 4
    name: '1e-3'
    """
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def escape(value: Any) -> Any:
    r"""Return a value with all interpolations escaped.

    >>> print(escape({"name": ["${seed}"]})["name"][0])
    \${seed}
    """
    return mapped(
        value,
        lambda leaf: re.sub(r"(\\*)\$\{", r"\1\1\\${", leaf) if isinstance(leaf, str) else leaf,
    )
