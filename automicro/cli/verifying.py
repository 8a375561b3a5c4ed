"""The command ``automicro verify``: whether splitting changes the gradient of a config's model."""

import argparse

from automicro.cli.config import RunConfig
from automicro.cli.job import Job, add_inputs
from automicro.cli.recipe import Recipe
from automicro.cli.subcommand import Subcommand
from automicro.errors import DataLoaderError
from automicro.trainer.device import choose_device
from automicro.verification import VerifyReport, verify

DESCRIPTION = """\
Find out whether splitting a batch changes the gradient of a config's model, and
why. Takes the first batch of its training data, and compares the gradient of the
whole batch with those of splits, in float64 where possible.
"""
# What the gradient of one batch does not depend on.
UNUSED = frozenset({"eval_data", "optimizer", "scheduler"})


def verify_config(config: RunConfig) -> VerifyReport:
    """Verify the model of a config on the first batch of its training data.

    Raises:
        ConfigError: a path that names nothing, or arguments that do not fit.
        DataLoaderError: the training data gives no batch.
        Exception: what a class or function of the config raises, with a note that says which.

    >>> from automicro.cli.loading import load_config
    >>> overrides = ["train_data.args.batch_size=9", "model.args.channels=8"]
    >>> verify_config(load_config("configs/digits.yaml", overrides)).status
    'exact'
    """
    recipe = Recipe(config, without=UNUSED)
    device = choose_device(config.device)
    model = recipe.make_model().to(device)
    loss_fn = recipe.make("loss")
    batch = next(iter(recipe.make("train_data")), None)
    if batch is None:
        raise DataLoaderError("train_data gave no batch; check its dataset and its sampler")
    return verify(
        model,
        batch,
        loss_fn=loss_fn.to(device) if hasattr(loss_fn, "to") else loss_fn,
        forward=recipe.make("forward"),
        loss_average=recipe.make_loss_average(),
        batch_layout=config.batch_layout,
        device=device,
    )


def _verify(arguments: argparse.Namespace) -> int:
    job = Job(arguments.inputs, command="verify")
    with job.reading(required=("model", "train_data")) as loaded:
        with job.making():
            report = verify_config(loaded.config)
        print(report)
    return report.exit_code


VERIFY = Subcommand(
    name="verify",
    brief="find out whether splitting changes a model's gradient",
    description=DESCRIPTION,
    examples=(
        "automicro verify job.yaml",
        "automicro verify job.yaml train_data.args.batch_size=9 loss_average=none",
    ),
    exit_codes={
        0: "splitting is exact as configured",
        1: "splitting is not exact as configured, or the run failed",
        3: "exactness cannot be verified",
    },
    add_arguments=add_inputs,
    run=_verify,
)
