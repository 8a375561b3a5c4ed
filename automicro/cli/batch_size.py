"""A config says how many rows the optimization batch has in all, not what is loaded at a time."""

from automicro.errors import ConfigError


def rows_to_load(
    rows: int,
    *,
    num_devices: int,
    accumulate_batches: int = 1,
    key: str = "global_batch_size",
) -> int:
    """Return how many rows each device loads at a time.

    Args:
        rows: of the whole batch.
        num_devices: by how many devices it is shared.
        accumulate_batches: how many loaded batches make one optimization batch.
        key: where the rows stand in the config.

    Raises:
        ConfigError: the rows cannot be shared out evenly, or there are none.

    >>> rows_to_load(512, num_devices=4, accumulate_batches=2)
    64
    """
    shares = num_devices * accumulate_batches
    if rows < 1:
        raise ConfigError(
            f"{key}={rows} has no rows: give the rows of a batch over all devices, at least "
            f"{shares}"
        )
    each, rest = divmod(rows, shares)
    if rest:
        nearest = [number * shares for number in (each, each + 1) if number]
        among = []
        if num_devices > 1 or accumulate_batches == 1:
            among.append(f"{num_devices} devices")
        if accumulate_batches > 1:
            among.append(f"accumulate_batches={accumulate_batches}")
        raise ConfigError(
            f"{key}={rows} cannot be shared by {' × '.join(among)}: {rest} of {rows} rows would "
            f"be left over; use {' or '.join(map(str, nearest))}"
        )
    return each
