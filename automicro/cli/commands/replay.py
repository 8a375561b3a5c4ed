"""Run a batch that did not fit once more.

Runs only this batch: forward, backward and the memory of the optimizer's first step,
under the memory limit of the config. Reports whether it fits now and at which size, its
peak, and what it needs at any size. Nothing is trained.

FILE is a batch saved by a run (the run's error names it). Without a CONFIG, config.yaml
next to FILE is used, as in the run_dir of a run. No code in FILE is run.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from automicro.cli.arguments import is_path, reading
from automicro.cli.config.keys import LISTS
from automicro.cli.output import to_json
from automicro.errors import ConfigError, describe_error

if TYPE_CHECKING:
    from automicro.cli.config.build import Recipe
    from automicro.trainer.failed_batch import FailedBatch

EXAMPLES = (
    "automicro replay runs/first/failed-batch-0001.pt",
    "automicro replay runs/first/failed-batch-0001.pt memory_limit=24GiB",
    "automicro replay /tmp/automicro-k3x/failed-batch-0001.pt job.yaml precision=bf16",
)
JSON = "print it as one JSON object"


# Keys that do not affect the memory of one batch.
UNUSED = frozenset({"scheduler", "checkpoint", "eval_dataloader", *LISTS})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a batch that did not fit")


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    path: Path = arguments.file
    arguments.inputs = _with_config(path, arguments.inputs)
    with reading(arguments, needs=("model",), unused=UNUSED) as (job, recipe, results):
        from automicro.cli.job import make_computation, options_of
        from automicro.tools.replay import replay
        from automicro.trainer.optimizer import build_optimizer
        from automicro.trainer.surroundings import noting

        with job.making():
            failed = _load(path, recipe)
            model, options = make_computation(recipe)
            optimizer = build_optimizer(recipe.grouped_optimizer(), model, [model])
            sizes = recipe.make_sizes()
        with noting(lambda: "while replaying a batch"):
            report = replay(
                failed,
                model,
                optimizer=optimizer,
                **options_of(
                    recipe,
                    *("nested", "when_too_large", "padding", "cut_padding"),
                    *("precision", "gradient_sums", "memory_limit"),
                ),
                **options,
                **sizes,
            )
        print(to_json(report.to_dict()) if arguments.json else report, file=results)
    return 0 if report.fits else 1


def _with_config(path: Path, inputs: list[str]) -> list[str]:
    """Return the inputs, with the config next to the batch file if they name none."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}: give the failed batch of a run")
    if any(map(is_path, inputs)):
        return inputs
    beside = path.parent / "config.yaml"
    if not beside.is_file():
        raise ConfigError(
            f"there is no config.yaml next to {path}: give the config of the run, as in "
            f"automicro replay {path} job.yaml"
        )
    return [str(beside), *inputs]


def _load(path: Path, recipe: "Recipe") -> "FailedBatch":
    """Load the batch; if its class is unknown, use a batch of the config as a template."""
    from automicro.cli.job import first_batch
    from automicro.trainer.failed_batch import UnknownClassError, UnreadableBatchError, load_batch

    try:
        try:
            return load_batch(path)
        except UnknownClassError:
            if recipe.config.train_dataloader is None:
                raise
            return load_batch(path, like=first_batch(recipe.make("train_dataloader")))
    except UnreadableBatchError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({describe_error(error)})") from error
