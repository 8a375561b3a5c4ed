"""Several Microbatchers in one process group: for one model, for two models, and in sequence."""

import gc
import os
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from automicro import BatchError
from automicro.errors import DesyncError, PeerFailedError
from automicro.values import same_values
from tests.ranks.faulty_models import Faults, build, points
from tests.ranks.jobs import batch
from tests.ranks.steps import another, squared_error
from tests.ranks.test_recovery import require_recovered
from tests.ranks.world import World, on_ranks

pytestmark = pytest.mark.sweep


KINDS = ["ddp", "fsdp"]


@pytest.mark.parametrize("point", ["first batch", "last backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_recovers_with_any_of_its_microbatchers(world2: World, kind: str, point: str) -> None:
    first, second = require_recovered(world2, kind, points(2)[point], beside=True)
    if kind == "ddp":  # which broadcasts the buffers of rank 0 before each step
        assert same_values(first["buffers"], second["buffers"])


@on_ranks()
def test_more_microbatchers_need_no_more_connections() -> None:
    model = build("fsdp", [Faults()], {})
    kept, threads = [], set()
    for step in range(4):
        kept.append(another(model))
        kept[-1].backward(batch(step, dist.get_rank(), {}))
        threads.add(len(os.listdir("/proc/self/task")))
    assert len(threads) == 1


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_model_can_still_train_and_is_freed_after_its_microbatcher(kind: str) -> None:
    model = build(kind, [Faults()], {})
    microbatcher = another(model)
    for step in range(2):
        microbatcher.backward(batch(step, dist.get_rank(), {}))
    del microbatcher
    gc.collect()
    x, y = batch(2, dist.get_rank(), {})
    squared_error(model(x), y).backward()
    refs: list[weakref.ref[Any]] = [weakref.ref(each) for each in (model, *model.parameters())]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in refs)


@on_ranks()
def test_ranks_continue_after_each_error_reported_to_all() -> None:
    """Rank 1 has a batch that cannot be split in every other step."""
    microbatcher = another(build("fsdp", [Faults()], {}))
    for step in range(4):
        x, y = batch(step, dist.get_rank(), {"rows": [4 + step] * 2})
        if step % 2:
            y = y[:-1] if dist.get_rank() == 1 else y
            with pytest.raises(BatchError if dist.get_rank() == 1 else PeerFailedError):
                microbatcher.backward((x, y))
        else:
            assert microbatcher.backward((x, y)).num_global_samples == 8 + 2 * step


@on_ranks()
def test_part_of_guarded_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    another(model)
    said = "part of a model that another Microbatcher.*give every Microbatcher the same outermost"
    with pytest.raises(ValueError, match=f"(?is){said}"):
        another(model[0])


# The next test leaves this world unusable, so it comes last


@on_ranks()
def test_different_microbatchers_per_rank_raise_without_hanging() -> None:
    model = build("ddp", [Faults()], {})
    pair = another(model), another(model)
    with pytest.raises(DesyncError, match=r"(?s)Microbatcher (\d+)\b.*Microbatcher (?!\1\b)\d"):
        pair[dist.get_rank()].backward(batch(0, dist.get_rank(), {}))
