"""Options that the Trainer passes on; the tests of each mechanism cover its details."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, ParameterGroups, Trainer
from automicro.features import NonFinite, Optimization
from tests.trainer.runs import FEATURES, adam, make_loader, make_model, make_trainer, schedule


def sentences(*lengths: int) -> list[dict[str, Tensor]]:
    """Return a batch of one row, padded to ten, for each length."""
    batches = []
    for length in lengths:
        mask = (torch.arange(10) < length).long()[None]
        batches.append({"input_ids": torch.ones(1, 10).long(), "attention_mask": mask})
    return batches


def language_trainer(**options: Any) -> Trainer:
    def forward(model: nn.Module, batch: Any) -> Any:
        logits = model(nn.functional.one_hot(batch["input_ids"], FEATURES).float())
        per_token = logits.pow(2).mean(-1) * batch["attention_mask"]
        return per_token.sum() / batch["attention_mask"].sum()

    return make_trainer(
        make_model(),
        sentences(4, 9, 2, 7),
        loss_fn=None,
        forward=forward,
        loss_average=lambda batch: batch["attention_mask"].sum(),
        **options,
    )


@pytest.mark.parametrize(
    ("duration", "steps"), [("1tok", 1), ("4tok", 1), ("5tok", 2), ("1e2tok", 18)]
)
def test_training_ends_after_batch_that_reaches_token_count(duration: str, steps: int) -> None:
    summary = language_trainer(max_duration=duration).fit()
    assert summary.steps == steps


def test_tokens_are_counted_by_mask() -> None:
    summary = language_trainer(max_duration="2ep", accumulate_batches=3).fit()
    assert summary.tokens == 2 * (4 + 9 + 2 + 7)
    assert summary.tokens_per_second is not None
    assert summary.tokens_per_second * 8 == pytest.approx(summary.samples_per_second * 44)


def test_parameter_groups_receive_their_options() -> None:
    seen: list[torch.optim.Optimizer] = []

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        seen.append(torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1))
        return seen[0]

    groups = [{"params": ["*.bias"], "weight_decay": 0.0}, {"params": "5.*", "lr": 0.5}]
    make_trainer(make_model(), optimizer=ParameterGroups(optimizer, groups)).fit()
    options = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in seen[0].param_groups]
    assert options == [(2, 0.01, 0.1), (3, 0.01, 0.0), (1, 0.5, 0.1)]


def grouped(group: dict[str, Any]) -> ParameterGroups:
    return ParameterGroups(torch.optim.AdamW, [group])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": grouped({"params": "*.bias", "weight_decya": 0.0})},
            "did you mean 'weight_decay'",
        ),
        ({"optimizer": grouped({"params": "*.bais"})}, "matches no parameter of the model"),
        ({"compile": {"mode": "reduce-overhead"}}, "captures CUDA graphs, but the microbatch size"),
        ({"compile": True, "memory_limit": "1MiB"}, "silently runs everything uncompiled"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(make_model(), **options)


def test_parameter_groups_refuse_built_optimizer() -> None:
    with pytest.raises(ValueError, match="Pass optimizer= as a callable"):
        ParameterGroups(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [{"params": "*.bias"}])


def test_flags_must_be_booleans() -> None:
    with pytest.raises(TypeError, match="deterministic is 1; pass True or False"):
        make_trainer(make_model(), deterministic=1)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("channels_last", r"convert the model: model.to\(memory_format=torch.channels_last\)"),
        ("max_time", r"give it to fit\(max_time='2h30m'\)"),
        ("parameter_groups", r"give optimizer=automicro.ParameterGroups"),
    ],
)
def test_misplaced_option_error_names_right_place(option: str, instead: str) -> None:
    given: dict[str, Any] = {option: 1}
    with pytest.raises(TypeError, match=instead):
        Trainer(make_model(), **given)


class Clipping(Optimization):
    pass


def test_keyword_is_equivalent_to_feature() -> None:
    words = {"scheduler": schedule, "scheduler_interval": "batch", "grad_clip_norm": 0.5}
    weights = []
    kinds = Optimization, Clipping
    features: Any = [{"features": [kind(schedule, "batch", 0.5)]} for kind in kinds]
    for given in (words, *features, {}):
        options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adam, **given}
        trainer = Trainer(make_model(), make_loader(), device="cpu", progress=False, **options)
        trainer.fit()
        weights.append(torch.cat([each.flatten() for each in trainer.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def test_features_must_be_list_even_with_keywords() -> None:
    options: Any = {"features": NonFinite("skip"), "grad_clip_norm": 1.0}
    with pytest.raises(TypeError, match="features is a NonFinite and not a list"):
        Trainer(make_model(), make_loader(), optimizer=adam, **options)


@pytest.mark.parametrize("kind", [Optimization, Clipping])
def test_several_features_of_one_kind_are_refused(kind: type[Optimization]) -> None:
    features = [kind(schedule, "batch"), Optimization(grad_clip_norm=1.0)]
    with pytest.raises(ValueError, match=r"several Optimization\(…\), of which only one"):
        Trainer(make_model(), make_loader(), optimizer=adam, features=features)


def test_trainer_features_are_refused_in_microbatcher() -> None:
    with pytest.raises(TypeError, match="NonFinite is a feature of the Trainer's loop"):
        Microbatcher(make_model(), loss_fn=nn.MSELoss(), features=[NonFinite("skip")])


def test_deterministic_applies_only_during_calls() -> None:
    seen = []

    class Noting(nn.Sequential):
        def forward(self, inputs: Tensor) -> Any:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(inputs)

    trainer = make_trainer(Noting(nn.Linear(FEATURES, 3)), deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
    trainer.fit()
    trainer.eval(make_loader())
    assert seen
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
