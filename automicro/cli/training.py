"""Training what a config describes, as ``automicro train`` does it."""

import argparse

from torch import nn

from automicro.cli.config import RunConfig
from automicro.cli.continuing import goes_on, own_before_others, source, telling_how_to_go_on
from automicro.cli.job import Job
from automicro.cli.recipe import Recipe
from automicro.cli.results import print_yaml, results_alone, to_json, warn
from automicro.cli.run_dir import open_run_dir
from automicro.cli.waiting import saying
from automicro.cli.writing import to_yaml
from automicro.trainer.parallel import whole_state_dict
from automicro.trainer.processes import place_in_environment
from automicro.trainer.trainer import Trainer


def build_trainer(config: RunConfig) -> Trainer:
    """Make everything that a config describes, and the trainer of it.

    All values, paths and arguments are checked before anything is made.

    Raises:
        ConfigError: a value that means nothing, a path that names nothing, or arguments that do
            not fit.
        Exception: what a class or function of the config raises, with a note that says which.

    >>> from automicro.cli.loading import load_config
    >>> trainer = build_trainer(load_config("configs/digits.yaml", ["progress=false"]))
    >>> trainer.state.batch
    0
    """
    recipe = Recipe(config)
    return recipe.make_trainer(recipe.make_model())


def _make(recipe: Recipe, *, was_begun: bool) -> tuple[nn.Module, Trainer]:
    recipe.checkpoint = own_before_others(recipe.checkpoint, was_begun=was_begun)
    folder, weights = source(recipe.checkpoint), recipe.config.weights
    if folder is not None and weights is not None:
        warn(f"weights={weights!r} is not used: the run goes on from checkpoints in {folder}")
    model = recipe.make_model(with_weights=folder is None)
    return model, recipe.make_trainer(model)


def train(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    job = Job(arguments.inputs, command="train", for_ranks=True)
    with job.reading() as loaded, results_alone(arguments.json) as results:
        config = loaded.config
        is_first = place_in_environment().is_first
        making = saying("making the model and the data", is_silent=not config.progress)
        with making, job.making():
            recipe = Recipe(config)
            run_dir = open_run_dir(
                config.run_dir, loaded.everything, goes_on=goes_on(recipe.checkpoint)
            )
            finished = run_dir.finished()
            if finished is None:
                model, trainer = _make(recipe, was_begun=run_dir.was_begun)
                # All ranks have looked into the folder by now: they have met.
                if is_first:
                    run_dir.begin()
        if finished is not None:
            print(to_json(finished) if arguments.json else finished, file=results)
            print(f"{config.run_dir} holds this run, trained to its end: nothing was left to do")
            return 0
        if config.progress:
            print_yaml(to_yaml(loaded.written) + "\n")
        going_on = telling_how_to_go_on(
            recipe.checkpoint, run_dir=config.run_dir, inputs=arguments.inputs
        )
        with going_on:
            summary = trainer.fit()
        weights = whole_state_dict(model) if config.run_dir is not None else {}
        written = run_dir.end(weights, summary) if is_first else ""
        if not config.progress and not arguments.json:
            print(summary)
        if written:
            print(written)
        if arguments.json:
            print(to_json(summary), file=results)
    return 0
