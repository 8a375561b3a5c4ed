"""From interpolations and global batch sizes to plain values."""

import datetime
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from automicro.cli.config.keys import KEYS, RENAMED, about, did_you_mean, mistake
from automicro.cli.config.nodes import leaves
from automicro.errors import ConfigError
from automicro.trainer.processes import agreed_time

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """Return plain values, interpolations replaced by what they stand for.

    ``${now:%Y-%m-%d_%H-%M-%S}`` is when the process first asked; of several, rank 0, and the first
    time where torchrun starts them again.

    Raises:
        ConfigError: an interpolation that stands for nothing.

    >>> resolve({"seed": 3, "model": {"args": {"seed": "${seed}"}}})["model"]
    {'args': {'seed': 3}}
    """
    _register_now()
    # Without types: what an interpolation brings is checked afterwards, as if it had been written.
    config = OmegaConf.create(tree)
    try:
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    except (OmegaConfBaseException, RecursionError) as error:
        with about(*filter(None, [getattr(error, "full_key", None)])):
            _refuse(error, tree)
        raise


def _refuse(error: Exception, tree: dict[str, Any]) -> None:
    """Say which interpolation stands for nothing, and why."""
    key = getattr(error, "full_key", None)
    if isinstance(error, InterpolationToMissingValueError):
        wanted = first_line(error).rpartition(": ")[2]
        raise ConfigError(
            f"{key} refers to ${{{wanted}}}, which is not set: write {wanted}: … at the top level"
        ) from error
    if isinstance(error, InterpolationKeyError):
        wanted = first_line(error).split("'")[1]
        top, dot, below = wanted.partition(".")
        if top in RENAMED:
            hint = f" (did you mean '{RENAMED[top]}{dot}{below}'?)"
        else:
            hint = did_you_mean(wanted, [*_prefixes(leaves(tree)), *KEYS])
        raise ConfigError(
            f"{key} refers to ${{{wanted}}}, which does not exist{hint}: "
            f"use a key of the config, from its top level"
        ) from error
    if isinstance(error, UnsupportedInterpolationType):
        wanted = first_line(error).rpartition(" ")[2]
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
    refers = {
        key: REFERENCE.findall(value)
        for key, value in leaves(tree).items()
        if isinstance(value, str)
    }
    for start in refers:
        way = _way_back(start, start, refers, [start])
        if way:
            return way
    return []


def _way_back(
    start: str, here: str, refers: Mapping[str, list[str]], way: list[str]
) -> list[str] | None:
    for each in refers.get(here, ()):
        if each == start:
            return [*way, start]
        if each not in way:
            found = _way_back(start, each, refers, [*way, each])
            if found:
                return found
    return None


def first_line(error: Exception) -> str:
    r"""What an error says before it explains itself.

    >>> first_line(ValueError("wrong\nbecause"))
    'wrong'
    """
    return str(error).partition("\n")[0]


@functools.cache
def _started_at() -> datetime.datetime:
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
    accumulate_batches: int = 1,
    key: str = "global_batch_size",
) -> int:
    """Return how many rows each device loads at a time.

    Args:
        rows: of the whole batch.
        num_devices: by how many devices it is shared.
        accumulate_batches: how many loaded batches make one optimization batch.
        key: where the rows stand in the config.

    Raises:
        ConfigError: the rows cannot be shared out evenly, or there are none.

    >>> rows_to_load(512, num_devices=4, accumulate_batches=2)
    64
    """
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
