"""The commands, one file each: name, help, arguments and work.

To add a command, add a file with a ``COMMAND``. Nothing here imports torch before a command runs,
so help, the version and mistyped options are answered at once.
"""

import importlib
import pkgutil
from collections.abc import Mapping

from automicro.cli.arguments import Command


def find_commands() -> Mapping[str, Command]:
    """Return all commands by name, in the order of the help.

    >>> list(find_commands())[:3]
    ['train', 'eval', 'plan']
    """
    names = [each.name for each in pkgutil.iter_modules(__path__)]
    found = {name: importlib.import_module(f"{__name__}.{name}").COMMAND for name in names}
    return dict(sorted(found.items(), key=lambda each: each[1].place))


COMMANDS = find_commands()
