"""The command `automicro cache`: its output, removals and exit codes."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from automicro.cli import main
from automicro.cli.commands.cache import COLUMNS
from automicro.remembered.cache import SizeCache
from tests.remembered.test_remembering import KEY, SIZE, size_of

DAY = 86400
NOW = 1_800_000_000.0
GPT2 = {
    **KEY,
    "model": "GPT2LMHeadModel",
    "parameters": 124_439_808,
    "device": "NVIDIA H100",
    "memory_bytes": 80 << 30,
    "precision": "bf16",
    "compiled": True,
    "rows": 512,
    "shapes": {"input_ids": "int64[?]"},
    "world_size": 8,
}
EVAL = {**KEY, "phase": "eval", "memory_bytes": None}


@pytest.fixture
def cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> SizeCache:
    """Return a cache with three sizes of different ages, and stop the clock."""
    cache = SizeCache()
    ages = {SIZE: 3 * DAY, size_of(24, GPT2): 40 * DAY, size_of(64, EVAL): 59}
    for size, age in ages.items():
        cache.remember(dataclasses.replace(size, written_at=NOW - age))
    monkeypatch.setattr(time, "time", lambda: NOW)
    return cache


def test_json_is_complete_and_table_is_abbreviated(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = dict.fromkeys(("input_ids", "attention_mask", "labels", "a", "b"), "int64[128]")
    SizeCache().remember(size_of(16, {**KEY, "shapes": shapes}))
    assert main(["cache"]) == 0
    assert "int64[128], int64[128], int64[128], [...]" in capsys.readouterr().out
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["key"]["shapes"] == shapes


def test_empty_cache_message_names_folder(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == (
        f"no size is remembered in {own_cache}/sizes: runs with microbatch_size=auto write there\n"
    )
    assert main(["cache", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"removed 0 sizes from {own_cache}/sizes\n"
    assert not own_cache.exists()


def test_clear_removes_all_sizes(cache: SizeCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"removed 3 sizes from {cache.folder}\n"
    assert cache.entries() == []


# Tests turn warnings into errors; users do not.
@pytest.mark.filterwarnings("default::automicro.SizeCacheWarning")
def test_damaged_file_gives_warning_and_others_are_listed(
    cache: SizeCache, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(cache.folder, f"{'0' * 64}.json")
    damaged.write_text("{", encoding="utf-8")
    assert main(["cache", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 3
    assert err.startswith(f"automicro: warning: {damaged} holds no remembered size (")
    assert err.endswith("), so it is ignored. Run automicro cache --clear to remove it\n")
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr() == (f"removed 4 sizes from {cache.folder}\n", "")


@pytest.mark.filterwarnings("default::automicro.SizeCacheWarning")
def test_failed_removal_gives_warning_and_exit_code_1(
    cache: SizeCache, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(cache.folder, f"{'0' * 64}.json")
    folder.mkdir()
    assert main(["cache", "--clear"]) == 1
    out, err = capsys.readouterr()
    assert out == f"removed 3 sizes from {cache.folder}\n"
    assert err.startswith(f"automicro: warning: {folder} cannot be removed (")


def test_file_text_is_escaped_for_terminal(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SizeCache().remember(size_of(16, {**KEY, "model": "[red]\x1b[2J|Net"}))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("[red]?[2J|Net  ")


def test_unknown_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "all"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "automicro cache: error: unknown argument 'all': cache accepts only options\n"
    )
    assert main(["cache", "--clean"]) == 2
    assert "unknown option '--clean' (did you mean '--clear'?): use" in capsys.readouterr().err
    assert main(["cache", "--json", "--clear"]) == 2
    assert "--json and --clear do not go together" in capsys.readouterr().err


def test_documented_table_matches_command_output() -> None:
    root = Path(__file__).resolve().parent.parent
    page = (root / "benchmarks" / "results" / "measured_sizes.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows[0].strip("| ").split(" | ") == list(COLUMNS)[:9]
    assert len(rows) >= 2 + 12
    assert "simulated on a CPU" in page
    last = page.splitlines()[-1]
    assert re.fullmatch(r"Measured \d{4}-\d\d-\d\d with automicro \S+ on torch \S+\.", last)
    for row in rows[2:]:
        *_, num_rows, size, count, _peak = row.strip("| ").split(" | ")
        assert -(-int(num_rows) // int(size)) == int(count)
