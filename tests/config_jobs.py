"""A small config to be changed in one place, and what is said of it."""

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
    """The typed keys of a file, or of several."""
    several = [paths] if isinstance(paths, str | Path) else paths
    return read_config(several, overrides, num_devices=num_devices).config


def build_trainer(config: RunConfig) -> Trainer:
    """Make everything that a config describes, and the trainer of it."""
    recipe = Recipe(config)
    return recipe.make_trainer(recipe.make_model())


def job(*overrides: str, text: str = JOB) -> RunConfig:
    """Write a config where we are, and load it."""
    Path("job.yaml").write_text(text, encoding="utf-8")
    return load_config("job.yaml", overrides)


def complaint(*overrides: str, text: str = JOB) -> str:
    """What is said of a config that is wrong."""
    with pytest.raises(ConfigError) as caught:
        build_trainer(job(*overrides, text=text))
    return str(caught.value)


def args_of(config: RunConfig, key: str) -> dict[str, object]:
    """The arguments of a node, which the config has to have."""
    args: dict[str, object] = getattr(config, key)["args"]
    return args
