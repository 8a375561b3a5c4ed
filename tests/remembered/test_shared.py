"""A cache that a team shares: behind a URL, in a folder, and where neither answers."""

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from automicro import Microbatcher, SizeCacheWarning
from automicro.cli import main
from automicro.remembered import remote
from automicro.remembered.cache import SizeCache, sizes_folder
from automicro.remembered.entry import RememberedSize
from automicro.remembered.remote import RemotePath, place_of
from tests.remembered.test_remembering import KEY, SIZE

URL = "memory://team/automicro"


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def train(**options: Any) -> list[int]:
    """How often memory ran out in each of a few steps."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.MSELoss(),
        device="cpu",
        memory_limit="112KiB",
        remember_sizes=True,
        probe=False,
        **options,
    )
    ooms = []
    for _ in range(6):
        result = microbatcher.backward((torch.randn(128, 64), torch.randn(128, 64)))
        ooms.append(result.ooms)
        model.zero_grad()
    return ooms


def test_a_team_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMICRO_CACHE", URL)
    first, second = train(), train()
    assert sum(first) > 0
    assert sum(second) == 0
    (entry,) = SizeCache().entries()
    assert str(entry.path) == f"{URL}/sizes/{entry.key.digest}.json"
    assert len(MemoryFileSystem.store) == 1  # one object for each key


def test_the_shared_place_comes_before_the_own_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOMICRO_CACHE_DIR", str(tmp_path / "own"))
    assert sizes_folder() == tmp_path / "own" / "sizes"
    monkeypatch.setenv("AUTOMICRO_CACHE", str(tmp_path / "shared"))
    assert sizes_folder() == tmp_path / "shared" / "sizes"
    monkeypatch.setenv("AUTOMICRO_CACHE", f"file://{tmp_path}/shared")
    assert sizes_folder() == tmp_path / "shared" / "sizes"
    monkeypatch.setenv("AUTOMICRO_CACHE", URL + "/")
    assert sizes_folder() == RemotePath(f"{URL}/sizes")


def test_what_is_behind_a_url_is_found_listed_and_cleared() -> None:
    cache = SizeCache(URL)
    assert cache.find(KEY) is None
    assert cache.entries() == []
    cache.remember(KEY, SIZE)
    cache.remember(KEY, RememberedSize(microbatch_size=8))
    found = cache.find(KEY)
    assert found is not None
    assert found.microbatch_size == 8
    (cache.folder / "notes.txt").write(b"of somebody else")
    assert [entry.size.microbatch_size for entry in cache.entries()] == [8]
    assert len(cache.clear().removed) == 1
    assert [path.name for path in cache.folder.iterdir()] == ["notes.txt"]


def test_writers_at_once_leave_one_whole_object() -> None:
    def write(size: int) -> None:
        cache = SizeCache(URL)
        for _ in range(30):
            cache.remember(KEY, RememberedSize(microbatch_size=size))

    writers = [threading.Thread(target=write, args=(size,)) for size in (1, 2, 4, 8)]
    for each in writers:
        each.start()
    reader = SizeCache(URL)
    seen = [reader.find(KEY) for _ in range(50)]
    for each in writers:
        each.join()
    assert {each.microbatch_size for each in seen if each} <= {1, 2, 4, 8}
    last = reader.find(KEY)
    assert last is not None
    assert len(reader.entries()) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"x" * (2 << 20)], ids=range(5))
def test_a_damaged_object_is_one_warning(content: bytes) -> None:
    cache = SizeCache(URL)
    (cache.folder / f"{KEY.digest}.json").write(content)
    with pytest.warns(SizeCacheWarning, match=r"memory://.* is not used .*automicro cache --clear"):
        assert cache.find(KEY) is None
    cache.remember(KEY, SIZE)
    assert cache.find(KEY) == SIZE


class Broken(MemoryFileSystem):
    """A store that refuses everything, with an error of its own."""

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


def test_a_store_that_refuses_is_one_warning_and_asked_once(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMICRO_CACHE", broken)
    with pytest.warns(SizeCacheWarning, match="403: not you") as caught:
        ooms = train()
    assert sum(ooms) > 0  # it trained
    assert len(caught) == 1
    assert Broken.asked == 1
    assert "secret" not in str(caught[0].message)
    assert "unset AUTOMICRO_CACHE" in str(caught[0].message)


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(remote, "SECONDS", 0.05)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: release.wait(20))
    cache = SizeCache(URL)
    with pytest.warns(SizeCacheWarning, match="no answer within 0.05 seconds"):
        assert cache.find(KEY) is None
    cache.remember(KEY, SIZE)  # is not tried: it was given up
    assert MemoryFileSystem.store == {}
    release.set()
    for thread in threading.enumerate():
        if thread.name == "automicro-cache":
            thread.join()


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.warns(SizeCacheWarning, match=r'pip install "automicro\[cache\]"'):
        assert SizeCache("s3://bucket/sizes").find(KEY) is None


def test_a_protocol_that_nobody_knows_is_one_warning() -> None:
    with pytest.warns(SizeCacheWarning, match="ValueError: Protocol not known"):
        assert SizeCache("nowhere://bucket/sizes").find(KEY) is None


@pytest.mark.skipif(not hasattr(os, "fchmod"), reason="has no modes")
def test_files_in_a_folder_of_a_team_are_the_teams(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder, mode in ((shared, 0o2775), (own, 0o700)):
        folder.mkdir()
        folder.chmod(mode)
        cache = SizeCache(folder)
        cache.remember(KEY, SIZE)
        (entry,) = cache.entries()
        assert stat.S_IMODE(os.stat(str(entry.path)).st_mode) == mode & 0o666


def test_places_are_told_from_urls() -> None:
    assert place_of("C:/cache") == Path("C:/cache")
    assert place_of("~/cache") == Path.home() / "cache"
    assert isinstance(place_of("gs://bucket"), RemotePath)


def test_the_command_says_where_and_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOMICRO_CACHE", URL)
    assert main(["cache"]) == 0
    assert f"no size is remembered in {URL}/sizes" in capsys.readouterr().out
    SizeCache().remember(KEY, SIZE)
    monkeypatch.setattr(time, "time", lambda: 1_900_000_000.0)
    assert main(["cache"]) == 0
    assert f"1 size in {URL}/sizes" in capsys.readouterr().out
    monkeypatch.delenv("AUTOMICRO_CACHE")
    assert main(["cache", "--folder", f"{URL}/sizes", "--markdown"]) == 0
    assert KEY.model in capsys.readouterr().out
    assert main(["cache", "--folder", f"{URL}/sizes", "--clear"]) == 0
    assert MemoryFileSystem.store == {}
