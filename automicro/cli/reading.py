"""YAML: a config file, and the value of an override."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automicro.cli.config import CallConfig
from automicro.cli.inputs import no_such_file
from automicro.cli.key_names import KEYS
from automicro.cli.keys import alternatives, type_in_words
from automicro.cli.nodes import NODE_KEYS, show
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
