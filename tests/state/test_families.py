"""Models of transformers and metrics of torchmetrics, after attempts that failed in three places.

``python -m tests.state.test_families`` prints what is otherwise, of all that the acceptance tables
have; words behind it choose families by how their names begin.
"""

import functools
import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.policy.policy import Outcome, Policy
from tests.acceptance.families import total
from tests.acceptance.rows import Draws
from tests.acceptance.torchmetrics_families import INPUTS, METRICS
from tests.acceptance.transformers_families import TRANSFORMERS
from tests.outside import Outside

BATCHES = 2
OUTSIDE = Outside(counts={}, plan=[])
Plan = list[tuple[str, int]]
# A model, its batches by index, options of the Microbatcher, and what else is compared in the end.
Make = Callable[[], tuple[nn.Module, Callable[[int], Any], dict[str, Any], Callable[[], Any]]]


class Falling(Policy):
    """Sizes in a row: the next one after a failure."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.left = list(sizes)

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return self.left[0]

    def record(self, outcome: Outcome) -> None:
        if not outcome.fits:
            self.left.pop(0)


def reach(where: str) -> None:
    """Run out of memory where the plan says so: at so many calls of an attempt."""
    counts, plan = OUTSIDE.counts, OUTSIDE.plan
    counts[where] = counts.get(where, 0) + 1
    if plan and plan[0] == (where, counts[where]):
        plan.pop(0)
        counts.clear()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def faulty(module: nn.Module, args: Any, output: Any) -> None:
    reach("forward")
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: reach("backward"))


def with_faults(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(faulty)
    return model.train()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def plan_for(counts: dict[str, int]) -> Plan:
    """In the forward; in the backward; when the first microbatch is done, in the second one."""
    forward, backward = counts["forward"], counts.get("backward", 1)
    within = max(1, forward * 2 // 3)
    return [("forward", within), ("backward", (backward + 1) // 2), ("forward", forward + within)]


def trained(make: Make, sizes: Sequence[int], plan: Plan) -> list[Any]:
    """All that there is after two batches."""
    seed(0)
    model, batch, options, more = make()
    OUTSIDE.plan = list(plan)
    policy = Falling(sizes if plan else sizes[-1:])
    microbatcher = Microbatcher(model, microbatch_size=policy, probe=False, **options)
    found: list[Any] = []
    seed(1)
    for index in range(BATCHES):
        OUTSIDE.counts = {}
        result = microbatcher.backward(batch(index))
        assert result.attempts == (1 + len(plan) if index == 0 else 1)
        gradients = [p.grad for p in model.parameters()]
        found += [result.loss, *(None if g is None else g.clone() for g in gradients)]
    assert not OUTSIDE.plan
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return [*found, *model.buffers(), more(), draws]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
    if isinstance(one, Tensor):
        is_nan = (one != one) & (other != other)
        return one.shape == other.shape and bool(((one == other) | is_nan).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def verdict(make: Make, sizes: Sequence[int], plan: Plan) -> str:
    clean, failed = trained(make, sizes, []), trained(make, sizes, plan)
    pairs = zip(clean, failed, strict=True)
    different = [place for place, pair in enumerate(pairs) if not same(*pair)]
    if not different:
        return "same"
    if not same(clean, trained(make, sizes, [])):
        return "never twice the same"
    return f"{len(different)} of {len(clean)} differ, first {different[:3]}"


def of_model(name: str) -> str:
    family = TRANSFORMERS[name]

    def batch(index: int) -> Any:
        return family.batch(Draws(torch.Generator().manual_seed(index), torch.float32, index))

    def make() -> Any:
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

    def forward(self, x: Tensor) -> Tensor:
        return self.by(x.double().float().reshape(len(x), -1, 1))  # type: ignore[no-any-return]


def of_metric(name: str) -> str:
    """Of one that a training forward updates."""
    kind, given = METRICS[name]

    def make() -> Any:
        metric = kind()

        def forward(model: nn.Module, batch: Any) -> Tensor:
            metric.update(*batch)
            return model(batch[0]).square().mean()  # type: ignore[no-any-return]

        def values() -> Any:
            seed(2)
            return metric.compute()

        def batch(index: int) -> Any:
            torch.manual_seed(index)
            return INPUTS[given]()

        options = {"forward": forward, "loss_average": "samples"}
        return with_faults(Scale()), batch, options, values

    return verdict(make, (30, 15, 10, 6), plan_for({"forward": 1, "backward": 1}))


JUDGES: dict[str, Callable[[], str]] = {
    **{f"transformers | {name}": functools.partial(of_model, name) for name in TRANSFORMERS},
    **{f"torchmetrics | {name}": functools.partial(of_metric, name) for name in METRICS},
}


def judged(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return JUDGES[name]()


MODELS = [name for name in JUDGES if name.startswith("transformers")]
OF_METRICS = [name for name in JUDGES if name.startswith("torchmetrics")]
# They take a seed of the system's.
UNREPEATABLE = {name for name in MODELS if "Reformer" in name}


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*MODELS[::8], *OF_METRICS[::4]])
def test_a_sample_of_families_is_as_without_failures(name: str) -> None:
    assert judged(name) == "same"


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGES)
def test_every_family_is_as_without_failures(name: str) -> None:
    assert judged(name) == ("never twice the same" if name in UNREPEATABLE else "same")


def main() -> None:
    logging.disable()
    gc.freeze()
    asked = sys.argv[1:] or [""]
    names = [name for name in JUDGES if any(name.startswith(each) for each in asked)]
    num_same = 0
    for name in names:
        try:
            found = judged(name)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:200]}"
        num_same += found == "same"
        if found != "same":
            print(f"{name}: {found}", flush=True)
    print(f"{num_same} of {len(names)} are the same")


if __name__ == "__main__":
    main()
