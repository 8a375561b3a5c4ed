"""The digits: real data in a fixed split, and a network that can be cut anywhere."""

import sys

import pytest
import torch

from automicro import find_batchnorm
from automicro.demo.digits import CNN, loader


def rows(split: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(loader(split, batch_size=512, **options))
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def test_images_are_floats_from_zero_to_one_with_a_channel() -> None:
    images, targets = rows("train")
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert targets.shape == (1437,)
    assert targets.dtype == torch.int64


def test_every_digit_has_the_same_share_of_both_parts() -> None:
    shares = [rows(split)[1].bincount(minlength=10) / n for split, n in PARTS.items()]
    assert (shares[0] - shares[1]).abs().max() < 0.005


PARTS = {"train": 1437, "eval": 360}


def test_the_parts_hold_all_images_and_share_none_by_position() -> None:
    from sklearn.datasets import load_digits

    ours = torch.cat([rows(split)[0] for split in PARTS]).flatten(1) * 16
    theirs = torch.as_tensor(load_digits().data, dtype=torch.float32)
    assert sorted(ours.tolist()) == sorted(theirs.tolist())


def test_the_parts_are_those_of_scikit_learn_row_by_row() -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, targets = load_digits(return_X_y=True)
    parts = train_test_split(images, targets, test_size=360, stratify=targets, random_state=0)
    for split, theirs, digits in (("train", *parts[::2]), ("eval", *parts[1::2])):
        ours, ours_digits = (
            torch.cat(each)
            for each in zip(*loader(split, batch_size=512, shuffle=False), strict=True)
        )
        assert torch.equal(ours.flatten(1) * 16, torch.as_tensor(theirs, dtype=torch.float32))
        assert torch.equal(ours_digits, torch.as_tensor(digits))


def test_no_row_is_dropped_at_the_end_of_an_epoch() -> None:
    assert [len(targets) for _, targets in loader("train", batch_size=512)] == [512, 512, 413]


def test_the_order_is_the_loaders_own_whatever_else_is_random() -> None:
    first, _ = rows("train", seed=3)
    torch.rand(7)
    again, _ = rows("train", seed=3)
    other, _ = rows("train", seed=4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_the_global_random_state_decides_the_order() -> None:
    torch.manual_seed(1)
    first, _ = rows("train", seed=None)
    torch.manual_seed(1)
    again, _ = rows("train", seed=None)
    other, _ = rows("train", seed=None)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_each_epoch_of_training_has_an_order_of_its_own() -> None:
    data = loader("train", batch_size=1437)
    (first, _), (second, _) = next(iter(data)), next(iter(data))
    assert not torch.equal(first, second)


def test_loading_leaves_the_global_random_state_alone_unless_asked() -> None:
    before = torch.get_rng_state()
    loader("train", batch_size=512, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_is_not_shuffled() -> None:
    assert torch.equal(rows("eval", seed=1)[1], rows("eval", seed=2)[1])


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split='test' is not a part of the digits: use 'train'"):
        loader("test", batch_size=8)


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"run pip install scikit-learn$"):
        loader("train", batch_size=8)


def test_the_network_does_not_average_over_the_batch() -> None:
    assert find_batchnorm(CNN()) == []
    model = CNN(channels=8).double().eval()
    images = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    whole = model(images)
    pieces = torch.cat([model(images[:1]), model(images[1:])])
    assert torch.allclose(whole, pieces, rtol=0, atol=1e-12)


def test_more_channels_are_more_parameters() -> None:
    small, large = (sum(p.numel() for p in CNN(channels=c).parameters()) for c in (8, 16))
    assert large > 3 * small


@pytest.mark.parametrize("channels", [0, -8, 12])
def test_channels_that_make_no_groups_are_refused(channels: int) -> None:
    with pytest.raises(ValueError, match=f"channels={channels} cannot be normalized in 8 groups"):
        CNN(channels=channels)
