"""The config files and overrides of a command line, to be read and created."""

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from automicro.cli.config.build import Recipe
from automicro.cli.config.load import LoadedConfig, read_config
from automicro.errors import ConfigError, DataLoaderError
from automicro.trainer.device import choose_device
from automicro.trainer.processes import process_in_environment
from automicro.trainer.surroundings import noting


class Job:
    """The job described by a command line."""

    loaded: LoadedConfig  # set when the config was read

    def __init__(
        self, files: Sequence[str], overrides: Sequence[str], *, alone: str | None = None
    ) -> None:
        self._files, self._overrides, self._alone = files, overrides, alone

    @contextlib.contextmanager
    def reading(self, required: Sequence[str], unused: Collection[str]) -> Iterator[Recipe]:
        """Read the config, with its folders and the current one importable inside the block."""
        num_processes = self._count_processes()
        # Including the yield, because code inside the block might import more modules.
        with _importing_beside(*self._files):
            self.loaded = read_config(
                self._files, self._overrides, required=required, num_devices=num_processes
            )
            with self.making():
                recipe = Recipe(self.loaded.config, without=unused)
            yield recipe

    def making(self) -> contextlib.AbstractContextManager[None]:
        """Turn errors in creating the objects of a config into config errors."""
        return self.loaded.sources.explaining()

    def _count_processes(self) -> int:
        try:
            number = process_in_environment().world_size
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if number > 1 and self._alone:
            raise ConfigError(
                f"WORLD_SIZE={number} means that torchrun started several processes, but "
                f"{self._alone} runs in one. Start it as automicro {self._alone}"
            )
        return number


@contextlib.contextmanager
def _importing_beside(*paths: str) -> Iterator[None]:
    """Make modules next to the configs importable, then modules in the current folder."""
    before = list(sys.path)
    folders = [str(Path(path).resolve().parent) for path in paths]
    sys.path[:0] = dict.fromkeys([*folders, str(Path.cwd())])
    try:
        yield
    finally:
        sys.path[:] = before


def make_computation(recipe: Recipe) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a config on its device, and the arguments for computing its loss."""
    device = choose_device(recipe.config.device)
    model = recipe.make_model()
    model.to(device)
    loss_fn = recipe.make("loss_fn")
    return model, {
        # A loss can be a function, or a module with class weights.
        "loss_fn": loss_fn.to(device) if hasattr(loss_fn, "to") else loss_fn,
        "forward": recipe.make("forward"),
        "loss_average": recipe.make("loss_average"),
        "batch_layout": recipe.config.batch_layout,
        "device": device,
    }


def first_batch(data: Iterable[Any]) -> Any:
    """Return the first batch of a config's training data."""
    with noting(lambda: "while taking the first batch of train_dataloader"):
        batch = next(iter(data), None)
    if batch is None:
        raise DataLoaderError("train_dataloader gave no batch; check its dataset and its sampler")
    return batch


def options_of(recipe: Recipe, *names: str) -> dict[str, Any]:
    """Return options of a config by name, for steps outside the Trainer."""
    options = {name: getattr(recipe.config, name) for name in names}
    # fp16 needs a loss scaler, which only the Trainer has; values in bf16 have the same size.
    if options.get("precision") == "fp16":
        options["precision"] = "bf16"
    return options
