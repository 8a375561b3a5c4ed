"""Print the config that train would use, all keys, or a template.

Files are merged, key=value is applied, and every key is shown with its default.
References such as ${seed} stay as they are written. All that can be checked without
creating objects is checked: keys, values, import paths and names of arguments.
automicro verify, or train, shows whether models and data can be created and fit each
other. run_dir is not checked.
"""

import argparse
import fnmatch
import inspect
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

from automicro.cli.arguments import reading
from automicro.cli.config.keys import GROUPS, KEYS, TO_TRAIN
from automicro.errors import ConfigError, suggestion

EXAMPLES = (
    "automicro config job.yaml",
    "automicro config base.yaml gpu.yaml seed=1 --set",
    "automicro config --keys",
    "automicro config --keys batch",
    "automicro config --template > job.yaml",
)

TEMPLATE = Path(__file__).parents[1] / "config" / "template.yaml"
ELSEWHERE = "see `Microbatcher`"
MOST_COLUMNS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--set", action="store_true", help="only the keys that are set")
    parser.add_argument(
        "--keys",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="list every key with type, default and meaning, or only those that match: part of a "
        "name, or a pattern such as '*_size'",
    )
    parser.add_argument("--template", action="store_true", help="print a config to start with")


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    if arguments.template:
        print(TEMPLATE.read_text(encoding="utf-8"), end="")
    elif arguments.keys is not None:
        _print_keys(arguments.keys)
    else:
        _print_config(arguments)
    return 0


def _print_config(arguments: argparse.Namespace) -> None:
    with reading(arguments, results_only=False) as (job, _, _):
        from automicro.cli.config.load import to_yaml

        print(to_yaml(job.loaded.written if arguments.set else job.loaded.everything), end="")


def documentation() -> dict[str, str]:
    """Return the meaning of each key in the terms of a config, with null for None.

    The docstring of Trainer explains its options, Microbatcher those that Trainer passes on,
    features their words, and RunConfig the rest. Keys inside others are explained by the classes in
    ``SECTIONS``.
    """
    from automicro.cli.config.schema import SECTIONS, RunConfig
    from automicro.features import WORDS, class_of
    from automicro.microbatcher import Microbatcher
    from automicro.trainer.trainer import Trainer

    ours, trainer, primitive = map(read_entries, (RunConfig, Trainer, Microbatcher))
    features = {}
    for name, word in WORDS.items():
        feature = class_of(word.feature)
        meaning = (inspect.getdoc(feature) or "").partition("\n")[0]
        features[name] = read_entries(feature).get(word.argument or "", meaning)
    found = {**features, **trainer, **ours}
    texts = {
        key: primitive.get(key, "") if _is_elsewhere(found.get(key)) else found[key] for key in KEYS
    }
    for section, (_, documented) in SECTIONS.items():
        texts |= {f"{section}.{name}": text for name, text in read_entries(documented).items()}
    # CheckpointConfig does not know run_dir, so the command line sets the folder's default.
    texts["checkpoint.folder"] += " Unless given, checkpoints in `run_dir`."
    return {key: _in_yaml(text) for key, text in texts.items()}


def describe_keys() -> dict[str, dict[str, tuple[str, str, str]]]:
    """Return the type, the default and the meaning of all keys, by group and name.

    Each key is followed by the keys inside it.
    """
    from automicro.cli.config.load import to_yaml
    from automicro.cli.config.schema import EXAMPLES, defaults, keys_inside, type_in_words

    meanings = documentation()

    def describe(name: str) -> tuple[str, str, str]:
        section, _, own = name.rpartition(".")
        values, default = defaults(section), "not set"
        if name in TO_TRAIN:
            default = f"required, such as {EXAMPLES[name]}"
        elif own in values:
            # Under an empty key, because top-level YAML is a mapping here.
            default = f"default {to_yaml({'': values[own]}).partition(': ')[2].strip()}"
        return type_in_words(name), default, meanings[name]

    return {
        group: {
            name: describe(name)
            for key in KEYS
            if key in options
            for name in (key, *(f"{key}.{inner}" for inner in keys_inside(key)))
        }
        for group, options in GROUPS.items()
    }


def read_entries(documented: Any) -> dict[str, str]:
    """Return the docstring of each argument or attribute of a class as one line."""
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


def _print_keys(pattern: str) -> None:
    """Print the matching keys with type, default and meaning.

    >>> _print_keys("*_dir")
    The run
    <BLANKLINE>
    run_dir: text or null, default null
        a folder for `config.yaml`, `summary.json`, `weights.pt` and checkpoints; with null, nothing
        is written. Such as `runs/${now:%Y-%m-%d_%H-%M-%S}`. Files of another run are never
        overwritten.
    """
    groups = describe_keys()
    known = [name for keys in groups.values() for name in keys]
    chosen = [name for name in known if fnmatch.fnmatch(name, pattern) or pattern in name]
    if not chosen:
        raise ConfigError(
            f"no key matches {pattern!r}{suggestion(pattern, known)}: give part of a name, a "
            f"pattern such as '*_size', or none for all keys"
        )
    wrapper = textwrap.TextWrapper(
        min(shutil.get_terminal_size().columns, MOST_COLUMNS),
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    blocks = []
    for group, keys in groups.items():
        shown = {name: keys[name] for name in keys if name in chosen}
        blocks += [group] if shown else []
        for name, (kind, default, meaning) in shown.items():
            head = wrapper.fill(f"{name}: {kind}, {default}")
            blocks.append(f"{head}\n{wrapper.fill('    ' + meaning)}")
    print("\n\n".join(blocks))


def _is_elsewhere(text: str | None) -> bool:
    return text is None or text.startswith(ELSEWHERE)


def _in_yaml(text: str) -> str:
    """Convert code in a docstring to the notation of a config."""
    text = re.sub(r'``"([^"`]*)"``', r"``\1``", text)
    for python, yaml in {"None": "null", "True": "true", "False": "false"}.items():
        text = re.sub(rf"\b{python}\b", yaml, text)
    return text.replace("``", "`")
