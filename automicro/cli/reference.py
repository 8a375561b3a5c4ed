"""What each key means, read from the docstrings of those who take it."""

import fnmatch
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from automicro.cli.config import SECTIONS, RunConfig
from automicro.cli.key_names import GROUPS, KEYS
from automicro.cli.keys import (
    EXAMPLES,
    TO_TRAIN,
    defaults,
    defaults_inside,
    keys_inside,
    type_in_words,
)
from automicro.cli.suggestions import did_you_mean
from automicro.cli.writing import to_yaml
from automicro.errors import ConfigError
from automicro.microbatcher import Microbatcher
from automicro.trainer.trainer import Trainer

UNSET = object()
ELSEWHERE = "see `Microbatcher`"
MOST_COLUMNS = 100
PAGE = """\
# Every key of a config

Written by `python -m automicro config --keys --markdown`; a test holds it to the code.
[The guide](configuration.md) explains the format, overrides, interpolations and commands. A node is
`{call: dotted.path, args: {name: value}}`.
"""


def documentation() -> dict[str, str]:
    """Return what each key means, as a config writes it: null in place of None.

    The Trainer's docstring explains its options, that of the Microbatcher those that the Trainer
    only hands on, and that of RunConfig the rest. Keys inside of others are explained by what
    these describe.

    >>> documentation()["seed"][:27]
    'seeds Python, NumPy and tor'
    """
    ours, trainer, primitive = map(read_entries, (RunConfig, Trainer, Microbatcher))
    found = {**trainer, **ours}
    texts = {
        key: primitive.get(key, "") if _is_elsewhere(found.get(key)) else found[key] for key in KEYS
    }
    for section, owner in SECTIONS.items():
        texts |= {f"{section}.{name}": text for name, text in read_entries(owner).items()}
    texts["checkpoint.folder"] += " Unless given, checkpoints in `run_dir`."
    return {key: _in_yaml(text) for key, text in texts.items()}


def read_entries(documented: type) -> dict[str, str]:
    """Return what a class's docstring says of each argument or attribute, in one line each.

    >>> from automicro.cli.config import CallConfig
    >>> read_entries(CallConfig)["call"]
    'the dotted path, such as ``torch.optim.AdamW``.'
    """
    lines = (inspect.getdoc(documented) or "").splitlines()
    entries: dict[str, list[str]] = {}
    inside, current = False, None
    for line in lines:
        entry = re.match(r"    (\w+): (.*)", line)
        if re.fullmatch(r"(Args|Attributes):", line):
            inside = True
        elif inside and entry:
            current = entries[entry[1]] = [entry[2]]
        elif inside and current is not None and line.startswith("        "):
            current.append(line.strip())
        elif line and not line.startswith(" "):
            inside = False
    return {name: " ".join(text) for name, text in entries.items()}


def print_keys(pattern: str) -> None:
    """Print the keys that match, with type, default and meaning.

    Args:
        pattern: part of a name, or a glob.

    Raises:
        ConfigError: no key matches.

    >>> print_keys("*_dir")
    The run
    <BLANKLINE>
    run_dir: text or null, default null
        a folder for `config.yaml`, `summary.json`, `weights.pt` and checkpoints; with null, nothing
        is written. Such as `runs/${now:%Y-%m-%d_%H-%M-%S}`. Nothing of another run is overwritten.
    """
    known = [key for keys in GROUPS.values() for key in _with_keys_inside(keys)]
    chosen = [key for key in known if fnmatch.fnmatch(key, pattern) or pattern in key]
    if not chosen:
        raise ConfigError(
            f"no key matches {pattern!r}{did_you_mean(pattern, known)}: give part of a name, a "
            f"pattern such as '*_size', or none for all keys"
        )
    console = Console()
    columns = min(console.width, MOST_COLUMNS)
    meanings = documentation()
    text = Text()
    for group, keys in GROUPS.items():
        shown = [key for key in _with_keys_inside(keys) if key in chosen]
        if shown:
            text.append(f"\n{group}\n" if text else f"{group}\n", "bold underline")
        for key in shown:
            indented = textwrap.fill(
                meanings[key],
                columns,
                initial_indent="    ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            text.append("\n").append(key, "bold")
            text.append(f": {type_in_words(key)}, {_default_in_words(key)}\n{indented}\n")
    console.print(text, soft_wrap=True, end="")


def markdown_page() -> str:
    """Return the reference of every key as a page with a table for each group.

    >>> print(markdown_page().splitlines()[0])
    # Every key of a config
    """
    meanings = documentation()
    parts = [PAGE]
    for group, keys in GROUPS.items():
        rows = [
            f"| `{key}` | {type_in_words(key)} | {_default_cell(key)} | {_cell(meanings[key])} |"
            for key in _with_keys_inside(keys)
        ]
        parts += [f"\n## {group}\n", "| Key | Type | Default | What it is |", "|---|---|---|---|"]
        parts += rows
    return "\n".join(parts) + "\n"


def _is_elsewhere(text: str | None) -> bool:
    return text is None or text.startswith(ELSEWHERE)


def _in_yaml(text: str) -> str:
    """Write what a docstring quotes as a config writes it."""
    text = re.sub(r'``"([^"`]*)"``', r"``\1``", text)
    for python, yaml in {"None": "null", "True": "true", "False": "false"}.items():
        text = re.sub(rf"\b{python}\b", yaml, text)
    return text.replace("``", "`")


def _default_in_words(key: str) -> str:
    if key in TO_TRAIN:
        return f"required, such as {EXAMPLES[key]}"
    return "not set" if _default(key) is UNSET else f"default {_as_yaml(key)}"


def _default_cell(key: str) -> str:
    if key in TO_TRAIN:
        return "required"
    return "not set" if _default(key) is UNSET else f"`{_as_yaml(key)}`"


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    return defaults_inside(section).get(name, UNSET) if name else defaults().get(key, UNSET)


def _as_yaml(key: str) -> str:
    return to_yaml({"": _default(key)}).partition(": ")[2].strip()


def _with_keys_inside(keys: Iterable[str]) -> list[str]:
    """Keys, each followed by those that it may hold."""
    return [each for key in keys for each in (key, *(f"{key}.{name}" for name in keys_inside(key)))]


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
