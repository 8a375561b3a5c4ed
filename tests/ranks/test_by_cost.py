"""Ranks with rows of different lengths train as one process on all rows."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher, PaddingWarning
from automicro.features import MicrobatchUnit
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import furthest, whole_gradients, wrapped
from tests.step.texts import IGNORED, Reader, texts
from tests.sweeps import mostly_in_sweeps

Lengths = Sequence[Sequence[int]]  # for each batch of a rank, the lengths of its rows


def reader(kind: str | None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Reader(**options)
    return wrapped(kind, model, model.mix)  # type: ignore[no-any-return]


def expected(
    ranks: Sequence[Lengths], *, padded: int | None = None, **options: Any
) -> list[Tensor]:
    """Loss and gradients of plain torch on the rows of all ranks, each batch padded as given."""
    model = reader(None, **options)
    batches = [texts(list(rows), padded=padded) for batches in ranks for rows in batches if rows]
    counts = [int((batch["labels"] != IGNORED).sum()) for batch in batches]
    losses = [model(**batch)["loss"] * n for batch, n in zip(batches, counts, strict=True)]
    loss: Tensor = sum(losses, torch.zeros((), dtype=torch.float64)) / sum(counts)
    loss.backward()
    return [loss.detach(), *whole_gradients(model)]


def by_tokens(model: nn.Module, declared: Any, **sizes: Any) -> Microbatcher:
    unit = MicrobatchUnit("tokens", cut_padding=declared)
    return Microbatcher(model, loss_average="tokens", features=[unit], probe=False, **sizes)


def train(
    kind: str,
    ranks: Sequence[Lengths],
    *,
    size: Any = 24,
    padded: int | None = None,
    steps: int = 1,
    fits: Sequence[int | None] = (None, None),
    declared: bool | str = "auto",
    sees_padding: bool = False,
) -> dict[str, Any]:
    """Train on batches with these lengths; a rank fits at most so many tokens at once."""
    model = reader(kind, sees_padding=sees_padding)
    rank = dist.get_rank()
    ran: list[tuple[int, int]] = []

    def note(_: nn.Module, __: Any, given: dict[str, Tensor]) -> None:
        rows, length = given["input_ids"].shape
        ran.append((rows, length))
        if rows * length > (fits[rank] or math.inf):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.register_forward_pre_hook(note, with_kwargs=True)
    microbatcher = by_tokens(model, declared, microbatch_size=size)
    batches = [texts(list(rows), padded=padded) for rows in ranks[rank] if rows]
    ooms = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            ran.clear()
            result = microbatcher.accumulate(batches)
            ooms += result.ooms
    return {
        "found": [result.loss, *whole_gradients(model)],
        "ran": ran[-result.num_microbatches :],
        "decided": (result.num_microbatches, result.microbatch_size, ooms),
        "rows": (result.num_samples, result.num_global_samples),
        "warned": [str(each.message) for each in caught if each.category is PaddingWarning],
    }


LONG, SHORT = [9, 3, 17, 5, 5, 12, 2, 8], [4, 2, 3, 6, 1]
CASES: dict[str, list[Lengths]] = {
    "no rows on one rank": [[LONG], [[]]],
    "no padding on one rank": [[[6, 6, 6]], [LONG]],
    "several batches": [[LONG, SHORT, [11]], [[2], [7, 30], SHORT]],
    "fewer batches on one rank": [[LONG, SHORT], [[13, 1]]],
    "one row each": [[[5]], [[14]]],
}
# Under FSDP, no rank can check on its own whether padding may be cut.
DECLARED: dict[str, bool | str] = {"ddp": "auto", "fsdp": True}


def require_same(world: World, kind: str, ranks: Sequence[Lengths], **options: Any) -> list[Any]:
    padded, sees = options.get("padded"), options.get("sees_padding", False)
    whole = expected(ranks, padded=padded, sees_padding=sees)
    found: list[Any] = world.run(train, kind, ranks, **options)
    own = [sum(map(len, batches)) for batches in ranks]
    for rank, rows in zip(found, own, strict=True):
        assert furthest(rank["found"], whole) <= 1e-9
        assert rank["rows"] == (rows, sum(own))
    assert len({rank["decided"] for rank in found}) == 1
    return found


@pytest.mark.parametrize(
    ("kind", "case"),
    mostly_in_sweeps(
        DECLARED, CASES, quick=[("ddp", "several batches"), ("fsdp", "no rows on one rank")]
    ),
)
def test_gradients_match_one_process_on_all_rows(world2: World, kind: str, case: str) -> None:
    for size in (24, None, "auto"):
        options: Any = {"size": size, "declared": DECLARED[kind], "steps": 2}
        found = require_same(world2, kind, CASES[case], **options)
        assert not any(rank["warned"] for rank in found)


@pytest.mark.parametrize(
    ("kind", "fits"),
    [("ddp", (None, 12)), pytest.param("fsdp", (18, 12), marks=pytest.mark.sweep)],
)
def test_out_of_memory_on_one_rank_shrinks_all_ranks(
    world2: World, kind: str, fits: tuple[int | None, int | None]
) -> None:
    options: Any = {"size": "auto", "declared": DECLARED[kind], "fits": fits, "steps": 3}
    found = require_same(world2, kind, [[LONG], [[*SHORT, 7, 12]]], **options)
    assert found[0]["decided"][2] >= 1
    for rank, limit in zip(found, fits, strict=True):
        assert limit is None or all(rows * length <= limit for rows, length in rank["ran"])


def test_rank_that_sees_padding_decides_for_all(world2: World) -> None:
    """The other rank has no padding, and would start to cut with its second batch."""
    ranks: list[Lengths] = [[[6, 6, 6]], [LONG]]
    first, second = require_same(world2, "ddp", ranks, sees_padding=True, steps=2)
    assert not first["warned"]
    [message] = second["warned"]
    assert "results change without padding" in message
    assert {length for _, length in second["ran"]} == {17}


def test_padding_that_no_rank_can_check_stays_with_warning(world2: World) -> None:
    ranks: list[Lengths] = [[LONG], [SHORT]]
    for rank in require_same(world2, "fsdp", ranks, padded=20, steps=2):
        assert {length for _, length in rank["ran"]} == {20}
        [message] = rank["warned"]
        assert "communicates with other ranks" in message
        assert "cut_padding=True" in message
    for rank in require_same(world2, "fsdp", ranks, padded=20, declared=True):
        assert not rank["warned"]
        assert all(length < 20 for _, length in rank["ran"])


@pytest.mark.parametrize("kind", DECLARED)
@on_ranks()
def test_evaluation_and_prediction_keep_row_order(kind: str) -> None:
    microbatcher = by_tokens(reader(kind), DECLARED[kind], eval_microbatch_size="auto")
    for rows in ([LONG, []], [LONG, SHORT]):  # of the ranks
        own = rows[dist.get_rank()]
        batch = texts(own) if own else None
        result = microbatcher.evaluate(batch, return_outputs=True)
        predicted = microbatcher.predict(batch)
        if batch is None:
            assert result.loss is None
            continue
        with torch.no_grad():
            alone = reader(None).eval()(**batch)
        real = batch["attention_mask"].bool()
        assert abs(result.loss - alone["loss"]) <= 1e-9
        for outputs in (result.outputs, predicted):
            found = outputs["logits"][real], outputs["pooled"]
            assert furthest(found, [alone["logits"][real], alone["pooled"]]) <= 1e-12
