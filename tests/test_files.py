"""Files are written completely or not at all."""

import os
import stat
from pathlib import Path
from typing import IO

import pytest

from automicro.files import write_whole


def test_old_file_stays_until_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    seen = []

    def write(file: IO[bytes]) -> None:
        file.write(b"new")
        file.flush()
        seen.append(path.read_bytes())

    def fail_halfway(file: IO[bytes]) -> None:
        write(file)
        raise RuntimeError("no more")

    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="no more"):
        write_whole(path, fail_halfway)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, write, lasts=True)
    assert seen == [b"old"] * 2
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_written_file_has_default_permissions(tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.write_bytes(b"")
    write_whole(ours, lambda file: file.write(b""))
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
