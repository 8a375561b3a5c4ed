"""The trainer trains like a loop written by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.runs import (
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


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("scheduler", [None, schedule])
def test_whole_batches_match_manual_loop_bit_for_bit(clip: Any, scheduler: Any) -> None:
    by_hand, model = make_model(), make_model()
    expected = train_by_hand(by_hand, make_loader(), epochs=3, clip=clip, schedule=scheduler)
    trainer = make_trainer(model, max_duration="3ep", grad_clip_norm=clip, scheduler=scheduler)
    losses = losses_of(trainer)
    summary = trainer.fit()
    assert losses == expected
    assert_same(model, by_hand)
    assert (summary.steps, summary.epochs, summary.samples) == (12, 3, 150)


def test_bf16_runs_forward_in_bf16_and_keeps_fp32_parameters() -> None:
    seen = set()

    def forward(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        seen.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs, batch[1])

    model = make_model()
    summary = make_trainer(
        model,
        precision="bf16",
        forward=forward,
        loss_fn=None,
        eval_dataloader=make_loader(),
        microbatch_size=None,  # the probe of splits runs outside autocast
    ).fit()
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert math.isfinite(summary.train_loss)


def test_model_in_eval_mode_is_set_to_training_mode() -> None:
    model = make_model().eval()
    make_trainer(model).fit()
    assert all(module.training for module in model.modules())


def test_model_optimizer_and_weights_are_available_after_fit(tmp_path: Path) -> None:
    trainer = make_trainer(make_model())
    trainer.fit()
    assert trainer.optimizer is not None
    trainer.save_weights(tmp_path / "weights.pt")
    again = make_model()
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_same(again, trainer.model)


def test_gradients_of_unoptimized_parameters_do_not_accumulate() -> None:
    model = make_model()
    make_trainer(model, optimizer=adam(model[5].parameters())).fit()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6


def test_seed_makes_runs_repeatable() -> None:
    def run(seed: int) -> list[float]:
        model = make_model(dropout=0.5)
        loader = DataLoader(make_data(), batch_size=16, shuffle=True)
        torch.manual_seed(99 + len(runs))
        trainer = make_trainer(model, loader, seed=seed, max_duration="2ep")
        losses = losses_of(trainer)
        trainer.fit()
        runs.append(losses)
        return losses

    runs: list[list[float]] = []
    assert run(5) == run(5)
    assert run(5) != run(6)


def test_class_weights_move_with_loss_and_stay_exact() -> None:
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    whole, split = make_model(), make_model()
    make_trainer(whole, loss_fn=loss_fn).fit()
    make_trainer(split, loss_fn=loss_fn, microbatch_size=5).fit()
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_samplers_receive_epoch() -> None:
    told = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    data = make_data()
    loader = DataLoader(data, batch_size=16, sampler=Sampler(data))  # type: ignore[arg-type]
    make_trainer(make_model(), loader, max_duration="3ep").fit()
    assert told == [0, 1, 2]


def test_interrupted_fit_continues_with_clean_gradients() -> None:
    def interrupt(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    trainer = make_trainer(Scripted(6, interrupt), max_duration="2ep", microbatch_size=16)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert (trainer.state.epoch, trainer.state.batch) == (1, 5)
    with pytest.warns(UserWarning, match=r"epoch 2\. This epoch begins again, so 1 batch"):
        summary = trainer.fit()
    assert (summary.epochs, summary.steps) == (2, 9)


def test_gradients_left_by_interruption_are_not_used() -> None:
    undisturbed, model = make_model(), make_model()
    make_trainer(undisturbed).fit()
    interruptions = [KeyboardInterrupt()]

    def interrupt(*_: Any) -> None:
        if interruptions:
            raise interruptions.pop()

    optimizer = adam(model.parameters())
    optimizer.register_step_pre_hook(interrupt)
    trainer = make_trainer(model, optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert model[0].weight.grad is not None
    trainer.fit()
    assert_same(model, undisturbed)
