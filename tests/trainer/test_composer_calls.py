"""The methods of the Trainer as Composer's users call them."""

from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from automicro import CheckpointConfig, CheckpointError, Trainer
from automicro.checkpoints.reading import load_checkpoint
from automicro.trainer.composer import ATTRIBUTES, ELSEWHERE, METHODS
from tests.trainer.composer_classes import Time
from tests.trainer.runs import CLASSES, assert_same, make_loader, make_model, make_trainer

BATCHES = 4  # of make_loader()


def test_fit_trains_for_that_much_more() -> None:
    model, other = make_model(), make_model()
    trainer = make_trainer(model, max_duration="1ep", eval_dataloader=make_loader())
    trainer.fit()
    summary = trainer.fit(duration="1ep")
    assert (summary.epochs, summary.steps) == (2, 2 * BATCHES)
    trainer.fit("3ba")
    assert trainer.state.batch == 2 * BATCHES + 3
    trainer.fit(duration=Time(1, "ba"))  # type: ignore[arg-type]
    make_trainer(other, max_duration="3ep").fit()
    assert_same(model, other)
    assert trainer.state.evaluated_at[""] == 3 * BATCHES


def test_the_first_fit_may_have_another_duration() -> None:
    trainer = make_trainer(make_model(), max_duration="1ep")
    assert trainer.fit(duration="2ep").epochs == 2


def test_tokens_are_counted_from_there_on() -> None:
    trainer = make_trainer(make_model(), count_tokens=lambda batch: 10)
    trainer.fit()
    trainer.fit(duration="15tok")
    assert trainer.state.tokens == 10 * (BATCHES + 2)
    unknown = make_trainer(make_model())
    unknown.fit()
    with pytest.raises(ValueError, match="pass count_tokens="):
        unknown.fit(duration="15tok")


def test_after_the_end_the_way_to_go_on_is_named() -> None:
    trainer = make_trainer(make_model())
    trainer.fit()
    with pytest.raises(ValueError, match=r"call fit\(duration='1ep'\) with what is to come"):
        trainer.fit()


def test_a_saved_run_has_its_duration_from_the_start(tmp_path: Any) -> None:
    trainer = make_trainer(make_model(), checkpoint=CheckpointConfig(folder=tmp_path))
    with pytest.raises(ValueError, match=r"taken up again .* give the Trainer the max_duration"):
        trainer.fit(duration="1ep")


@pytest.mark.parametrize(
    ("duration", "error", "message"),
    [
        (make_loader(), TypeError, "was given a DataLoader; give a loader to the Trainer"),
        (2, TypeError, "duration=2 has no unit; say '2ep'"),
        ("0.5dur", ValueError, "of a share of the training, 0.5, give the number"),
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
    first = list(make_loader())[:2]
    assert trainer.eval(max_batches=2) == trainer.eval(first)
    assert trainer.eval(make_loader(), max_batches=2) == trainer.eval(first)
    assert trainer.eval(max_batches=99) == trainer.eval()
    with pytest.raises(ValueError, match="max_batches=-1 must be at least 1"):
        trainer.eval(max_batches=-1)


@pytest.mark.parametrize(
    ("method", "name"), [(method, name) for method, names in METHODS.items() for name in names]
)
def test_arguments_of_composers_methods_are_answered(method: str, name: str) -> None:
    trainer = make_trainer(make_model(), eval_dataloader=make_loader())
    with pytest.raises(TypeError) as caught:
        getattr(trainer, method)(**{name: None})
    hint = METHODS[method][name].hint.replace("`", "")
    assert str(caught.value).startswith(f"{method}() has no argument {name!r}: Composer's")
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        ("fit", "durations", "did you mean 'duration'"),
        ("fit", "epochs", "here it is max_duration"),
        ("eval", "subset_num_batch", "'subset_num_batches' was meant.* here it is max_batches"),
        ("eval", "zebra", "has no argument 'zebra'; it has dataloader, max_batches"),
    ],
)
def test_other_mistakes_are_answered_too(method: str, name: str, message: str) -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(TypeError, match=message):
        getattr(trainer, method)(**{name: None})


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_composers_trainer_are_answered(name: str) -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(AttributeError, match="object has no attribute") as caught:
        getattr(trainer, name)
    assert ATTRIBUTES[name] in str(caught.value)
    assert not hasattr(trainer, name)


@pytest.mark.parametrize(("name", "ours"), ELSEWHERE.items())
def test_methods_of_other_trainers_are_answered_with_ours(name: str, ours: str) -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': here it is {ours}\(\)$"):
        getattr(trainer, name)
    assert callable(getattr(trainer, ours))
    assert not hasattr(trainer, name)


def test_other_attributes_are_missing_as_ever() -> None:
    trainer: Any = make_trainer(make_model())
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'zebra'$"):
        trainer.zebra  # noqa: B018


def write_checkpoint(folder: Any) -> Any:
    """A file named and made up as Composer does."""
    path = folder / "ep2-ba8-rank0.pt"
    folder.mkdir(exist_ok=True)
    torch.save({"state": {"model": make_model().state_dict(), "optimizers": {}}, "rng": []}, path)
    return path


def composer_file(folder: Any) -> str:
    return rf"{folder}/ep2-ba8-rank0.pt is a checkpoint of Composer's.*\['state'\]\['model'\]"


def test_a_run_does_not_begin_anew_beside_checkpoints_of_composers(tmp_path: Any) -> None:
    write_checkpoint(tmp_path)
    trainer = make_trainer(make_model(), checkpoint=CheckpointConfig(folder=tmp_path))
    with pytest.raises(CheckpointError, match=composer_file(tmp_path)):
        trainer.fit()


@pytest.mark.parametrize("is_file", [True, False])
def test_they_are_refused_with_the_way_to_their_weights(tmp_path: Any, is_file: bool) -> None:
    theirs = tmp_path / "theirs"
    file = write_checkpoint(theirs)
    given = file if is_file else theirs
    config = CheckpointConfig(folder=tmp_path / "ours", resume=given)
    with pytest.raises(CheckpointError, match=composer_file(theirs)):
        make_trainer(make_model(), checkpoint=config).fit()
    with pytest.raises(CheckpointError, match=composer_file(theirs)):
        load_checkpoint(given)
    # The line that the message gives does what it says.
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = torch.load(str(file), map_location="cpu", weights_only=False)["state"]["model"]
    model.load_state_dict(loaded)
    assert_same(model, make_model())


def test_any_other_file_is_said_to_be_one(tmp_path: Any) -> None:
    file = tmp_path / "weights.pt"
    torch.save({}, file)
    with pytest.raises(CheckpointError, match=r"weights.pt is a file; give the folder of one"):
        load_checkpoint(file)
    trainer = make_trainer(make_model(), checkpoint=CheckpointConfig(folder=tmp_path))
    trainer.fit()  # weights beside the checkpoints are nothing to stop for
    assert isinstance(trainer, Trainer)
