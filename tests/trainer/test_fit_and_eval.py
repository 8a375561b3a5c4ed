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


def test_what_is_no_duration_is_answered() -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(TypeError, match="duration=2 has no unit: write '2ep'"):
        trainer.fit(2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'0.5dur' is not a duration"):
        trainer.fit("0.5dur")


def test_eval_may_see_fewer_batches() -> None:
    metrics = {"accuracy": MulticlassAccuracy(CLASSES)}
    trainer = make_trainer(make_model(), eval_dataloader=make_loader(), metrics=metrics)
    few = Evaluator(dataloader=make_loader(), max_batches=2)
    assert trainer.eval(few) == trainer.eval(list(make_loader())[:2])
    many = Evaluator(dataloader=make_loader(), max_batches=99)
    assert trainer.eval(many) == trainer.eval()
    with pytest.raises(TypeError, match=r"no argument max_batches\. Pass eval\(Evaluator\("):
        trainer.eval(max_batches=2)  # type: ignore[call-arg]
