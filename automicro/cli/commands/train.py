"""What the command ``automicro train`` is called and takes."""

import argparse

from automicro.cli.inputs import add_inputs, look_for_files
from automicro.cli.subcommand import Subcommand
from automicro.cli.waiting import importing

DESCRIPTION = """\
Train what YAML configs describe. A config names a model, data, a loss, an optimizer
and metrics by dotted import paths with arguments, and sets the options of the
Trainer. Modules are looked for beside the configs, then where the command is started.

automicro config --template prints a config to start with, automicro config --keys
explains every key.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the summary as one JSON object, and nothing else, on stdout",
    )


def _run(arguments: argparse.Namespace) -> int:
    look_for_files(arguments.inputs, command="train")
    with importing(arguments.inputs, in_logs=True):
        from automicro.cli.training import train

    return train(arguments)


TRAIN = Subcommand(
    name="train",
    brief="train what a config describes",
    description=DESCRIPTION,
    examples=(
        "automicro train job.yaml",
        "automicro train job.yaml max_duration=5ep memory_limit=4MiB",
        "automicro train job.yaml optimizer.args.lr=1e-2 microbatch_size=64",
        "automicro train job.yaml scheduler=null 'model.args={channels: 16}'",
        "automicro train base.yaml gpu.yaml seed=1 run_dir=runs/first",
        "automicro train job.yaml run_dir=runs/first checkpoint={} max_time=2h",
        "automicro train job.yaml --json > summary.json",
        "torchrun --nproc-per-node 2 -m automicro train job.yaml parallel=ddp",
    ),
    exit_codes={0: "it trained to its end", 1: "the run failed"},
    add_arguments=_add_arguments,
    run=_run,
)
