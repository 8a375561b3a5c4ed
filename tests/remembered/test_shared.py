"""Shared caches: at a URL, in a folder, and if neither responds."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from automicro import Microbatcher, SizeCacheWarning
from automicro.features import RememberSizes
from automicro.remembered import cache as remembered
from automicro.remembered.cache import SizeCache
from tests.remembered.test_remembering import KEY, SIZE, size_of

URL = "memory://team/automicro"


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def train(**options: Any) -> list[int]:
    """Return the number of out-of-memory errors in each of a few steps."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.MSELoss(),
        device="cpu",
        memory_limit="112KiB",
        features=[RememberSizes()],
        probe=False,
        **options,
    )
    ooms = []
    for _ in range(6):
        result = microbatcher.backward((torch.randn(128, 64), torch.randn(128, 64)))
        ooms.append(result.ooms)
        model.zero_grad()
    return ooms


def test_shared_cache_avoids_second_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMICRO_CACHE", URL)
    first, second = train(), train()
    assert sum(first) > 0
    assert sum(second) == 0
    (entry,) = SizeCache().entries()
    assert list(MemoryFileSystem.store) == [f"/team/automicro/sizes/{entry.file}"]


def put(name: str, content: bytes) -> None:
    MemoryFileSystem().pipe_file(f"{URL}/{name}", content)


def test_cache_at_url_is_found_listed_and_cleared() -> None:
    cache = SizeCache(URL)
    assert cache.find(KEY) is None
    assert cache.entries() == []
    cache.remember(SIZE)
    cache.remember(size_of(8))
    assert cache.find(KEY) == size_of(8)
    put("notes.txt", b"of another program")
    assert cache.entries() == [size_of(8)]
    assert cache.clear() == 1
    assert list(MemoryFileSystem.store) == ["/team/automicro/notes.txt"]


class Broken(MemoryFileSystem):
    """A store that rejects everything with its own error."""

    protocol = "broken"
    asked = 0

    def _refuse(self, *_: Any, **__: Any) -> Any:
        Broken.asked += 1
        raise RuntimeError("403: not you, at broken://key:secret@bucket")

    cat_file = pipe_file = ls = makedirs = rm_file = _refuse


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(Broken, "asked", 0)
    return "broken://key:secret@bucket/sizes"


def test_failing_store_is_tried_once_with_one_warning(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMICRO_CACHE", broken)
    with pytest.warns(SizeCacheWarning, match="403: not you") as caught:
        ooms = train()
    assert sum(ooms) > 0  # training still works
    assert len(caught) == 1
    assert Broken.asked == 1
    assert "secret" not in str(caught[0].message)
    assert "set AUTOMICRO_CACHE to another" in str(caught[0].message)


def test_unresponsive_store_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(remembered, "SECONDS", 0.05)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: release.wait(20))
    cache = SizeCache(URL)
    with pytest.warns(SizeCacheWarning, match="no answer within 0.05 seconds"):
        assert cache.find(KEY) is None
    cache.remember(SIZE)  # not tried, because the store was given up
    assert MemoryFileSystem.store == {}
    release.set()
    for thread in threading.enumerate():
        if thread.name == "automicro-cache":
            thread.join()


def test_unknown_protocol_causes_warning() -> None:
    with pytest.warns(SizeCacheWarning, match="ValueError: Protocol not known"):
        assert SizeCache("nowhere://bucket/sizes").find(KEY) is None


def test_folder_may_be_url_or_start_with_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    SizeCache(f"file://{tmp_path}/sizes").remember(SIZE)
    assert SizeCache("~/sizes").find(KEY) == SizeCache(tmp_path / "sizes").find(KEY) == SIZE
