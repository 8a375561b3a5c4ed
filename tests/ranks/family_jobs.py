"""Models that nobody here wrote, on several ranks as people wrap them, at every level."""

from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from automicro.features import RankReduction, WhenTooLarge
from automicro.savers import offload
from automicro.savers.recompute import Recompute, repeated_blocks
from tests.ranks.steps import local
from tests.savers.families import LANGUAGE, OTHERS, Family
from tests.torture.engine.subject import begin_at_level

LEVELS: dict[str, Any] = {
    "plain": ("error", 0),
    "recompute": ("recompute", 1),
    "offload": ("offload", 1),
    "both": (["recompute", "offload"], 2),
}


def wrapped(kind: str, model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """As in anybody's script: blocks, then the root."""
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=options.get("unused", False))
    keywords: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": options.get("reshard", True),
    }
    if options.get("bf16"):
        keywords["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in repeated_blocks(model).values():
        fully_shard(block, **keywords)
    return cast(nn.Module, fully_shard(model, **keywords))


def train(kind: str, family: Family, options: dict[str, Any], name: str) -> dict[str, Any]:
    """Three steps at a level; parameters, losses, gradients' norm and the random state."""
    when, level = LEVELS[name]
    model = wrapped(kind, family.make(), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    microbatcher = Microbatcher(
        model,
        microbatch_size=2,
        features=[WhenTooLarge(when), RankReduction(options.get("sync", "each"))],
        forward=family.forward,
        optimizer=optimizer,
        probe=False,
    )
    torch.manual_seed(100 + dist.get_rank())
    np.random.seed(dist.get_rank())  # SpecAugment draws from it
    losses = []
    for _ in range(3):
        if level:
            begin_at_level(microbatcher, level)
        batch = family.batch()
        result = microbatcher.backward(batch)
        assert result.level == microbatcher._levels[level].name
        losses.append(result.loss)
        optimizer.step()
        optimizer.zero_grad()
    used = [
        block.turn > 0
        for saver in microbatcher._levels[level].savers
        if isinstance(saver, Recompute)
        for block in saver.blocks
    ]
    state: dict[str, Tensor] = {key: local(each.detach()) for key, each in model.named_parameters()}
    state |= {"losses": torch.stack(losses), "rng": torch.get_rng_state()}
    return {"state": state, "used": used}


def compare_levels(kind: str, name: str, options: dict[str, Any]) -> dict[str, list[str]]:
    """What is another bit at a level than at the plain one, by the name of the level."""
    family = (LANGUAGE | OTHERS)[name]
    found = {}
    with mock.patch.object(offload, "SMALL_BYTES", 1 << 10):
        plain = train(kind, family, options, "plain")["state"]
        for level in list(LEVELS)[1:]:
            one = train(kind, family, options, level)
            differing = [key for key in plain if not torch.equal(plain[key], one["state"][key])]
            found[level] = differing + ["nothing is recomputed"] * (not all(one["used"]))
    return found
