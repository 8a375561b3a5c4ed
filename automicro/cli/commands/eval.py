"""Evaluate a config's model on its eval_dataloader.

Prints the loss and the metrics, one per line. weights names a file with the model's
state dict, such as the weights.pt that train writes into run_dir, or a folder of
checkpoints, of which the newest intact one is used. Objects that only training needs
are neither created nor checked.
"""

import argparse
import sys

from automicro.cli.arguments import reading
from automicro.cli.config.keys import LISTS
from automicro.cli.output import to_json, warn

EXAMPLES = (
    "automicro eval job.yaml weights=runs/first/weights.pt",
    "automicro eval runs/first/config.yaml weights=runs/first/weights.pt --json",
    "automicro eval job.yaml weights=runs/first/checkpoints",
    "automicro eval job.yaml eval_dataloader.args.batch_size=90 memory_limit=null",
    "torchrun --nproc-per-node 2 -m automicro eval job.yaml parallel=ddp",
)
JSON = "print one JSON object in place of lines"

# Keys that an evaluation does not need, so their objects do not have to exist.
UNUSED = frozenset({"train_dataloader", "optimizer", "scheduler", "checkpoint", *LISTS})


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    needs = ("model", "eval_dataloader")
    with reading(arguments, needs=needs, unused=UNUSED, for_ranks=True) as (job, recipe, results):
        from automicro.trainer.progress import describe_number

        # Progress is not a result, so it is shown only in a terminal.
        progress = recipe.config.progress and sys.stderr.isatty()
        with job.making():
            trainer = recipe.make_trainer(recipe.make_model(), progress=progress)
        if recipe.config.weights is None:
            warn("the model has its initial weights: add weights=PATH to evaluate trained ones")
        values = trainer.eval()
        if arguments.json:
            print(to_json(values), file=results)
        else:
            width = max(map(len, values), default=0)
            for name, value in values.items():
                print(f"{name:<{width}}  {describe_number(value)}", file=results)
    return 0
