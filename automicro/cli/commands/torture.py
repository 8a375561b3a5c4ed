"""``automicro torture``: fail every operation of a step of the caller's own model."""

import argparse
import sys
from typing import TYPE_CHECKING

from automicro.cli.arguments import Command
from automicro.errors import ConfigError

if TYPE_CHECKING:
    from automicro.torture.torture import Row, TortureReport

DESCRIPTION = """\
Run out of memory before and after each operation of a training step, of an
evaluation, of gradient clipping and of the optimizer's step; raise foreign errors
and Ctrl-C there; fail again in the retry. After each trial compare parameters,
gradients, buffers, optimizer, metrics, random numbers, batches and later steps bit
by bit with a run without faults.

SUBJECT is the import path of a function without arguments that returns an
automicro.torture.Subject: model, optimizer, at least four batches, options of the
Microbatcher, metrics. docs/torture.md shows one, and how to read the table.
"""

# Those of automicro.torture, which takes torch.
CALLS = ("backward", "evaluate", "unscale", "clip", "step")
QUICK_PLANS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("subject", metavar="SUBJECT", help="import path of a function")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_PLANS} trials for each line of the table"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice among trials")
    parser.add_argument(
        "--calls",
        default=",".join(CALLS),
        help="what to disturb (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    from automicro.cli.job import importing_beside

    with importing_beside():
        report = _torture(arguments)
    print(report)
    return report.exit_code


def _torture(arguments: argparse.Namespace) -> "TortureReport":
    from automicro.cli.config.nodes import import_callable
    from automicro.torture.subject import check_subject
    from automicro.torture.torture import torture

    path: str = arguments.subject
    make = import_callable(path, key="SUBJECT")
    chosen = [call.strip() for call in arguments.calls.split(",")]
    unknown = [call for call in chosen if call not in CALLS]
    if unknown:
        raise ConfigError(
            f"--calls {arguments.calls}: there is no {', '.join(map(repr, unknown))}: choose some "
            f"of {','.join(CALLS)}"
        )
    subject = make()
    try:
        check_subject(subject)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return torture(
        make,
        name=path.rpartition(".")[2],
        calls=chosen,
        most_plans=QUICK_PLANS if arguments.quick else None,
        seed=arguments.seed,
        show=_show,
    )


def _show(row: "Row") -> None:
    """Tell that it goes on: the whole sweep takes minutes."""
    print(f"{row.what}: {row.plans} trials, {len(row.wrong)} wrong", file=sys.stderr)


COMMAND = Command(
    name="torture",
    brief="fail every operation of a model's step and see what is lost",
    description=DESCRIPTION,
    examples=(
        "automicro torture my_module.make_subject --quick",
        "automicro torture my_module.make_subject --calls backward,step --seed 1",
    ),
    exit_codes={
        0: "every fault was recovered from bit by bit, or refused with the state as before",
        1: "something was lost; the table says what",
    },
    add_arguments=add_arguments,
    run=run,
    place=7,
)
