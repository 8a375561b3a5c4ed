"""Checkpoints give back tensors, values and generators; the last and the best ones are kept."""

import random
import warnings
from collections import Counter, OrderedDict
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from automicro.checkpoints import writing
from automicro.checkpoints.manifest import FORMAT
from automicro.checkpoints.reading import find_newest, load_checkpoint
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.checkpoints.store import CheckpointStore
from automicro.errors import CheckpointError, CheckpointWarning

TENSORS = {
    "half": torch.randn(5).to(torch.float16),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(2, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
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


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def test_tensors_round_trip_bit_for_bit(store: CheckpointStore) -> None:
    store.save({"x": [*TENSORS.values()]}, step=1)
    for kind, back in zip(TENSORS, store.load().state["x"], strict=True):
        tensor = TENSORS[kind].detach()
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), kind
        if kind != "expanded":
            assert back.stride() == tensor.stride(), kind
        assert bits(back) == bits(tensor), kind


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


def test_plain_values_round_trip_unchanged(store: CheckpointStore) -> None:
    versions = nn.BatchNorm2d(2).state_dict()
    coinciding = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    of_numpy = {"best": np.float64(0.5), "count": np.int64(3)}
    metrics: dict[str, Any] = {"a": torch.tensor(0.5), "b": float("inf"), "c": 3}
    store.save(
        {"plain": PLAIN, "versions": versions, **coinciding, **of_numpy}, step=1, metrics=metrics
    )
    assert store.load().metrics == {"a": 0.5, "b": float("inf"), "c": 3.0}
    back = store.load().state
    assert back["plain"] == PLAIN
    assert [*map(type, back["plain"].values())] == [*map(type, PLAIN.values())]
    assert type(back["versions"]) is OrderedDict
    assert vars(back["versions"]) == vars(versions) != {}
    assert (back["a.b"].item(), back["a"]["b"].item()) == (1, 2)
    assert (back["best"], back["count"], type(back["best"])) == (0.5, 3, float)


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
        ({"meta": torch.empty(2, device="meta")}, "meta"),
        ({"sparse": torch.eye(3).to_sparse()}, "sparse"),
    ],
)
def test_unsupported_values_are_refused_with_their_path(
    store: CheckpointStore, state: dict, place: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^{place} is "):
        store.save(state, step=1)
    assert not store.folder.exists()


def test_in_place_load_fills_existing_tensors(store: CheckpointStore) -> None:
    saved = {"w": torch.randn(1000), "transposed": torch.randn(3, 4)}
    store.save({"model": saved, "extra": {"e": torch.ones(2)}}, step=1)
    targets = {"w": torch.zeros(1000), "transposed": torch.zeros(4, 3).t()}
    loaded = store.load(into={"model": targets})
    for name, target in targets.items():
        assert loaded.state["model"][name] is target
        assert torch.equal(target, saved[name])
    assert torch.equal(loaded.state["extra"]["e"], torch.ones(2))


@pytest.mark.parametrize(
    ("current", "words"),
    [
        ({"w": torch.zeros(3)}, "only it has: model.b"),
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
def test_mismatched_model_error_lists_differences(
    store: CheckpointStore, current: dict, words: str
) -> None:
    store.save({"model": {"w": torch.ones(3), "b": torch.ones(1)}}, step=1)
    with pytest.raises(CheckpointError) as caught:
        store.load(into={"model": current})
    assert words in str(caught.value)
    assert "resume='never'" in str(caught.value)
    assert all(not tensor.any() for tensor in current.values())


def test_load_accepts_path_folder_or_found_checkpoint(store: CheckpointStore, mocker) -> None:
    assert store.newest() is None
    assert store.best() is None
    with pytest.raises(CheckpointError, match="does not exist"):
        store.load()
    (store.folder / ".tmp-host-1-abc").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        store.load()
    path = store.save({"x": 1}, step=7, metrics={"eval/loss": 0.5})
    for checkpoint in (path, str(path), store.folder, None, store.newest()):
        loaded = store.load(checkpoint)
        assert (loaded.path, loaded.step, loaded.metrics) == (path, 7, {"eval/loss": 0.5})
        assert loaded.state == {"x": 1}
    found = store.newest()
    assert find_newest(str(store.folder)) == found
    reading = mocker.patch("automicro.checkpoints.reading.verify")
    store.load(found)  # a found checkpoint is not verified again
    reading.assert_not_called()


def test_torch_distributed_checkpoint_reads_saved_tensors(store: CheckpointStore) -> None:
    model = nn.Linear(3, 2)
    path = store.save({"model": model.state_dict(), "step": 3}, step=3)
    current = {"model": {name: torch.zeros_like(p) for name, p in model.state_dict().items()}}
    with warnings.catch_warnings(action="ignore"):  # It warns that it runs in one process.
        load_with_torch(current, checkpoint_id=path)
    assert torch.equal(current["model"]["weight"], model.weight)


# The store


def test_other_format_is_refused_and_kept(store: CheckpointStore, mocker) -> None:
    store.save({"x": 1}, step=1)
    mocker.patch("automicro.checkpoints.manifest.FORMAT", FORMAT + 1)
    store.save({"x": 2}, step=2)
    mocker.stopall()
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}.*Use the version"):
        store.newest()
    assert load_checkpoint(store.folder / "00001-step-1").state == {"x": 1}
    CheckpointStore(store.folder, keep_last=1).save({"x": 3}, step=3)
    assert names(store) == ["00002-step-2", "00003-step-3"]


def test_newest_checkpoint_is_last_saved_not_highest_step(store: CheckpointStore, mocker) -> None:
    for step in (10, 20, 5, 10):
        store.save({"x": step}, step=step)
    assert names(store) == ["00001-step-10", "00002-step-20", "00003-step-5", "00004-step-10"]
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.path.name) == (10, "00004-step-10")
    mocker.patch.object(writing, "list_checkpoints", return_value=[])
    # Another process has taken the first name.
    assert store.save({"x": 2}, step=10).name == "00002-step-10"


def test_only_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=2)
    losses = [0.9, 0.1, 0.5, float("nan"), 0.3, 0.8, 0.7]
    for step, loss in enumerate(losses, start=1):
        store.save({"step": step}, step=step, metrics={"eval/loss": loss})
    assert [int(name.rpartition("-")[2]) for name in names(store)] == [2, 5, 6, 7]
    highest = CheckpointStore(tmp_path, keep_last=1, keep_best=1, best_mode="max")
    for kept, step in ((store, 2), (highest, 6)):
        best = kept.best()
        assert best is not None
        assert best.step == step
    highest.save({}, step=8, metrics={"eval/loss": 0.8})  # of equal values, the newer one is kept
    assert [int(name.rpartition("-")[2]) for name in names(store)] == [8]


def test_missing_best_metric_warns_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_best=1, best_metric="accurracy")
    store.save({}, step=0)
    with pytest.warns(CheckpointWarning, match="no metric 'accurracy'.*there are: accuracy"):
        store.save({}, step=1, metrics={"accuracy": 0.5})
    store.save({}, step=2, metrics={"accuracy": 0.5})


# Generators


def draw() -> list:
    return [
        *([random.random() for _ in range(700)], [random.gauss(0, 1) for _ in range(3)]),
        *(np.random.rand(700).tolist(), np.random.randn(3).tolist()),
        *(torch.rand(700).tolist(), torch.randn(3).tolist()),
    ]


@pytest.mark.parametrize("before", range(2))
def test_all_generators_resume_from_saved_state(store: CheckpointStore, before: int) -> None:
    for _ in range(before):
        # After an odd number of normal draws, the state includes a cached value.
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    store.save({"rng": rng_state()}, step=before)
    expected = draw()
    assert draw() != expected
    restore_rng_state(store.load().state["rng"])
    rng_state()  # draws nothing
    assert draw() == expected


def test_numpy_generator_with_large_state_is_restored(store: CheckpointStore) -> None:
    original = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(5))
        store.save(rng_state(), step=1)
        expected = np.random.rand(10).tolist()
        restore_rng_state(store.load().state)
        assert np.random.rand(10).tolist() == expected
    finally:
        np.random.mtrand.set_bit_generator(original)


def test_state_with_more_accelerators_warns() -> None:
    state = rng_state()
    state["accelerators"] = [*state["accelerators"], torch.zeros(16, dtype=torch.uint8)]
    with pytest.warns(CheckpointWarning, match="will draw other numbers"):
        restore_rng_state(state)
