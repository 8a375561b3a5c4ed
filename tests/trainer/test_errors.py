"""Errors in runs and arguments, and their messages."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from automicro import BatchError, DataLoaderError, NonFiniteLossError, Trainer
from tests.trainer.runs import (
    Scripted,
    adam,
    assert_same,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    schedule,
)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_ends_run_before_optimizer_step(bad: float) -> None:
    model = Scripted(6, lambda outputs: outputs * bad)
    steps: list[Any] = []
    optimizer = adam(model.parameters())
    optimizer.register_step_post_hook(
        lambda *_: steps.append(copy.deepcopy(model.linear.state_dict()))
    )
    trainer = make_trainer(model, optimizer=optimizer, max_duration="3ep", microbatch_size=16)
    with pytest.raises(
        NonFiniteLossError,
        match=r"the loss is nan in epoch 2, batch 2 of the epoch \(5 batches done\).*Lower",
    ):
        trainer.fit()
    assert len(steps) == 5
    assert torch.equal(steps[-1]["weight"], model.linear.weight)


def test_non_finite_gradient_is_caught_when_clipping() -> None:
    def root(outputs: Tensor) -> Tensor:
        return (outputs * 0).abs().sqrt() + outputs

    model = Scripted(1, root)
    before = copy.deepcopy(model.linear)
    with pytest.raises(NonFiniteLossError, match="the norm of its gradient is nan"):
        make_trainer(model, grad_clip_norm=1.0, microbatch_size=None).fit()
    assert_same(model.linear, before)


def test_error_in_evaluation_names_evaluation_batch() -> None:
    def fail(_: Tensor) -> Tensor:
        raise KeyError("mine")

    trainer = make_trainer(Scripted(6, fail), eval_dataloader=make_loader(), microbatch_size=16)
    with pytest.raises(KeyError) as raised:
        trainer.fit()
    assert raised.value.__notes__[0] == "automicro: in evaluation, batch 2"


def test_batch_with_different_structure_is_named_by_position() -> None:
    inputs, targets = make_data()[:]
    batches = [(inputs, targets), (inputs, targets[:7])]
    with pytest.raises(BatchError) as raised:
        make_trainer(make_model(), batches).fit()
    assert "epoch 1, batch 2 of the epoch" in raised.value.__notes__[-1]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], r"^train_dataloader \(list\) gave no batch. Check its data set"),
        (
            DataLoader(make_data(3), batch_size=4, drop_last=True),
            r"gave no batch from 3 rows\..* drop_last=True drops an incomplete batch",
        ),
    ],
    ids=["list", "drop_last"],
)
def test_empty_loader_error_gives_reason(loader: Any, message: str) -> None:
    with pytest.raises(DataLoaderError, match=message):
        make_trainer(make_model(), loader).fit()
    with pytest.raises(DataLoaderError, match=message.replace("train_", "")):
        make_trainer(make_model()).eval(loader)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": [1, 2]}, TypeError, "a list of 2, but each .* with a Microbatcher for each"),
        ({"optimizer": len}, TypeError, "optimizer is of type int, not a"),
        ({"scheduler": 3}, TypeError, "scheduler is a int without a step method"),
        ({"scheduler": lambda _: 3}, TypeError, "scheduler is a int without a step"),
        (
            {"scheduler": schedule(adam(nn.Linear(2, 2).parameters()))},
            ValueError,
            "belongs to another optimizer",
        ),
        ({"max_duration": "1e2ba"}, ValueError, "write a positive whole number of epochs"),
        ({"grad_clip_norm": 0}, ValueError, "grad_clip_norm=0 must be above 0"),
        ({"grad_clip_norm": "1"}, TypeError, "grad_clip_norm is '1', not a number"),
        ({"device": "meta"}, ValueError, "holds no data"),
        ({"seed": 1.5}, TypeError, "seed is 1.5, not a whole number"),
        ({"eval_dataloader": {}}, ValueError, "eval_dataloader={} names no evaluation. Pass"),
        ({"progress": "yes"}, TypeError, "progress is 'yes'; pass True"),
        ({"metrics": [MeanMetric()]}, TypeError, r"metrics need names\. Pass a mapping"),
        ({"accumulate_batches": 1.5}, TypeError, "1.5, not a whole number; pass an int such as 1"),
        ({"accumulate_batches": True}, TypeError, "True, not a whole number; pass an int"),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value))[:50],
)
def test_invalid_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(make_model(), **options)


def test_fit_and_eval_without_data_name_missing_arguments() -> None:
    trainer = Trainer(make_model(), loss_fn=nn.CrossEntropyLoss(), device="cpu", progress=False)
    with pytest.raises(ValueError, match=r"Pass train_dataloader=… and optimizer=…"):
        trainer.fit()
    with pytest.raises(ValueError, match=r"Pass eval_dataloader=…"):
        trainer.eval()
    assert "loss" in trainer.eval(make_loader())


def test_scheduler_without_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="but no optimizer"):
        make_trainer(make_model(), scheduler=schedule, optimizer=None)
