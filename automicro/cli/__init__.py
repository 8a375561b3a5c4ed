"""The command line, and the configs that it reads: the only part that knows OmegaConf.

::

    command      arguments, exit codes, how errors are shown
    training     from a config to a Trainer
    config       TrainConfig: every key, with its default
    loading      a YAML file and key=value overrides to a TrainConfig
    reading      YAML files and values
    overrides    what key=value does to a config
    nodes        {call: dotted.path, args: {…}}: what is well formed, and what it builds
    signatures   whether arguments fit, told before anything is called
    dotted       from a dotted path to the object
    suggestions  did you mean
    batch_size   the global batch size, per device
"""

from automicro.cli.command import main

__all__ = ["main"]
