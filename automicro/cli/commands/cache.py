"""What the command ``automicro cache`` is called and takes."""

import argparse
from pathlib import Path

from automicro.cli.subcommand import Subcommand

DESCRIPTION = """\
List the microbatch sizes that earlier runs have found, or clear them. A run with
microbatch_size=auto starts with the size that the same model found on the same
device; a wrong one costs an attempt or two, and is replaced.

They lie in $AUTOMICRO_CACHE_DIR, else in $XDG_CACHE_HOME/automicro, else in
~/.cache/automicro, one small file each.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clear", action="store_true", help="remove the sizes, damaged files included"
    )
    parser.add_argument("--model", metavar="NAME", help="only those of a model's class")
    parser.add_argument("--older-than", metavar="AGE", help="only those older, such as 12h or 30d")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--markdown", action="store_true", help="print them as a table for docs")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="of another cache")


def _run(arguments: argparse.Namespace) -> int:
    from automicro.cli.caching import run_cache

    return run_cache(arguments)


CACHE = Subcommand(
    name="cache",
    brief="list or clear the microbatch sizes that runs have found",
    description=DESCRIPTION,
    examples=(
        "automicro cache --model GPT2LMHeadModel",
        "automicro cache --clear --older-than 30d",
        "automicro cache --json",
    ),
    exit_codes={
        0: "listed or cleared; what cannot be read was told on stderr",
        1: "a file could not be removed",
    },
    add_arguments=_add_arguments,
    run=_run,
)
