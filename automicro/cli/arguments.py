"""The interface of a command, and the files and overrides that most commands take."""

import argparse
import contextlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from automicro.cli.config.keys import KEYS, TO_TRAIN
from automicro.cli.output import results_alone
from automicro.errors import ConfigError, nearest

if TYPE_CHECKING:
    from automicro.cli.config.build import Recipe
    from automicro.cli.job import Job

FORM = "CONFIG [CONFIG …] [key=value …]"
"""Usage text for the files and overrides, which argparse cannot distinguish."""


class Command:
    """One command of ``automicro``: a module with a docstring, ``run`` and ``EXAMPLES``."""

    def __init__(self, module: ModuleType) -> None:
        self.doc = inspect.getdoc(module) or ""  # lists of commands show the first line
        self.run: Callable[[argparse.Namespace], int] = module.run  # returns the exit code
        self.examples: Sequence[str] = module.EXAMPLES  # complete command lines
        self._add_arguments = getattr(module, "add_arguments", None)
        self._takes_config = getattr(module, "TAKES_CONFIG", True)  # files and overrides
        self._json = getattr(module, "JSON", "")  # help of --json, if there is such an option

    @property
    def brief(self) -> str:
        """First line of the help, for the list of commands."""
        line = self.doc.partition(".\n")[0]
        return line[0].lower() + line[1:]

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Add all arguments and the help of the command to a parser."""
        examples = "".join(f"  {example}\n" for example in self.examples)
        parser.description = self.doc
        parser.epilog = f"examples:\n{examples}"
        if self._add_arguments is not None:
            self._add_arguments(parser)
        if self._takes_config:
            parser.add_argument(
                "inputs",
                metavar="CONFIG",
                nargs="*",
                help="YAML files, merged in order (later ones win), and key=value overrides, "
                "with dots for nested keys and YAML for values",
            )
        if self._json:
            parser.add_argument("--json", action="store_true", help=self._json)


def split_inputs(inputs: Sequence[str], *, command: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Separate paths of YAML files from ``key=value``.

    >>> split_inputs(["base.yaml", "seed=1", "runs/lr=0.1/config.yaml"], command="train")
    (('base.yaml', 'runs/lr=0.1/config.yaml'), ('seed=1',))
    """
    files = tuple(each for each in inputs if is_path(each))
    if not files:
        raise ConfigError(
            f"{command} needs a CONFIG: name a YAML file, as in automicro {command} job.yaml; "
            f"automicro config --template prints one to start with"
        )
    return files, tuple(each for each in inputs if not is_path(each))


@contextlib.contextmanager
def reading(
    arguments: argparse.Namespace,
    *,
    needs: Sequence[str] = TO_TRAIN,
    unused: Collection[str] = (),
    for_ranks: bool = False,
    results_only: bool = True,
) -> "Iterator[tuple[Job, Recipe, TextIO]]":
    """Read and check the config of a command."""
    files, overrides = split_inputs(arguments.inputs, command=arguments.command)
    # Checked first, because importing torch takes seconds, and a mistyped path should be reported
    # at once.
    for path in map(Path, files):
        if not path.exists():
            raise no_such_file(path)
    from automicro.cli.job import Job

    job = Job(files, overrides, alone=None if for_ranks else arguments.command)
    with job.reading(needs, unused) as recipe, results_alone(results_only) as results:
        yield job, recipe, results


def whole_number(text: str) -> int:
    """Read an option that must be at least 1."""
    # argparse itself reports the ValueError for text that is not a number.
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1: give at least 1")
    return int(text)


def no_such_file(path: Path) -> ConfigError:
    """Return the error for a config that does not exist, with a suggestion.

    >>> print(no_such_file(Path("configs/digit.yaml")))
    there is no file 'configs/digit.yaml': did you mean 'configs/digits.yaml'?
    """
    return ConfigError(f"there is no file {str(path)!r}{_files_near(path)}")


def is_path(argument: str) -> bool:
    """Return whether an argument is a path and not ``key=value``.

    >>> is_path("configs/digits.yaml"), is_path("seed=1")
    (True, False)
    """
    # Names of folders might contain values, as in runs/lr=0.1/config.yaml, but no key contains a
    # slash.
    before, equals, _ = argument.partition("=")
    return not equals or os.sep in before or "/" in before or Path(argument).is_file()


def _files_near(path: Path) -> str:
    folders = {Path(), Path("configs"), path.parent}
    found = sorted({str(each) for folder in folders for each in folder.glob("[!.]*.y*ml")})
    names = {Path(each).stem: each for each in found}
    if str(path).partition(".")[0] in KEYS and path.suffix not in (".yaml", ".yml"):
        return f": to set the key, write {path}=VALUE"
    near = nearest(path.stem, names)
    if near is not None:
        return f": did you mean {names[near]!r}?"
    return f": give the path of a YAML file, such as {', '.join(found[:3]) or 'job.yaml'}"
