"""From a config to the report of `automicro.verify`."""

from automicro.cli.config import TrainConfig
from automicro.cli.training import Recipe
from automicro.errors import DataLoaderError
from automicro.trainer.device import choose_device
from automicro.verification import VerifyReport, verify


def verify_config(config: TrainConfig) -> VerifyReport:
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
    recipe = Recipe(config)
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
