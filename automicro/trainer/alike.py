"""What must be alike on all ranks: compared before they wait for each other."""

import hashlib
import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from automicro.errors import DesyncError
from automicro.ranks import Ranks
from automicro.trainer.outline import Outline
from automicro.trainer.together import of_all_ranks

_SHOWN = 8
_SHORT = 300  # letters
_MISSING = "there is none"


def require_alike(
    device: torch.device, outline: Callable[[], Outline], *, what: str = "options"
) -> None:
    """Compare what ranks were given. All ranks call it; for one process it is free.

    Args:
        device: where ranks can exchange tensors.
        outline: says what this rank was given.
        what: is compared, for the message.

    Raises:
        DesyncError: on all ranks, with each thing that differs and every rank's value.

    >>> require_alike(torch.device("cpu"), lambda: {"max_duration": "'2ep'"})
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    from automicro.distributed import own_collectives, wait_for_all  # slow to import

    own = dict(outline())
    wait_for_all(f"comparing {what}")
    number = _number_of(own)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    with own_collectives():
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        highest, lowest = extremes.tolist()
        if highest == -lowest:
            return
        outlines: list[Outline] = [{}] * dist.get_world_size()
        dist.all_gather_object(outlines, own)
    raise DesyncError(describe_differences(outlines, what=what))


def describe_differences(outlines: Sequence[Outline], *, what: str) -> str:
    """What differs between ranks, with the remedy.

    Args:
        outlines: of all ranks, in order.
        what: is compared.

    >>> print(describe_differences([{"metrics": "None"}, {"metrics": "F1"}], what="options"))
    ranks were given different options:
      metrics: None on rank 0; F1 on rank 1
    Give every rank the same. All ranks train, evaluate, count metrics and save checkpoints \
together, and rank 0 alone shows and logs what comes of it: nothing of this has to be left out \
elsewhere.
    """
    names = list(dict.fromkeys(name for each in outlines for name in each))
    lines = []
    for name in names:
        values = [each.get(name, _MISSING) for each in outlines]
        if len(set(values)) > 1:
            lines.append(f"  {name}: {by_rank(values)}")
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(
        [
            f"ranks were given different {what}:",
            *lines[:_SHOWN],
            *more,
            "Give every rank the same. All ranks train, evaluate, count metrics and save "
            "checkpoints together, and rank 0 alone shows and logs what comes of it: nothing of "
            "this has to be left out elsewhere.",
        ]
    )


def by_rank(values: Sequence[str]) -> str:
    """Values with the ranks that have them.

    >>> by_rank(["a", "b", "a"])
    'a on ranks 0, 2; b on rank 1'
    """
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{_shortened(value)} on rank{'s' * (len(each) > 1)} {_shortened(', '.join(each))}"
        for value, each in ranks.items()
    )


def require_same_order(ranks: Ranks, checksum: int | None, name: str) -> None:
    """Compare the order of rows that ranks share. All ranks call it, once in a pass.

    Args:
        ranks: of the run.
        checksum: of this rank's order; None where it shares none, or has drawn none.
        name: of the loader's argument.

    Raises:
        DesyncError: on all ranks, where orders differ.

    >>> from automicro.ranks import OneRank
    >>> require_same_order(OneRank(), 3, "train_dataloader")
    """
    compare_orders(of_all_ranks(ranks, checksum, f"comparing the order of {name}"), name)


def compare_orders(checksums: Sequence[int | None], name: str) -> None:
    """Refuse orders of rows that differ.

    Args:
        checksums: of all ranks, in order; None where there is none.
        name: of the loader's argument.

    Raises:
        DesyncError: with the remedy.

    >>> compare_orders([7, None, 7], "train_dataloader")
    """
    known = [each for each in checksums if each is not None]
    if len(set(known)) < 2:
        return
    # Which letter stands for which order does not matter.
    letters = {each: f"order {number + 1}" for number, each in enumerate(dict.fromkeys(known))}
    found = by_rank(["none" if each is None else letters[each] for each in checksums])
    raise DesyncError(
        f"the rows of {name} come in another order on some ranks ({found}), so some would be used "
        "twice and others never. Its sampler draws from something that is not alike on all ranks: "
        "give its generator a fixed seed, or let it draw from the global random numbers of torch, "
        "Python or NumPy, which are the same everywhere while it draws"
    )


def _number_of(outline: Outline) -> int:
    digest = hashlib.sha256(json.dumps(outline, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]} …"
