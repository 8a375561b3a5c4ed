"""The command ``automicro``: finds the subcommand, runs it, and shows failures."""

import argparse
import re
import sys
from collections.abc import Sequence

from automicro.cli.arguments import FORM
from automicro.cli.commands import COMMANDS
from automicro.cli.config.keys import KEYS
from automicro.cli.output import one_rank_speaks
from automicro.durations import duration_meant
from automicro.errors import suggestion
from automicro.version import __version__

DESCRIPTION = """\
Train PyTorch models on full optimization batches, on any memory: batches are cut into
microbatches that fit, with the gradient of the whole batch.
"""


EXIT_CODES = {
    0: "success",
    1: "the run failed, or would (plan); verify: not exact",
    2: "the command line or the config is wrong",
    3: "verify: exactness cannot be verified",
    130: "interrupted with Ctrl-C",
    141: "the output was closed, as by | head",
    143: "ended by SIGTERM",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        arguments = _parse(argv)
    except SystemExit as exit:  # argparse has printed its message
        return int(exit.code or 0)
    from automicro.cli import errors

    try:
        with one_rank_speaks(), errors.warnings_in_one_line():
            code = COMMANDS[arguments.command].run(arguments)
        # Flushed here, because otherwise Python would report a closed pipe when it exits.
        print(end="", flush=True)
        return code
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if errors.is_closed_pipe(error):
            errors.forget_stdout()
            return errors.CLOSED_PIPE
        if isinstance(error, SystemExit) and not errors.is_sigterm(error):  # from user code
            raise
        return errors.show_failure(error, debug=arguments.debug)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if argv is None else argv)
    parser, commands = make_parsers()
    if given and given[0] == "help":
        given = [*given[1:2], "--help"]
    name = next((each for each in given if not each.startswith("-")), None)
    # argparse would refuse it, too, but without a suggestion.
    if name is not None and name not in COMMANDS:
        parser.error(
            f"there is no command {name!r}{suggestion(name, COMMANDS)}: give one of "
            f"{', '.join(COMMANDS)}"
        )
    # Not parse_args(), because its error has no suggestion and it refuses a file after an option.
    arguments, rest = parser.parse_known_args(given)
    mine = parser if name is None else commands[name]
    for each in rest:
        if each.startswith("-"):
            known = re.findall(r"--[\w-]+", mine.format_usage())
            hint = _key_meant(each, *given[given.index(each) + 1 :]) or suggestion(each, known)
            mine.error(
                f"unknown option {each!r}{hint}: use {', '.join(known)}, or key=value for a key "
                "of the config"
            )
    if name is None:
        example = COMMANDS["train"].examples[0]
        parser.error(f"no command was given: give one of {', '.join(COMMANDS)}, such as {example}")
    if "inputs" in arguments:
        # argparse takes no more positional arguments after an option between them.
        arguments.inputs = [*arguments.inputs, *rest]
    elif rest:
        mine.error(f"unknown argument {rest[0]!r}: {name} accepts only options")
    return arguments


def _key_meant(option: str, *behind: str) -> str:
    key, equals, value = option.lstrip("-").partition("=")
    key = key.replace("-", "_")
    if not equals:
        value = "VALUE" if not behind or behind[0].startswith("-") else behind[0]
    # Other programs have --epochs 3, which is max_duration=3ep here.
    if duration := duration_meant(value, key):
        key, value = "max_duration", duration
    return f" (did you mean '{key}={value}'?)" if key.partition(".")[0] in KEYS else ""


def make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and the parsers of the commands by name."""
    parser = argparse.ArgumentParser(
        prog="automicro",
        description=DESCRIPTION,
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"automicro {__version__}",
    )
    _add_debug(parser, default=False)
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands = {}
    for name, command in COMMANDS.items():
        commands[name] = choices.add_parser(
            name,
            help=command.brief,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.fill(commands[name])
        # Without a default, so that it does not overwrite a --debug before the command.
        _add_debug(commands[name], default=argparse.SUPPRESS)
        usage = commands[name].format_usage().removeprefix("usage: ")
        commands[name].usage = usage.replace("[CONFIG ...]", FORM)
    return parser, commands


def _add_debug(parser: argparse.ArgumentParser, *, default: object) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of any error"
    )


def _overview() -> str:
    lines = ["examples:", *(f"  {each.examples[0]}" for each in COMMANDS.values())]
    lines += ["", "automicro COMMAND --help shows more. The first steps with a model of your own:"]
    lines += ["  automicro config --template > job.yaml", "  automicro train job.yaml", ""]
    lines += ["exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())]
    return "\n".join(lines)
