"""The command line, and the configs that it reads: the only part that knows OmegaConf.

::

    command      the command line: finds the subcommand, runs it
    commands     what each subcommand is called and takes, without importing torch
    subcommand   what every subcommand has: a name, its help, its arguments
    completing   what may come next in a line that is being typed
    inputs       files and overrides of a command line: which is which, are they there
    training  evaluating  verifying  configuring  torturing  caching    what each does
    waiting      what takes long before a command can say anything
    peers        whether other processes of the run speak too
    failures     how errors are shown; exit codes
    places       where in the code an error was raised
    wording      messages of the library in the words of a config
    warning_lines   warnings in one line each
    results      what is printed, as text and as JSON
    saved_summary   a summary that an earlier run left
    size_table   remembered sizes as a table, as JSON and as Markdown
    size_cells   what tells one remembered size from another, in few letters

    job          the files and overrides of a command line, to be read and made
    recipe       what a config names: checked first, made afterwards
    values       whether values mean something
    continuing   whether a run goes on from checkpoints, from which, and how to go on
    configured_logger   a logger that takes down the config, too
    weights      a model's weights from a file or a checkpoint
    run_dir      the folder in which a run leaves its config, summary, weights and checkpoints

    template     a config to start with
    config       RunConfig: every key, with its type and default
    key_names    the names of all keys, in groups
    keys         what is known of each key besides: its group, its type in words
    reference    what each key means, from the docstrings of those who take it

    loading      YAML files and key=value overrides to a RunConfig
    reading      YAML files and values
    merging      what a later file does to an earlier one
    overrides    what key=value does to a config
    shapes       whether nodes, lists and mappings stand where they belong
    sections     keys that hold further keys: evaluations, checkpoints
    resolving    interpolations
    batch_size   the global batch size, per device and per batch that is accumulated
    writing      configs as YAML

    nodes        {call: dotted.path, args: {…}}: what is well formed, and what it builds
    signatures   whether arguments fit, told before anything is called
    dotted       from a dotted path to the object
    data         whether what is made for data gives batches
    suggestions  did you mean
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments, those of the process unless given.

    >>> main(["--version"])
    automicro ...
    0
    """
    try:
        # Imports may take long on a cold disk: whoever presses Ctrl-C meanwhile wants no traceback.
        from automicro.cli.command import main as run

        return run(argv)
    except KeyboardInterrupt:
        print("automicro: interrupted", file=sys.stderr)
        return INTERRUPTED


__all__ = ["main"]
