"""Predict the largest microbatch that will fit, without a device.

Plans for a config's model: how many microbatches a batch is cut into, what fills the
device, and what would help. Takes the first batch of its training data, and runs a
step on tensors with shapes but no data, which needs no GPU and no memory for the
model. With when_too_large in the config, reports every level; with nested, the
slices of nested parts that fit.
"""

import argparse
from dataclasses import replace
from functools import partial

from automicro.cli.arguments import reading, whole_number
from automicro.cli.config.keys import LISTS
from automicro.cli.output import to_json
from automicro.errors import ConfigError

EXAMPLES = (
    "automicro plan job.yaml --device a100-80gb",
    "automicro plan job.yaml --memory 24GiB --ranks 8 when_too_large=recompute",
    "automicro plan job.yaml --memory 24GiB train_dataloader.args.batch_size=512 --json",
)
JSON = "print all of it as JSON"

# Keys that do not affect the memory of a step.
UNUSED = frozenset({"eval_dataloader", "scheduler", "checkpoint", *LISTS})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="memory for tensors, such as 24GiB; with --device, a part of its memory",
    )
    parser.add_argument(
        "--device",
        default=None,
        metavar="NAME",
        help="a device whose memory is known, such as a100-80gb; --device help lists them",
    )
    parser.add_argument(
        "--ranks",
        type=whole_number,
        default=1,
        metavar="N",
        help="number of ranks that shard parameters, gradients and optimizer state; rows and "
        "bytes are those of one rank",
    )
    parser.add_argument(
        "--rows",
        type=whole_number,
        metavar="N",
        help="rows of the batch (default: those of the training data)",
    )
    parser.add_argument(
        "--eval", action="store_true", help="plan an evaluation instead of a training step"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    if arguments.device == "help":
        from automicro.tools.plan.devices import as_table

        print(as_table())
        return 0
    needs = ("model", "train_dataloader")
    with reading(arguments, needs=needs, unused=UNUSED, results_only=arguments.json) as (
        job,
        recipe,
        results,
    ):
        from automicro.cli.job import first_batch, options_of
        from automicro.tools.plan.devices import read_memory
        from automicro.tools.plan.plan import plan
        from automicro.trainer.surroundings import noting

        try:
            # Called only for its errors, which are mistakes in the command line.
            read_memory(arguments.memory, arguments.device or "cuda")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"plan: {error}") from None
        config = recipe.config
        with job.making():
            options = {
                **options_of(recipe, "gradient_sums", "when_too_large", "nested", "batch_layout"),
                "precision": config.precision,
                "loss_fn": recipe.make("loss_fn"),
                "forward": recipe.make("forward"),
                "optimizer": recipe.optimizer,
                # A named device determines its memory; otherwise the config's limit applies.
                "memory": arguments.memory or (None if arguments.device else config.memory_limit),
                "device": arguments.device or "cuda",
                "rows": arguments.rows,
                "ranks": arguments.ranks,
                "train": not arguments.eval,
            }
            data = recipe.make("train_dataloader")
        batch = first_batch(data)
        with noting(lambda: "while planning, on the first batch of train_dataloader"):
            # The memory of a step does not depend on weights, so their file does not have to be
            # here.
            report = plan(partial(recipe.make_model, with_weights=False), batch, **options)
        if config.batchnorm == "exact":
            report = replace(report, assumptions=[*report.assumptions, _NOT_EXACT])
        print(to_json(report.to_dict(), indent=2) if arguments.json else report, file=results)
    return report.exit_code


_NOT_EXACT = (
    "BatchNorm averages over each microbatch; with batchnorm='exact', a batch needs different "
    "memory, which is not planned"
)
