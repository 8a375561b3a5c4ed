"""A small config that tests vary, and the errors that it raises."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from automicro.cli.config.build import Recipe
from automicro.cli.config.load import read_config
from automicro.cli.config.schema import RunConfig
from automicro.errors import ConfigError
from automicro.trainer.trainer import Trainer

JOB = """\
model: {call: torch.nn.Linear, args: {in_features: 8, out_features: 2}}
train_dataloader: {call: torch.utils.data.DataLoader, args: {dataset: [1, 2, 3], batch_size: 2}}
loss_fn: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: torch.optim.SGD, args: {lr: 0.1}}
"""


def load_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    num_devices: int = 1,
) -> RunConfig:
    """Load the typed keys of one or several files."""
    several = [paths] if isinstance(paths, str | Path) else paths
    return read_config(several, overrides, num_devices=num_devices).config


def build_trainer(config: RunConfig) -> Trainer:
    """Build everything that a config describes, including its trainer."""
    recipe = Recipe(config)
    return recipe.make_trainer(recipe.make_model())


def job(*overrides: str, text: str = JOB) -> RunConfig:
    """Write a config to the working directory and load it."""
    Path("job.yaml").write_text(text, encoding="utf-8")
    return load_config("job.yaml", overrides)


def config_error(*overrides: str, text: str = JOB) -> str:
    """Return the error message of an invalid config."""
    with pytest.raises(ConfigError) as caught:
        build_trainer(job(*overrides, text=text))
    return str(caught.value)


def args_of(config: RunConfig, key: str) -> dict[str, object]:
    """Return the arguments of a node that the config must have."""
    args: dict[str, object] = getattr(config, key)["args"]
    return args
