"""Optimizers with train() and eval(), which train some weights and evaluate and save others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automicro import Callback, CheckpointConfig, Run, Trainer
from automicro.checkpoints.reading import load_checkpoint
from automicro.checkpoints.store import CheckpointStore
from tests.trainer.runs import assert_same, make_data, make_loader, make_model, make_trainer


class ScheduleFree(torch.optim.Optimizer):
    """Trains other weights than it evaluates, like schedule-free SGD."""

    def __init__(self, parameters: Any, lr: float = 0.5, beta: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "is_training": False})

    @torch.no_grad()
    def _change(self, is_training: bool, share: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.lerp_(self.state[each]["z"], share(group["beta"]))
            group["is_training"] = is_training

    def train(self) -> None:
        self._change(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._change(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"]
            group["k"] += 1
            share = 1 / group["k"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, share)
                each.add_(each.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(each.grad, alpha=group["lr"])


def loss_of(model: nn.Module) -> float:
    data = make_data(dtype=torch.float64)
    rows, targets = map(torch.stack, zip(*[(x, y) for x, y in data], strict=True))  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(nn.CrossEntropyLoss()(model(rows), targets))


class Values(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def eval_end(self, run: Run, values: Any) -> None:
        self.losses.append(values["eval/loss"])


def make_schedule_free(model: nn.Module, **options: Any) -> Trainer:
    loader = make_loader(dtype=torch.float64)
    settings = {"eval_dataloader": loader, "microbatch_size": 4, **options}
    return make_trainer(model, loader, optimizer=ScheduleFree, **settings)


def test_optimizer_with_train_and_eval_matches_manual_loop() -> None:
    by_hand, model = make_model().double(), make_model().double()
    optimizer, expected = ScheduleFree(by_hand.parameters()), []
    for _ in range(3):
        optimizer.train()
        for inputs, targets in make_loader(dtype=torch.float64):
            nn.CrossEntropyLoss()(by_hand(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        expected.append(loss_of(by_hand))
    values = Values()
    trainer = make_schedule_free(model, max_duration="3ep", callbacks=[values])
    trainer.fit()
    assert values.losses == pytest.approx(expected, rel=1e-12)
    assert loss_of(model) == pytest.approx(expected[-1], rel=1e-12)
    assert trainer.eval()["loss"] == pytest.approx(expected[-1], rel=1e-12)


def test_evaluation_and_prediction_inside_fit_use_eval_weights() -> None:
    class Looks(Callback):
        seen: list[float]

        def batch_end(self, run: Run, result: Any) -> None:
            outputs = torch.cat(trainer.predict(make_loader(dtype=torch.float64)))
            targets = torch.stack([y for _, y in make_data(dtype=torch.float64)])  # type: ignore[attr-defined]
            predicted = nn.CrossEntropyLoss()(outputs, targets).item()
            self.seen = [loss_of(run.model), trainer.eval()["loss"], predicted]

    looks = Looks()
    trainer = make_schedule_free(make_model().double(), callbacks=[looks])
    trainer.fit()
    at_training, *used = looks.seen
    assert used == pytest.approx([loss_of(trainer._run.model)] * 2, rel=1e-12)
    assert abs(at_training - used[0]) > 1e-6


@pytest.mark.sweep
def test_checkpoint_has_eval_weights_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    class Fails(Callback):
        def batch_start(self, run: Run, batch: Any) -> None:
            if run.state.batch == 7:
                raise KeyError("broken")

    def train(folder: Path, *callbacks: Callback) -> nn.Module:
        model = make_model().double()
        checkpoint = CheckpointConfig(
            folder=folder, interval="3ba", keep_best=1, best_metric="eval/loss"
        )
        make_schedule_free(
            model,
            checkpoint=checkpoint,
            eval_interval="2ba",
            max_duration="3ep",
            callbacks=callbacks,
        ).fit()
        return model

    undisturbed = train(tmp_path / "a")
    with pytest.raises(KeyError):
        train(tmp_path / "b", Fails())
    assert_same(train(tmp_path / "b"), undisturbed)
    best = CheckpointStore(tmp_path / "b", keep_best=1, best_metric="eval/loss").best()
    assert best is not None
    model = make_model().double()
    model.load_state_dict(load_checkpoint(best.path).state["modules"][0])
    assert loss_of(model) == pytest.approx(best.metrics["eval/loss"], rel=1e-12)
