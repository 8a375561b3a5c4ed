"""Train a model as a config describes it.

A config names a model, data, a loss, an optimizer and metrics by dotted import paths
with arguments, and sets the options of the Trainer. Modules are searched next to the
configs, then in the current folder.

automicro config --template prints a config to start with, automicro config --keys
explains every key.
"""

import argparse
from typing import TYPE_CHECKING

from automicro.cli.arguments import reading
from automicro.cli.output import to_json, warn

if TYPE_CHECKING:
    from torch import nn

    from automicro.cli.config.build import Recipe
    from automicro.trainer.trainer import Trainer

EXAMPLES = (
    "automicro train job.yaml",
    "automicro train job.yaml max_duration=5ep memory_limit=4MiB",
    "automicro train job.yaml optimizer.args.lr=1e-2 microbatch_size=64",
    "automicro train job.yaml scheduler=null 'model.args={channels: 16}'",
    "automicro train base.yaml gpu.yaml seed=1 run_dir=runs/first",
    "automicro train job.yaml run_dir=runs/first checkpoint={} max_time=2h",
    "automicro train job.yaml --json > summary.json",
    "torchrun --nproc-per-node 2 -m automicro train job.yaml parallel=ddp",
)
JSON = "print the summary as one JSON object, and nothing else, on stdout"


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    with reading(arguments, for_ranks=True, results_only=arguments.json) as (job, recipe, results):
        from automicro.cli.config.load import to_yaml
        from automicro.cli.run_dir import RunDir, goes_on, telling_how_to_go_on
        from automicro.trainer.parallel import whole_state_dict
        from automicro.trainer.processes import process_in_environment

        loaded, config = job.loaded, recipe.config
        is_first = process_in_environment().is_first
        with job.making():
            run_dir = RunDir(config.run_dir, loaded.everything, goes_on=goes_on(recipe.checkpoint))
            finished = run_dir.finished()
            if finished is None:
                model, trainer = _make(recipe)
                # All ranks have met and read the folder by now.
                if is_first:
                    run_dir.begin()
        if finished is not None:
            print(to_json(finished, indent=None if arguments.json else 2), file=results)
            print(f"{config.run_dir} holds this run, which is complete: there is nothing to do")
            return 0
        if config.progress:
            print(to_yaml(loaded.written))
        going_on = telling_how_to_go_on(
            recipe.checkpoint, run_dir=config.run_dir, inputs=arguments.inputs
        )
        if config.run_dir is not None:
            trainer.keep_failures_in(config.run_dir)
        with going_on:
            summary = trainer.fit(max_time=config.max_time)
        # Called on every rank although only one writes, because weights are gathered by all.
        weights = whole_state_dict(model) if config.run_dir is not None else {}
        written = run_dir.end(weights, summary) if is_first else ""
        if not config.progress and not arguments.json:
            print(summary)
        if written:
            print(written)
        if arguments.json:
            print(to_json(summary), file=results)
    return 0


def _make(recipe: "Recipe") -> "tuple[nn.Module, Trainer]":
    from automicro.cli.run_dir import goes_on_from

    folder, weights = goes_on_from(recipe.checkpoint), recipe.config.weights
    if folder is not None and weights is not None:
        warn(f"weights={weights!r} is not used: the run resumes from the checkpoints in {folder}")
    model = recipe.make_model(with_weights=folder is None)
    return model, recipe.make_trainer(model)
