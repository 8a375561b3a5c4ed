"""Damaged checkpoints are skipped, and code in a checkpoint file never runs."""

import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from automicro.checkpoints.manifest import MANIFEST, FileSum, NewFolder, write_manifest
from automicro.checkpoints.reading import load_checkpoint
from automicro.checkpoints.store import CheckpointStore
from automicro.checkpoints.tensors import TABLE
from automicro.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError

FILES = (".metadata", "__0_0.distcp", TABLE, "state.pt", "manifest.json")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        store.save({"model": {"w": torch.full((50,), float(step))}, "step": step}, step=step)
    return store


def newest_folder(store: CheckpointStore) -> Path:
    return max(store.folder.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


cut = rewrite(lambda data: data[:-1])
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": rewrite(lambda data: b""),
    "zeros": rewrite(lambda data: bytes(len(data))),
    "longer": lambda path: path.write_bytes(
        b"[]" if path.name == MANIFEST else path.read_bytes() + b" "
    ),
    "missing": Path.unlink,
    "a folder": replace_with_folder,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_skipped_and_file_is_named(
    store: CheckpointStore, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    whole = shutil.copytree(newest_folder(store), tmp_path / "whole")
    assert {path.name for path in whole.iterdir()} == set(FILES)
    for name in FILES:
        folder = newest_folder(store)
        damage(folder / name)
        with pytest.warns(CheckpointWarning) as caught:
            loaded = store.load()
        assert loaded.state["step"] == 1
        assert torch.equal(loaded.state["model"]["w"], torch.ones(50))
        assert len(caught) == 1
        assert str(folder / name) in str(caught[0].message)
        assert "00001-step-1, the newest good one" in str(caught[0].message)
        with pytest.raises(CheckpointError if name == MANIFEST else DamagedCheckpointError):
            load_checkpoint(folder)
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)


def test_single_flipped_byte_is_detected(store: CheckpointStore) -> None:
    for name in FILES:
        path = newest_folder(store) / name
        whole = path.read_bytes()
        # All bytes of small files, and about 150 bytes of larger ones.
        for at in range(0, len(whole), max(1, len(whole) // 150)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(DamagedCheckpointError):
                load_checkpoint(path.parent)
        path.write_bytes(whole)
    assert load_checkpoint(newest_folder(store)).step == 2


def test_incomplete_and_temporary_folders_are_skipped(store: CheckpointStore) -> None:
    half = store.folder / "00003-step-3"
    half.mkdir()
    shutil.copy(newest_folder(store).parent / "00002-step-2" / "state.pt", half)
    shutil.copytree(store.folder / "00002-step-2", store.folder / ".tmp-host-1-abc")
    with pytest.warns(CheckpointWarning, match=r"00003-step-3/manifest\.json cannot be read"):
        assert store.load().step == 2


def test_error_lists_files_when_all_checkpoints_are_damaged(store: CheckpointStore) -> None:
    for folder in store.folder.iterdir():
        cut(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="all 2 checkpoints") as caught:
        store.newest()
    assert "00001-step-1/__0_0.distcp has" in str(caught.value)
    assert "00002-step-2/__0_0.distcp has" in str(caught.value)
    assert "another folder" in str(caught.value)


def test_damaged_checkpoints_do_not_count_toward_keep_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        store.save({}, step=step)
    (tmp_path / "00003-step-3" / MANIFEST).unlink()
    store.save({}, step=4)
    # Two intact checkpoints stay. The damaged one is newer than the older of the two.
    assert sorted(os.listdir(tmp_path)) == ["00002-step-2", "00003-step-3", "00004-step-4"]
    store.save({}, step=5)
    assert sorted(os.listdir(tmp_path)) == ["00004-step-4", "00005-step-5"]


def test_damaged_best_checkpoint_is_skipped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=None)
    for step, loss in enumerate([0.3, 0.1, 0.2], start=1):
        store.save({"x": torch.ones(3)}, step=step, metrics={"eval/loss": loss})
    flip(tmp_path / "00002-step-2" / "__0_0.distcp")
    with pytest.warns(CheckpointWarning, match="was the best one"):
        best = store.best()
    assert best is not None
    assert best.step == 3


class Bomb:
    """Creates a folder when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self._path,))


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    return Bomb(tmp_path / "exploded")


def exploded(bomb: Bomb) -> bool:
    return Path(bomb._path).exists()


def as_pickle(bomb: Bomb, path: Path) -> None:
    path.write_bytes(pickle.dumps(bomb))


def forge_table(folder: Path, **values: Any) -> None:
    """Change the place of each tensor in the table."""
    table = torch.load(folder / TABLE, weights_only=False)  # this test wrote it
    for place in table.storage_data.values():
        vars(place).update(values)
    torch.save(table, folder / TABLE)


def forge_manifest(folder: Path) -> None:
    """Write a manifest that matches the current files."""
    (folder / MANIFEST).unlink(missing_ok=True)
    new = NewFolder(folder)
    new.sums = {path.name: FileSum.of(path) for path in folder.iterdir()}
    write_manifest(new, step=2, metrics={})


def as_archive(bomb: Bomb, path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"model": bomb}, file)


@pytest.mark.parametrize("plant", [as_pickle, as_archive])
@pytest.mark.parametrize("name", FILES)
def test_planted_pickle_is_refused_without_running(
    store: CheckpointStore, bomb: Bomb, name: str, plant: Callable[[Bomb, Path], None]
) -> None:
    folder = newest_folder(store)
    plant(bomb, folder / name)
    with pytest.raises(DamagedCheckpointError, match=name):
        load_checkpoint(folder)
    if name == "__0_0.distcp":
        forge_table(folder, offset=0, length=(folder / name).stat().st_size)
    forge_manifest(folder)
    if name in (".metadata", MANIFEST):  # never read, and rewritten
        assert torch.equal(load_checkpoint(folder).state["model"]["w"], torch.full((50,), 2.0))
    else:
        with pytest.raises(CheckpointError, match=str(folder)):
            load_checkpoint(folder)
    assert not exploded(bomb)


def test_bomb_explodes_in_unpickling_reader(store: CheckpointStore, bomb: Bomb) -> None:
    folder = newest_folder(store)
    as_pickle(bomb, folder / ".metadata")
    with suppress(AttributeError):
        FileSystemReader(folder).read_metadata()
    assert exploded(bomb)


OUTSIDE = "outside of the folder"
WRITTEN = "automicro wrote"


@pytest.mark.parametrize(
    ("place", "table", "message"),
    [
        ({"relative_path": "../00001-step-1/__0_0.distcp"}, {}, OUTSIDE),
        ({"relative_path": "/etc/hostname"}, {}, OUTSIDE),
        ({}, {"state_dict_metadata": {}}, WRITTEN),
        ({}, {"state_dict_metadata": {"model.w": BytesStorageMetadata()}}, WRITTEN),
        ({}, {"storage_data": None}, WRITTEN),
        ({}, {"storage_data": {}}, WRITTEN),
    ],
)
def test_forged_table_is_refused(
    store: CheckpointStore, place: dict[str, Any], table: dict[str, Any], message: str
) -> None:
    folder = newest_folder(store)
    forge_table(folder, **place)
    torch.save(replace(torch.load(folder / TABLE, weights_only=False), **table), folder / TABLE)
    forge_manifest(folder)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_bomb_in_table_is_refused_without_running(store: CheckpointStore, bomb: Bomb) -> None:
    folder = newest_folder(store)
    forge_table(folder, offset=bomb)
    forge_manifest(folder)
    with pytest.raises(CheckpointError, match=WRITTEN):
        load_checkpoint(folder)
    assert not exploded(bomb)
