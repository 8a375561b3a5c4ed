"""What version 7ecc4e8 wrote is read: checkpoints of one process, and sizes."""

import shutil
from pathlib import Path

import pytest

from tests.trainer.resume.earlier_runs import EARLIER, compare, train_with_remembered_size


@pytest.mark.parametrize("kind", ["alone", "averaged"])
def test_a_checkpoint_of_an_earlier_version_goes_on_as_that_did(kind: str, tmp_path: Path) -> None:
    shutil.copytree(EARLIER / kind / "checkpoints", tmp_path / "run")
    assert compare(kind, tmp_path / "run") == []


def test_a_size_that_an_earlier_version_found_is_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EARLIER / "sizes", tmp_path / "sizes")
    monkeypatch.setenv("AUTOMICRO_CACHE_DIR", str(tmp_path / "sizes"))
    first, *_ = train_with_remembered_size()
    assert (first.recalled_size, first.ooms) == (256, 0)
