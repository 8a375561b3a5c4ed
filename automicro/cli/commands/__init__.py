"""Every command: what it is called, its help and its arguments.

Nothing here imports torch before a command runs: help, a version and a mistyped option are for
people who wait.
"""

from collections.abc import Mapping

from automicro.cli.commands.cache import CACHE
from automicro.cli.commands.complete import COMPLETE
from automicro.cli.commands.config import CONFIG
from automicro.cli.commands.eval import EVAL
from automicro.cli.commands.torture import TORTURE
from automicro.cli.commands.train import TRAIN
from automicro.cli.commands.verify import VERIFY
from automicro.cli.subcommand import Subcommand

COMMANDS: Mapping[str, Subcommand] = {
    each.name: each for each in (TRAIN, EVAL, VERIFY, CONFIG, TORTURE, CACHE, COMPLETE)
}

__all__ = ["COMMANDS"]
