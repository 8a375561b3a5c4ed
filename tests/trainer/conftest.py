"""What every test of a trainer starts from."""

import os

import pytest


@pytest.fixture(autouse=True)
def files_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system write checkpoints when it likes: no test here takes the power away.

    What must be on the disk, and when, is asked by the tests of checkpoints and of run folders.
    """

    def sync(descriptor: int) -> None:
        os.fstat(descriptor)  # an error for what is not open, as fsync has it

    monkeypatch.setattr(os, "fsync", sync)
