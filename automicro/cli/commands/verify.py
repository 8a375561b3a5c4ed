"""What the command ``automicro verify`` is called and takes."""

import argparse

from automicro.cli.inputs import add_inputs, look_for_files
from automicro.cli.subcommand import Subcommand
from automicro.cli.waiting import importing

DESCRIPTION = """\
Find out whether splitting a batch changes the gradient of a config's model, and
why. Takes the first batch of its training data, and compares the gradient of the
whole batch with those of splits, in float64 where possible.
"""


def _run(arguments: argparse.Namespace) -> int:
    look_for_files(arguments.inputs, command="verify")
    with importing(arguments.inputs):
        from automicro.cli.verifying import run_verify

    return run_verify(arguments)


VERIFY = Subcommand(
    name="verify",
    brief="find out whether splitting changes a model's gradient",
    description=DESCRIPTION,
    examples=(
        "automicro verify job.yaml",
        "automicro verify job.yaml train_data.args.batch_size=9 loss_average=none",
    ),
    exit_codes={
        0: "splitting is exact as configured",
        1: "splitting is not exact as configured, or the run failed",
        3: "exactness cannot be verified",
    },
    add_arguments=add_inputs,
    run=_run,
)
