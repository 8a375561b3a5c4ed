"""Whether what a config names for data gives batches, told before anything is trained."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from automicro.errors import ConfigError


def checking_data(make: Callable[..., Any], call: str, key: str) -> Callable[..., Any]:
    """Return what makes the same, and refuses it where it gives no batches.

    Args:
        make: makes the data.
        call: what the config names, for messages.
        key: where it stands.

    Raises:
        ConfigError: once it is called, there is nothing, or a dataset that gives single rows.

    >>> checking_data(lambda: None, "my_data.loader", "train_data")()
    Traceback (most recent call last):
        ...
    automicro.errors.ConfigError: train_data: my_data.loader returned None: return a DataLoader
    """

    def made() -> Any:
        data = make()
        if data is None:
            raise ConfigError(f"{key}: {call} returned None: return a DataLoader")
        # A dataset that is iterated over may give whole batches; one with places gives rows.
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            raise ConfigError(
                f"{key}: {call} gave a {type(data).__name__}, which gives single rows: wrap it in "
                f"a torch.utils.data.DataLoader"
            )
        return data

    return made
