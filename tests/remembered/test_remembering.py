"""Remembered sizes: keys, damaged files, concurrent writers, and caches at a URL."""

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from automicro import MemoryBudget, SizeCacheWarning
from automicro.remembered import cache as remembered
from automicro.remembered.cache import RememberedSize, RunKey, SizeCache, file_of, sizes_folder
from automicro.remembered.recollection import describe_run, describe_shapes

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
URL = "memory://team/automicro"


@pytest.fixture
def cache(tmp_path: Path) -> SizeCache:
    return SizeCache(tmp_path / "sizes")


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def path_of(cache: SizeCache, key: RunKey = KEY) -> Path:
    return Path(cache.folder, file_of(key))


def size_of(microbatch_size: int, key: RunKey = KEY) -> RememberedSize:
    return RememberedSize(key=key, microbatch_size=microbatch_size)


def warnings_of(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught if each.category is SizeCacheWarning]


class Net(nn.Module):
    def __init__(self, *, width: int = 8, name: str = "mean", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layer = nn.Linear(width, 2, dtype=dtype)
        self.register_buffer(name, torch.zeros(2))


class Other(Net):
    """Another class with the same tensors."""


def changed_net(change: Callable[[Net], object]) -> Callable[[], Net]:
    def make() -> Net:
        change(net := Net())
        return net

    return make


def batch(width: int = 8, rows: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    return {"x": torch.zeros(rows, width, dtype=dtype), "y": torch.zeros(rows)}


def describe(
    module: Callable[[], Any] = Net, *, more: Any = (), limit: str | None = None, **changed: Any
) -> RunKey:
    net = module()
    optimizer = changed.pop("optimizer", torch.optim.SGD)
    setup: Any = SimpleNamespace(
        modules=[net, *more],
        optimizer=None if optimizer is None else optimizer(net.parameters(), lr=0.1),
        device=changed.pop("device", torch.device("cpu")),
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
    "frozen": {"module": changed_net(lambda net: net.layer.bias.requires_grad_(False))},
    "a part without tensors": {"module": changed_net(lambda net: net.add_module("act", nn.GELU()))},
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
UNCHANGED: dict[str, dict[str, Any]] = {
    "mode": {"module": changed_net(lambda net: net.eval())},
    "values of weights": {"module": changed_net(lambda net: net.layer.bias.data.add_(1.0))},
    "lengths of the batch": {"batch": batch(width=9)},
    "rows that only the batch shows": {"batch": batch(rows=5)},
    "order of the keys of the batch": {"batch": dict(reversed(list(batch().items())))},
}


def test_key_changes_with_each_ingredient_and_with_nothing_else() -> None:
    assert [name for name, change in CHANGES.items() if describe(**change) == describe()] == []
    assert [name for name, change in UNCHANGED.items() if describe(**change) != describe()] == []


def test_key_contains_versions_and_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe()
    compiled = describe(lambda: torch.compile(Net(), backend="eager"))
    assert (compiled["model"], compiled["compiled"], before["compiled"]) == ("Net", True, False)
    assert before["parameters"] == 8 * 2 + 2
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert describe() == {**before, "torch": "2.99.0"}


def test_file_name_is_stable_across_machines_and_processes() -> None:
    # A literal, because a change invalidates every user's cache.
    assert SIZE.file == "5f08cf52fb9953f8f7acadb915a3f945f7853646594d9a010926580cac276ccb.json"


def test_key_contains_cuda_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=80 * 10**9, name="A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    key = describe(device=torch.device("cuda", 0))
    assert (key["device"], key["memory_bytes"]) == ("A GPU", 40 * 10**9)


def test_file_is_small_and_contains_its_key(cache: SizeCache) -> None:
    key = describe(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(300))))
    cache.remember(size_of(2, key))
    text = path_of(cache, key).read_text(encoding="utf-8")
    assert len(text) < 2048
    assert json.loads(text)["key"]["model"] == "Sequential"


def changed(**values: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda content: json.dumps(content | values).encode()


DAMAGES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "cut short": lambda content: json.dumps(content).encode()[:100],
    "deep": lambda content: b"[" * 100_000,
    "large": lambda content: b" " * (1 << 20) + b"{}",
    "foreign": lambda content: b'{"name": "left-pad"}',
    "of zero rows": changed(microbatch_size=0),
    "of more rows than the batch": changed(microbatch_size=65),
    "of a negative peak": changed(peak_bytes=-1),
    "of no cost": changed(cost_per_row=float("nan")),
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
    found: list[Any] = []
    (message,) = warnings_of(
        lambda: found.extend([cache.find(KEY), cache.find(KEY), *cache.entries()])
    )
    assert found == [None, None]
    assert message.startswith(f"{path} holds no remembered size (")
    assert message.endswith("), so it is ignored. Run automicro cache --clear to remove it")
    cache.remember(SIZE)  # the next run repairs it
    assert cache.find(KEY) == SIZE


@pytest.mark.parametrize("call", ["pathlib.Path.open", "os.replace"])
def test_failed_write_keeps_old_size_and_no_temporary_file(
    cache: SizeCache, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    cache.remember(SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.warns(SizeCacheWarning, match="Permission denied"):
            cache.remember(size_of(8))
    assert SizeCache(cache.folder).find(KEY) == SIZE
    assert os.listdir(cache.folder) == [SIZE.file]


def test_clear_counts_damaged_files_but_none_that_others_deleted(
    cache: SizeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (SIZE, size_of(8, {**KEY, "memory_bytes": None})):
        cache.remember(size)
    assert [each.microbatch_size for each in cache.entries()] == [8, 16]
    damaged = path_of(cache, {**KEY, "rows": 65})
    foreign = damaged.with_name("notes.json")
    for path in (damaged, foreign):
        path.write_text("{", encoding="utf-8")
    names = remembered._names
    monkeypatch.setattr(
        remembered, "_names", lambda fs, folder: [f"{'0' * 64}.json", *names(fs, folder)]
    )
    assert cache.clear() == 3
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


def test_cache_at_url_is_found_listed_and_cleared() -> None:
    cache = SizeCache(URL)
    assert cache.find(KEY) is None
    assert cache.entries() == []
    cache.remember(SIZE)
    cache.remember(size_of(8))
    assert cache.find(KEY) == size_of(8)
    MemoryFileSystem().pipe_file(f"{URL}/notes.txt", b"of another program")
    assert cache.entries() == [size_of(8)]
    assert cache.clear() == 1
    assert list(MemoryFileSystem.store) == ["/team/automicro/notes.txt"]


def test_folder_may_be_url_or_start_with_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    SizeCache(f"file://{tmp_path}/sizes").remember(SIZE)
    assert SizeCache("~/sizes").find(KEY) == SizeCache(tmp_path / "sizes").find(KEY) == SIZE
    with pytest.warns(SizeCacheWarning, match="ValueError: Protocol not known"):
        assert SizeCache("nowhere://bucket/sizes").find(KEY) is None


class Broken(MemoryFileSystem):
    """A store that rejects everything with its own error."""

    protocol = "broken"
    asked = 0

    def _refuse(self, *_: Any, **__: Any) -> Any:
        Broken.asked += 1
        raise RuntimeError("403: not you, at broken://key:secret@bucket")

    cat_file = pipe_file = ls = makedirs = rm_file = _refuse


@pytest.mark.parametrize("where", ["a store", "a folder in a file", "a folder for a file"])
def test_unusable_cache_is_tried_once_with_one_warning(
    where: str, cache: SizeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(Broken, "asked", 0)
    if where == "a store":
        cache = SizeCache("broken://key:secret@bucket/sizes")
    elif where == "a folder in a file":
        Path(cache.folder).write_text("in the way", encoding="utf-8")
    else:
        path_of(cache).mkdir(parents=True)

    def use() -> None:
        cache.remember(SIZE)
        cache.remember(size_of(8))
        assert cache.find(KEY) is None

    (message,) = warnings_of(use)
    assert message.startswith(f"{cache.folder}/{SIZE.file} cannot be written (")
    assert message.endswith(
        "), so sizes are not remembered. Give access to it, or set AUTOMICRO_CACHE to another "
        "folder"
    )
    assert "secret" not in message
    assert Broken.asked == (where == "a store")


def test_unresponsive_store_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release, is_daemon = threading.Event(), []

    def hang(*_: Any, **__: Any) -> None:
        is_daemon.append(threading.current_thread().daemon)
        release.wait(20)

    monkeypatch.setattr(remembered, "SECONDS", 0.05)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", hang)
    cache = SizeCache(URL)
    with pytest.warns(SizeCacheWarning, match=r"no answer within 0\.05 seconds"):
        assert cache.find(KEY) is None
    cache.remember(SIZE)  # not tried, because the store was given up
    assert (MemoryFileSystem.store, is_daemon) == ({}, [True])
    release.set()
    for thread in threading.enumerate():
        if thread.name == "automicro-cache":
            thread.join()
