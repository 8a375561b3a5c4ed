"""``automicro eval``: the loss and the metrics of a model with given weights."""

import argparse
import sys
from dataclasses import replace
from functools import partial

from automicro.cli.arguments import Command, add_inputs, look_for_files
from automicro.cli.output import importing, results_alone, to_json, warn

DESCRIPTION = """\
Evaluate a config's model on its eval_dataloader, and print the loss and the
metrics, one per line. weights names a file with the model's state dict, such as the
weights.pt that train leaves in run_dir, or a folder of checkpoints, of which the
newest good one counts. What only training needs is neither made nor looked at.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_inputs(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of lines"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    look_for_files(arguments.inputs, command="eval")
    with importing(arguments.inputs):
        from automicro.cli.config.build import ONLY_FOR_TRAINING, Recipe
        from automicro.cli.job import Job
        from automicro.trainer.progress import describe_number

    job = Job(arguments.inputs, command="eval", for_ranks=True)
    # How it goes is no result: it is for whoever watches.
    check = partial(Recipe, without=ONLY_FOR_TRAINING)
    reading = job.reading(required=("model", "eval_dataloader"), check=check)
    with reading as loaded, results_alone(True) as results:
        config = replace(loaded.config, progress=loaded.config.progress and sys.stderr.isatty())
        with job.making():
            recipe = check(config)
            trainer = recipe.make_trainer(recipe.make_model())
        if config.weights is None:
            warn("the model has its initial weights: add weights=PATH to evaluate trained ones")
        values = trainer.eval()
        if arguments.json:
            print(to_json(values), file=results)
        else:
            width = max(map(len, values), default=0)
            for name, value in values.items():
                print(f"{name:<{width}}  {describe_number(value)}", file=results)
    return 0


COMMAND = Command(
    name="eval",
    brief="evaluate a config's model on its eval_dataloader",
    description=DESCRIPTION,
    examples=(
        "automicro eval job.yaml weights=runs/first/weights.pt",
        "automicro eval runs/first/config.yaml weights=runs/first/weights.pt --json",
        "automicro eval job.yaml weights=runs/first/checkpoints",
        "automicro eval job.yaml eval_dataloader.args.batch_size=90 memory_limit=null",
        "torchrun --nproc-per-node 2 -m automicro eval job.yaml parallel=ddp",
    ),
    exit_codes={0: "evaluated", 1: "the run failed"},
    add_arguments=add_arguments,
    run=run,
    place=2,
)
