"""Full disks and killed processes, at each point where a save touches the disk."""

import errno
import os
import shutil
import stat
import time
import warnings
from pathlib import Path

import pytest
import torch

from automicro import files
from automicro.checkpoints import writing as leftovers
from automicro.checkpoints.store import CheckpointStore
from automicro.errors import CheckpointError, CheckpointWarning
from tests.checkpoints.faults import Faults, fail, in_child, kill
from tests.processes import KILLED


def state(step: int) -> dict:
    return {
        "model": {"w": torch.full((40, 10), float(step)), "b": torch.full((3,), float(step))},
        "progress": {"step": step, "note": "x" * step},
    }


def assert_good(store: CheckpointStore, steps: set[int]) -> int:
    """The newest checkpoint is from one of these steps and holds the state of that step."""
    loaded = store.load()
    assert loaded.step in steps
    assert torch.equal(loaded.state["model"]["w"], state(loaded.step)["model"]["w"])
    assert torch.equal(loaded.state["model"]["b"], state(loaded.step)["model"]["b"])
    assert loaded.state["progress"] == state(loaded.step)["progress"]
    return loaded.step


def assert_tidy(store: CheckpointStore, steps: list[int]) -> None:
    names = sorted(path.name for path in store.folder.iterdir())
    assert [name.partition("-step-")[2] for name in names] == [str(step) for step in steps]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


class Scene:
    """Provides copies of a store with steps 1 and 2, whose next save writes step 3 and drops 1."""

    def __init__(self, folder: Path, faults: Faults) -> None:
        self._folder, self._count = folder, 0
        CheckpointStore(folder / "start").save(state(1), step=1)
        CheckpointStore(folder / "start").save(state(2), step=2)
        faults.disarm()
        self.fresh().save(state(3), step=3)
        self.points = list(faults.seen)

    def fresh(self) -> CheckpointStore:
        self._count += 1
        copy = self._folder / f"copy-{self._count}"
        shutil.copytree(self._folder / "start", copy)
        return CheckpointStore(copy, keep_last=2)


@pytest.fixture
def scene(tmp_path: Path, faults: Faults) -> Scene:
    return Scene(tmp_path, faults)


def test_files_are_synced_before_renames(scene: Scene) -> None:
    a_file = ["open_new", "write", "sync"]
    assert scene.points == [
        "make_folder",
        *a_file,  # The tensors.
        *a_file,  # Their table; torch writes it to a temporary name.
        "replace",
        *a_file,  # The table as text.
        *a_file,  # The structure.
        *a_file,  # The manifest.
        "sync",  # The temporary folder.
        "replace",
        "sync",  # Its parent folder.
        "replace",  # The checkpoint to drop.
        "remove_folder",
    ]


def error_of(store: CheckpointStore) -> CheckpointError | None:
    try:
        store.save(state(3), step=3)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize(
    "lasts", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["once", "from then on"]
)
def test_full_disk_at_any_point_loses_no_checkpoint(
    scene: Scene, faults: Faults, lasts: bool
) -> None:
    outcomes = []
    for index in range(len(scene.points)):
        store = scene.fresh()
        faults.arm(lambda at, n=index: at >= n if lasts else at == n, fail)  # type: ignore[misc]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = error_of(store)
        if error is None:
            assert [each.category for each in caught] == [CheckpointWarning]
            assert "could not be removed" in str(caught[0].message)
            expected = {3}
        else:
            assert isinstance(error.__cause__, OSError)
            assert error.__cause__.errno == errno.ENOSPC
            assert f"step 3 could not be written to {store.folder}" in str(error)
            assert "Free space" in str(error)
            # The last point that can fail is the sync of the new name.
            expected = {2, 3} if scene.points[index] == "sync" else {2}
        outcomes.append(error is None)
        faults.disarm()

        assert_good(store, expected)
        store.save(state(4), step=4)
        assert_good(store, {4})
        assert len(list(store.folder.iterdir())) == 2, "something is left over"
    # Only the removal at the end may fail without an error.
    assert outcomes == [False] * (len(outcomes) - 2) + [True] * 2


@pytest.mark.sweep
def test_kill_at_any_point_loses_no_checkpoint(scene: Scene, faults: Faults) -> None:
    found = []
    for index in range(len(scene.points)):
        store = scene.fresh()
        faults.arm(lambda at, n=index: at == n, kill)  # type: ignore[misc]
        assert in_child(lambda s=store: s.save(state(3), step=3)) == KILLED  # type: ignore[misc]
        faults.disarm()

        found.append(assert_good(store, {2, 3}))
        store.save(state(4), step=4)
        assert_good(store, {4})
        assert_tidy(store, [found[-1], 4])
    # A kill before the rename leaves step 2 newest, and a kill after it step 3.
    assert found == sorted(found)
    assert found[0] == 2
    assert found[-1] == 3


def test_ctrl_c_propagates_and_leaves_no_files(tmp_path: Path, faults: Faults) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    faults.arm(lambda at: at == 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(state(2), step=2)
    faults.disarm()
    assert_good(store, {1})
    assert_tidy(store, [1])


def test_file_system_without_folder_sync_is_accepted(tmp_path: Path, mocker) -> None:
    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    mocker.patch.object(files, "sync", sync)
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=1)
    assert_good(store, {1})


def test_next_save_finishes_killed_removal(scene: Scene, faults: Faults) -> None:
    store = scene.fresh()
    faults.arm(lambda at: at == len(scene.points) - 1, kill)
    assert in_child(lambda: store.save(state(3), step=3)) == KILLED
    faults.disarm()
    assert len(list(store.folder.glob(".tmp-*"))) == 1
    store.save(state(4), step=4)
    assert_tidy(store, [3, 4])


def test_folder_of_live_process_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with leftovers.temporary_folder(tmp_path) as mine:
        parents = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{os.getppid()}-")
        parents.mkdir()
        elsewhere = tmp_path / ".tmp-another_machine-1-abc"
        elsewhere.mkdir()
        store.save(state(1), step=1)
        assert mine.exists()
        assert parents.exists()
        assert elsewhere.exists()
        for path in (mine, parents, elsewhere):
            two_days_ago = time.time() - 2 * 24 * 3600
            os.utime(path, (two_days_ago, two_days_ago))
        store.save(state(2), step=2)
        assert mine.exists()
    assert_tidy(store, [1, 2])
