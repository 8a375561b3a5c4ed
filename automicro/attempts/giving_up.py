"""What to say where not even the smallest microbatch fits."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from automicro.errors import PeerStoppedError, SampleTooLargeError
from automicro.memory import ResidentMemory, allocated_bytes, format_bytes, peak_bytes


def give_up_fixed(failure: BaseException, num_rows: int, size: int) -> NoReturn:
    """Raise the out-of-memory error of a size that never changes, with what would.

    Raises:
        BaseException: the failure.
        SampleTooLargeError: it happened on another rank.
    """
    if isinstance(failure, PeerStoppedError):
        who = "another rank" if failure.culprit is None else f"rank {failure.culprit}"
        raise SampleTooLargeError(
            f"the microbatch size is fixed, and {size} rows of {num_rows} do not fit on {who}; "
            'microbatch_size="auto" would try smaller ones. The state is as before the step.'
        ) from failure
    what = f"the whole batch of {num_rows} rows does" if size == num_rows else None
    failure.add_note(
        f"automicro: the microbatch size is fixed, and {what or f'{size} rows of {num_rows} do'} "
        'not fit; microbatch_size="auto" would try smaller ones. The state is as before the step.'
    )
    raise failure


def why_nothing_fits(
    num_rows: int,
    tried: Sequence[int],
    min_rows: int,
    residents: ResidentMemory | None,
    device: torch.device,
) -> str:
    """What there is to say where the smallest size ran out of memory."""
    # A size may have been tried twice, the second time cut into slices of two rows.
    listed = f"(tried: {', '.join(map(str, dict.fromkeys(tried)))})"
    text = f"a microbatch of {tried[-1]} of {num_rows} rows does not fit, and "
    state = "The state is as before the step. What helps:"
    less_state = "an optimizer with less state, " if _has_state(residents) else ""
    if residents is not None and residents.limit is not None and residents.leaves_nothing:
        return (
            f"{text}no size can {listed}: {residents} come to {format_bytes(residents.total)} "
            f"without any row, and the limit is {format_bytes(residents.limit)}. {state} "
            f"{less_state}a smaller model, a higher limit, a larger device."
        )
    floor = ", because BatchNorm cannot train on one row" * (tried[-1] > 1 < min_rows)
    text += f"there is no smaller one{floor} {listed}."
    peak, allocated = peak_bytes(device), allocated_bytes(device)
    if peak is not None:
        text += f" Peak memory on {device} was {format_bytes(peak)}."
    if allocated is not None:
        text += f" Between attempts {format_bytes(allocated)} were allocated."
    if residents is not None and residents.total:
        limit = f" of {format_bytes(residents.limit)}" if residents.limit is not None else ""
        text += f" Every size needs {format_bytes(residents.total)}{limit} for {residents}."
    return (
        f"{text} {state} shorter or smaller samples, activation checkpointing, precision='bf16', "
        f"{less_state}a larger device."
    )


def _has_state(residents: ResidentMemory | None) -> bool:
    return residents is not None and residents.optimizer_state > 0
