"""Record the start and end of each test: pytest with ``-p tests.gpu.journal``.

Each is one line of JSON, flushed at once, so an interrupted run loses only its current test, whose
name is known.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

BEGAN = "began"
_MOST_CHARACTERS = 4000  # of a failure message


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, help="the file to write a line to for each test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--journal")
    if path is not None:
        config.pluginmanager.register(Journal(path))


class Journal:
    """A plugin that writes the outcomes of tests to a file."""

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
    """Return the outcome of each test; one without an end was interrupted, or crashed."""
    tests: dict[str, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                test = json.loads(line)
            except json.JSONDecodeError:  # the process died while writing it
                continue
            tests[test["name"]] = test
    return list(tests.values())
