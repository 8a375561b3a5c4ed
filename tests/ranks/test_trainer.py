"""`Trainer` on real processes: results match one process, and all ranks act together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from automicro import Callback, CheckpointConfig
from automicro.callbacks import ExponentialMovingAverage
from automicro.features import RankReduction
from tests.ranks.trainer_jobs import (
    UNDECAYED,
    Net,
    make_trainer,
    train,
)
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import require_alike, whole


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


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.sweep)])
def test_two_ranks_match_one_process_with_same_global_batch(world2: World, parallel: str) -> None:
    """They also average weights for evaluation."""
    # 25 rows in batches of 12 leave one rank without a row in the last batch; 11 rows to evaluate.
    options: dict[str, Any] = {"callbacks": [ExponentialMovingAverage(decay=0.5)]}
    results = world2.run(train, parallel=parallel, **options)
    require_same(results, train(**options))
    assert [result["num_devices"] for result in results] == [2, 2]
    assert {result["samples"] for result in results} == {50}
    assert {result["sharded"] for result in results} == {3 if parallel == "fsdp" else 0}


def train_wrapped_by_hand() -> dict[str, Any]:
    return train(DistributedDataParallel(Net()), optimizer=UNDECAYED, eval_dataloader=None)


def test_model_wrapped_by_caller_is_accepted(world2: World) -> None:
    results = world2.run(train_wrapped_by_hand)
    assert differ(results, train(eval_dataloader=None, optimizer=UNDECAYED)) < 1e-9


class Stopper(Callback):
    def batch_end(self, run: Any, result: Any) -> None:
        if run.rank == 1 and run.state.batch == 2:
            run.stop("enough")


@on_ranks()
def test_stop_on_one_rank_ends_all_after_same_batch() -> None:
    found = train(parallel="ddp", callbacks=[Stopper()])
    assert found["state"][0] == 2
    assert found["stop_reason"] == ["another rank asked for it", "enough"][dist.get_rank()]


@on_ranks()
def test_ranks_start_with_equal_weights_and_different_random_numbers() -> None:
    model = make_trainer(parallel="ddp")._run.model
    require_alike([whole(each) for each in model.parameters()])
    with pytest.raises(AssertionError):
        require_alike(torch.rand(()))


@on_ranks()
def test_several_processes_with_unwrapped_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"there are 2 processes.*Pass parallel='ddp'"):
        make_trainer(parallel=None)


def save_and_resume(folder: str, **options: Any) -> dict[str, Any]:
    """Stop in the middle of an epoch, and resume with another trainer."""
    checkpoint = CheckpointConfig(folder=folder)
    make_trainer(max_duration="1ba", checkpoint=checkpoint, **options).fit()
    return train(checkpoint=checkpoint, **options)


@pytest.mark.sweep
def test_run_resumes_in_middle_of_epoch(world2: World, tmp_path: Path) -> None:
    late: dict[str, Any] = {"parallel": "fsdp", "features": [RankReduction("auto")]}
    results = world2.run(save_and_resume, str(tmp_path), microbatch_size=2, **late)
    require_same(results, train())
