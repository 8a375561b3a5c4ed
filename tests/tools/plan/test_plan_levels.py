"""Plans of levels, and of parts with their own size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import automicro
from automicro import MemoryBudget, Microbatcher
from automicro.features import Nested
from tests.sweeps import mostly_in_sweeps
from tests.tools.plan.conftest import adam, real_peak

LOSS = nn.CrossEntropyLoss()
ROWS = 64


class Model(nn.Module):
    """Blocks that can be recomputed, and a head with much larger hidden layers."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 8 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(8 * width, width)
            )
            for _ in range(depth)
        )
        self.joint = nn.Sequential(nn.Linear(width, 4000), nn.Tanh(), nn.Linear(4000, 10))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.joint(x)


class Tail(nn.Linear):
    def forward(self, hidden: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        return LOSS(super().forward(hidden), target)


class WithTail(Model):
    """The same model with a tail that returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.tail = nn.Identity(), Tail(64, 4000)  # type: ignore[assignment]

    def forward(self, x: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        return {"loss": self.tail(super().forward(x), target)}


def batch(rows: int = ROWS) -> Any:
    return torch.randn(rows, 64), torch.randint(10, (rows,))


def named(rows: int = ROWS) -> Any:
    x, target = batch(rows)
    return {"x": x, "target": target}


def loss_of(model: nn.Module) -> nn.Module | None:
    return None if isinstance(model, WithTail) else LOSS


def plan(model: nn.Module, data: Any, **options: Any) -> automicro.PlanReport:
    own = {"loss_fn": loss_of(model), "optimizer": adam, "device": "cpu"}
    return automicro.plan(model, data, **{**own, **options})


CASES: dict[str, tuple[type[Model], Any, dict[str, Any]]] = {
    "recompute": (Model, batch, {"when_too_large": "recompute"}),
    "offload": (Model, batch, {"when_too_large": "offload"}),
    "both": (Model, batch, {"when_too_large": ["recompute", "offload"]}),
    "named blocks": (Model, batch, {"when_too_large": {"recompute": ["blocks.*.0", "joint"]}}),
    "a part in the middle": (Model, batch, {"nested": {"joint": 4}}),
    "a tail": (WithTail, named, {"nested": {"tail": 4}}),
    "tail, recomputed": (WithTail, named, {"nested": {"tail": 4}, "when_too_large": "recompute"}),
}


@pytest.mark.parametrize("size", mostly_in_sweeps([ROWS, 16], quick=[16]))
@pytest.mark.parametrize("case", mostly_in_sweeps(CASES, quick=["tail, recomputed", "offload"]))
def test_planned_peak_of_level_matches_real_microbatcher(
    case: str, size: int, without_workspaces: None
) -> None:
    make, data, options = CASES[case]
    found = plan(make(), data(), microbatch_size=size, **options).levels[-1]
    model = make()
    real = real_peak(model, data(), size, loss_fn=loss_of(model), **options)
    assert found.peak_bytes == pytest.approx(real, rel=0.02)
    assert found.needed_bytes >= real


@pytest.mark.sweep
def test_report_uses_first_level_that_fits() -> None:
    limit = plan(Model(), batch(512)).needed_bytes * 3 // 4
    report = plan(Model(), batch(512), memory=limit, when_too_large=["recompute", "offload"])
    assert [level.name for level in report.levels] == ["plain", "recompute", "recompute + offload"]
    assert report.level == "plain"
    sizes = [level.microbatch_size for level in report.levels]
    assert 0 < sizes[0] < sizes[1] <= sizes[2]
    for level in report.levels:
        assert level.fits
        assert level.needed_bytes <= limit


def test_report_uses_later_level_if_plain_does_not_fit() -> None:
    data = torch.randn(1, 512, 64), torch.randn(1, 512, 10)
    alone, further = (
        plan(Model(), data, loss_fn=nn.MSELoss(), **options)
        for options in ({}, {"when_too_large": "recompute"})
    )
    limit = (further.levels[1].needed_bytes + alone.needed_bytes) // 2
    options = {"loss_fn": nn.MSELoss(), "memory": limit}
    plain = plan(Model(), data, **options)
    assert not plain.fits
    assert (plain.exit_code, len(plain.levels)) == (1, 1)
    report = plan(Model(), data, when_too_large="recompute", **options)
    assert (report.fits, report.exit_code, report.level) == (True, 0, "recompute")
    assert [level.fits for level in report.levels] == [False, True]
    assert report.peak_bytes == report.levels[1].peak_bytes
    text = str(report)
    assert "at the level recompute" in text
    assert "plain: not even one row fits: it needs" in text


@pytest.mark.sweep
def test_auto_part_is_planned_at_largest_size_that_fits() -> None:
    whole = plan(WithTail(), named(2048), nested={"tail": "auto"})
    assert whole.nested_sizes == {"tail": 2048}
    limit = whole.needed_bytes // 2
    plain = plan(WithTail(), named(2048), memory=limit)
    report = plan(WithTail(), named(2048), memory=limit, nested={"tail": "auto"})
    assert report.microbatch_size > 1.5 * plain.microbatch_size
    assert report.needed_bytes <= limit
    size = report.nested_sizes["tail"]
    assert 1 <= size < report.microbatch_size
    assert f"tail {size} at a time" in str(report)
    twice = plan(
        WithTail(),
        named(2048),
        microbatch_size=report.microbatch_size,
        nested={"tail": {"microbatch_size": 2 * size}},
    )
    assert twice.needed_bytes > limit
    model = WithTail()
    with MemoryBudget(limit):
        result = Microbatcher(
            model,
            optimizer=adam(model.parameters()),
            microbatch_size=report.microbatch_size,
            features=[Nested({"tail": size})],
        ).backward(named(2048))
    assert (result.ooms, result.nested_sizes) == (0, report.nested_sizes)


def test_existing_split_keeps_its_size() -> None:
    model = WithTail()
    part = automicro.split(model.tail, microbatch_size=8)
    report = plan(model, named())
    assert report.nested_sizes == {"tail": 8}
    assert part.sizes == []
    assert part.is_attached


def test_wrong_arguments_raise_error_with_remedy() -> None:
    cases: list[Any] = [
        ({"when_too_large": "smaller"}, "when_too_large"),
        ({"nested": {"jiont": "auto"}}, "did you mean 'joint'"),
        ({"nested": {"joint": {"size": 1}}}, "a part takes"),
        ({"nested": ["joint"]}, "is no NestedSplit"),
        ({"when_too_large": "nested"}, "not a language model"),
    ]
    for options, words in cases:
        with pytest.raises((TypeError, ValueError), match=words):
            plan(Model(), batch(), **options)
