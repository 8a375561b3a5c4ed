"""Arguments that the trainer refuses, with the reason and a remedy."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from automicro import (
    BatchError,
    Callback,
    CheckpointConfig,
    DataLoaderError,
    DeterminismWarning,
    Evaluator,
    Explore,
    Microbatcher,
    ParameterGroups,
    Trainer,
)
from automicro.callbacks import EarlyStopping
from automicro.features import CountData, NonFinite, Optimization, RememberSizes, Repeatable
from automicro.trainer.optimizer import group_parameters
from tests.trainer.runs import (
    FEATURES,
    Scripted,
    adam,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    schedule,
)


class Clipping(Optimization): ...


def grouped(**group: Any) -> Any:
    return ParameterGroups(torch.optim.AdamW, [group])


def with_method(name: str) -> Any:
    return type("Foreign", (Callback,), {name: lambda self, *_: None})()


EVERY_BATCH = {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)}
LOADERS = (DataLoader(make_data()), DataLoader(make_data()))
OTHER = schedule(adam(nn.Linear(2, 2).parameters()))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": [1, 2]}, "a list of 2, but each .* with a Microbatcher for each"),
    ({"optimizer": len}, "optimizer is of type int, not a"),
    ({"optimizer": None, "scheduler": schedule}, "but no optimizer"),
    (
        {"optimizer": grouped(params="*.bias", weight_decya=0.0)},
        r"did you mean 'weight_decay'",
    ),
    ({"optimizer": grouped(params="*.bais")}, "matches no parameter of the model"),
    ({"scheduler": 3}, "scheduler is a int without a step method"),
    ({"scheduler": lambda _: 3}, "scheduler is a int without a step"),
    ({"scheduler": OTHER}, "belongs to another optimizer"),
    (
        {**EVERY_BATCH, "scheduler_interval": None},
        r"Pass scheduler_interval='batch' to step it after each .* or 'epoch' to",
    ),
    (
        {"scheduler": lambda _: SimpleNamespace(step=print), "scheduler_interval": None},
        r"Pass scheduler_interval='batch' to step it after each .* or 'epoch' to",
    ),
    ({"device": "meta"}, "holds no data"),
    ({"parallel": "dpp"}, "did you mean 'ddp'"),
    ({"eval_dataloader": {}}, "eval_dataloader={} names no evaluation. Pass"),
    ({"progress": "yes"}, "progress is 'yes'; pass True"),
    ({"deterministic": 1}, "deterministic is 1; pass True or False"),
    ({"metrics": [MeanMetric()]}, r"metrics need names\. Pass a mapping"),
    ({"train_dataloader": LOADERS}, r"train_dataloader is a tuple of loaders, .*ConcatDataset"),
    (
        {"eval_dataloader": iter(make_loader()), "max_duration": "2ep"},
        r"eval_dataloader is an iterator \(\w+\).*DataLo",
    ),
    ({"eval_interval": "60sec"}, "eval_interval=.*limit in time, pass max_time="),
    ({"eval_interval": 1}, "eval_interval=.*has no unit: write '1ep'"),
    ({"max_duration": "2h"}, r"^max_duration='2h' counts seconds of data.*max_time='2h30m'"),
    ({"eval_interval": "2h"}, r"^eval_interval='2h' counts seconds of data.*max_time='2h30m'"),
    (
        {"checkpoint": CheckpointConfig(folder="unused", interval="1h")},
        r"^checkpoint interval='1h' counts seconds of data",
    ),
    ({"accumulate_batches": "1e6tok"}, "the number of tokens in a batch of train_dataloader"),
    ({"features": [CountData(seconds=5)]}, "count_seconds=5 cannot be called"),  # type: ignore[arg-type]
    ({"features": [CountData(tokens="ids")]}, r"count_tokens='ids' cannot be called\. Pass"),  # type: ignore[arg-type]
    ({"compile": {"mode": "reduce-overhead"}}, "captures CUDA graphs, but the microbatch size"),
    ({"compile": True, "memory_limit": "1MiB"}, "silently runs everything uncompiled"),
    ({"channels_last": 1}, r"convert the model: model.to\(memory_format=torch.channels_last\)"),
    ({"max_time": 1}, r"give it to fit\(max_time='2h30m'\)"),
    ({"parameter_groups": 1}, r"give optimizer=automicro.ParameterGroups"),
    ({"callbacks": EarlyStopping()}, "not a list; pass a list of callbacks"),
    (
        {"callbacks": [with_method("on_train_batch_end")]},
        r"Foreign\.on_train_batch_end would never be called: the event is called batch_end. Rename",
    ),
    ({"callbacks": [with_method("on_fit_start")]}, "the event is called fit_start. Rename"),
    ({"callbacks": [with_method("batch_ended")]}, "batch_ended would never be called: the events"),
    ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is the class CrossEntropyLoss; make an instance"),
    (
        {"deterministic": True, "eval_microbatch_size": Explore()},
        r"deterministic was given, .* pass the size that it",
    ),
    (
        {"microbatch_unit": "tokens", "microbatch_size": "explore"},
        "slices of tokens are packed",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[each[1] for each in REFUSED])
def test_invalid_argument_is_refused_with_remedy(options: dict[str, Any], message: str) -> None:
    given = dict(options)
    loader = given.pop("train_dataloader", make_loader())
    with pytest.raises((TypeError, ValueError), match=message):
        make_trainer(make_model(), loader, **given)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (NonFinite("skip"), "features is a NonFinite and not a list"),
        *(
            ([kind(schedule, "batch"), Optimization(grad_clip_norm=1.0)], "several Optimization")
            for kind in (Optimization, Clipping)
        ),
    ],
)
def test_invalid_features_are_refused(features: Any, message: str) -> None:
    options: Any = {"grad_clip_norm": 1.0} if isinstance(features, NonFinite) else {}
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer(make_model(), make_loader(), optimizer=adam, features=features, **options)


def test_arguments_of_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="NonFinite is a feature of the Trainer's loop"):
        Microbatcher(make_model(), loss_fn=nn.MSELoss(), features=[NonFinite("skip")])
    with pytest.raises(TypeError, match=r"model is the class Linear; make an instance"):
        Microbatcher(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"repeatable=True was given. Leave"):
        Microbatcher(make_model(), microbatch_size="explore", features=[Repeatable()])
    with pytest.raises(TypeError, match="remember_sizes is 'no'; pass True or False"):
        RememberSizes("no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Pass optimizer= as a callable"):
        ParameterGroups(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [{"params": "*.bias"}])
    with pytest.warns(DeterminismWarning, match="by measured time, so two runs may"):
        make_trainer(make_model(), seed=1, microbatch_size="explore")


FORM = "write mappings such as {'params': ['*.bias'], 'weight_decay': 0.0}"
NAMES = "Use names such as '0.weight', '0.bias', '1.weight', with * for any letters"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"params": "*"}, f"parameter_groups is of type dict, not a list: {FORM}"),
        ("*.bias", f"parameter_groups is of type str, not a list: {FORM}"),
        *(
            (
                [{"params": names}],
                f"parameter_groups[0] is {{'params': {names}}}, without names in 'params': {FORM}",
            )
            for names in ([], [3], torch.zeros(2))
        ),
        (
            [{"params": "1.*"}, {"params": ["1.bias", "0.wieght"]}],
            "parameter_groups[1]: '0.wieght' matches no parameter of the model (did you mean "
            f"'0.weight'?). {NAMES}",
        ),
        (
            [{"params": "*.Bias"}],
            "parameter_groups[0]: '*.Bias' matches no parameter of the model (did you mean "
            f"'1.bias'?). {NAMES}",
        ),
        (
            [{"params": "*.bias", "lr": 0.1}, {"params": ["1.bias"], "lr": 0.2}],
            "parameter_groups[1] has no parameters: all that ['1.bias'] match are in earlier "
            "groups. Move this group before them, or leave it out",
        ),
    ],
)
def test_invalid_group_is_named_with_position_and_remedy(groups: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        group_parameters(model, groups)


# Arguments of calls, and what is found out during them


def test_invalid_arguments_of_fit_and_eval_are_refused(tmp_path: Any) -> None:
    trainer = make_trainer(make_model())
    calls: list[tuple[Any, str]] = [
        (lambda: trainer.fit(max_time="soon"), "is not a time"),
        (lambda: trainer.fit(2), "duration=2 has no unit: write '2ep'"),  # type: ignore[arg-type]
        (lambda: trainer.fit("0.5dur"), r"'0.5dur' is not a duration"),
        (lambda: trainer.fit(duration="2h"), r"^duration='2h' counts seconds of data"),
        (
            lambda: make_trainer(make_model()).fit("2tok"),
            r"^duration='2tok' counts tokens.*CountData",
        ),
        (lambda: trainer.eval([*LOADERS]), "dataloader is a list of loaders, .* in a mapping"),
        (lambda: trainer.eval(max_batches=2), r"no argument max_batches\. Pass eval\(Evaluator\("),  # type: ignore[call-arg]
        (lambda: trainer.predict([]), "gave no batch"),
    ]
    for shuffling in ({"shuffle": True}, {"sampler": torch.utils.data.SubsetRandomSampler([1])}):
        loader = DataLoader(make_data(), batch_size=4, **shuffling)
        calls.append((partial(trainer.predict, loader), r"in an unknown order. Pass a loader with"))
    saving = make_trainer(make_model(), checkpoint=CheckpointConfig(folder=tmp_path))
    calls.append((lambda: saving.fit(duration="1ep"), r"resumed from its .* Pass the whole max_d"))
    for call, message in calls:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert trainer.fit(duration="2ep").epochs == 2


def test_empty_loader_error_gives_reason() -> None:
    empty = DataLoader(make_data(3), batch_size=4, drop_last=True)
    message = r"dataloader \(DataLoader\) gave no batch from 3 rows\..* drop_last=True drops an in"
    with pytest.raises(DataLoaderError, match=f"^train_{message}"):
        make_trainer(make_model(), empty).fit()
    with pytest.raises(DataLoaderError, match=f"^{message}"):
        make_trainer(make_model()).eval(empty)
    trainer = make_trainer(make_model(), eval_dataloader={"seen": make_loader(), "new": empty})
    with pytest.raises(DataLoaderError, match=r"eval_dataloader\['new'\].* no batch from 3 rows"):
        trainer.fit()
    assert trainer.state.batch == 0
    never = Evaluator(dataloader=empty, interval=None)
    assert make_trainer(make_model(), eval_dataloader=never).fit().steps == 4


def test_errors_name_their_batch() -> None:
    def fail(_: Any) -> Any:
        raise KeyError("mine")

    trainer = make_trainer(Scripted(6, fail), eval_dataloader=make_loader(), microbatch_size=16)
    with pytest.raises(KeyError) as raised:
        trainer.fit()
    assert raised.value.__notes__[0] == "automicro: in evaluation, batch 2"
    inputs, targets = make_data()[:]
    with pytest.raises(BatchError) as other:
        make_trainer(make_model(), [(inputs, targets), (inputs, targets[:7])]).fit()
    assert "epoch 1, batch 2 of the epoch" in other.value.__notes__[-1]


def test_uninitialized_layer_added_later_is_always_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 3))
    trainer = make_trainer(model, eval_dataloader=make_loader())
    model.append(nn.LazyLinear(3))
    for call in (trainer.eval, trainer.eval, lambda: trainer.predict(make_loader()), trainer.fit):
        with pytest.raises(ValueError, match="Run the model once first"):
            call()


def test_trainer_without_data_names_missing_arguments() -> None:
    trainer = Trainer(make_model(), loss_fn=nn.CrossEntropyLoss(), device="cpu", progress=False)
    with pytest.raises(ValueError, match=r"Pass train_dataloader=… and optimizer=…"):
        trainer.fit()
    with pytest.raises(ValueError, match=r"Pass eval_dataloader=…"):
        trainer.eval()
    assert "loss" in trainer.eval(make_loader())


def test_values_that_callbacks_and_evaluators_wait_for_must_exist() -> None:
    evaluators = {
        "quick": Evaluator(dataloader=make_loader(), interval="1ba"),
        "full": Evaluator(dataloader=make_loader(), interval="3ba"),
    }

    def train(monitor: str) -> int:
        stopping = EarlyStopping(monitor, patience=1, min_delta=1e9)
        options: dict[str, Any] = {"callbacks": [stopping], "max_duration": "9ba"}
        return make_trainer(make_model(), eval_dataloader=evaluators, **options).fit().steps

    assert train("eval/full/loss") == 6
    for wrong in ("eval/quick/los", "eval/loss", "eval/full/los"):
        near = "eval/full/loss" if "full" in wrong else "eval/quick/loss"
        with pytest.raises(ValueError, match=f"no value called '{wrong}'.* {near}"):
            train(wrong)
    evaluator = Evaluator(dataloader=make_loader(), interval="10tok")
    with pytest.raises(ValueError, match=r"Pass .*CountData"):
        make_trainer(make_model(), eval_dataloader=evaluator).fit()
