"""Every command is one file here: what it is called, its help, its arguments and what it does.

A new one is a new file with a ``COMMAND``. Nothing here imports torch before a command runs: help,
a version and a mistyped option are for people who wait.
"""

import importlib
import pkgutil
from collections.abc import Mapping

from automicro.cli.arguments import Command


def find_commands() -> Mapping[str, Command]:
    """All commands by name, in the order in which help lists them.

    >>> list(find_commands())[:3]
    ['train', 'eval', 'plan']
    """
    names = [each.name for each in pkgutil.iter_modules(__path__)]
    found = {name: importlib.import_module(f"{__name__}.{name}").COMMAND for name in names}
    return dict(sorted(found.items(), key=lambda each: each[1].place))


COMMANDS = find_commands()
