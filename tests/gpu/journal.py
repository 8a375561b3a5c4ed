"""Write down each test as it begins and as it ends: pytest with ``-p tests.gpu.journal``.

A line of JSON each, flushed at once, so that a run which is cut off, or whose process dies, has
lost nothing but the test that it was in, and that one is known by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

BEGAN = "began"
_MOST_CHARACTERS = 4000  # of what a failure says


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, help="the file to write a line to for each test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--journal")
    if path is not None:
        config.pluginmanager.register(Journal(path))


class Journal:
    """Writes to a file what becomes of tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._test: dict[str, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = {"name": nodeid, "outcome": BEGAN, "seconds": 0.0, "message": ""}
        self._write(self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._test
        test["seconds"] += report.duration
        test["measured"] = dict(report.user_properties)
        if report.failed and test["outcome"] != "failed":
            test["outcome"] = "failed" if report.when == "call" else "error"
            test["message"] = report.longreprtext[-_MOST_CHARACTERS:]
        elif report.skipped:
            test["outcome"], test["message"] = "skipped", _reason(report)
        elif test["outcome"] == BEGAN and report.when == "call":
            test["outcome"] = "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write({**self._test, "seconds": round(self._test["seconds"], 3)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            message = report.longreprtext[-_MOST_CHARACTERS:]
            self._write({"name": report.nodeid, "outcome": "error", "message": message})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext[-_MOST_CHARACTERS:]


def read_journal(path: Path) -> list[dict[str, Any]]:
    """What a journal has of each test; one that only began was cut off, or ended the process."""
    tests: dict[str, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                test = json.loads(line)
            except json.JSONDecodeError:  # the process died in it
                continue
            tests[test["name"]] = test
    return list(tests.values())
