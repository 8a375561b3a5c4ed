"""Rehearsal of the largest batches on several ranks, which leaves no trace in the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automicro import SampleTooLargeError
from automicro.values import same_values
from tests.ranks.world import World
from tests.ranks.wrapping import whole
from tests.trainer.rehearsals import Model, loader_of, log_normal, make_trainer


def train(
    parallel: str,
    *,
    rehearse: str | None,
    limits: list[str] | None = None,
    sizes: Any = None,
    duration: str = "2ep",
    folder: str | None = None,
) -> dict[str, Any]:
    """Train on texts of varying length; return the results to compare."""
    trainer: Any = make_trainer(
        Model(dropout=0.3),
        loader_of(log_normal(3, 61), 4, shuffle=True),
        eval_dataloader=loader_of(log_normal(4, 19), 4),
        parallel=parallel,
        rehearse=rehearse,
        memory_limit=None if limits is None else limits[dist.get_rank()],
        max_duration=duration,
    )
    if sizes is not None:
        trainer._microbatcher.load_state_dict(sizes)
    if folder is not None:
        trainer.keep_failures_in(folder)
    found: dict[str, Any] = {}
    rehearsal = trainer._fit.rehearsal
    if rehearsal is not None:
        run = rehearsal.run

        def noting(*arguments: Any) -> None:
            run(*arguments)
            rows = [each.batch and each.batch.rows for each in rehearsal.report.batches]
            sizes = trainer._microbatcher.state_dict()
            found.update(sizes=sizes, batches=rows, rehearsed_ooms=rehearsal.report.ooms)

        rehearsal.run = noting
    try:
        summary = trainer.fit()
    except SampleTooLargeError as error:
        return {"notes": error.__notes__}
    state = {
        "parameters": [whole(each).clone() for each in trainer._run.model.parameters()],
        "train_loss": summary.train_loss,
        "metrics": dict(summary.eval_metrics),
        "ooms": summary.ooms,
        "random": torch.get_rng_state(),
    }
    return {"state": state, **found}


def require_same(rehearsed: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for one, other in zip(rehearsed, plain, strict=True):
        assert same_values(one["state"], other["state"])


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rehearsal_leaves_training_bit_identical_on_all_ranks(world2: World, parallel: str) -> None:
    rehearsed = world2.run(train, parallel, rehearse="worst")
    require_same(rehearsed, world2.run(train, parallel, rehearse=None))
    worst = [result["batches"][0] for result in rehearsed]
    assert worst[0] != worst[1]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("limits", "duration", "parallel"),
    [(["1GiB", "68KiB"], "1ep", "fsdp"), (["68KiB"] * 2, "2ep", "ddp")],
)
def test_memory_shortage_of_one_rank_is_found_before_run(
    world2: World, parallel: str, limits: list[str], duration: str
) -> None:
    """In the second epoch, a rank with less memory may get a batch of another rank."""
    given: dict[str, Any] = {"limits": limits, "duration": duration}
    rehearsed = world2.run(train, parallel, rehearse="worst", **given)
    assert all(each["rehearsed_ooms"] > 0 for each in rehearsed)
    assert [each["state"]["ooms"] for each in rehearsed] == [0, 0]
    assert world2.run(train, parallel, rehearse=None, **given)[0]["state"]["ooms"] > 0
    sizes = rehearsed[0]["sizes"]
    require_same(rehearsed, world2.run(train, parallel, rehearse=None, sizes=sizes, **given))


def test_failing_batch_is_saved_by_rank_without_memory(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(
        train, "ddp", rehearse="worst", limits=["1GiB", "40KiB"], folder=str(tmp_path)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["failed-batch-0001-rank1.pt"]
    assert any("failed-batch-0001-rank1.pt" in note for note in second["notes"])
    assert not any("is kept" in note for note in first["notes"])
