"""A config says how many rows the optimization batch has in all, not per device."""

from automicro.errors import ConfigError


def batch_size_per_device(global_batch_size: int, num_devices: int) -> int:
    """Return how many rows each device loads for one optimization batch.

    Raises:
        ConfigError: the rows cannot be shared out evenly, or there are none.

    >>> batch_size_per_device(512, 4)
    128
    """
    if global_batch_size < 1:
        raise ConfigError(
            f"global_batch_size={global_batch_size} has no rows: give the rows of an optimization "
            f"batch over all devices, at least {num_devices}"
        )
    rows, rest = divmod(global_batch_size, num_devices)
    if rest:
        multiples = [each * num_devices for each in (rows, rows + 1) if each]
        raise ConfigError(
            f"global_batch_size={global_batch_size} cannot be shared by {num_devices} devices: "
            f"{rest} of {global_batch_size} rows would be left over; "
            f"use {' or '.join(map(str, multiples))}"
        )
    return rows
