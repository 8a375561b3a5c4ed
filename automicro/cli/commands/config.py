"""What the command ``automicro config`` is called and takes."""

import argparse

from automicro.cli.inputs import add_inputs
from automicro.cli.subcommand import Subcommand

DESCRIPTION = """\
Print the config that train would use: files merged, key=value applied, interpolations
resolved, and every key with its default. What can be told without making anything is
checked: keys, values, import paths and the names of arguments. Whether models and data
can be made and fit each other shows automicro verify, or train. run_dir is not looked at.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--set", action="store_true", help="only the keys that are set")
    parser.add_argument(
        "--keys",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="list every key with type, default and meaning, or those that match: part of a "
        "name, or a pattern such as '*_size'",
    )
    parser.add_argument("--markdown", action="store_true", help="with --keys: as a page")
    parser.add_argument("--template", action="store_true", help="print a config to start with")


def _run(arguments: argparse.Namespace) -> int:
    from automicro.cli.configuring import run_config

    return run_config(arguments)


CONFIG = Subcommand(
    name="config",
    brief="print what train would use, all keys, or a template",
    description=DESCRIPTION,
    examples=(
        "automicro config job.yaml",
        "automicro config base.yaml gpu.yaml seed=1 --set",
        "automicro config --keys",
        "automicro config --keys batch",
        "automicro config --template > job.yaml",
    ),
    exit_codes={0: "no mistake was found"},
    add_arguments=_add_arguments,
    run=_run,
)
