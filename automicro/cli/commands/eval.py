"""What the command ``automicro eval`` is called and takes."""

import argparse

from automicro.cli.inputs import add_inputs, look_for_files
from automicro.cli.subcommand import Subcommand
from automicro.cli.waiting import importing

DESCRIPTION = """\
Evaluate a config's model on its eval_data, and print the loss and the metrics, one
per line. weights names a file with the model's state dict, such as the weights.pt
that train leaves in run_dir, or a folder of checkpoints, of which the newest good
one counts. What only training needs is neither made nor looked at.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of lines"
    )


def _run(arguments: argparse.Namespace) -> int:
    look_for_files(arguments.inputs, command="eval")
    with importing(arguments.inputs):
        from automicro.cli.evaluating import evaluate

    return evaluate(arguments)


EVAL = Subcommand(
    name="eval",
    brief="evaluate a config's model on its eval_data",
    description=DESCRIPTION,
    examples=(
        "automicro eval job.yaml weights=runs/first/weights.pt",
        "automicro eval runs/first/config.yaml weights=runs/first/weights.pt --json",
        "automicro eval job.yaml weights=runs/first/checkpoints",
        "automicro eval job.yaml eval_data.args.batch_size=90 memory_limit=null",
        "torchrun --nproc-per-node 2 -m automicro eval job.yaml parallel=ddp",
    ),
    exit_codes={0: "evaluated", 1: "the run failed"},
    add_arguments=_add_arguments,
    run=_run,
)
