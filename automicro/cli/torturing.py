"""The command ``automicro torture``: fail every operation of a step of the caller's own model."""

import argparse
import sys

from automicro.cli.dotted import import_callable
from automicro.cli.job import importing_beside
from automicro.cli.subcommand import Subcommand
from automicro.errors import ConfigError
from automicro.torture import CALLS, TortureReport, torture
from automicro.torture.subject import check_subject
from automicro.torture.table import Row
from automicro.torture.torture import QUICK_PLANS

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


def torture_subject(path: str, *, quick: bool, seed: int, calls: str) -> TortureReport:
    """Torture what a dotted path names.

    Args:
        path: of a function that returns a `Subject`.
        quick: whether to sample a few trials.
        seed: of the choice.
        calls: names joined by commas.

    Raises:
        ConfigError: the path names nothing, or no subject comes of it.
        Exception: what the function itself raises.
    """
    make = import_callable(path, key="SUBJECT")
    chosen = [call.strip() for call in calls.split(",")]
    unknown = [call for call in chosen if call not in CALLS]
    if unknown:
        raise ConfigError(
            f"--calls {calls}: there is no {', '.join(map(repr, unknown))}: choose some of "
            f"{','.join(CALLS)}"
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
        most_plans=QUICK_PLANS if quick else None,
        seed=seed,
        show=_show,
    )


def _show(row: Row) -> None:
    """Tell that it goes on: the whole sweep takes minutes."""
    print(f"{row.what}: {row.plans} trials, {len(row.wrong)} wrong", file=sys.stderr)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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


def _torture(arguments: argparse.Namespace) -> int:
    with importing_beside():
        report = torture_subject(
            arguments.subject, quick=arguments.quick, seed=arguments.seed, calls=arguments.calls
        )
    print(report)
    return report.exit_code


TORTURE = Subcommand(
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
    add_arguments=_add_arguments,
    run=_torture,
)
