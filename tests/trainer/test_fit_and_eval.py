"""What `fit` and `eval` take: how much longer, and on how many batches."""

from typing import Any

import pytest
from torchmetrics.classification import MulticlassAccuracy

from automicro import CheckpointConfig, Evaluator
from tests.trainer.runs import CLASSES, make_loader, make_model, make_trainer

BATCHES = 4  # of make_loader()


def test_the_first_fit_may_have_another_duration() -> None:
    trainer = make_trainer(make_model(), max_duration="1ep")
    assert trainer.fit(duration="2ep").epochs == 2


def test_a_saved_run_has_its_duration_from_the_start(tmp_path: Any) -> None:
    trainer = make_trainer(make_model(), checkpoint=CheckpointConfig(folder=tmp_path))
    with pytest.raises(ValueError, match=r"resumed from its .* Pass the whole max_duration"):
        trainer.fit(duration="1ep")


@pytest.mark.parametrize(
    ("duration", "error", "message"),
    [
        (make_loader(), TypeError, "was given a DataLoader; give a loader to the Trainer"),
        (2, TypeError, "duration=2 has no unit: write '2ep'"),
        ("0.5dur", ValueError, "'0.5dur' is not a duration"),
    ],
)
def test_what_is_no_duration_is_answered(
    duration: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(make_model()).fit(duration)


def test_eval_may_see_fewer_batches() -> None:
    metrics = {"accuracy": MulticlassAccuracy(CLASSES)}
    trainer = make_trainer(make_model(), eval_dataloader=make_loader(), metrics=metrics)
    few = Evaluator(dataloader=make_loader(), max_batches=2)
    assert trainer.eval(few) == trainer.eval(list(make_loader())[:2])
    many = Evaluator(dataloader=make_loader(), max_batches=99)
    assert trainer.eval(many) == trainer.eval()
