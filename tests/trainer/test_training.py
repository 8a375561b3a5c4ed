"""The trainer trains like a loop written by hand."""

import copy
import math
from collections import UserDict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from automicro import Callback, NonFiniteLossError, Run, Trainer
from automicro.durations import Unit
from automicro.features import NonFinite, Optimization
from automicro.schedules import cosine_with_warmup
from automicro.trainer.counting import Counter
from automicro.trainer.optimizer import group_parameters
from tests.outside import Unreached
from tests.trainer.runs import (
    CLASSES,
    FEATURES,
    ROWS,
    ScheduleFree,
    Scripted,
    adam,
    assert_same,
    losses_of,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    schedule,
    train_by_hand,
)

# An epoch has four batches, with 16, 16, 16 and 2 rows.


@pytest.mark.parametrize(("clip", "scheduler"), [(None, None), (0.05, schedule)])
def test_whole_batches_match_manual_loop_bit_for_bit(clip: Any, scheduler: Any) -> None:
    by_hand = make_model()
    expected = train_by_hand(by_hand, make_loader(), epochs=3, clip=clip, schedule=scheduler)
    words = {"grad_clip_norm": clip, "scheduler": scheduler, "scheduler_interval": "batch"}
    for given in (words, {"features": [Optimization(scheduler, "batch", clip)]}):
        model = make_model().eval()
        options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adam, **given}
        trainer = Trainer(
            model, make_loader(), max_duration="3ep", device="cpu", progress=False, **options
        )
        losses = losses_of(trainer)
        summary = trainer.fit()
        assert losses == expected
        assert_same(model, by_hand)
        assert model[2].training
        assert (summary.steps, summary.epochs, summary.samples) == (12, 3, 150)


@pytest.mark.parametrize(("accumulate", "size"), [(3, 3), (4, None), (9, 3)])
def test_accumulated_batches_train_like_larger_batches(accumulate: int, size: int | None) -> None:
    ours, theirs = make_model().double(), make_model().double()
    summary = make_trainer(
        ours,
        make_loader(dtype=torch.float64),
        accumulate_batches=accumulate,
        microbatch_size=size,
        scheduler=schedule,
        grad_clip_norm=0.5,
        max_duration="3ep",
    ).fit()
    whole = DataLoader(make_data(dtype=torch.float64), batch_size=16 * accumulate)
    train_by_hand(theirs, whole, epochs=3, clip=0.5, schedule=schedule)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)
    assert (summary.steps, summary.samples) == (3 * len(whole), 3 * ROWS)
    assert summary.global_batch.rows == pytest.approx(ROWS / len(whole))
    assert summary.global_batch.rows_per_device == ROWS / 4
    assert summary.global_batch.accumulation == 4 / len(whole)


def test_bf16_runs_forward_in_bf16_and_keeps_fp32_parameters() -> None:
    seen = set()

    def forward(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        seen.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs, batch[1])

    model = make_model()
    options: dict[str, Any] = {"forward": forward, "loss_fn": None, "microbatch_size": None}
    trainer = make_trainer(model, precision="bf16", eval_dataloader=make_loader(), **options)
    assert math.isfinite(trainer.fit().train_loss)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def train_in_fp16(model: nn.Module, clip: float | None) -> torch.amp.GradScaler:
    """Train with the loop of torch's documentation."""
    optimizer = adam(model.parameters())
    scheduler = schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for inputs, targets in make_loader():
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            scheduler.step()
    return scaler


class Overflows(nn.Module):
    """A linear model with a finite loss whose gradient is infinite at some training forwards."""

    calls = Unreached()

    def __init__(self, *calls: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.calls = 0
        self._at = calls

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.linear(inputs)
        if self.calls in self._at:
            outputs = outputs + (outputs * 0).abs().sqrt()  # zero, with an infinite slope
        return outputs


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("calls", [(), (2, 3)])
def test_fp16_trains_like_loop_of_torch_documentation(
    calls: tuple[int, ...], clip: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = Overflows(*calls), Overflows(*calls)
    options: dict[str, Any] = {"precision": "fp16", "microbatch_size": None, "progress": True}
    summary = make_trainer(ours, grad_clip_norm=clip, scheduler=schedule, **options).fit()
    assert train_in_fp16(theirs, clip).get_scale() == 2.0 ** (16 - len(calls))
    assert_same(ours, theirs)
    assert (summary.steps, summary.skipped_steps) == (4 - len(calls), len(calls))
    said = "gradients overflowed, so the scale of the loss was lowered in epoch 1, batch"
    assert capfd.readouterr().out.count(said) == len(calls)


def test_gradients_of_backward_in_callback_are_not_scaled() -> None:
    def grads(model: nn.Module) -> list[Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    class Twice(Callback):
        def gradients_ready(self, run: Run, result: Any) -> None:
            once = grads(run.model)
            run.microbatcher().backward(make_data()[:])
            pairs = zip(grads(run.model), once, strict=True)
            self.ratios = [float((both - g).norm() / g.norm()) for both, g in pairs]

    twice = Twice()
    options: dict[str, Any] = {"precision": "fp16", "microbatch_size": None}
    make_trainer(make_model(), [make_data()[:]], callbacks=[twice], **options).fit()
    assert max(twice.ratios) < 2  # the initial scale is 65,536


def loss_of(model: nn.Module) -> float:
    inputs, targets = make_data(dtype=torch.float64)[:]
    with torch.no_grad():
        return float(nn.CrossEntropyLoss()(model(inputs), targets))


class Looks(Callback):
    """Notes the losses of evaluations, at training weights, by eval and by predict."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def eval_end(self, run: Run, values: Any) -> None:
        if "eval/loss" in values:
            self.losses.append(values["eval/loss"])

    def epoch_end(self, run: Run) -> None:
        outputs = torch.cat(self.trainer.predict(make_loader(dtype=torch.float64)))
        targets = make_data(dtype=torch.float64)[:][1]
        predicted = nn.CrossEntropyLoss()(outputs, targets).item()
        self.seen = [loss_of(run.model), predicted]

    trainer: Any


def test_optimizer_with_train_and_eval_matches_manual_loop() -> None:
    by_hand, model = make_model().double(), make_model().double()
    optimizer, expected = ScheduleFree(by_hand.parameters()), []
    loader = make_loader(dtype=torch.float64)
    for _ in range(3):
        optimizer.train()
        for inputs, targets in loader:
            nn.CrossEntropyLoss()(by_hand(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        expected.append(loss_of(by_hand))
    looks = Looks()
    options: dict[str, Any] = {"optimizer": ScheduleFree, "microbatch_size": 4}
    looks.trainer = trainer = make_trainer(
        model, loader, eval_dataloader=loader, max_duration="3ep", callbacks=[looks], **options
    )
    trainer.fit()
    assert looks.losses == pytest.approx(expected, rel=1e-12)
    used = [loss_of(model), trainer.eval()["loss"], looks.seen[1]]
    assert used == pytest.approx([expected[-1]] * 3, rel=1e-12)
    assert abs(looks.seen[0] - used[0]) > 1e-6


def test_samplers_receive_epoch() -> None:
    told: list[int] = []
    loader: Any = make_loader()
    loader.sampler.set_epoch = told.append
    make_trainer(make_model(), loader, max_duration="3ep").fit()
    assert told == [0, 1, 2]


def test_only_given_parameters_train_and_weights_can_be_saved(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(model, optimizer=adam(model[5].parameters()))
    trainer.fit()
    assert_same(model[3], make_model()[3])
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    trainer.save_weights(tmp_path / "weights.pt")
    again = make_model()
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_same(again, trainer.model)


def test_torch_trains_each_group_with_its_options() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(4, 4), "output": nn.Linear(4, 4)})
    model["output"].weight = model["embed"].weight  # found by either name
    for name in ("embed.weight", "output.weight", ["embed.*", "output.weight"]):
        rest, group = group_parameters(model, [{"params": name, "lr": 0.1}])
        assert group["lr"] == 0.1
        assert [id(each) for each in group["params"]] == [id(model["embed"].weight)]
        assert [id(each) for each in rest["params"]] == [id(model["output"].bias)]
    optimizer = torch.optim.SGD(group_parameters(model, [{"params": "*.bias", "lr": 0.0}]), lr=0.5)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(model["output"].bias, before["output"].bias)
    assert torch.equal(model["embed"].weight, before["embed"].weight - 0.5)


def test_loss_parameters_missing_from_optimizer_are_named() -> None:
    class Centred(nn.CrossEntropyLoss):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(()))

    with pytest.warns(UserWarning, match=r"Centred has parameters that the optimizer does not"):
        trainer = make_trainer(make_model(), loss_fn=Centred())
    assert len(trainer._run.modules) == 2


def test_builtin_schedules_know_their_interval() -> None:
    rates: list[float] = []

    class Rates(Callback):
        def batch_start(self, run: Run, batch: Any) -> None:
            assert run.optimizer is not None
            rates.append(run.optimizer.param_groups[0]["lr"])

    ours = partial(cosine_with_warmup, warmup=2, total=4)
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "scheduler": ours}
    make_trainer(make_model(), scheduler_interval=None, callbacks=[Rates()], **options).fit()
    assert rates[:2] == [0.05, 0.1]
    with pytest.raises(ValueError, match=r"WarmupLR, which is stepped after every batch\. Leave"):
        make_trainer(make_model(), scheduler_interval="epoch", **options)


def test_batch_is_counted_before_scheduler_fails() -> None:
    scheduler = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)
    trainer = make_trainer(make_model(), max_duration="9ba", scheduler=scheduler)
    with pytest.raises(ValueError, match="Tried to step 4 times"):
        trainer.fit()
    optimizer = trainer._run.optimizer
    assert optimizer is not None
    steps = {int(each["step"]) for each in optimizer.state.values()}
    assert steps == {trainer.state.batch} == {4}


# Non-finite losses and gradients


def nan(outputs: Tensor) -> Tensor:
    return outputs * math.nan


def test_non_finite_loss_ends_run_before_optimizer_step() -> None:
    model, kept = Scripted(6, nan), list[nn.Module]()
    optimizer = adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: kept.append(copy.deepcopy(model.linear)))
    trainer = make_trainer(model, optimizer=optimizer, max_duration="3ep", microbatch_size=16)
    message = r"the loss is nan in epoch 2, batch 2 of the epoch \(5 batches done\).*Lower"
    with pytest.raises(NonFiniteLossError, match=message):
        trainer.fit()
    assert len(kept) == 5
    assert_same(kept[-1], model.linear)


@pytest.mark.parametrize(
    ("model", "options", "message", "skipped"),
    [
        (
            Scripted(1, lambda outputs: (outputs * 0).abs().sqrt() + outputs),
            {"grad_clip_norm": 1.0},
            "the norm of its gradient is nan",
            0,
        ),
        (
            nn.Linear(FEATURES, CLASSES),
            {"features": [NonFinite("skip")], "loss_fn": lambda *_: nan(_[0].sum())},
            "50 skipped batches before it",
            50,
        ),
        (
            Overflows(*range(100)),
            {"precision": "fp16"},
            r"gradients overflowed.*50 skipped batches before it",
            50,
        ),
    ],
    ids=["clipping", "skipping", "scaling"],
)
def test_non_finite_gradients_and_many_skipped_batches_end_run(
    model: nn.Module, options: dict[str, Any], message: str, skipped: int
) -> None:
    before = copy.deepcopy(model)
    trainer = make_trainer(model, microbatch_size=None, max_duration="99ba", **options)
    with pytest.raises(NonFiniteLossError, match=message):
        trainer.fit()
    assert trainer.state.skipped == skipped
    assert_same(model, before)


def test_non_finite_batch_can_be_ignored() -> None:
    model = Scripted(2, nan)
    summary = make_trainer(model, microbatch_size=None, features=[NonFinite("ignore")]).fit()
    assert summary.steps == 4
    assert math.isnan(summary.train_loss)
    assert not torch.isfinite(model.linear.weight).any()


def test_skipped_batch_leaves_model_and_metrics_unchanged() -> None:
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(5)]
    bad = [*batches[:2], (torch.full((4, 6), torch.nan), batches[2][1]), *batches[2:]]

    def train(given: list[Any]) -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        metrics = {"accuracy": MulticlassAccuracy(3)}
        return model, make_trainer(
            model, given, metrics=metrics, features=[NonFinite("skip")]
        ).fit()

    (model, summary), (undisturbed, expected) = train(bad), train(batches)
    assert (summary.skipped_steps, summary.steps) == (1, 5)
    assert_same(model, undisturbed)
    assert summary.train_metrics == expected.train_metrics


# Durations


def test_max_time_ends_training_after_at_least_one_batch() -> None:
    trainer = make_trainer(make_model(), max_duration="9999ep")
    summary = trainer.fit(max_time=timedelta(seconds=0.05))
    assert summary.stop_reason == "max_time is over"
    assert summary.steps >= 1
    assert trainer.fit(max_time=timedelta(microseconds=1)).steps == summary.steps + 1


def language_trainer(**options: Any) -> Trainer:
    """Return a trainer of one row per batch, padded to ten tokens."""
    masks = [(torch.arange(10) < length).long()[None] for length in (4, 9, 2, 7)]
    batches = [{"input_ids": torch.ones(1, 10).long(), "attention_mask": mask} for mask in masks]

    def forward(model: nn.Module, batch: Any) -> Any:
        logits = model(nn.functional.one_hot(batch["input_ids"], FEATURES).float())
        per_token = logits.pow(2).mean(-1) * batch["attention_mask"]
        return per_token.sum() / batch["attention_mask"].sum()

    options |= {"loss_average": lambda batch: batch["attention_mask"].sum(), "loss_fn": None}
    return make_trainer(make_model(), batches, forward=forward, **options)


@pytest.mark.parametrize(("duration", "steps"), [("4tok", 1), ("5tok", 2), ("1e2tok", 18)])
def test_training_ends_after_batch_that_reaches_token_count(duration: str, steps: int) -> None:
    assert language_trainer(max_duration=duration).fit().steps == steps


def test_tokens_are_counted_over_accumulated_batches() -> None:
    summary = language_trainer(max_duration="2ep", accumulate_batches=3).fit()
    assert summary.tokens == 2 * (4 + 9 + 2 + 7)
    assert summary.tokens_per_second is not None
    assert summary.tokens_per_second * 8 == pytest.approx(summary.samples_per_second * 44)


def test_refused_duration_does_not_count_in_later_fits() -> None:
    trainer = make_trainer(make_model(), make_loader(), max_duration="1ep")
    with pytest.raises(ValueError, match="duration='2tok' counts tokens"):
        trainer.fit(duration="2tok")
    assert trainer.fit(duration="1ep").steps == len(make_loader())


IDS = torch.arange(12).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"attention_mask": MASK}, 7),
        ({"input_ids": IDS.numpy(), "attention_mask": MASK.numpy()}, 7),
        ({"input_ids": [IDS[0], IDS[1, :2]]}, 6),
        (UserDict({"input_ids": IDS, "attention_mask": MASK}), 7),
        (({"input_ids": IDS, "attention_mask": MASK}, torch.zeros(3)), 7),
        ({"input_ids": IDS, "attention_mask": torch.zeros(3, 4)}, 12),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4, dtype=torch.bool)}, 12),
        ({"input_ids": [[1, 2], [3]]}, None),
        ((IDS, IDS), None),
        ("ab", None),
    ],
    ids=str,
)
def test_tokens_are_counted_from_mask_or_ids(batch: Any, tokens: int | None) -> None:
    assert Counter(Unit.TOKENS).count_all([batch]) == tokens


@pytest.mark.parametrize("given", [5, np.int64(5), torch.tensor(5), np.array(5)], ids=repr)
def test_custom_token_count_takes_precedence(given: Any) -> None:
    count = Counter(Unit.TOKENS, lambda batch: given).count_all([{"input_ids": IDS}])
    assert (count, type(count)) == (5, int)


@pytest.mark.parametrize("given", [1.5, True, -3, torch.tensor([1, 2])], ids=repr)
def test_invalid_token_count_is_named(given: Any) -> None:
    message = r"count_tokens gave .* not a whole number from 0\. Return"
    with pytest.raises((TypeError, ValueError), match=message):
        Counter(Unit.TOKENS, lambda batch: given).count_all([IDS])
