"""The command ``automicro``: its arguments, its exit codes, and how it shows errors.

Exit codes: 0 all went well, 1 a run failed or splitting is not exact, 2 the command or its config
is wrong, 3 exactness cannot be verified, 130 Ctrl-C.
"""

import argparse
import contextlib
import importlib.metadata
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from automicro.cli.loading import load_config
from automicro.cli.nodes import as_yaml
from automicro.cli.suggestions import did_you_mean
from automicro.cli.torturing import add_torture, torture_subject
from automicro.cli.training import build_trainer
from automicro.cli.verifying import verify_config
from automicro.errors import AutomicroError, ConfigError
from automicro.oom import is_out_of_memory
from automicro.passes import METRIC_NOTE

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

EXAMPLES = """\
examples:
  automicro train configs/digits.yaml
  automicro train configs/digits.yaml max_duration=5ep memory_limit=4MiB
  automicro train configs/digits.yaml optimizer.args.lr=1e-2 microbatch_size=64
  automicro train configs/digits.yaml scheduler=null 'model.args={channels: 16}'
  automicro verify configs/digits.yaml
"""

TRAIN_HELP = """\
Train what a YAML config describes. The config names a model, data, a loss, an
optimizer and metrics by dotted import paths with arguments, and sets the options
of the Trainer. docs/configuration.md lists every key.
"""

VERIFY_HELP = """\
Find out whether splitting a batch changes the gradient of a config's model, and
why. Takes the first batch of its training data, and compares the gradient of the
whole batch with those of splits, in float64 where possible.
"""

EXIT_CODES = """
exit codes:
  0  all went well
  1  the run failed; verify: splitting is not exact as configured
  2  the command line or the config is wrong
  3  verify: exactness cannot be verified
  130  interrupted with Ctrl-C
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments, those of the process unless given.

    >>> main(["--version"])
    automicro ...
    0
    """
    try:
        arguments = _parse(argv)
    except SystemExit as exit:  # argparse has written its message
        return int(exit.code or OK)
    run = {"train": _train, "verify": _verify}.get(arguments.command)
    try:
        if run is None:
            return _torture(arguments)
        return run(arguments.config, arguments.overrides)
    except KeyboardInterrupt as error:
        _show(error, "interrupted", debug=arguments.debug)
        return INTERRUPTED
    except ConfigError as error:
        _show(error, _describe(error), debug=arguments.debug)
        return MISUSED
    except AutomicroError as error:
        _show(error, _describe(error), debug=arguments.debug)
        return FAILED
    except Exception as error:
        if is_out_of_memory(error):
            _show(error, _describe(error), debug=arguments.debug)
            return FAILED
        if _comes_from_a_metric(error):
            _show(error, _in_one_line(error), debug=arguments.debug)
            return FAILED
        # A mistake in the user's code: without the traceback nobody can find it.
        _show(error, f"the run failed: {_summary(error)}", debug=True)
        return FAILED


def _train(path: str, overrides: Sequence[str]) -> int:
    with _importing_beside(path):
        config = load_config(path, overrides)
        with _building(path):
            trainer = build_trainer(config)
        summary = trainer.fit()
    if not config.progress:
        print(summary)
    return OK


def _verify(path: str, overrides: Sequence[str]) -> int:
    with _importing_beside(path):
        config = load_config(path, overrides)
        with _building(path):
            report = verify_config(config)
    print(report)
    return report.exit_code


def _torture(arguments: argparse.Namespace) -> int:
    with _importing_beside(arguments.subject):
        report = torture_subject(
            arguments.subject, quick=arguments.quick, seed=arguments.seed, calls=arguments.calls
        )
    print(report)
    return report.exit_code


@contextlib.contextmanager
def _building(path: str) -> Iterator[None]:
    """Tell mistakes in what a config names from those of a run."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}: {_summary(error)}") from error


@contextlib.contextmanager
def _importing_beside(path: str) -> Iterator[None]:
    """Let a config name modules that lie beside it, then those where the command was started."""
    before = list(sys.path)
    sys.path[:0] = dict.fromkeys([str(Path(path).resolve().parent), str(Path.cwd())])
    try:
        yield
    finally:
        sys.path[:] = before


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    for each in rest:
        if each.startswith("-") or arguments.command is None:
            hint = did_you_mean(each, ["--help", "--version", "--debug"])
            parser.error(f"unknown option {each!r}{hint}; options of a config are key=value")
    if arguments.command is None:
        parser.error("no command was given: say automicro train CONFIG or automicro verify CONFIG")
    elif arguments.command != "torture":
        # argparse takes no more positionals once an option came between them.
        arguments.overrides += rest
    elif rest:
        parser.error(f"unknown argument {rest[0]!r}; torture takes one SUBJECT and options")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="automicro",
        description="Full optimization batches on any memory.",
        epilog=EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"automicro {importlib.metadata.version('automicro')}",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, brief, description in (
        ("train", "train what a config describes", TRAIN_HELP),
        ("verify", "find out whether splitting changes a model's gradient", VERIFY_HELP),
    ):
        command = commands.add_parser(
            name,
            help=brief,
            description=description,
            epilog=EXAMPLES + EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("config", metavar="CONFIG", help="a YAML file")
        command.add_argument(
            "overrides",
            metavar="key=value",
            nargs="*",
            help="replaces a key of the config; the value is YAML",
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of any error")
    add_torture(commands)
    return parser


def _describe(error: Exception) -> str:
    notes = getattr(error, "__notes__", [])
    said = [str(error), *(note.removeprefix("automicro: ") for note in notes)]
    text = "\n  ".join(said)
    # A mistake in a config may quote somebody else's error.
    return text if isinstance(error, ConfigError) else as_yaml(text)


def _comes_from_a_metric(error: Exception) -> bool:
    return any(note.startswith(METRIC_NOTE) for note in getattr(error, "__notes__", []))


def _in_one_line(error: Exception) -> str:
    """An error whose own message may have many lines, and its notes."""
    notes = [note.removeprefix("automicro: ") for note in error.__notes__]
    said = " ".join(str(error).split())
    return "\n  ".join([f"the run failed: {type(error).__name__}: {said}", *notes])


def _summary(error: Exception) -> str:
    notes = getattr(error, "__notes__", [])
    return "\n  ".join([f"{type(error).__name__}: {error}", *notes])


def _show(error: BaseException, text: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    print(f"automicro: {text}", file=sys.stderr)
    if not debug:
        print("(--debug shows the traceback)", file=sys.stderr)
