"""Check whether splitting changes a model's gradient.

Explains why, too. Takes the first batch of its training data, and compares the gradient
of the whole batch with those of splits, in float64 if possible.
"""

import argparse

from automicro.cli.arguments import reading
from automicro.cli.config.keys import LISTS

EXAMPLES = (
    "automicro verify job.yaml",
    "automicro verify job.yaml train_dataloader.args.batch_size=9 loss_average=none",
)

# Keys that do not affect the gradient of one batch.
UNUSED = frozenset({"eval_dataloader", "optimizer", "scheduler", "checkpoint", *LISTS})


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    needs = ("model", "train_dataloader")
    with reading(arguments, needs=needs, unused=UNUSED, results_only=False) as (job, recipe, _):
        from automicro.checking.verify import verify
        from automicro.cli.job import first_batch, make_computation
        from automicro.trainer.surroundings import noting

        with job.making():
            model, options = make_computation(recipe)
            del options["device"]  # where the model is
            data = recipe.make("train_dataloader")
        batch = first_batch(data)
        with noting(lambda: "while verifying, on the first batch of train_dataloader"):
            report = verify(model, batch, **options)
        print(report)
        # YAML cannot hold a lambda.
        if (count := report.loss_average.removeprefix("lambda batch: ")) != report.loss_average:
            print(
                "  in a config: loss_average: {call: pkgutil.resolve_name, args: {name: "
                f"my_data.count}}}}, with `def count(batch): return {count}` in my_data.py"
            )
    return report.exit_code
