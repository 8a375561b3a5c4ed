"""From a config with interpolations to plain values."""

import datetime
import functools
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from automicro.cli.keys import KEYS
from automicro.cli.suggestions import did_you_mean
from automicro.errors import ConfigError


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """Return plain values, interpolations replaced by what they stand for.

    ``${now:%Y-%m-%d_%H-%M-%S}`` is when the process first asked.

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
    except InterpolationToMissingValueError as error:
        wanted = first_line(error).rpartition(": ")[2]
        raise ConfigError(
            f"{error.full_key} refers to ${{{wanted}}}, which is not set: write {wanted}: … at "
            f"the top level"
        ) from error
    except InterpolationKeyError as error:
        wanted = first_line(error).split("'")[1]
        raise ConfigError(
            f"{error.full_key} refers to ${{{wanted}}}, which does not exist"
            f"{did_you_mean(wanted, KEYS)}: use a key of the config, from its top level"
        ) from error
    except UnsupportedInterpolationType as error:
        wanted = first_line(error).rpartition(" ")[2]
        raise ConfigError(
            f"{error.full_key} uses ${{{wanted}:…}}, which does not exist: use ${{key}}, "
            f"${{oc.env:NAME}} or ${{now:%Y-%m-%d}}"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}: correct it") from error


def first_line(error: Exception) -> str:
    r"""What an error says before it explains itself.

    >>> first_line(ValueError("wrong\nbecause"))
    'wrong'
    """
    return str(error).partition("\n")[0]


@functools.cache
def _started_at() -> datetime.datetime:
    return datetime.datetime.now()


def _register_now() -> None:
    if not OmegaConf.has_resolver("now"):
        # OmegaConf 2.4 renamed it, and warns of the old name.
        name = "register_resolver"
        register = getattr(OmegaConf, name, None) or OmegaConf.register_new_resolver
        register("now", lambda form: _started_at().strftime(form))
