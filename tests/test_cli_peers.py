"""Error reports of several processes."""

import json
from pathlib import Path

import pytest

from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.cli.errors import show_failure
from automicro.cli.run_dir import telling_how_to_go_on
from automicro.errors import ConfigError, DesyncError, PeerFailedError, PeerLostError


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Act as rank 0 of two processes under torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    return monkeypatch


def said(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    show_failure(error, debug=False)
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", [ConfigError, DesyncError])
def test_first_rank_reports_common_error_in_full(
    kind: type[Exception], torchrun: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "no model; " + "give one " * 60
    assert text in said(kind(text), capsys)
    torchrun.setenv("RANK", "1")
    line = said(kind(text), capsys)
    assert line.startswith("automicro: rank 1 of 2: no model; give one")
    assert len(line) < 400


def test_rank_stopped_by_peer_reports_one_line(
    torchrun: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(
        PeerFailedError("rank 0 of 2 stops because another rank failed:\nrank 1: x"), capsys
    )
    assert text == "automicro: rank 0 of 2 stops because another rank failed: rank 1: x\n"


LOST = (
    "rank 1 of 2 could not go on at 'the collectives of a batch': rank 0 of 2 gone or stuck. "
    "A retry needs all ranks: start again from the last checkpoint; the log of the missing rank, "
    "or the kernel's (out of memory on the host), has the cause"
)


@pytest.mark.parametrize(
    ("is_saved", "end"),
    [(True, "the same command resumes from there"), (False, "the same command starts over")],
)
def test_lost_rank_error_explains_how_to_resume(
    is_saved: bool,
    end: str,
    tmp_path: Path,
    torchrun: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torchrun.setenv("RANK", "1")
    config = CheckpointConfig(folder=tmp_path)
    if is_saved:
        CheckpointStore(tmp_path).save({}, step=1)
    with (
        pytest.raises(PeerLostError) as caught,
        telling_how_to_go_on(config, run_dir=None, inputs=["job.yaml"]),
    ):
        raise PeerLostError(LOST)
    assert said(caught.value, capsys) == (f"automicro: {LOST}; {end}\n")


def test_torchrun_error_file_contains_only_original_error(
    torchrun: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    torchrun.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    said(PeerFailedError("rank 1 failed"), capsys)
    assert not path.exists()  # torchrun would take the consequence for the cause
    said(RuntimeError("a mistake"), capsys)
    message = json.loads(path.read_text(encoding="utf-8"))["message"]
    assert message["message"] == "RuntimeError: a mistake"
    assert message["extraInfo"]["timestamp"].isdecimal()
