"""What the command ``automicro torture`` is called and takes."""

import argparse

from automicro.cli.subcommand import Subcommand

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


def _run(arguments: argparse.Namespace) -> int:
    from automicro.cli.torturing import run_torture

    return run_torture(arguments)


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
    run=_run,
)
