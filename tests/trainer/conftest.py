"""Fixtures for all tests of the trainer."""

import os

import pytest


@pytest.fixture(autouse=True)
def skip_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the fsync of checkpoints, because no test here simulates a power failure.

    The tests of checkpoints and of run folders check when data must be on disk.
    """

    def sync(descriptor: int) -> None:
        os.fstat(descriptor)  # fails for closed files, as fsync does

    monkeypatch.setattr(os, "fsync", sync)
