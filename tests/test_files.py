"""Files are written completely or not at all."""

import os
import stat
from pathlib import Path
from typing import IO

import pytest

from automicro.files import write_whole


def fail_halfway(file: IO[bytes]) -> None:
    file.write(b"half")
    raise RuntimeError("no more")


def test_failed_write_keeps_old_file_without_remnants(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_whole(path, lambda file: file.write(b"old"))
    with pytest.raises(RuntimeError, match="no more"):
        write_whole(path, fail_halfway)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_old_file_is_readable_during_write(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")
    seen = []

    def write(file: IO[bytes]) -> None:
        file.write(b"new")
        file.flush()
        seen.append(path.read_bytes())

    write_whole(path, write, lasts=True)
    assert seen == [b"old"]
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_written_file_has_default_permissions(tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.write_bytes(b"")
    write_whole(ours, lambda file: file.write(b""))
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
