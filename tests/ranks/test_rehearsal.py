"""The worst batches first on several ranks: each its own, all together, without a trace."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automicro.values import same_values
from tests.ranks import rehearsal_jobs as jobs
from tests.ranks.world import World


def without_report(result: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in result.items()
        if key in ("parameters", "train_loss", "metrics", "ooms", "random")
    }


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_train_with_the_same_bits_after_a_rehearsal(world2: World, parallel: str) -> None:
    rehearsed = world2.run(jobs.train, parallel, rehearse="worst")
    plain = world2.run(jobs.train, parallel, rehearse=None)
    for one, other in zip(rehearsed, plain, strict=True):
        assert same_values(without_report(one), without_report(other))
    worst = [result["batches"][0] for result in rehearsed]
    assert worst[0].dataset_rows != worst[1].dataset_rows


@pytest.mark.parametrize(
    ("limits", "duration", "parallel"),
    [
        (["1GiB", "68KiB"], "1ep", "ddp"),
        pytest.param(["1GiB", "68KiB"], "1ep", "fsdp", marks=pytest.mark.sweep),
        pytest.param(["68KiB"] * 2, "2ep", "ddp", marks=pytest.mark.sweep),
        pytest.param(["68KiB"] * 2, "2ep", "fsdp", marks=pytest.mark.sweep),
    ],
)
def test_memory_that_a_rank_lacks_is_found_before_the_run(
    world2: World, parallel: str, limits: list[str], duration: str
) -> None:
    """In a second epoch, a rank that is smaller than others may get what one of these had."""
    given: dict[str, Any] = {"limits": limits, "duration": duration}
    rehearsed = world2.run(jobs.train, parallel, rehearse="worst", **given)
    assert all(each["rehearsed_ooms"] > 0 for each in rehearsed)
    assert [each["ooms"] for each in rehearsed] == [0, 0]
    assert world2.run(jobs.train, parallel, rehearse=None, **given)[0]["ooms"] > 0
    again = world2.run(jobs.train, parallel, rehearse=None, sizes=rehearsed[0]["sizes"], **given)
    for one, other in zip(rehearsed, again, strict=True):
        assert same_values(without_report(one), without_report(other))


@pytest.mark.slow
def test_on_three_ranks_ddp_arranges_its_buckets_earlier_so_sums_may_round_otherwise(
    world3: World,
) -> None:
    rehearsed = world3.run(jobs.train, "ddp", rehearse="worst")
    plain = world3.run(jobs.train, "ddp", rehearse=None)
    for one, other in zip(rehearsed, plain, strict=True):
        assert same_values(one["random"], other["random"])
        for each, expected in zip(one["parameters"], other["parameters"], strict=True):
            assert torch.allclose(each, expected, atol=1e-5)


def test_a_batch_that_does_not_fit_is_kept_by_the_rank_that_lacks_memory(
    world2: World, tmp_path: Path
) -> None:
    results = world2.run(
        jobs.train, "ddp", rehearse="worst", limits=["1GiB", "40KiB"], folder=str(tmp_path)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["failed-batch-0001-rank1.pt"]
    assert "error" in results[0]
    assert any("failed-batch-0001-rank1.pt" in note for note in results[1]["notes"])
    assert not any("is kept" in note for note in results[0]["notes"])
