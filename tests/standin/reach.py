"""The lines of the package's device code that tests on the stand-in do not reach.

    python -m tests.standin.reach [pytest's arguments]

Runs the tests on the stand-in with a trace of the files below, and prints how many ran and the
lines not reached. A line counts if a function has code in it; imports and definitions do not.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "automicro"
# Files in which the package calls a device, and does not only describe one.
FILES = [
    "memory/device.py",
    "memory/meter.py",
    "optimization/reservation.py",
    "transaction/rng.py",
    "transfer.py",
    "trainer/device.py",
    "trainer/determinism.py",
    "trainer/processes.py",
    "callbacks/memory.py",
    "callbacks/oom_report.py",
    "distributed/ddp.py",
    "distributed/fsdp.py",
    "oom.py",
]


class Outcomes:
    """The outcomes of the tests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "skipped":
            self.counts[report.outcome] += 1


def lines_of_functions(code: CodeType, *, is_function: bool = False) -> set[int]:
    """Return the numbers of the lines with code in functions, methods and nested functions."""
    found = {line for _, _, line in code.co_lines() if line} if is_function else set()
    found.discard(code.co_firstlineno)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_inner_function = bool(inner.co_flags & 0x2)  # CO_NEWLOCALS: not a class body
            found |= lines_of_functions(inner, is_function=is_inner_function)
    return found


def tracer(reached: dict[str, set[int]]) -> Callable[..., Any]:
    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        lines = reached.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        return trace

    return trace


def spans(numbers: set[int]) -> str:
    """Format numbers as ``1-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in parts)


def main() -> int:
    reached: dict[str, set[int]] = {str(PACKAGE / name): set() for name in FILES}
    outcomes, trace = Outcomes(), tracer(reached)
    arguments = sys.argv[1:] or ["tests/standin", "tests/gpu"]
    threading.settrace(trace)
    sys.settrace(trace)
    options = ["-q", "-n0", "-p", "tests.standin.plugin", "-m", "standin or gpu", *arguments]
    code = pytest.main(options, plugins=[outcomes])
    sys.settrace(None)
    threading.settrace(None)
    print(f"\non the stand-in: {dict(outcomes.counts)}; lines of functions that none reached:")
    for name, lines in reached.items():
        source = Path(name).read_text()
        wanted = lines_of_functions(compile(source, name, "exec"))
        missed = wanted - lines
        short = name.removeprefix(f"{PACKAGE}/")
        print(f"{short}: {len(wanted) - len(missed)} of {len(wanted)}; not {spans(missed)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
