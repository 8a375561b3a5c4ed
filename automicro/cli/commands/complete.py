"""``automicro complete``: what may come next in a command line that is being typed.

Nothing here imports torch: whoever presses Tab waits for the answer.
"""

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from automicro.cli.arguments import Command, is_path
from automicro.cli.config.keys import KEYS

DESCRIPTION = """\
Print what lets a shell complete command lines of automicro with the Tab key:
commands, options, configs, keys of a config (those inside of others, too) and the
words that they take. Add the line of your shell to the file that it reads first.
"""

# What ends so is gone on with, so no space follows it.
SCRIPTS = {
    "bash": """\
_automicro() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($("$1" complete bash --line "$line" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _automicro automicro
""",
    "zsh": """\
_automicro() {
    local -a found
    found=("${(@f)$("${words[1]}" complete zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- "${(@M)found:#*[=/.]}"
    compadd -- "${(@)found:#*[=/.]}"
}
compdef _automicro automicro
""",
    "fish": """\
function __automicro
    set -l words (commandline -opc) (commandline -ct)
    $words[1] complete fish --words $words[2..] 2>/dev/null
end
complete -c automicro -f -a '(__automicro)'
""",
}
_TRUTH = ("true", "false")
_MODES = (
    *("fixed", "duration", "1D-bucketing", "1D-bucketing-dyn"),
    *("2D-bucketing", "2D-bucketing-fixed", "2D-bucketing-singlet"),
)
_SIZES = ("auto", "explore", "null")
VALUES: Mapping[str, tuple[str, ...]] = {
    "accumulate_batches": (),
    "batchnorm": ("warn", "error", "disable", "ignore", "exact"),
    "channels_last": _TRUTH,
    "checkpoint": ("null",),
    "checkpoint.asynchronous": _TRUTH,
    "checkpoint.best_mode": ("min", "max"),
    "checkpoint.interval": ("null",),
    "checkpoint.keep_last": ("null",),
    "checkpoint.resume": ("auto", "never"),
    "compile": _TRUTH,
    "deterministic": _TRUTH,
    "eval_dataloader.interval": ("null",),
    "eval_dataloader.max_batches": ("null",),
    "eval_dataloader.metrics": ("null",),
    "eval_dataloader.microbatch_size": _SIZES,
    "eval_microbatch_size": _SIZES,
    "gradient_sums": ("fp32", "native"),
    "sync": ("each", "auto"),
    "loss_average": ("auto", "samples", "tokens", "none"),
    "cut_padding": ("auto", *_TRUTH),
    "microbatch_size": _SIZES,
    "microbatch_unit": ("rows", "tokens", "seconds"),
    "non_finite": ("stop", "skip", "ignore"),
    "nested": ("null",),
    "when_too_large": ("error", "recompute", "offload", "nested", "auto"),
    "padding": ("null",),
    "parallel": ("ddp", "fsdp", "null"),
    "precision": ("fp32", "bf16", "fp16"),
    "probe": _TRUTH,
    "progress": _TRUTH,
    "remember_sizes": (*_TRUTH, "null"),
    "rehearse": ("worst", "null"),
    "sampling_mode": (*_MODES, "null"),
    "sampling_mode.mode": _MODES,
    "sampling_mode.shuffle": _TRUTH,
    "sampling_mode.unit": ("seconds", "tokens", "null"),
    "sampling_mode.second_unit": ("seconds", "tokens", "null"),
    **{
        f"sampling_mode.{name}": ("null",)
        for name in (
            *("lengths", "second_lengths", "batch_size", "batch_length", "batch_cost", "cost"),
            *("bucket_edges", "num_buckets", "seed"),
        )
    },
    "scheduler_interval": ("batch", "epoch"),
    "strict_divisible": _TRUTH,
    **dict.fromkeys(
        (
            *("max_time", "eval_interval", "memory_limit", "grad_clip_norm", "seed", "weights"),
            *(
                "eval_dataloader",
                "loss_fn",
                "forward",
                "scheduler",
                "update_metric",
                "count_tokens",
                "count_seconds",
            ),
            *("global_batch_size", "eval_global_batch_size", "run_dir"),
        ),
        ("null",),
    ),
}
"""The words that a key takes. What is free, such as a number, cannot be completed."""
SECTION_KEYS: Mapping[str, tuple[str, ...]] = {
    "eval_dataloader": ("data", "metrics", "microbatch_size", "max_batches", "interval"),
    "checkpoint": (
        *("folder", "interval", "keep_last", "keep_best", "best_metric", "best_mode"),
        *("asynchronous", "resume"),
    ),
    "sampling_mode": (
        *("mode", "lengths", "second_lengths", "batch_size", "batch_length", "batch_cost", "cost"),
        *("bucket_edges", "num_buckets", "shuffle", "seed", "unit", "second_unit"),
    ),
}
_PATHS = ("run_dir", "weights", "checkpoint.folder", "checkpoint.resume")
_EVERYWHERE = ("--help", "--version", "--debug")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("shell", choices=list(SCRIPTS), help="of which shell")
    # How the scripts ask: bash cuts words in pieces at =, so it gives the line.
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    if arguments.line is None and arguments.words is None:
        print(SCRIPTS[arguments.shell], end="")
        return 0
    from automicro.cli.commands import COMMANDS

    words = words_of(arguments.line) if arguments.words is None else arguments.words
    found = candidates(words, COMMANDS)
    if arguments.line is not None:
        found = for_bash(found, words[-1] if words else "")
    print("\n".join(found))
    return 0


def words_of(line: str) -> list[str]:
    """The words of a line after the program's name; the last one is being typed.

    >>> words_of("automicro train job.yaml 'model={call: x")
    ['train', 'job.yaml', 'model={call: x']
    >>> words_of("automicro train ")
    ['train', '']
    """
    for end in ("", "'", '"'):  # a quote that is open yet
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words[1:], ""] if line[-1:].isspace() and not end else words[1:]
    return line.split()[1:]


def candidates(words: Sequence[str], commands: Mapping[str, Command]) -> list[str]:
    """What the last word may become.

    Args:
        words: those after the program's name; the last one is being typed, and may be empty.
        commands: all commands by name.

    >>> from automicro.cli.commands import COMMANDS
    >>> candidates(["tr"], COMMANDS)
    ['train']
    >>> candidates(["train", "configs/digits.yaml", "microbatch_s"], COMMANDS)
    ['microbatch_size=']
    >>> candidates(["train", "configs/digits.yaml", "optimizer.args.w"], COMMANDS)
    ['optimizer.args.weight_decay=']
    """
    *before, typed = words or [""]
    name = next((each for each in before if not each.startswith("-")), None)
    if name is None:
        return _beginning(typed, [*commands, *_EVERYWHERE])
    if name not in commands:
        return []
    parser = argparse.ArgumentParser(add_help=False)
    commands[name].add_arguments(parser)
    if typed.startswith("-"):
        options = [each for action in parser._actions for each in action.option_strings]
        return _beginning(typed, [*sorted(options), "--help", "--debug"])
    for action in parser._actions:
        if before[-1] in action.option_strings and action.nargs != 0:
            return _of_option(before[-1], typed)
        if action.choices and not action.option_strings:
            return _beginning(typed, map(str, action.choices))
    if any(action.dest == "inputs" for action in parser._actions):
        return _of_inputs([each for each in before if each != name], typed)
    return []


def _of_option(option: str, typed: str) -> list[str]:
    if option == "--keys":
        return _beginning(typed, KEYS)
    return _paths(typed, only_folders=True) if option == "--folder" else []


def _of_inputs(before: Sequence[str], typed: str) -> list[str]:
    key, equals, value = typed.partition("=")
    if equals:
        found = _beginning(value, VALUES.get(key, ()))
        if key in _PATHS:
            found += _paths(value, only_folders=key != "weights", ends=(".pt",))
        return [f"{key}={each}" for each in found]
    files = [each for each in before if not each.startswith("-") and is_path(each)]
    config = _merged(map(Path, files))
    keys = _keys(config, typed) if files else []
    return [*keys, *_paths(typed, ends=(".yaml", ".yml"))]


def _keys(config: Mapping[str, Any], typed: str) -> list[str]:
    """Keys with an equals sign, and with a dot where there is something inside of them."""
    above, dot, last = typed.rpartition(".")
    inside: Any = config
    for name in above.split(".") if dot else ():
        inside = _inside(inside, name)
    found = []
    for name in _names(inside):
        if name.startswith(last):
            found.append(f"{above}{dot}{name}=")
            if _names(_inside(inside, name)):
                found.append(f"{above}{dot}{name}.")
    return found


def _names(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [str(each) for each in value]
    return [str(index) for index in range(len(value))] if isinstance(value, list) else []


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    is_there = isinstance(value, list) and name.isdecimal() and int(name) < len(value)
    return value[int(name)] if is_there else None


def _merged(files: Iterable[Path]) -> dict[str, Any]:
    """All keys, with what files have in them, later ones over earlier ones."""
    import yaml  # type: ignore[import-untyped]

    config: dict[str, Any] = {key: dict.fromkeys(SECTION_KEYS.get(key, ())) or None for key in KEYS}
    for path in files:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):  # the command itself will say it
            continue
        if isinstance(content, Mapping):
            _merge(config, content)
    return config


def _merge(config: dict[str, Any], content: Mapping[Any, Any]) -> None:
    for name, value in content.items():
        there = config.get(str(name))
        if isinstance(there, dict) and isinstance(value, Mapping):
            _merge(there, value)
        else:
            config[str(name)] = value


def _paths(typed: str, *, only_folders: bool = False, ends: tuple[str, ...] = ()) -> list[str]:
    """Folders with a slash, and files with these endings. Hidden ones where a dot was typed."""
    folder, slash, last = typed.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return []
    found = []
    for each in entries:
        if not each.name.startswith(last) or (each.name.startswith(".") and not last):
            continue
        if each.is_dir():
            found.append(f"{folder}{slash}{each.name}/")
        elif not only_folders and each.name.endswith(ends):
            found.append(f"{folder}{slash}{each.name}")
    return found


def _beginning(typed: str, words: Iterable[str]) -> list[str]:
    return [each for each in words if each.startswith(typed)]


def for_bash(found: Iterable[str], typed: str) -> list[str]:
    r"""Candidates as bash wants them: only what follows the last ``=`` or ``:``, and quoted.

    >>> for_bash(["precision=bf16"], "precision=b")
    ['bf16']
    >>> for_bash(["my jobs/"], "my")
    ['my\\ jobs/']
    """
    breaks = [each.end() for each in re.finditer("[=:]", typed)]
    start = breaks[-1] if breaks else 0
    return [re.sub(r"([^\w.,/=:@%+~-])", r"\\\1", each[start:]) for each in found]


COMMAND = Command(
    name="complete",
    brief="print what lets a shell complete command lines",
    description=DESCRIPTION,
    examples=(
        'eval "$(automicro complete bash)"     # in ~/.bashrc',
        'eval "$(automicro complete zsh)"      # in ~/.zshrc, after compinit',
        "automicro complete fish | source      # in ~/.config/fish/config.fish",
    ),
    exit_codes={0: "printed"},
    add_arguments=add_arguments,
    run=run,
    place=11,
)
