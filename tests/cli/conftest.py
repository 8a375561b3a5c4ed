"""A folder with a job for each test, and the command line in it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from automicro.cli import main
from tests.cli_jobs import enter_folder_with_job

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "configs" / "digits.yaml")
EVAL_DATA = "{call: cli_job.loader, args: {batch_size: 8}}"


class Said(NamedTuple):
    """The output of a command."""

    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with_job(tmp_path, monkeypatch)


@pytest.fixture
def automicro(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command, which must end with a given exit code."""

    def run(*arguments: str, code: int = 0) -> Said:
        capsys.readouterr()
        ended = main([*arguments])
        said = Said(*capsys.readouterr())
        assert ended == code, said.err
        return said

    return run
