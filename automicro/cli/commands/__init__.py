"""The commands, one file each: name, help, arguments and work.

To add a command, add a file with ``run`` and ``EXAMPLES``. Nothing here imports torch before a
command runs, so help, the version and mistyped options are answered at once.
"""

import importlib
import pkgutil
from collections.abc import Mapping

from automicro.cli.arguments import Command


def find_commands() -> Mapping[str, Command]:
    """Return all commands by name, in the order of the help, new ones last.

    >>> list(find_commands())[:3]
    ['train', 'eval', 'plan']
    """
    names = dict.fromkeys((*_ORDER, *(each.name for each in pkgutil.iter_modules(__path__))))
    return {name: Command(importlib.import_module(f"{__name__}.{name}")) for name in names}


_ORDER = ("train", "eval", "plan", "explore", "verify", "config", "doctor", "replay", "cache")


COMMANDS = find_commands()
