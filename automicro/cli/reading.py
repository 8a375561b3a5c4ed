"""YAML: a config file, and the value of an override."""

import difflib
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.keys import KEYS
from automicro.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file as plain values, interpolations left as they are.

    Raises:
        ConfigError: there is no such file, it is not YAML, or it holds no keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}{_files_near(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a YAML file") from error
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(
            f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}; correct this "
            f"line or the one above it"
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
    return cast(dict[str, Any], tree)


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


def _files_near(path: Path) -> str:
    folders = {Path(), Path("configs"), path.parent}
    found = {
        str(each)
        for folder in folders
        for pattern in ("*.yaml", "*.yml")
        for each in folder.glob(pattern)
    }
    if str(path).partition(".")[0] in KEYS and not path.suffix.startswith(".y"):
        return f": to set this key, say {path}=VALUE"
    names = {Path(each).name: each for each in sorted(found)}
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)
    if near:
        return f": did you mean {' or '.join(repr(names[each]) for each in near)}?"
    if not found:
        return ": give the path of a YAML file; there is none here"
    return f": give the path of a YAML file, such as {', '.join(sorted(found)[:3])}"
