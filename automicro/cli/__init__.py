"""The command line, and the configs that it reads: the only part that knows OmegaConf.

::

    command      the command line: finds the subcommand, runs it
    subcommand   what every subcommand has: a name, its help, its arguments
    training  evaluating  verifying  configuring  torturing     one subcommand each
    failures     how errors are shown; exit codes
    results      what is printed, as text and as JSON

    job          the files and overrides of a command line, to be read and made
    recipe       what a config names: checked first, made afterwards
    values       whether values mean something
    weights      a model's weights from a file
    run_dir      the folder in which a run leaves its config, summary and weights

    config       RunConfig: every key, with its type and default
    keys         what is known of each key besides: its group, its type in words
    reference    what each key means, from the docstrings of those who take it

    loading      YAML files and key=value overrides to a RunConfig
    reading      YAML files and values
    merging      what a later file does to an earlier one
    overrides    what key=value does to a config
    shapes       whether nodes, lists and mappings stand where they belong
    resolving    interpolations
    batch_size   the global batch size, per device and per batch that is accumulated
    writing      configs as YAML

    nodes        {call: dotted.path, args: {…}}: what is well formed, and what it builds
    signatures   whether arguments fit, told before anything is called
    dotted       from a dotted path to the object
    suggestions  did you mean
"""

from automicro.cli.command import main

__all__ = ["main"]
