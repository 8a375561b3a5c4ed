"""Measure which microbatch size is the fastest.

Measures a config's model on its own data: forward and backward, rolled back, with sizes
in turn, until the result is precise enough. Successive batches are pooled for larger
sizes. Progress is printed to stderr after each round; Ctrl-C ends the measurement.
Prints a table, the size, and the nearest global batch that the size divides.
"""

import argparse

from automicro.cli.arguments import reading, whole_number
from automicro.cli.config.keys import LISTS, mistake
from automicro.cli.output import to_json

EXAMPLES = (
    "automicro explore job.yaml",
    "automicro explore job.yaml --eval --max-steps 20",
    "automicro explore job.yaml --max-rows 512 memory_limit=64MiB --json",
)
JSON = "print one JSON object in place of a table"

# Keys that do not affect the speed of forward and backward.
UNUSED = frozenset({"scheduler", "checkpoint", *LISTS})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--eval", action="store_true", help="measure evaluation, on eval_dataloader"
    )
    parser.add_argument(
        "--max-steps",
        type=whole_number,
        default=60,
        metavar="N",
        help="trials (default: %(default)s)",
    )
    parser.add_argument(
        "--max-rows",
        type=whole_number,
        metavar="N",
        help="most rows of a microbatch (default: those of four batches)",
    )
    parser.add_argument(
        "--picture",
        type=_picture,
        metavar="OUT",
        help="draw speed and memory into this file, .png or .svg",
    )


def _picture(text: str) -> str:
    # Checked with the other options, and not after minutes of measuring.
    from automicro.tools.pictures import check_name

    try:
        check_name(text)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    loader, other = "train_dataloader", "eval_dataloader"
    if arguments.eval:
        loader, other = other, loader
    unused = UNUSED | {other}
    with reading(arguments, needs=("model", loader), unused=unused) as (job, recipe, results):
        from automicro.cli.job import make_computation, options_of
        from automicro.step.plan import ROWS
        from automicro.tools.explore import explore
        from automicro.tools.pictures import save
        from automicro.trainer.evaluators import read_evaluators
        from automicro.trainer.surroundings import noting

        with job.making():
            unit = recipe.config.microbatch_unit
            if unit != ROWS:
                raise mistake(
                    f"microbatch_unit={unit} packs slices for the least time already, but "
                    "explore compares numbers of rows. Leave the size to microbatch_size=auto, "
                    "or explore with microbatch_unit=rows",
                    "microbatch_unit",
                )
            model, options = make_computation(recipe)
            data = recipe.make(loader)
            if arguments.eval:
                data = next(iter(read_evaluators(loader, data).values())).dataloader
        with noting(lambda: f"while measuring sizes on {loader}"):
            report = explore(
                model,
                data,
                evaluate=arguments.eval,
                max_steps=arguments.max_steps,
                max_rows=arguments.max_rows,
                emit=print,
                **options_of(recipe, "precision", "memory_limit"),
                **options,
            )
        if arguments.picture is not None:
            save(report.picture(), arguments.picture)
        print(to_json(report.to_dict()) if arguments.json else report, file=results)
    return 0
