"""Remembered sizes: keys, damaged files, and concurrent writers."""

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from automicro import MemoryBudget, SizeCacheWarning
from automicro.batch.layout import BatchLayout
from automicro.remembered.cache import RememberedSize, RunKey, SizeCache, file_of, sizes_folder
from automicro.remembered.recollection import describe_run, describe_shapes

CPU = torch.device("cpu")
KEY: RunKey = {
    "model": "CNN",
    "structure": "1f2e",
    "parameters": 34_000,
    "device": "CPU",
    "memory_bytes": 1 << 20,
    "precision": "fp32",
    "phase": "train",
    "compiled": False,
    "optimizer": "AdamW",
    "rows": 64,
    "shapes": {"0": "float32[1, 8, 8]", "1": "int64[]"},
    "world_size": 1,
    "automicro": "0.1.0",
    "torch": "2.13.0",
}
SIZE = RememberedSize(key=KEY, microbatch_size=16, cost_per_row=64.0, peak_bytes=900_000)


@pytest.fixture
def cache(tmp_path: Path) -> SizeCache:
    return SizeCache(tmp_path / "sizes")


def path_of(cache: SizeCache, key: RunKey = KEY) -> Path:
    return Path(cache.folder, file_of(key))


def size_of(microbatch_size: int, key: RunKey = KEY) -> RememberedSize:
    return RememberedSize(key=key, microbatch_size=microbatch_size)


class Net(nn.Module):
    def __init__(self, *, width: int = 8, name: str = "mean", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layer = nn.Linear(width, 2, dtype=dtype)
        self.register_buffer(name, torch.zeros(2))


class Other(Net):
    """Another class with the same tensors."""


def frozen() -> Net:
    net = Net()
    net.layer.bias.requires_grad_(False)
    return net


def with_gelu() -> Net:
    net = Net()
    net.act = nn.GELU()
    return net


def batch(width: int = 8, rows: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    return {"x": torch.zeros(rows, width, dtype=dtype), "y": torch.zeros(rows)}


def describe(
    module: Callable[[], nn.Module] = Net,
    *,
    more: Any = (),
    limit: str | None = None,
    **changed: Any,
) -> RunKey:
    net = module()
    optimizer = changed.pop("optimizer", torch.optim.SGD)
    setup: Any = SimpleNamespace(
        modules=[net, *more],
        optimizer=None if optimizer is None else optimizer(net.parameters(), lr=0.1),
        device=changed.pop("device", CPU),
        precision=changed.pop("precision", "fp32"),
        ranks=SimpleNamespace(world_size=changed.pop("world_size", 1)),
    )
    shapes = describe_shapes(changed.pop("batch", batch()))
    with MemoryBudget(limit) if limit else contextlib.nullcontext():
        return describe_run(setup, shapes, **{"rows": 6, **changed})


CHANGES: dict[str, dict[str, Any]] = {
    "class of the model": {"module": Other},
    "shape of a parameter": {"module": lambda: Net(width=9)},
    "name of a buffer": {"module": lambda: Net(name="variance")},
    "dtype of a parameter": {"module": lambda: Net(dtype=torch.float64)},
    "whether a parameter is trained": {"module": frozen},
    "class of a submodule without tensors": {"module": with_gelu},
    "a further module": {"more": [nn.Linear(1, 1)]},
    "limit": {"limit": "1MiB"},
    "precision": {"precision": "bf16"},
    "phase": {"phase": "eval"},
    "class of the optimizer": {"optimizer": torch.optim.Adagrad},
    "no optimizer": {"optimizer": None},
    "dimensions of the batch": {"batch": {**batch(), "y": torch.zeros(6, 1)}},
    "dtype of the batch": {"batch": batch(dtype=torch.float64)},
    "structure of the batch": {"batch": tuple(batch().values())},
    "rows": {"rows": 7},
    "world size": {"world_size": 2},
}


def test_key_changes_with_each_ingredient() -> None:
    assert [name for name, change in CHANGES.items() if describe(**change) == describe()] == []


def trained() -> Net:
    net = Net()
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    net.layer.weight.grad = torch.ones_like(net.layer.weight)
    return net.eval()


UNCHANGED: dict[str, dict[str, Any]] = {
    "values, gradients and mode": {"module": trained},
    "lengths of the batch": {"batch": batch(width=9)},
    "values of the batch": {"batch": {"x": torch.ones(6, 8), "y": torch.ones(6)}},
    "rows that only the batch shows": {"batch": batch(rows=5)},
    "order of the keys of the batch": {"batch": dict(reversed(list(batch().items())))},
}


def test_key_ignores_everything_else() -> None:
    assert [name for name, change in UNCHANGED.items() if describe(**change) != describe()] == []


def test_key_contains_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    after = describe()
    assert after == {**before, "torch": "2.99.0"}


def test_compiled_model_has_separate_key_and_same_name() -> None:
    def compiled_net() -> nn.Module:
        model: Any = torch.compile(Net(), backend="eager")
        return cast(nn.Module, model)

    compiled = describe(compiled_net)
    assert (compiled["model"], compiled["compiled"], describe()["compiled"]) == ("Net", True, False)


def test_file_name_is_stable_across_machines_and_processes() -> None:
    # A literal, because a change invalidates every user's cache.
    assert SIZE.file == "5f08cf52fb9953f8f7acadb915a3f945f7853646594d9a010926580cac276ccb.json"


def test_key_contains_cuda_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    key = describe(device=torch.device("cuda", 0))
    assert (key["device"], key["memory_bytes"]) == ("A GPU", 40 * 10**9)


def test_described_shapes_omit_row_dimension() -> None:
    given = {"x": torch.zeros(5, 4, 3), "mask": torch.ones(1, 4)}
    layout = BatchLayout({"x": 1, "mask": "shared"})
    assert describe_shapes(given, layout=layout) == {
        "*.mask": "float32[?, ?]",
        "x": "float32[?, ?]",
    }


def test_file_is_small_and_contains_its_key(cache: SizeCache) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))
    key = describe(lambda: model)
    cache.remember(size_of(2, key))
    text = path_of(cache, key).read_text(encoding="utf-8")
    assert len(text) < 2048
    assert json.loads(text)["key"]["model"] == "Sequential"


def test_impossible_size_is_rejected() -> None:
    cases: list[Any] = [
        {"microbatch_size": 0},
        {"microbatch_size": 65},
        {"microbatch_size": 2, "peak_bytes": -1},
        {"microbatch_size": 2, "cost_per_row": float("nan")},
    ]
    for wrong in cases:
        with pytest.raises(ValueError, match=r"cannot have been measured\. Use values of a batch"):
            RememberedSize(key=KEY, **wrong)


def changed(**values: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda content: json.dumps(content | values).encode()


DAMAGES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "cut short": lambda content: json.dumps(content).encode()[:100],
    "deep": lambda content: b"[" * 100_000,
    "large": lambda content: b" " * (1 << 20) + b"{}",
    "foreign": lambda content: b'{"name": "left-pad"}',
    "of zero rows": changed(microbatch_size=0),
    "of a text": changed(microbatch_size="16"),
    "with a key of less": changed(key={"rows": 64}),
    "of another run": lambda content: changed(key=content["key"] | {"rows": 128})(content),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_ignored_with_one_warning(
    cache: SizeCache, damage: Callable[[dict[str, Any]], bytes]
) -> None:
    cache.remember(SIZE)
    path = path_of(cache)
    path.write_bytes(damage(json.loads(path.read_bytes())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.find(KEY) is None
        assert cache.find(KEY) is None
        assert cache.entries() == []
    assert [each.category for each in caught] == [SizeCacheWarning]
    message = str(caught[0].message)
    assert message.startswith(f"{path} holds no remembered size (")
    assert message.endswith("), so it is ignored. Run automicro cache --clear to remove it")
    cache.remember(SIZE)  # the next run repairs it
    assert cache.find(KEY) == SIZE


def test_folder_in_place_of_file_is_not_overwritten(cache: SizeCache) -> None:
    path_of(cache).mkdir(parents=True)
    with pytest.warns(SizeCacheWarning, match="cannot be read"):
        assert cache.find(KEY) is None
    with pytest.warns(SizeCacheWarning, match="cannot be written"):
        SizeCache(cache.folder).remember(SIZE)
    assert os.listdir(cache.folder) == [SIZE.file]


def test_uncreatable_folder_causes_one_warning_with_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    cache = SizeCache(tmp_path / "file" / "sizes")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.remember(SIZE)
        cache.remember(size_of(8))
        assert cache.find(KEY) is None
    (warning,) = caught
    assert warning.category is SizeCacheWarning
    message = str(warning.message)
    assert message.startswith(f"{path_of(cache)} cannot be written (")
    assert message.endswith(
        "), so sizes are not remembered. Give access to it, or set AUTOMICRO_CACHE to another "
        "folder"
    )


@pytest.mark.parametrize("call", ["pathlib.Path.open", "os.replace"])
def test_failed_write_keeps_old_size_and_no_temporary_file(
    cache: SizeCache, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    cache.remember(SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.warns(SizeCacheWarning, match="Permission denied"):
            cache.remember(size_of(8))
    assert SizeCache(cache.folder).find(KEY) == SIZE
    assert os.listdir(cache.folder) == [SIZE.file]


def test_clear_does_not_count_files_already_deleted(
    cache: SizeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.remember(SIZE)
    names = [f"{'0' * 64}.json", SIZE.file]
    monkeypatch.setattr("automicro.remembered.cache._names", lambda fs, folder: names)
    assert cache.entries() == [SIZE]
    assert cache.clear() == 1
    assert os.listdir(cache.folder) == []


def test_clear_removes_damaged_files_and_keeps_foreign_ones(cache: SizeCache) -> None:
    cache.remember(SIZE)
    damaged = path_of(cache, {**KEY, "rows": 65})
    foreign = damaged.with_name("notes.json")
    for path in (damaged, foreign):
        path.write_text("{", encoding="utf-8")
    assert cache.clear() == 2
    assert os.listdir(cache.folder) == ["notes.json"]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"AUTOMICRO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/sizes"),
        ({"AUTOMICRO_CACHE": "s3://bucket/a/"}, "s3://bucket/a/sizes"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/automicro/sizes"),
        ({"XDG_CACHE_HOME": "b"}, "/home/me/.cache/automicro/sizes"),
        ({}, "/home/me/.cache/automicro/sizes"),
    ],
    ids=str,
)
def test_folder_follows_user_cache_variables(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AUTOMICRO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    assert sizes_folder() == folder
