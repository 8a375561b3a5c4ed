"""Layers that cannot be split exactly are found, and messages name them."""

import pytest
import torch
from torch import nn

from automicro.batchnorm import batchnorm_buffers, batchnorm_message, find_batchnorm, needs_two_rows


class BatchNormAct2d(nn.BatchNorm2d):
    """A layer like timm's: normalization and activation in one, with an additional buffer."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("calls", torch.zeros(()))


class FrozenBatchNorm2d(nn.Module):
    """A layer like torchvision's: constant statistics, not a subclass of BatchNorm."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))


BATCH_DEPENDENT: dict[str, nn.Module] = {
    "BatchNorm1d": nn.BatchNorm1d(4),
    "SyncBatchNorm": nn.SyncBatchNorm(4),
    "LazyBatchNorm1d": nn.LazyBatchNorm1d(),
    "derived": BatchNormAct2d(4),
    "parameters frozen, statistics not": nn.BatchNorm1d(4).requires_grad_(False),
    "no running statistics, eval": nn.BatchNorm1d(4, track_running_stats=False).eval(),
}
ROWWISE: dict[str, nn.Module] = {
    "BatchNorm in eval mode": nn.BatchNorm2d(4).eval(),
    "InstanceNorm": nn.InstanceNorm2d(4),
    "InstanceNorm, tracking": nn.InstanceNorm2d(4, track_running_stats=True),
    "lazy InstanceNorm, tracking": nn.LazyInstanceNorm1d(track_running_stats=True),
    "FrozenBatchNorm2d": FrozenBatchNorm2d(4),
    "GroupNorm": nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("kind", BATCH_DEPENDENT)
def test_batch_dependent_layers_are_found_by_name(kind: str) -> None:
    layer = BATCH_DEPENDENT[kind]
    assert find_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))) == ["1.0"]
    assert find_batchnorm(layer) == [type(layer).__name__]
    assert kind != "BatchNorm1d" or "running_mean" in batchnorm_buffers(layer)


@pytest.mark.parametrize("kind", ROWWISE)
def test_rowwise_layers_are_not_found(kind: str) -> None:
    model = nn.Sequential(ROWWISE[kind])
    assert find_batchnorm(model) == []
    assert batchnorm_buffers(model) == set()


@pytest.mark.parametrize(("count", "more"), [(5, None), (6, "and 1 more"), (53, "and 48 more")])
def test_message_lists_at_most_five_layers(count: int, more: str | None) -> None:
    message = batchnorm_message([f"bn{i}" for i in range(count)], 1, 2)
    assert "bn4" in message
    assert "bn5" not in message
    assert (more in message) if more else ("more" not in message)


def test_other_errors_are_not_two_row_errors() -> None:
    with pytest.raises(ValueError, match="more than 1 spatial element") as raised:
        nn.InstanceNorm1d(4)(torch.randn(2, 4, 1))
    assert not needs_two_rows(raised.value)
    assert not needs_two_rows(ValueError("docs: Expected more than 1 value per channel"))
    text = "Expected more than 1 value per channel when training, got [1, 4]"
    assert not needs_two_rows(RuntimeError(text))
