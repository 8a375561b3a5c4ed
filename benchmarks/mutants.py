"""Small mistakes in the code: how many the tests detect, and which test detects each.

    python -m benchmarks.mutants --json benchmarks/results/mutants.json      # about two hours
    python -m benchmarks.mutants --compare benchmarks/results/mutants.json   # a quarter of an hour
    python -m benchmarks.mutants --count 20 --tests "tests/checkpoints tests/trainer/resume"

A seed picks lines of the areas below. Each gets one mistake: an inverted comparison, a missing
call, a changed constant, a negated condition. Temporary copies of the tree contain all of them,
inactive. The tests run once there, which records the mistakes that each test reaches. Then each
mistake is activated in its own process, where the tests that reach it run, quick ones first, until
one fails or hangs twice in a row. Sweeps run for mistakes that all other tests miss. Code in other
processes counts, too. A mistake that no test reaches has survived.

`--compare` takes the mistakes that were killed when a file was written, and reports whether today's
tests kill all of them. Each former killer runs first; other tests run only if it is gone or kills
no more. Lines are found again wherever they moved. A mistake whose line no longer exists is "gone"
and does not count. The times above are for two idle cores.

With `--progress` an interrupted run resumes, as long as no test and no code changes.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import queue
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants_worker import SWITCH

ROOT = Path(__file__).parent.parent
# Parts of automicro that the tests must cover. Each gets at least LEAST mistakes.
AREAS = (
    *(("step",), ("transaction",), ("batch",), ("loss", "checking"), ("policy",), ("optimizer",)),
    *(("microbatcher.py",), ("ranks",), ("checkpoints",), ("integrations",)),
    *(("trainer/data",), ("trainer/resume",), ("trainer/fit.py", "trainer/step.py")),
)
LEAST = 8
# Tests that need a device, read the source of automicro, or serve another purpose.
LEFT_OUT = (
    *(
        "tests/packaging",
        "tests/gpu",
        "tests/standin",
        "tests/real_memory",
        "tests/test_mutants.py",
    ),
    *("tests/test_architecture.py", "tests/test_documentation.py", "tests/test_gpu_report.py"),
)
MARKS = "not gpu and not slow and not standin"  # sweeps included
# Time limit of a test, in seconds, while all mistakes are inactive, on a busy machine.
ASLEEP = 600.0
# The same while one is active, in addition to ten times its former duration.
LIMIT = 30.0
TURNED = {
    ast.Lt: ">=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake, identified by the text of its line, so that it is found after moves.

    Attributes:
        file: path relative to the root.
        function: qualified name of the function.
        line: text of the line, stripped.
        nth: index among mistakes of this function that are otherwise equal.
        kind: kind of the mistake.
        before: original text.
        after: replacement.
    """

    file: str
    function: str
    line: str
    nth: int
    kind: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Position of a mistake: bytes of a file, and the line for messages."""

    mutant: Mutant
    number: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a mistake.

    Attributes:
        outcome: "killed", "survived" or "gone" (its line no longer exists).
        by: the test that failed or hung.
        reached: number of selected tests that reach it.
        ran: number of these that ran.
    """

    mutant: Mutant
    outcome: str
    by: str = ""
    reached: int = 0
    ran: int = 0


class Source:
    """A file with its lines and expression positions."""

    def __init__(self, path: Path) -> None:
        self.bytes = path.read_bytes()
        self.tree = ast.parse(self.bytes)
        self.lines = self.bytes.decode().splitlines()
        lengths = (len(line) for line in self.bytes.splitlines(keepends=True))
        self._starts = list(itertools.accumulate(lengths, initial=0))

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def begin(self) -> int:
        """Position for imports: after the docstring."""
        first = next(
            each
            for each in self.tree.body
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            and not (isinstance(each, ast.ImportFrom) and each.module == "__future__")
        )
        decorators: list[ast.expr] = getattr(first, "decorator_list", [])
        number = min([first.lineno, *(each.lineno for each in decorators)])
        return self._starts[number - 1]

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()


def places_in(path: Path, root: Path) -> list[Place]:
    """Return all possible mistakes in a file, in order."""
    source = Source(path)
    unused = {  # calls whose result is unused can be removed
        statement.value
        for statement in ast.walk(source.tree)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    }
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    found = []
    for node, function in nodes_that_run(source.tree):
        start, end = source.span(node)
        before = source.text(node)
        line = source.lines[node.lineno - 1].strip()
        wrong = [("call left out", "None")] if node in unused else mistakes(node, source)
        for kind, after in wrong:
            key = (function, line, kind, before, after)
            mutant = Mutant(
                file=str(path.relative_to(root)),
                function=function,
                line=line,
                nth=counts[key],
                kind=kind,
                before=before,
                after=after,
            )
            counts[key] += 1
            found.append(Place(mutant=mutant, number=node.lineno, start=start, end=end))
    return found


def nodes_that_run(
    node: ast.AST, names: tuple[str, ...] = (), *, inside: bool = False
) -> Iterator[tuple[ast.expr, str]]:
    """Yield expressions in function bodies, each with the name of its function.

    Annotations, defaults, decorators and f-strings are skipped.
    """
    if isinstance(node, ast.expr) and inside:
        yield node, ".".join(names)
    if isinstance(node, ast.JoinedStr | ast.pattern):
        return
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names = (*names, node.name)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list") or (is_function and name != "body"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_that_run(child, names, inside=inside or is_function)


def mistakes(node: ast.expr, source: Source) -> Iterator[tuple[str, str]]:
    """Yield possible mistakes in an expression: the kind and the wrong text."""
    text = source.text
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield "comparison turned", f"({text(left)}) {TURNED[type(operator)]} ({text(right)})"
        case ast.BoolOp(op=operator, values=values):
            other = " or " if isinstance(operator, ast.And) else " and "
            yield "and, or", other.join(f"({text(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not left out", f"({text(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition negated", f"({text(orelse)}) if ({text(test)}) else ({text(body)})"
        case ast.Constant(value=bool() as value):
            yield "constant changed", str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant changed", repr(value + 1)


def places(root: Path, area: Sequence[str] = (".",)) -> list[Place]:
    """Return possible mistakes in a part of the package, or in all of it."""
    files: list[Path] = []
    for name in area:
        path = root / "automicro" / name
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [place for path in files for place in places_in(path, root)]


def pick(root: Path, *, seed: int, count: int) -> list[Mutant]:
    """Draw mistakes, at most one per statement, equally over the kinds of each area.

    Each area gets at least LEAST, or an equal share if that is too many; larger areas get more.
    """
    of_areas = [places(root, area) for area in AREAS]
    numbers = [0] * len(AREAS)
    least = min(LEAST, count // len(AREAS))
    for _ in range(count):
        short = [here for here, number in enumerate(numbers) if number < least and of_areas[here]]
        every = range(len(AREAS))
        numbers[
            max(short or every, key=lambda here: len(of_areas[here]) / (numbers[here] + 1))
        ] += 1
    random_numbers = random.Random(seed)
    return [
        mutant
        for of_area, number in zip(of_areas, numbers, strict=True)
        for mutant in pick_in(of_area, number, random_numbers)
    ]


def pick_in(of_area: Sequence[Place], count: int, random_numbers: random.Random) -> list[Mutant]:
    by_kind: dict[str, list[Place]] = collections.defaultdict(list)
    for place in of_area:
        by_kind[place.mutant.kind].append(place)
    picked: list[Place] = []
    for kind in itertools.cycle(random_numbers.sample(sorted(by_kind), len(by_kind))):
        if len(picked) == count or not any(by_kind.values()):
            break
        free = [place for place in by_kind[kind] if not any(clash(place, one) for one in picked)]
        if free:
            picked.append(random_numbers.choice(free))
        by_kind[kind] = free
    return [place.mutant for place in picked]


def clash(one: Place, other: Place) -> bool:
    return one.mutant.file == other.mutant.file and (
        one.number == other.number or (one.start < other.end and other.start < one.end)
    )


def find(root: Path, mutants: Sequence[Mutant]) -> list[Place | None]:
    """Return current positions of mistakes; None if gone.

    Renamed files and functions are recognized if the line is unambiguous.
    """
    found: list[Place | None] = [None] * len(mutants)
    everywhere = places(root)
    for renamed in ((), ("file",), ("function",), ("file", "function")):
        unknown: Any = dict.fromkeys(renamed, "")
        where: dict[Mutant, list[Place]] = collections.defaultdict(list)
        for place in everywhere:
            where[dataclasses.replace(place.mutant, **unknown)].append(place)
        for number, mutant in enumerate(mutants):
            meant = where[dataclasses.replace(mutant, **unknown)]
            if found[number] is None and len(meant) == 1:
                others = [place for place in found if place is not None]
                if not any(clash(meant[0], other) for other in others):
                    found[number] = meant[0]
    return found


def put_to_sleep(root: Path, found: Sequence[Place | None]) -> None:
    """Write every mistake into the tree, each behind a condition."""
    by_file: dict[str, list[tuple[int, Place]]] = collections.defaultdict(list)
    for number, place in enumerate(found):
        if place is not None:
            by_file[place.mutant.file].append((number, place))
    for name, there in by_file.items():
        source = (root / name).read_bytes()
        begin = Source(root / name).begin()
        for number, place in sorted(there, key=lambda each: -each[1].start):
            before = source[place.start : place.end].decode()
            text = f"(({place.mutant.after}) if {SWITCH}.awake({number}) else ({before}))"
            source = source[: place.start] + text.encode() + source[place.end :]
        switch = f"import {SWITCH}\n".encode()  # not a call: a compiler cannot trace __import__
        (root / name).write_bytes(source[:begin] + switch + source[begin:])


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a test in a worker: whether it failed, and the mistakes that it reached."""

    test: str
    failed: bool
    seconds: float
    passed: Sequence[int]


class Worker:
    """Process that runs tests on request in a copy of the tree.

    Args:
        root: root of the tree.
        found: mistakes to insert, inactive.
        arguments: pytest's arguments, which select the tests.
    """

    def __init__(self, root: Path, found: Sequence[Place | None], arguments: Sequence[str]) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        folder = Path(self._temporary.name)
        copy = folder / "tree"
        unneeded = shutil.ignore_patterns(
            ".git", ".*_cache", ".venv*", "__pycache__", ".hypothesis"
        )
        shutil.copytree(root, copy, ignore=unneeded)
        put_to_sleep(copy, found)
        (folder / "tmp").mkdir()
        own = {"PYTHONPATH": str(copy), "TMPDIR": str(folder / "tmp")}
        self._log = folder / "log"
        script = str(Path(__file__).with_name("mutants_worker.py"))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, str(folder), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=copy,
                env={**os.environ, "CI": "1", "OMP_NUM_THREADS": "1", **own},
            )
        self.tests: dict[str, bool] = {}

    def collect(self) -> None:
        """Wait for the list `tests` of collected tests, with their sweep marks."""
        self.tests = self._answer()

    def run(self, tests: Sequence[str], limits: Sequence[float], *, awake: int) -> list[Result]:
        assert self._process.stdin is not None
        order = {"tests": list(tests), "limits": list(limits), "awake": awake}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return [
            Result(test=test, failed=failed, seconds=seconds, passed=passed)
            for test, failed, seconds, passed in self._answer()
        ]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # it ends after its current order
        self._process.stdout.close()
        self._process.wait()
        self._temporary.cleanup()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-30:])
            raise SystemExit(f"a worker ended:\n{tail}")
        return json.loads(line)


class Progress:
    """Results so far, optionally also in a file, from which another run can resume.

    Attributes:
        seconds: duration of each test that ran with inactive mistakes.
        passing: mistakes that each test reached; none if it failed.
        verdicts: results by stage and mistake.

    Args:
        path: path of the file.
        key: digest of everything that must not have changed.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.seconds: dict[str, float] = {}
        self.passing: dict[str, set[int]] = {}
        self.verdicts: dict[tuple[str, int], Mapping[str, Any]] = {}
        self.failed: set[str] = set()
        self._file = None
        if path is None:
            return
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        is_same = lines[:1] == [key + "\n"]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(key + "\n")
            for line in lines[1:] if is_same else ():
                if line.endswith("\n"):  # not truncated by the end of that run
                    file.write(line)
                    self._learn(json.loads(line))
        if lines and not is_same:
            say("code, tests or mistakes have changed since the earlier run: beginning anew")
        self._file = path.open("a", buffering=1)

    def note(self, **what: Any) -> None:
        self._learn(what)
        if self._file is not None:
            self._file.write(json.dumps(what) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _learn(self, what: Mapping[str, Any]) -> None:
        if "verdict" in what:
            self.verdicts[what["stage"], what["number"]] = what["verdict"]
        for test, failed, seconds, passed in what.get("ran", ()):
            self.seconds[test] = seconds
            self.passing[test] = set() if failed else set(passed)
            self.failed |= {test} if failed else set()


class Measurement:
    """Judges mistakes with several workers.

    Args:
        workers: workers that have collected.
        progress: results so far.
        seconds: test time per mistake and stage.
    """

    def __init__(self, workers: Sequence[Worker], progress: Progress, seconds: float) -> None:
        self._workers = workers
        self._progress = progress
        self._seconds = seconds
        self._order = {name: place for place, name in enumerate(workers[0].tests)}
        self.verdicts: dict[int, dict[str, Any]] = {}

    def stage(
        self, name: str, tests: Sequence[str], numbers: Sequence[int], first: Mapping[int, str]
    ) -> None:
        """Let tests judge the mistakes that are not killed yet.

        Args:
            name: name of the stage.
            tests: tests that judge.
            numbers: indices of the mistakes.
            first: the test that judges a mistake before all others.
        """
        left = [each for each in numbers if self.verdicts.get(each, {}).get("outcome") != "killed"]
        if not left or not tests:
            return
        known = self._progress.verdicts
        self._map(name, [test for test in tests if test not in self._progress.seconds])
        todo = [number for number in left if (name, number) not in known]

        def judge(worker: Worker, number: int) -> None:
            verdict = self._judge(worker, number, tests, first.get(number, ""))
            self._progress.note(stage=name, number=number, verdict=verdict)

        self._spread(f"{name}: mistakes judged", todo, judge, len)
        for number in left:
            before = self.verdicts.get(number, {})
            now = dict(known[name, number])
            for count in ("reached", "ran"):
                now[count] += before.get(count, 0)
            self.verdicts[number] = now

    def _map(self, name: str, tests: Sequence[str]) -> None:
        """Find out which tests reach which mistakes."""
        by_file = collections.defaultdict(list)
        for test in sorted(tests, key=self._order.__getitem__):
            by_file[test.partition("::")[0]].append(test)

        def run(worker: Worker, left: list[str]) -> None:
            while left:
                results = worker.run(left, [ASLEEP] * len(left), awake=-1)
                left = left[len(results) :]
                self._progress.note(ran=[list(dataclasses.astuple(each)) for each in results])

        # Large ones first, so that the workers finish at about the same time.
        files = sorted(by_file.values(), key=len, reverse=True)
        self._spread(
            f"{name}: tests run once", files, run, lambda done: sum(len(each) for each in done)
        )

    def _judge(
        self, worker: Worker, number: int, tests: Sequence[str], first: str
    ) -> dict[str, Any]:
        reached = [test for test in tests if number in self._progress.passing[test]]
        chosen = self._choose(reached, first)
        limits = {test: LIMIT + 10 * self._progress.seconds[test] for test in chosen}
        told: dict[str, Any] = {"outcome": "survived", "by": "", "reached": len(reached)}
        told["ran"] = 0

        def run(tests: Sequence[str]) -> list[Result]:
            return worker.run(tests, [limits[test] for test in tests], awake=number)

        while chosen:
            results = run(chosen)
            chosen = chosen[len(results) :]
            told["ran"] += len(results)
            test = results[-1].test
            # A single failure might have other reasons on a busy machine.
            if results[-1].failed and run([test])[-1].failed:
                return told | {"outcome": "killed", "by": test}
        return told

    def _choose(self, reached: Sequence[str], first: str) -> list[str]:
        """Return quick tests that reach a mistake, with shared fixtures kept together."""
        stages: list[list[str]] = [[], []]
        total = 0.0
        for test in sorted(reached, key=self._progress.seconds.__getitem__):
            stages[total > self._seconds / 20].append(test)
            total += self._progress.seconds[test]
            if total > self._seconds:
                break
        in_order = [test for each in stages for test in sorted(each, key=self._order.__getitem__)]
        if first in reached:
            return [first, *(test for test in in_order if test != first)]
        return in_order

    def _spread(
        self,
        what: str,
        jobs: Sequence[Any],
        do: Callable[[Worker, Any], None],
        size: Callable[[Sequence[Any]], int],
    ) -> None:
        """Assign each job to a free worker, and print the progress."""
        free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            free.put(worker)
        begin = time.monotonic()

        def with_a_worker(job: Any) -> Any:
            worker = free.get()
            try:
                do(worker, job)
            finally:
                free.put(worker)
            return job

        done = []
        with concurrent.futures.ThreadPoolExecutor(len(self._workers)) as pool:
            try:
                waiting = [pool.submit(with_a_worker, job) for job in jobs]
                for each in concurrent.futures.as_completed(waiting):
                    done.append(each.result())
                    minutes = (time.monotonic() - begin) / 60
                    left = minutes * (size(jobs) / size(done) - 1)
                    say(f"{what}: {size(done)} of {size(jobs)}, about {left:.0f} min left")
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    mutants: Sequence[Mutant],
    arguments: Sequence[str],
    *,
    root: Path,
    seconds: float,
    former: Mapping[Mutant, str] | None = None,
    progress: Path | None = None,
    workers: int = 2,
) -> list[Verdict]:
    """Judge mistakes in copies of the tree.

    Args:
        mutants: the mistakes.
        arguments: pytest's arguments, which select the tests that judge.
        root: root of the tree.
        seconds: test time per mistake and stage.
        former: the test that killed a mistake before, which judges it first.
        progress: file that survives an interruption.
        workers: number of processes that run tests.
    """
    found = find(root, mutants)
    numbers = [number for number, place in enumerate(found) if place is not None]
    with contextlib.ExitStack() as stack:
        crew = []
        for _ in range(workers):
            crew.append(Worker(root, found, arguments))
            stack.callback(crew[-1].close)
        for worker in crew:
            worker.collect()
        known = Progress(progress, digest(root, mutants, arguments))
        stack.callback(known.close)
        measurement = Measurement(crew, known, seconds)
        tests = crew[0].tests
        first = {number: (former or {}).get(mutants[number], "") for number in numbers}
        # If a killer is gone or has other parameters, tests with its name might kill as well.
        gone = {function_of(test) for test in first.values() if test and test not in tests}
        named = set(first.values())
        killers = [test for test in tests if test in named or function_of(test) in gone]
        say(f"{len(numbers)} mistakes of {len(mutants)} have their lines; {len(tests)} tests")
        measurement.stage("former killers", killers, numbers, first)
        quick = [test for test, is_sweep in tests.items() if not is_sweep]
        measurement.stage("tests", quick, numbers, first)
        sweeps = [test for test, is_sweep in tests.items() if is_sweep]
        measurement.stage("sweeps", sweeps, numbers, first)
        if known.failed:
            say("these fail while all mistakes sleep, and judge nothing:")
            say("\n".join(f"  {test}" for test in sorted(known.failed)))
    no_test: dict[str, Any] = {"outcome": "survived"}
    return [
        Verdict(mutant=mutant, **measurement.verdicts.get(number, no_test))
        if place is not None
        else Verdict(mutant=mutant, outcome="gone")
        for number, (mutant, place) in enumerate(zip(mutants, found, strict=True))
    ]


def function_of(test: str) -> str:
    return test.partition("::")[2].partition("[")[0]


def digest(root: Path, mutants: Sequence[Mutant], arguments: Sequence[str]) -> str:
    """Return a digest of everything that a verdict depends on."""
    whole = hashlib.sha256(repr((mutants, arguments)).encode())
    for path in sorted(root.rglob("*.py")):
        if ".venv" not in str(path.relative_to(root)):
            whole.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return whole.hexdigest()


def table(verdicts: Sequence[Verdict]) -> str:
    rows = []
    for each in sorted(verdicts, key=lambda verdict: verdict.outcome):
        mutant = each.mutant
        by = each.by or f"{each.ran} of {each.reached} tests"
        rows.append(f"{each.outcome:8}  {mutant.kind:18}  {mutant.file}: {mutant.function}  {by}")
        if each.outcome != "killed":
            rows.append(f"          {mutant.line}")
            rows.append(f"          {mutant.before!r} → {mutant.after!r}")
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    rows.append(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return "\n".join(rows)


def read(path: Path) -> list[Verdict]:
    told = json.loads(path.read_text())
    return [Verdict(**one | {"mutant": Mutant(**one["mutant"])}) for one in told]


def write(path: Path, verdicts: Sequence[Verdict]) -> None:
    told = [dataclasses.asdict(verdict) for verdict in verdicts]
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=34)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--mutants", type=Path, help="of an earlier --json, in place of a seed")
    parser.add_argument("--compare", type=Path, help="an earlier --json: exit 1 if it kills less")
    parser.add_argument("--tests", default="", help="what pytest is given, as in a shell")
    parser.add_argument("--json", type=Path, help="write the mistakes with their verdicts")
    parser.add_argument("--progress", type=Path, help="goes on with this file after a break")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree to judge")
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests for each mistake")
    parser.add_argument("--workers", type=int, default=2, help="tests that run at a time")
    given = parser.parse_args()
    root = given.root.resolve()
    missing = [part for area in AREAS for part in area if not (root / "automicro" / part).exists()]
    former: dict[Mutant, str] = {}
    if given.compare:
        former = {each.mutant: each.by for each in read(given.compare) if each.outcome == "killed"}
        mutants = list(former)
    elif given.mutants:
        mutants = [each.mutant for each in read(given.mutants)]
    elif missing:
        parser.error(f"no longer there: {', '.join(missing)}; say in AREAS where that code is now")
    else:
        mutants = pick(root, seed=given.seed, count=given.count)
    left_out = [option for name in LEFT_OUT for option in ("--ignore", name)]
    arguments = shlex.split(given.tests) or ["tests", "automicro", *left_out]
    verdicts = measure(
        mutants,
        ["-m", MARKS, *arguments],
        root=root,
        seconds=given.seconds,
        former=former,
        progress=given.progress,
        workers=given.workers,
    )
    print(table(verdicts))
    if given.json:
        kept = read(given.compare) if given.compare else []
        write(given.json, [*verdicts, *(each for each in kept if each.mutant not in former)])
    lost = [each for each in verdicts if each.outcome == "survived"]
    if given.compare and lost:
        print(f"{len(lost)} mistakes survive that were killed before: a test too many is gone")
    return 1 if given.compare and lost else 0


if __name__ == "__main__":
    sys.exit(main())
