"""`Trainer` on real processes: results match one process, and all ranks act together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from automicro.callbacks import ExponentialMovingAverage
from automicro.features import RankReduction
from tests.ranks import trainer_jobs as jobs
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import require_alike, require_told, whole
from tests.sweeps import mostly_in_sweeps

MODES = ("ddp", "fsdp")


class BrokenRow(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index == 10:
            raise KeyError(f"row {index} is broken")
        return self._data[index]


def differ(results: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    """Return the largest difference of any parameter on any rank."""
    return max(
        float((result["parameters"][name] - value).abs().max())
        for result in results
        for name, value in alone["parameters"].items()
    )


def require_same(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert differ(results, alone) < 1e-9
    for result in results:
        assert result["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-9)
        assert result["metrics"] == pytest.approx(alone["metrics"], abs=1e-9)
        assert result["state"] == alone["state"]


@pytest.mark.parametrize("parallel", mostly_in_sweeps(MODES, quick=["ddp"]))
def test_two_ranks_match_one_process_with_same_global_batch(world2: World, parallel: str) -> None:
    # 25 rows in batches of 12 leave one rank without a row in the last batch; 11 rows to evaluate.
    results = world2.run(jobs.train, parallel=parallel)
    require_same(results, jobs.train())
    assert [result["num_devices"] for result in results] == [2, 2]
    assert {result["samples"] for result in results} == {50}
    assert {result["sharded"] for result in results} == {3 if parallel == "fsdp" else 0}


@pytest.mark.parametrize(
    ("parallel", "sync"),
    [("ddp", "each"), pytest.param("fsdp", "each", marks=pytest.mark.sweep), ("fsdp", "auto")],
)
def test_all_ranks_recover_when_one_has_less_memory(
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


def test_model_wrapped_by_caller_is_accepted(world2: World) -> None:
    results = world2.run(jobs.train_wrapped_by_hand)
    alone = jobs.train(eval_dataloader=None, optimizer=jobs.UNDECAYED)
    assert differ(results, alone) < 1e-9


def test_stop_on_one_rank_ends_all_after_same_batch(world2: World) -> None:
    stopper = jobs.Stopper(rank=1, after=2)
    results = world2.run(jobs.train, parallel="ddp", callbacks=[stopper])
    assert [result["state"][0] for result in results] == [2, 2]
    assert [result["stop_reason"] for result in results] == ["another rank asked for it", "enough"]


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
@on_ranks()
def test_error_on_one_rank_is_reported_with_its_number(argument: str) -> None:
    """Only one rank reads the broken row."""
    loader = DataLoader(BrokenRow(jobs.make_data(24)), batch_size=6)
    given: Any = {"broken": loader} if argument == "eval_dataloader" else loader
    trainer = jobs.make_trainer(parallel="ddp", **{argument: given})
    told, own = "rank 1: KeyError: 'row 10 is broken'", "this happened on rank 1 of 2"
    require_told(trainer.fit, "KeyError", told=told, own=own)


@pytest.mark.parametrize("parallel", mostly_in_sweeps(MODES, quick=["ddp"]))
def test_weight_average_evaluates_as_in_one_process(world2: World, parallel: str) -> None:
    results = world2.run(
        jobs.train, parallel=parallel, callbacks=[ExponentialMovingAverage(decay=0.5)]
    )
    require_same(results, jobs.train(callbacks=[ExponentialMovingAverage(decay=0.5)]))


@on_ranks()
def test_ranks_start_with_equal_weights_and_different_random_numbers() -> None:
    model = jobs.make_trainer(parallel="ddp")._run.model
    require_alike([whole(each) for each in model.parameters()])
    with pytest.raises(AssertionError):
        require_alike(torch.rand(()))


@on_ranks()
def test_several_processes_with_unwrapped_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"there are 2 processes.*Pass parallel='ddp'"):
        jobs.make_trainer(parallel=None)


@pytest.mark.sweep
def test_run_resumes_in_middle_of_epoch(world2: World, tmp_path: Path) -> None:
    late: dict[str, Any] = {"parallel": "fsdp", "features": [RankReduction("auto")]}
    results = world2.run(jobs.save_and_resume, str(tmp_path), microbatch_size=2, **late)
    alone = jobs.train()
    assert differ(results, alone) < 1e-9
    assert [result["state"] for result in results] == [alone["state"]] * 2
