"""`make gpu` runs all parts, loses no results when interrupted, and writes a page."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from benchmarks import gpu_page, gpu_report
from benchmarks.gpu_report import NOT_STARTED, PARTS, Part, Report

pytestmark = pytest.mark.sweep

ROOT = pathlib.Path(__file__).resolve().parent.parent

TESTS = """
import os, time, pytest

def test_first(record_property):
    record_property("costs_us", {"a call": 1.5})
    record_property("texts", [{"where": "here", "type": "E", "means": "RETRYABLE", "text": "a|b"}])
    record_property("sizes", [(3, [8, 4])])

def test_fails():
    assert 1 == 2, "of a number"

@pytest.mark.skipif(True, reason="only CUDA has one")
def test_left_out():
    pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the end")

def test_ends_badly(broken):
    pass

def test_last():
    END
"""


def run(
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str = "pass",
    *,
    part_seconds: float = 60,
    seconds: float = 100,
) -> dict[str, Any]:
    """Return a report of a few tests, a part that only CUDA has, and a script."""
    tests = folder / "test_some.py"
    tests.write_text(TESTS.replace("END", end))
    writes = "import json, sys; open(sys.argv[-1], 'w').write(json.dumps({'results': []}))"
    parts = [
        Part(name="some", asks="whether it works", seconds=part_seconds, tests="test_some.py"),
        Part(name="some, other", asks="again", seconds=10, needs="it"),
        Part(name="overhead", asks="what it costs", seconds=60, script=("x",)),
    ]
    real = gpu_report.command_of

    def command_of(part: Part, target: pathlib.Path, **options: Any) -> list[str]:
        if part.script:
            return [sys.executable, "-c", writes, "--json", str(target)]
        command = real(part, target, **{**options, "standin": False})
        command = [str(tests) if each.startswith("tests/gpu/") else each for each in command]
        command += ["-m", "not gpu", "--rootdir", str(folder), "-c", os.devnull]
        return [*command, "--confcutdir", str(folder)]

    monkeypatch.setattr(gpu_report, "command_of", command_of)
    monkeypatch.setattr(gpu_report, "SLOWER", 1)
    report = Report(folder / "report.json", "standin", parts)
    gpu_report.run_all(parts, report, seconds=seconds, standin=True, expression="")
    found: dict[str, Any] = json.loads(report.path.read_text())
    assert found == json.loads(json.dumps(report.content))
    return found


def outcomes(part: dict[str, Any]) -> dict[str, str]:
    return {gpu_page.short(test["name"]): test["outcome"] for test in part["tests"]}


EXPECTED = {
    "test_first": "passed",
    "test_fails": "failed",
    "test_left_out": "skipped",
    "test_ends_badly": "error",
}


def test_report_and_page_contain_each_test_and_its_measurements(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, monkeypatch)
    assert found["is_whole"]
    some, other, overhead = found["parts"]
    assert outcomes(some) == {**EXPECTED, "test_last": "passed"}
    assert some["state"] == overhead["state"] == "done"
    assert some["tests"][0]["measured"]["sizes"] == [[3, [8, 4]]]
    assert "of a number" in some["tests"][1]["message"]
    assert some["tests"][2]["message"] == "only CUDA has one"
    assert "in the end" in some["tests"][3]["message"]
    assert other["state"] == "left out: only CUDA has it"
    assert [gpu_page.is_well(part) for part in found["parts"]] == [False, True, True]
    capsys.readouterr()
    assert gpu_report.main(["--show", str(tmp_path / "report.json")]) == 0
    shown = capsys.readouterr().out
    assert shown == gpu_page.page(found) + "\n"
    for line in (
        *("5 tests in", "1 error, 1 failed, 2 passed, 1 skipped", "| only CUDA has one | 1 |"),
        *("| a call | 1.5 | test_first |", "| here | E | RETRYABLE | a\\|b |"),
        *("| test_first | sizes | (3, (8, 4)) |", "AssertionError: of a number"),
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("end", "state"), [("os._exit(9)", "died"), ("time.sleep(600)", "cut off")]
)
def test_aborted_part_loses_only_its_current_test(
    end: str, state: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 60 if state == "died" else 15
    found = run(tmp_path, monkeypatch, end, part_seconds=seconds)
    assert outcomes(found["parts"][0]) == {**EXPECTED, "test_last": "began"}
    assert [part["state"] for part in found["parts"]][::2] == [state, "done"]
    shown = gpu_page.page(found)
    assert f"### some: {state}" in shown
    assert "test_last: cut off, or it ended the process" in shown


INTERRUPTED = """
import pathlib, sys
from benchmarks import gpu_report
from benchmarks.gpu_report import Part

def command_of(part, target, **_):
    writes = "import json, sys, time; open(sys.argv[2], 'w').write(json.dumps({'rows': [1]}));"
    return [sys.executable, "-c", writes + "time.sleep(20)", "--json", str(target)]

gpu_report.command_of = command_of
gpu_report.PARTS = [
    Part(name=name, asks="", seconds=500, script=("x",)) for name in ("one", "two", "three")
]
sys.exit(gpu_report.main(["--standin", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_keeps_results_so_far(
    number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def known() -> dict[str, Any]:
        paths = list((tmp_path / "out").glob("rehearsal-*.json"))
        found: dict[str, Any] = json.loads(paths[0].read_text()) if paths else {"parts": []}
        return found

    try:
        while not any("results" in part for part in known()["parts"]) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    found = known()
    assert not found["is_whole"]
    first = next(part for part in found["parts"] if "results" in part)
    assert first["results"] == {"rows": [1]}
    assert process.returncode == (-number if number is signal.SIGKILL else 1)
    if number is not signal.SIGKILL:
        assert first["state"] == "interrupted"
        assert found["parts"][2]["state"].startswith(NOT_STARTED)
        [page] = (tmp_path / "out").glob("*.md")
        assert "**It was cut off.**" in page.read_text()


def test_parts_include_every_gpu_test_file() -> None:
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {part.tests for part in PARTS if part.tests} == files
    assert PARTS[-1].tests == "test_thousand_failures_gpu.py"
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in PARTS:
        assert bool(part.tests) != bool(part.script)
        if part.script:
            assert part.rehearsed_with
