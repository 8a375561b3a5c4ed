"""Fixtures: a checkpoint store, and no disk syncs outside the fault tests."""

from pathlib import Path

import pytest

from automicro import files
from automicro.checkpoints.store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "runs" / "checkpoints", keep_last=None)


@pytest.fixture(autouse=True)
def skip_disk_sync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the fault tests check when data reaches the disk."""
    if request.path.name != "test_faults.py":
        monkeypatch.setattr(files, "sync", lambda _: None)
