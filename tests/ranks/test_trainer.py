"""A `Trainer` over real processes: the same run as in one, whatever happens on which rank."""

from pathlib import Path
from typing import Any

import pytest

from automicro.callbacks import ExponentialMovingAverage, FreezeSchedule
from automicro.features import RankReduction
from tests.ranks import trainer_jobs as jobs
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps

MODES = ("ddp", "fsdp")
LATE: dict[str, Any] = {"parallel": "fsdp", "features": [RankReduction("auto")]}


def differ(results: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    """The largest difference of any parameter on any rank."""
    return max(
        float((result["parameters"][name] - value).abs().max())
        for result in results
        for name, value in alone["parameters"].items()
    )


def require_the_same(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert differ(results, alone) < 1e-9
    for result in results:
        assert result["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-9)
        assert result["metrics"] == pytest.approx(alone["metrics"], abs=1e-9)
        assert result["state"] == alone["state"]


@pytest.mark.parametrize("parallel", mostly_in_sweeps(MODES, quick=["ddp"]))
def test_two_ranks_train_like_one_process_with_the_same_global_batch(
    world2: World, parallel: str
) -> None:
    # 25 rows in batches of 12: one rank has no row in the last; 11 rows to evaluate on.
    results = world2.run(jobs.train, parallel=parallel)
    require_the_same(results, jobs.train())
    assert [result["num_devices"] for result in results] == [2, 2]
    assert {result["samples"] for result in results} == {50}
    assert {result["sharded"] for result in results} == {3 if parallel == "fsdp" else 0}


@pytest.mark.parametrize(
    ("parallel", "sync"),
    [("ddp", "each"), pytest.param("fsdp", "each", marks=pytest.mark.sweep), ("fsdp", "auto")],
)
def test_all_ranks_recover_where_one_has_less_memory(
    world2: World, parallel: str, sync: str
) -> None:
    results = world2.run(
        jobs.train_wide, limit_of_last="800KiB", parallel=parallel, features=[RankReduction(sync)]
    )
    alone = jobs.train_wide(limit_of_last=None)
    assert differ(results, alone) < 1e-9
    assert [result["train_loss"] for result in results] == pytest.approx([alone["train_loss"]] * 2)
    assert results[0]["ooms"] == results[1]["ooms"] > 0
    assert results[0]["microbatch_size"] == results[1]["microbatch_size"] < 60


def test_a_model_that_the_caller_wrapped_is_taken_as_it_is(world2: World) -> None:
    results = world2.run(jobs.train_wrapped_by_hand)
    alone = jobs.train(eval_dataloader=None, optimizer=jobs.UNDECAYED)
    assert differ(results, alone) < 1e-9


def test_a_callback_that_stops_on_one_rank_stops_all_after_the_same_batch(world2: World) -> None:
    stopper = jobs.Stopper(rank=1, after=2)
    results = world2.run(jobs.train, parallel="ddp", callbacks=[stopper])
    assert [result["state"][0] for result in results] == [2, 2]
    assert [result["stop_reason"] for result in results] == ["another rank asked for it", "enough"]


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_an_error_of_one_rank_is_told_to_all_by_its_number(world2: World, argument: str) -> None:
    (kind, text), (own_kind, own_text) = world2.ends(jobs.fail, argument)
    assert kind == "PeerFailedError"
    assert "rank 1: KeyError: 'row 10 is broken'" in text
    assert own_kind == "KeyError"
    assert "this happened on rank 1 of 2" in own_text


@pytest.mark.parametrize("parallel", mostly_in_sweeps(MODES, quick=["ddp"]))
def test_an_average_of_the_weights_is_evaluated_as_in_one_process(
    world2: World, parallel: str
) -> None:
    results = world2.run(
        jobs.train, parallel=parallel, callbacks=[ExponentialMovingAverage(decay=0.5)]
    )
    require_the_same(results, jobs.train(callbacks=[ExponentialMovingAverage(decay=0.5)]))


def test_ranks_begin_with_the_same_weights_and_draw_other_numbers(world2: World) -> None:
    (first, weights), (second, others) = world2.run(jobs.draw, parallel="ddp")
    assert weights == others
    assert first != second


def test_several_processes_with_a_bare_model_are_refused(world2: World) -> None:
    for kind, text in world2.ends(jobs.draw, parallel=None):
        assert kind == "ValueError"
        assert "there are 2 processes" in text
        assert "Pass parallel='ddp'" in text


def test_freezing_in_the_course_of_training_is_refused(world2: World) -> None:
    freezes = FreezeSchedule({"first.*": "1ba"})
    for kind, text in world2.ends(jobs.train, parallel="ddp", callbacks=[freezes]):
        assert kind == "ValueError"
        assert "2 ranks fixed them when the model was wrapped" in text


@pytest.mark.parametrize(
    "options",
    mostly_in_sweeps(
        [{"parallel": "ddp"}, {"parallel": "fsdp"}, LATE],
        quick=[LATE],
    ),
    ids=lambda options: f"{options['parallel']}{' late' * ('features' in options)}",
)
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    world2: World, options: dict[str, Any], tmp_path: Path
) -> None:
    results = world2.run(jobs.save_and_resume, str(tmp_path), microbatch_size=2, **options)
    alone = jobs.train()
    assert differ(results, alone) < 1e-9
    assert [result["state"] for result in results] == [alone["state"]] * 2
