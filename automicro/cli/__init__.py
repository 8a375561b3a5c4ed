"""The command line and its configs: the only part of the package that uses OmegaConf.

::

    command_line   finds the command, runs it, and shows failures
    arguments      arguments of all commands; files and overrides
    commands       one file per command: its help, its arguments, its work
    job            the files and overrides of a command line, to be read and created
    run_dir        the folder with the results of a run, and how a run resumes there
    output         printing
    errors         display of errors and warnings; exit codes

    config/keys    names of all keys, in groups
    config/schema  types and defaults of keys, and checks of their values
    config/sources YAML files and overrides, and the source of each mistake
    config/load    from files and overrides to a RunConfig
    config/nodes   {call: dotted.path, args: {…}}
    config/build   from a RunConfig to a Trainer
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        # Imports might take long on a cold disk, so Ctrl-C is handled here, too, without a
        # traceback.
        from automicro.cli.command_line import main as run

        return run(argv)
    except KeyboardInterrupt:
        print("automicro: interrupted", file=sys.stderr)
        return INTERRUPTED


__all__ = ["main"]
