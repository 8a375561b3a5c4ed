"""The digits have a fixed split, and the network treats each row separately."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from automicro import find_batchnorm
from automicro.demo.digits import CNN, loader


def rows(split: str, **options: Any) -> tuple[Tensor, Tensor]:
    batches = list(loader(split, batch_size=512, **options))
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def test_splits_match_scikit_learn() -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, targets = load_digits(return_X_y=True)
    parts = train_test_split(images, targets, test_size=360, stratify=targets, random_state=0)
    for split, theirs, digits in (("train", *parts[::2]), ("eval", *parts[1::2])):
        ours, ours_digits = rows(split, shuffle=False)
        assert torch.equal(ours, torch.tensor(theirs).float().reshape(-1, 1, 8, 8) / 16)
        assert torch.equal(ours_digits, torch.as_tensor(digits))


def test_loader_has_own_order_and_drops_no_rows() -> None:
    before = torch.get_rng_state()
    data = loader("train", batch_size=512, seed=3)
    epochs = [torch.cat([targets for _, targets in data]) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(targets) for _, targets in data] == [512, 512, 413]
    assert not torch.equal(*epochs)
    torch.rand(7)
    assert torch.equal(rows("train", seed=3)[1], epochs[0])
    assert not torch.equal(rows("train", seed=4)[1], epochs[0])
    assert torch.equal(rows("eval", seed=1)[1], rows("eval", seed=2)[1]), "not shuffled"


def test_order_without_seed_follows_global_random_state() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(rows("train", seed=None)[1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_invalid_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="split='test' is not a part of the digits: use 'train'"):
        loader("test", batch_size=8)
    for channels in (-8, 12):
        with pytest.raises(ValueError, match=f"channels={channels} cannot be normalized in 8"):
            CNN(channels=channels)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"run pip install scikit-learn$"):
        loader("train", batch_size=8)


def test_network_does_not_mix_rows() -> None:
    assert find_batchnorm(CNN()) == []
    small = CNN(channels=8).double().eval()
    images = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    pieces = torch.cat([small(images[:1]), small(images[1:])])
    assert torch.allclose(small(images), pieces, rtol=0, atol=1e-12)
