"""What every command has: a name, its help, its arguments, what it does."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """One command of ``automicro``.

    Attributes:
        name: as it is typed.
        brief: for the list of commands.
        description: for its own help.
        examples: whole command lines; the first one stands in the list of commands, too.
        exit_codes: what each means here, by number; 2, 130, 141 and 143 are the same everywhere.
        add_arguments: adds them to the command's parser.
        run: does it, and returns the exit code.
    """

    name: str
    brief: str
    description: str
    examples: Sequence[str]
    exit_codes: Mapping[int, str]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    @property
    def epilog(self) -> str:
        """The examples and the exit codes."""
        return "\n".join(
            [
                "examples:",
                *(f"  {example}" for example in self.examples),
                "",
                *exit_code_lines(self.exit_codes),
            ]
        )


def exit_code_lines(codes: Mapping[int, str]) -> list[str]:
    """Return what exit codes mean, those of every command included.

    >>> print(exit_code_lines({0: "trained"})[1])
      0    trained
    """
    everywhere = {
        2: "the command line or the config is wrong",
        130: "interrupted with Ctrl-C",
        141: "nobody reads the output any more, as behind | head",
        143: "ended by SIGTERM",
    }
    lines = [f"  {code:<4} {meaning}" for code, meaning in sorted({**codes, **everywhere}.items())]
    return ["exit codes:", *lines]
