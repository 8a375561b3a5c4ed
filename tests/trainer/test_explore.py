"""Exploring sizes during a run changes only its speed, and reports its progress."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import DeterminismWarning, Explore, Microbatcher, Trainer
from automicro.features import Repeatable
from automicro.policy.policy import Policy
from automicro.step.results import StepResult
from tests.trainer.runs import make_loader, make_model, make_trainer


class Noting(Explore):
    """Explores, and records the sizes that fit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes: list[int] = []

    def record(self, outcome: Any) -> None:
        super().record(outcome)
        if outcome.fits:
            self.sizes.append(outcome.microbatch_size)


def train(model: nn.Module, policy: Policy, *, rows: int = 32, **options: Any) -> Trainer:
    torch.manual_seed(3)
    settings = {"max_duration": "30ba", "probe": False, **options}
    loader = make_loader(rows=4 * rows, batch_size=rows)
    trainer = make_trainer(model, loader, microbatch_size=policy, **settings)
    trainer.fit()
    return trainer


def test_summary_reports_chosen_size_not_trial() -> None:
    policy = Explore(max_steps=12)
    # Long enough for the exploration to end, however often it switches between sizes.
    trainer = train(make_model(), policy, max_duration="60ba")
    assert trainer.state.train.cut is not None
    assert trainer.state.train.cut.microbatch_size == policy.propose(32)


def test_microbatcher_explores_and_reports_progress() -> None:
    model = make_model()
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), microbatch_size="explore", probe=False
    )
    results: list[StepResult] = []
    batch = next(iter(make_loader(rows=64, batch_size=64)))
    for _ in range(70):
        results.append(microbatcher.backward(tuple(batch)))
        model.zero_grad()
    told = [each.exploration for each in results if each.exploration is not None]
    assert told[-1].ended is not None
    assert results[-1].exploration is None
    assert not results[-1].is_measuring
    assert results[-1].microbatch_size == told[-1].microbatch_size
    assert any(each.is_measuring for each in results)


class Normed(nn.Module):
    """Averages over the rows of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs


def test_batchnorm_is_not_explored_unless_ignored() -> None:
    policy = Noting()
    train(Normed(), policy)
    assert set(policy.sizes) == {32}
    accepted = Noting()
    train(Normed(), accepted, batchnorm="ignore")
    assert len(set(accepted.sizes)) > 1


def test_exploring_warns_with_seed_and_refuses_determinism() -> None:
    with pytest.warns(DeterminismWarning, match="by measured time, so two runs may"):
        make_trainer(make_model(), seed=1, microbatch_size="explore")
    with pytest.raises(ValueError, match=r"deterministic was given, .* pass the size that it"):
        make_trainer(make_model(), deterministic=True, eval_microbatch_size=Explore())
    with pytest.raises(ValueError, match=r"repeatable=True was given. Leave"):
        Microbatcher(make_model(), microbatch_size="explore", features=[Repeatable()])
