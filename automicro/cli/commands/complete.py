"""Print a script for shell completion.

With it, the Tab key completes commands, options and files. Needs shtab: pip install
"automicro[completion]".
"""

import argparse

from automicro.errors import ConfigError

EXAMPLES = (
    'eval "$(automicro complete bash)"   # in ~/.bashrc',
    'eval "$(automicro complete zsh)"    # in ~/.zshrc, after compinit',
    "automicro complete fish | source    # in ~/.config/fish/config.fish",
    "automicro complete tcsh             # into a file that ~/.tcshrc sources",
)
TAKES_CONFIG = False

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, help="of which shell")


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            'complete needs shtab, which is not installed: pip install "automicro[completion]"'
        ) from error
    from automicro.cli.command_line import make_parsers

    parser, commands = make_parsers()
    paths = {"CONFIG": shtab.FILE, "FILE": shtab.FILE, "OUT": shtab.FILE}
    # argparse does not know which arguments are files; shtab reads this attribute.
    for action in (action for each in commands.values() for action in each._actions):
        if action.metavar in paths:
            vars(action)["complete"] = paths[action.metavar]
    print(shtab.complete(parser, arguments.shell))
    return 0
