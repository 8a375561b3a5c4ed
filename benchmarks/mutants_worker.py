"""Worker that runs the tests for benchmarks.mutants, in a copy of the tree.

It collects the tests once. For each order, a fork of it runs some of them: all with inactive
mistakes, or until one fails with one active mistake. So no test is affected by an earlier order,
and none waits for imports. Linux only.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

# Imported by the copy of the tree, in every process that runs its code.
SWITCH = "automicro_mutants_switch"
SWITCH_SOURCE = """
import os, time

FOLDER = {folder!r}
runner = None  # the process that runs the tests
passed = set()  # by it
_process = _awake = None
_told = {{}}


def awake(number):
    global _process, _awake
    if os.getpid() != _process:
        with open(os.path.join(FOLDER, "awake")) as file:
            _awake = int(file.read())
        _process = os.getpid()
    if _awake >= 0:
        return number == _awake
    if _process == runner:
        passed.add(number)
    elif time.time() - _told.get(number, 0) > 0.01:
        _told[number] = time.time()
        with open(os.path.join(FOLDER, "passed"), "a") as file:
            file.write(f"{{number}}\\n")
    return False


awake._dynamo_marked_constant = True  # torch.compile asks it, and does not look into it
"""
# Almost every test needs it, and importing it takes seconds.
SLOW_IMPORT = "torch._dynamo"
GRACE_SECONDS = 30.0
BECOME_SUBREAPER = 36


class Worker:
    """Plugin of pytest that runs tests on request.

    An order is a line of JSON: the `tests`, which mistake is `awake` (-1: none) and the `limits` of
    the tests in seconds. So is the answer: the name of each test that ran, whether it failed, its
    duration, and the mistakes that it reached.

    Args:
        folder: folder shared with the switch.
        orders: stream of orders.
        answers: stream of answers.
    """

    def __init__(self, folder: Path, orders: TextIO, answers: TextIO) -> None:
        self._folder = folder
        self._orders = orders
        self._answers = answers
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False  # tests that are not even collected cannot judge
        if "torch" in sys.modules:
            importlib.import_module(SLOW_IMPORT)
        gc.freeze()
        items = {item.nodeid: item for item in session.items}
        self._answer({name: bool(item.get_closest_marker("sweep")) for name, item in items.items()})
        for line in self._orders:
            order = json.loads(line)
            chosen = [items[name] for name in order["tests"]]
            self._answer(self._obey(chosen, order["awake"], order["limits"]))
        return True

    def _answer(self, what: object) -> None:
        self._answers.write(json.dumps(what) + "\n")
        self._answers.flush()

    def _obey(
        self, items: list[pytest.Item], awake: int, limits: Sequence[float]
    ) -> list[list[Any]]:
        (self._folder / "awake").write_text(str(awake))
        (self._folder / "passed").write_text("")
        results = self._folder / "results"
        results.write_text("")
        process = os.fork()
        if process == 0:
            try:
                self._run(items, limits, is_awake=awake >= 0)
            finally:
                os._exit(1)
        begin = time.monotonic()
        try:
            wait_for(process, results, limits)
        finally:
            end_descendants()
        done = [json.loads(line) for line in results.read_text().splitlines()]
        if len(done) < len(items) and not (awake >= 0 and done and done[-1][1]):
            name = items[len(done)].nodeid  # it hung, or ended the process
            done.append([name, True, time.monotonic() - begin, []])
        return done

    def _run(self, items: list[pytest.Item], limits: Sequence[float], *, is_awake: bool) -> None:
        switch: Any = importlib.import_module(SWITCH)
        switch.runner = os.getpid()
        with open(os.devnull, "w") as nowhere:
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
        results = (self._folder / "results").open("a", buffering=1)
        elsewhere = (self._folder / "passed").open()
        for item, following, limit in zip(items, [*items[1:], None], limits, strict=True):
            item.add_marker(pytest.mark.timeout(limit), append=False)
            begin = time.monotonic()
            switch.passed.clear()
            self._failed = False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            passed = switch.passed | {int(line) for line in elsewhere}
            took = time.monotonic() - begin
            results.write(json.dumps([item.nodeid, self._failed, took, sorted(passed)]) + "\n")
            if is_awake and self._failed:
                break
        os._exit(0)


def wait_for(process: int, results: Path, limits: Sequence[float]) -> None:
    """Wait until a process ends or one of its tests exceeds its limit.

    The test's own timeout comes first, unless it hangs outside Python.
    """
    lines, since = 0, time.monotonic()
    while not os.waitpid(process, os.WNOHANG)[0]:
        time.sleep(0.02)
        now = results.read_bytes().count(b"\n")
        if now > lines:
            lines, since = now, time.monotonic()
        if lines < len(limits) and time.monotonic() - since > limits[lines] + GRACE_SECONDS:
            return


def end_descendants() -> None:
    """Kill everything that remains of a fork, including other sessions.

    This process adopts the orphans.
    """
    while children := list(children_of_this_process()):
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def children_of_this_process() -> Iterable[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        yield from map(int, path.read_text().split())


def main(folder: Path, arguments: Sequence[str]) -> int:
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    # Hidden from the tests, and from pytest, which reports to stderr.
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (folder / "awake").write_text("-1")
    Path(f"{SWITCH}.py").write_text(SWITCH_SOURCE.format(folder=str(folder)))
    # The copy's automicro might lack the plugin that is installed next to it.
    left_out = [f"-pno:{each}" for each in ("cacheprovider", "xdist", "automicro")]
    temporary = f"--basetemp={folder / 'tests'}"
    options = ["-q", *left_out, temporary, "--tb=no", *arguments]
    return pytest.main(options, plugins=[Worker(folder, orders, answers)])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
