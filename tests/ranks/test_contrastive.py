"""Contrastive losses over ranks: rows of all are compared, as in one process with all rows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.ranks.contrastive_jobs import (
    contrastive_step,
    gathered,
    step_with_little_memory_on_one,
    step_with_shards_inside,
)
from tests.ranks.world import World


@pytest.mark.parametrize(
    ("kind", "rows", "size"),
    [
        ("plain", [7, 7], 3),
        ("microbatcher", [7, 7], 3),
        ("microbatcher", [9, 4], "auto"),
        ("fsdp", [7, 7], 3),
        ("fsdp, encoders", [9, 4], 3),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    world2: World, kind: str, rows: Sequence[int], size: Any
) -> None:
    expected = contrastive_step("alone", [sum(rows)], None)
    for found in world2.run(contrastive_step, kind, rows, size):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-9


def test_shards_inside_of_an_encoder_are_refused_with_what_helps(world2: World) -> None:
    for said in world2.run(step_with_shards_inside, [7, 6]):
        assert "apply fully_shard to the part itself" in said


def test_rows_of_all_ranks_come_with_the_gradients_of_all(world2: World) -> None:
    first, second = world2.run(gathered, [3, 2])
    assert torch.equal(first[0], second[0])
    assert first[0][3:].tolist() == [[100, 101], [102, 103]]
    assert (first[1], second[1]) == (0, 3)
    assert torch.equal(first[2], torch.full((3, 2), 3.0))  # one of rank 0, and two of rank 1
    assert torch.equal(second[2], torch.full((2, 2), 3.0))


def test_memory_that_runs_out_on_one_rank_shrinks_its_slices_alone(world2: World) -> None:
    first, second = world2.run(step_with_little_memory_on_one, [128, 128])
    assert max(first[0]["query"]) < 128
    assert second[0]["query"] == [128]
    assert torch.equal(first[1], second[1])
