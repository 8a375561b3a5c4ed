"""Failing steps of the Trainer: the state they leave, and the messages they raise."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, Evaluator, FitSummary, Microbatcher, Trainer
from automicro.callbacks import EarlyStopping
from automicro.events.run import Run
from automicro.features import NonFinite
from tests.trainer.runs import make_data, make_loader, make_model, make_trainer


def test_skipped_batch_leaves_model_and_metrics_unchanged() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(5)]
    bad = [*batches[:2], (torch.full((4, 6), torch.nan), batches[2][1]), *batches[2:]]

    def train(given: list[Any]) -> tuple[nn.Module, FitSummary]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        trainer = Trainer(
            model,
            given,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            metrics={"accuracy": MulticlassAccuracy(3)},
            features=[NonFinite("skip")],
            device="cpu",
            progress=False,
        )
        return model, trainer.fit()

    model, summary = train(bad)
    undisturbed, expected = train(batches)
    assert (summary.skipped_steps, summary.steps) == (1, 5)
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert summary.train_metrics == expected.train_metrics


def test_batch_that_stops_run_leaves_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    batch = torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.long)
    trainer = make_trainer(model, [batch], loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="the loss is nan in epoch 1, batch 1"):
        trainer.fit()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_batch_is_counted_before_scheduler_fails() -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)

    trainer = make_trainer(make_model(), max_duration="9ba", scheduler=schedule)
    with pytest.raises(ValueError, match="Tried to step 4 times"):
        trainer.fit()
    optimizer = trainer._run.optimizer
    assert optimizer is not None
    steps = {int(each["step"]) for each in optimizer.state.values()}
    assert steps == {trainer.state.batch} == {4}


def test_loss_parameters_missing_from_optimizer_are_named() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(()))

        def forward(self, outputs: Any, targets: Any) -> Any:
            return nn.functional.cross_entropy(outputs, targets) + self.centre.square()

    with pytest.warns(UserWarning, match=r"Centred has parameters that the optimizer does not"):
        trainer = make_trainer(make_model(), loss_fn=Centred())
    assert len(trainer._run.modules) == 2


def test_early_stopping_waits_for_its_evaluation() -> None:
    evaluators = {
        "quick": Evaluator(dataloader=make_loader(), interval="1ba"),
        "full": Evaluator(dataloader=make_loader(), interval="3ba"),
    }

    def train(monitor: str) -> FitSummary:
        stopping = EarlyStopping(monitor, patience=1, min_delta=1e9)
        return make_trainer(
            make_model(), eval_dataloader=evaluators, callbacks=[stopping], max_duration="9ba"
        ).fit()

    assert train("eval/full/loss").steps == 6
    for wrong in ("eval/ful/loss", "eval/quick/los", "eval/loss"):
        with pytest.raises(ValueError, match=f"no value called '{wrong}'.* eval/quick/loss"):
            train(wrong)
    with pytest.raises(ValueError, match=r"no value called 'eval/full/los'.* eval/full/loss"):
        train("eval/full/los")


def test_uncountable_interval_in_tokens_is_refused() -> None:
    evaluator = Evaluator(dataloader=make_loader(), interval="10tok")
    trainer = make_trainer(make_model(), eval_dataloader=evaluator)
    with pytest.raises(ValueError, match=r"Pass .*CountData"):
        trainer.fit()


def test_gradients_of_backward_in_callback_are_not_scaled() -> None:
    def grads(model: nn.Module) -> list[Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    class Twice(Callback):
        def gradients_ready(self, run: Run, result: Any) -> None:
            once = grads(run.model)
            run.microbatcher().backward(make_data()[:])
            self.ratio = [
                ((both - g).norm() / g.norm()).item()
                for both, g in zip(grads(run.model), once, strict=True)
            ]

    twice = Twice()
    batch = make_data()[:]
    make_trainer(
        make_model(), [batch], precision="fp16", microbatch_size=None, callbacks=[twice]
    ).fit()
    assert max(twice.ratio) < 2  # the initial scale is 65,536


@pytest.mark.parametrize("wrong", [EarlyStopping(), 3])
def test_callbacks_must_be_list(wrong: Any) -> None:
    with pytest.raises(TypeError, match="not a list; pass a list of callbacks"):
        make_trainer(make_model(), callbacks=wrong)


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("on_batch_end", "batch_end"),
        ("on_train_batch_end", "batch_end"),
        ("on_fit_start", "fit_start"),
    ],
)
def test_event_names_of_other_trainers_are_refused(name: str, event: str) -> None:
    foreign = type("Foreign", (Callback,), {name: lambda self, *_: None})
    message = rf"Foreign\.{name} would never be called: the event is called {event}. Rename"
    with pytest.raises(ValueError, match=message):
        make_trainer(make_model(), callbacks=[foreign()])


def test_misspelled_event_is_refused() -> None:
    misspelt = type("Misspelt", (Callback,), {"batch_ended": lambda self, *_: None})
    with pytest.raises(ValueError, match=r"Misspelt.batch_ended would never be called: the events"):
        make_trainer(make_model(), callbacks=[misspelt()])


def test_class_instead_of_instance_is_named() -> None:
    with pytest.raises(TypeError, match=r"loss_fn is the class CrossEntropyLoss; make an instance"):
        make_trainer(make_model(), loss_fn=nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match=r"model is the class Linear; make an instance"):
        Microbatcher(nn.Linear)  # type: ignore[arg-type]
