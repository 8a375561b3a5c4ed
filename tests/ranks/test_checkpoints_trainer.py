"""A `Trainer` of so many ranks goes on from the checkpoint of another number of them."""

from pathlib import Path

import pytest

from automicro import CheckpointConfig
from tests.ranks import trainer_jobs as jobs
from tests.ranks.test_trainer import differ
from tests.ranks.world import World

pytestmark = pytest.mark.sweep


def test_every_epoch_may_have_another_number_of_ranks(
    world2: World, world3: World, tmp_path: Path
) -> None:
    checkpoint = CheckpointConfig(folder=tmp_path)
    world2.run(jobs.train, max_duration="1ep", checkpoint=checkpoint, parallel="fsdp")
    world3.run(jobs.train, max_duration="2ep", checkpoint=checkpoint, parallel="ddp")
    jobs.train(max_duration="3ep", checkpoint=checkpoint)
    last = {"max_duration": "4ep", "checkpoint": checkpoint, "parallel": "fsdp"}
    results = world2.run(jobs.train, **last)
    alone = jobs.train(max_duration="4ep")
    assert [result["steps"] for result in results] == [12, 12]
    assert differ(results, alone) < 1e-9
    assert [result["state"] for result in results] == [alone["state"]] * 2
