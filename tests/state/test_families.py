"""Models of transformers and metrics of torchmetrics after failures at three points."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.policy.policy import Policy
from tests.acceptance.families import judges, total
from tests.acceptance.rows import Draws
from tests.acceptance.torchmetrics_families import INPUTS, METRICS
from tests.acceptance.transformers_families import TRANSFORMERS
from tests.outside import Outside
from tests.state.undone import picture
from tests.sweeps import mostly_in_sweeps

OUTSIDE = Outside(counts={}, plan=[])


class DescendingSizes(Policy):
    """A policy that proposes its next size after each failure."""

    def __init__(self, sizes):
        self.left = list(sizes)

    def propose(self, num_rows, cost=None):
        return self.left[0]

    def record(self, outcome):
        if not outcome.fits:
            self.left.pop(0)


def reach(where):
    """Raise out of memory at the planned calls of an attempt."""
    counts, plan = OUTSIDE.counts, OUTSIDE.plan
    counts[where] = counts.get(where, 0) + 1
    if plan and plan[0] == (where, counts[where]):
        plan.pop(0)
        counts.clear()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def faulty(module, args, output):
    reach("forward")
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: reach("backward"))


def with_faults(model):
    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(faulty)
    return model.train()


def seed(number):
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(number)


def plan_for(counts):
    """Plan failures in the forward, the backward, and after the first microbatch."""
    forward, backward = counts["forward"], counts.get("backward", 1)
    within = max(1, forward * 2 // 3)
    return [("forward", within), ("backward", (backward + 1) // 2), ("forward", forward + within)]


def trained(make, sizes, plan):
    """Return all state after two batches."""
    seed(0)
    model, batch, options, more = make()
    OUTSIDE.plan = list(plan)
    policy = DescendingSizes(sizes if plan else sizes[-1:])
    microbatcher = Microbatcher(model, microbatch_size=policy, probe=False, **options)
    found: list[Any] = []
    seed(1)
    for index in range(2):
        OUTSIDE.counts = {}
        result = microbatcher.backward(batch(index))
        assert result.attempts == (1 + len(plan) if index == 0 else 1)
        found += [picture(each) for each in (result.loss, *(p.grad for p in model.parameters()))]
    assert not OUTSIDE.plan
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return [*found, *map(picture, (*model.buffers(), more(), draws))]


def verdict(make, sizes, plan):
    clean, failed = trained(make, sizes, []), trained(make, sizes, plan)
    pairs = enumerate(zip(clean, failed, strict=True))
    different = [place for place, (one, other) in pairs if one != other]
    if not different:
        return "same"
    if clean != trained(make, sizes, []):
        return "never twice the same"
    return f"{len(different)} of {len(clean)} differ, first {different[:3]}"


def of_model(name):
    family = TRANSFORMERS[name]

    def batch(index):
        return family.batch(Draws(torch.Generator().manual_seed(index), torch.float32, index))

    def make():
        return with_faults(family.model()), batch, dict(family.declared), lambda: None

    seed(0)
    OUTSIDE.plan, OUTSIDE.counts, model = [], {}, with_faults(family.model())
    forward = family.declared.get("forward", lambda model, batch: model(**batch).loss)
    total(forward(model, batch(0))).backward()
    return verdict(make, (8, 4, 3, 2), plan_for(OUTSIDE.counts))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Linear(1, 1)

    def forward(self, x):
        return self.by(x.double().float().reshape(len(x), -1, 1))


def of_metric(name):
    """Return the verdict on a metric that a training forward updates."""
    kind, given = METRICS[name]

    def make():
        metric = kind()

        def forward(model, batch):
            metric.update(*batch)
            return model(batch[0]).square().mean()

        def batch(index):
            torch.manual_seed(index)
            return INPUTS[given]()

        options = {"forward": forward, "loss_average": "samples"}
        return with_faults(Scale()), batch, options, lambda: (seed(2), metric.compute())

    return verdict(make, (30, 15, 10, 6), plan_for({"forward": 1, "backward": 1}))


BY_LIBRARY: dict[str, Any] = {"transformers": of_model, "torchmetrics": of_metric}
NAMES = [name for name in judges() if name.startswith(tuple(BY_LIBRARY))]
MODELS = [name for name in NAMES if name.startswith("transformers")]
OF_METRICS = [name for name in NAMES if name.startswith("torchmetrics")]


def judged(name):
    library, name = name.split(" | ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BY_LIBRARY[library](name)


@pytest.mark.parametrize(
    "name", [*mostly_in_sweeps(MODELS, few=10), *mostly_in_sweeps(OF_METRICS, few=14)]
)
def test_model_family_trains_identically_after_failures(name):
    # Reformers draw a seed from the system.
    assert judged(name) == ("never twice the same" if "Reformer" in name else "same")
