"""What ``automicro verify`` finds out: whether splitting changes a model's gradient."""

import argparse
from functools import partial

from automicro.cli.config import RunConfig
from automicro.cli.job import Job
from automicro.cli.keys import LISTS
from automicro.cli.places import is_refusal
from automicro.cli.recipe import Recipe
from automicro.cli.wording import counting_as_node
from automicro.errors import AutomicroError, DataLoaderError
from automicro.options import check_model
from automicro.trainer.device import choose_device
from automicro.trainer.surroundings import noting
from automicro.verification.report import VerifyReport
from automicro.verification.verify import verify

# What the gradient of one batch does not depend on.
UNUSED = frozenset({"eval_data", "optimizer", "scheduler", "checkpoint", *LISTS})


def verify_config(config: RunConfig) -> VerifyReport:
    """Verify the model of a config on the first batch of its training data.

    Raises:
        ConfigError: a path that names nothing, or arguments that do not fit.
        DataLoaderError: the training data gives no batch.
        Exception: what a class or function of the config raises, with a note that says which, or
            where in verification.

    >>> from automicro.cli.loading import load_config
    >>> overrides = ["train_data.args.batch_size=9", "model.args.channels=8"]
    >>> verify_config(load_config("configs/digits.yaml", overrides)).status
    'exact'
    """
    return _examine(_Subject(config))


class _Subject:
    """What a config names, as far as it takes part in a gradient."""

    def __init__(self, config: RunConfig) -> None:
        recipe = Recipe(config, without=UNUSED)
        self.batch_layout = config.batch_layout
        self.device = choose_device(config.device)
        self.model = recipe.make_model()
        check_model(self.model)
        self.model.to(self.device)
        loss_fn = recipe.make("loss")
        self.loss_fn = loss_fn.to(self.device) if hasattr(loss_fn, "to") else loss_fn
        self.forward = recipe.make("forward")
        self.loss_average = recipe.make_loss_average()
        self.train_data = recipe.make("train_data")


def _examine(subject: _Subject) -> VerifyReport:
    with noting(lambda: "while taking the first batch of train_data"):
        batch = next(iter(subject.train_data), None)
    if batch is None:
        raise DataLoaderError("train_data gave no batch; check its dataset and its sampler")
    with noting(lambda: "in verification, on the first batch of train_data"):
        return verify(
            subject.model,
            batch,
            loss_fn=subject.loss_fn,
            forward=subject.forward,
            loss_average=subject.loss_average,
            batch_layout=subject.batch_layout,
            device=subject.device,
        )


def run_verify(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    job = Job(arguments.inputs, command="verify")
    check = partial(Recipe, without=UNUSED)
    with job.reading(required=("model", "train_data"), check=check) as loaded:
        with job.making():
            subject = _Subject(loaded.config)
        try:
            report = _examine(subject)
        except (TypeError, ValueError) as error:
            if isinstance(error, AutomicroError) or not is_refusal(error):
                raise
            with job.making():  # the config asks for what makes no sense
                raise
        print(counting_as_node(str(report)))
    return report.exit_code
