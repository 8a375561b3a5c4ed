"""What to say where not even the smallest microbatch fits."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from automicro.errors import PeerStoppedError, SampleTooLargeError, add_note
from automicro.memory import ResidentMemory, allocated_bytes, format_bytes, peak_bytes
from automicro.observer import bystander

_LESS_BESIDE = (
    "let it compute and keep less on the device (detach and move to the host what it keeps), take "
    "it out, or a larger device"
)


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
    beside = bystander(failure)
    if beside is not None:
        add_note(
            failure,
            f"automicro: memory ran out in {beside}, while {size} rows of {num_rows} were "
            f"computed. The state is as before the step. What helps: {_LESS_BESIDE}.",
        )
        raise failure
    what = f"the whole batch of {num_rows} rows does" if size == num_rows else None
    add_note(
        failure,
        f"automicro: the microbatch size is fixed, and {what or f'{size} rows of {num_rows} do'} "
        'not fit; microbatch_size="auto" would try smaller ones. The state is as before the step.',
    )
    raise failure


def why_nothing_fits(
    num_rows: int,
    tried: Sequence[int],
    min_rows: int,
    residents: ResidentMemory | None,
    device: torch.device,
    *,
    who: str | None = None,
) -> str:
    """What there is to say where the smallest size ran out of memory.

    Args:
        num_rows: of the batch.
        tried: sizes, in order.
        min_rows: the fewest rows of a slice.
        residents: what lies on the device at any size.
        device: where the work ran.
        who: the callback or metric in which memory ran out at the last size; None for neither.
    """
    # A size may have been tried twice, the second time cut into slices of two rows.
    listed = f"(tried: {', '.join(map(str, dict.fromkeys(tried)))})"
    text = f"a microbatch of {tried[-1]} of {num_rows} rows does not fit, and "
    state = "The state is as before the step. What helps:"
    if who is not None:
        return (
            f"memory ran out in {who}, with every size {listed} of {num_rows} rows, so that fewer "
            f"rows do not help. {state} {_LESS_BESIDE}."
        )
    less_state = "an optimizer with less state, " if _has_state(residents) else ""
    shared = residents is not None and residents.shared_inputs > 0
    less_shared = "less in the parts of the batch that are shared by all rows, " * shared
    if residents is not None and residents.limit is not None and residents.leaves_nothing:
        return (
            f"{text}no size can {listed}: {residents} come to {format_bytes(residents.total)} "
            f"without any row, and the limit is {format_bytes(residents.limit)}. {state} "
            f"{less_shared}{less_state}a smaller model, a higher limit, a larger device."
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
    # Where more than half is taken without any row, it is not the samples that are large.
    smaller = "shorter or smaller samples, "
    if _is_mostly_taken(residents):
        smaller = "" if shared else "a smaller model, "
    return (
        f"{text} {state} {less_shared}{smaller}activation checkpointing, precision='bf16', "
        f"{less_state}a larger device."
    )


def _is_mostly_taken(residents: ResidentMemory | None) -> bool:
    if residents is None or residents.limit is None:
        return False
    return residents.total > residents.limit / 2


def _has_state(residents: ResidentMemory | None) -> bool:
    return residents is not None and residents.optimizer_state > 0
