"""The command line, and the configs that it reads: the only part that knows OmegaConf.

::

    command_line   finds the command, runs it, shows what goes wrong
    arguments      what every command has; files and overrides
    commands       one file for each command: its help, its arguments, what it does
    job            the files and overrides of a command line, to be read and made
    run_dir        where a run leaves its results, and how it goes on there
    output         what is printed
    errors         how errors and warnings are shown; exit codes

    config/keys    the names of all keys, in groups
    config/schema  each key with its type and default, and whether a value belongs under it
    config/sources YAML files and overrides, and which of them brought a mistake
    config/load    all of this: from files and overrides to a RunConfig
    config/nodes   {call: dotted.path, args: {…}}
    config/build   from a RunConfig to a Trainer
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    >>> main(["--version"])
    automicro ...
    0
    """
    try:
        # Imports may take long on a cold disk: Ctrl-C meanwhile prints no traceback.
        from automicro.cli.command_line import main as run

        return run(argv)
    except KeyboardInterrupt:
        print("automicro: interrupted", file=sys.stderr)
        return INTERRUPTED


__all__ = ["main"]
