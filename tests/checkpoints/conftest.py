"""A store, and no waiting for the disk but where faults are tested."""

from pathlib import Path

import pytest

from automicro import files
from automicro.checkpoints.store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "runs" / "checkpoints", keep_last=None)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the disk when is for the tests of faults."""
    if request.path.name != "test_faults.py":
        monkeypatch.setattr(files, "sync", lambda _: None)
