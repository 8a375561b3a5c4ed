"""Checkpoints: what is saved comes back, in place or anew, and only into what it fits."""

import warnings
from collections import Counter, OrderedDict
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from automicro.checkpoints.reading import FoundCheckpoint, differences, find_newest
from automicro.checkpoints.state import put_together, take_apart
from automicro.checkpoints.store import CheckpointStore
from automicro.errors import CheckpointError

TENSORS = {
    "float": torch.randn(3, 4),
    "half": torch.randn(5).to(torch.float16),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(2, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "uint32": torch.arange(5).to(torch.uint32),
    "one number": torch.tensor(3.5),
    "no number": torch.empty(0, 3),
    "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "view of much": torch.randn(1000)[10:13],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "parameter": nn.Parameter(torch.randn(3)),
}


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).tolist() if flat.numel() else []


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_bit_for_bit(store: CheckpointStore, kind: str) -> None:
    tensor = TENSORS[kind].detach()
    store.save({"x": [TENSORS[kind]]}, step=1)

    back = store.load().state["x"][0]

    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    if kind != "expanded":
        assert back.stride() == tensor.stride()
    assert bits(back) == bits(tensor)


PLAIN = {
    "none": None,
    "numbers": [1, 2.5, True, 1 + 2j, 2**80, float("inf")],
    "text": "naïve ×",
    "bytes": b"\x00\xff",
    "betas": (0.9, 0.999),
    "nested": {"a": [{"b": (1, [2, {}])}], 3: "three", (1, 2): "a pair"},
    "milestones": Counter([3, 3, 5]),
    "set": {1, "two"},
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
}


def test_plain_values_come_back_as_they_were(store: CheckpointStore) -> None:
    store.save(PLAIN, step=1)
    back = store.load().state
    assert back == PLAIN
    assert [type(value) for value in back.values()] == [type(value) for value in PLAIN.values()]


def test_numbers_of_numpy_come_back_as_plain_ones(store: CheckpointStore) -> None:
    store.save({"best": np.float64(0.5), "count": np.int64(3)}, step=1)
    assert store.load().state == {"best": 0.5, "count": 3}
    assert type(store.load().state["best"]) is float


def test_the_versions_in_a_module_state_come_back(store: CheckpointStore) -> None:
    state = nn.BatchNorm2d(2).state_dict()
    store.save({"model": state}, step=1)
    back = store.load().state["model"]
    assert type(back) is OrderedDict
    assert vars(back) == vars(state)
    assert vars(back)


class Color(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"scheduler": {"lr_lambdas": [lambda step: 0.5]}}, "scheduler.lr_lambdas.0"),
        ({"a": {"color": Color.RED}}, "a.color"),
        ({"a": {Color.RED: 1}}, "the key of a.red"),
        ({"a": {3, Color.RED}}, "a"),
        ({"array": np.array([object()])}, "array"),
        ({"model": nn.Linear(1, 1)}, "model"),
        ({"meta": torch.empty(2, device="meta")}, "meta"),
        ({"sparse": torch.eye(3).to_sparse()}, "sparse"),
    ],
)
def test_what_is_no_data_is_refused_by_its_place(
    store: CheckpointStore, state: dict, place: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^{place} is "):
        store.save(state, step=1)
    assert not store.folder.exists()


def test_names_that_coincide_are_kept_apart(store: CheckpointStore) -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    store.save(state, step=1)
    back = store.load().state
    assert (back["a.b"].item(), back["a"]["b"].item()) == (1, 2)


def test_taking_apart_shares_no_data_and_keeps_no_copy() -> None:
    tensor = torch.randn(3)
    structure, tensors = take_apart({"x": tensor})
    assert structure["x"].is_meta
    assert tensors["x"].data_ptr() == tensor.data_ptr()
    assert put_together(structure, {"x": tensor})["x"] is tensor


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_model_and_its_optimizer_come_back(store: CheckpointStore) -> None:
    model, optimizer = trained()
    store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=1)
    again, optimizer_again = trained()

    loaded = store.load(into={"model": again.state_dict()})
    again.load_state_dict(loaded.state["model"])
    optimizer_again.load_state_dict(loaded.state["optimizer"])

    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert not differences(optimizer.state_dict(), optimizer_again.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer_again.state_dict()["state"][index][name])


def test_loading_in_place_fills_the_tensors_that_are_there(store: CheckpointStore) -> None:
    saved = torch.randn(1000)
    store.save({"model": {"w": saved}, "extra": {"e": torch.ones(2)}}, step=1)
    target = torch.zeros(1000)

    loaded = store.load(into={"model": {"w": target}})

    assert loaded.state["model"]["w"] is target
    assert torch.equal(target, saved)
    assert torch.equal(loaded.state["extra"]["e"], torch.ones(2))


def test_a_transposed_tensor_is_filled_in_place(store: CheckpointStore) -> None:
    saved = torch.randn(3, 4)
    store.save({"model": {"w": saved}}, step=1)
    target = torch.zeros(4, 3).t()
    store.load(into={"model": {"w": target}})
    assert torch.equal(target, saved)


@pytest.mark.parametrize(
    ("current", "words"),
    [
        ({"w": torch.zeros(3)}, "only it has: model.b"),
        (
            {"w": torch.zeros(3), "b": torch.zeros(1), "c": torch.zeros(1)},
            "it lacks: model.c",
        ),
        ({"w": torch.zeros(4), "b": torch.zeros(1)}, "shapes differ: model.w (3, here 4)"),
        (
            {"w": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(1)},
            "dtypes differ: model.w (float32, here float64)",
        ),
        (
            {f"x{i}": torch.zeros(1) for i in range(5)},
            "it lacks: model.x0, model.x1, model.x2 and 2 more; only it has: model.w, model.b",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    store: CheckpointStore, current: dict, words: str
) -> None:
    store.save({"model": {"w": torch.ones(3), "b": torch.ones(1)}}, step=1)
    with pytest.raises(CheckpointError) as caught:
        store.load(into={"model": current})
    assert words in str(caught.value)
    assert "resume='never'" in str(caught.value)
    assert all(not tensor.any() for tensor in current.values())


def test_a_part_that_was_not_saved_is_missing(store: CheckpointStore) -> None:
    store.save({"model": {}}, step=1)
    with pytest.raises(CheckpointError, match=r"it lacks: ema\.w"):
        store.load(into={"ema": {"w": torch.zeros(3)}})


def test_nothing_to_load_says_so(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert store.best() is None
    with pytest.raises(CheckpointError, match="does not exist"):
        store.load()
    store.folder.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        store.load()


@pytest.mark.parametrize("given", ["found", "path", "text", "folder", "none"])
def test_a_checkpoint_is_loaded_by_whatever_names_it(store: CheckpointStore, given: str) -> None:
    path = store.save({"x": 1}, step=7, metrics={"eval/loss": 0.5})
    checkpoint: FoundCheckpoint | Path | str | None = {
        "found": store.newest(),
        "path": path,
        "text": str(path),
        "folder": store.folder,
        "none": None,
    }[given]
    loaded = store.load(checkpoint)
    assert (loaded.path, loaded.step, loaded.metrics) == (path, 7, {"eval/loss": 0.5})
    assert loaded.state == {"x": 1}


def test_what_was_found_is_not_read_through_again(store: CheckpointStore, mocker) -> None:
    store.save({"x": torch.ones(3)}, step=1)
    found = store.newest()
    reading = mocker.patch("automicro.checkpoints.reading.verify")
    store.load(found)
    reading.assert_not_called()


def test_the_library_below_reads_the_tensors_too(store: CheckpointStore) -> None:
    model = nn.Linear(3, 2)
    path = store.save({"model": model.state_dict(), "step": 3}, step=3)
    current = {"model": {name: torch.zeros_like(p) for name, p in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that it runs in one process.
        load_with_torch(current, checkpoint_id=path)
    assert torch.equal(current["model"]["weight"], model.weight)


def test_find_newest_needs_no_store(store: CheckpointStore) -> None:
    store.save({}, step=4)
    found = find_newest(str(store.folder))
    assert found is not None
    assert found.step == 4
