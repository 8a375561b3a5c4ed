"""What ``automicro eval`` prints: the loss and the metrics of a model with given weights."""

import argparse
import sys
from dataclasses import replace
from functools import partial

from automicro.cli.job import Job
from automicro.cli.recipe import ONLY_FOR_TRAINING, Recipe
from automicro.cli.results import results_alone, to_json, warn
from automicro.trainer.progress import describe_number


def evaluate(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    job = Job(arguments.inputs, command="eval", for_ranks=True)
    # How it goes is no result: it is for whoever watches.
    check = partial(Recipe, without=ONLY_FOR_TRAINING)
    reading = job.reading(required=("model", "eval_data"), check=check)
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
