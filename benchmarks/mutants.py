"""How many small mistakes in the core the tests would notice.

    python -m benchmarks.mutants [--seed 15] [--count 60] [--tests tests/policy/test_policy.py …]
    python -m benchmarks.mutants --save-mutants core.json
    python -m benchmarks.mutants --mutants core.json --json before.json

Picked by a seed are lines of the core; each gets one mistake: a comparison turned, a call left
out, a constant changed, a condition negated. All of them stand in one temporary copy of the tree,
asleep. The tests run once in it, which says what is passed on its way by each of them; then, for
each mistake, awake in a process of its own, those run that pass by, the quick ones first, until one
fails or hangs. A saved list finds its lines again wherever they moved, so that two states of the
tests are judged by the same mistakes.

Tests in other processes count, too. A mistake that no test passes by has survived.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import itertools
import json
import multiprocessing.forkserver
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).parent.parent
CORE = (
    *("step", "transaction", "batch", "loss", "policy", "optimizer", "microbatcher.py"),
    *("ranks/interface.py", "ranks/votes.py", "ranks/coordinated.py"),
)
# What reads the source of automicro, or runs for the sake of something else.
LEFT_OUT = (
    *("tests/packaging", "tests/gpu", "tests/standin", "tests/real_memory", "tests/trainer/resume"),
    *("tests/test_architecture.py", "tests/test_documentation.py", "tests/test_gpu_report.py"),
)
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
# Imported by the copy of the tree: which mistake is awake in this process.
SWITCH = "automicro_mutants_switch"
SWITCH_SOURCE = """
import os, time

FOLDER = {folder!r}
passed = set()
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
    if _process == {main}:
        passed.add(number)
    elif time.time() - _told.get(number, 0) > 0.01:
        _told[number] = time.time()
        with open(os.path.join(FOLDER, "passed"), "a") as file:
            file.write(f"{{number}} {{time.time()}}\\n")
    return False
"""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake, found again by the text of its line when lines have moved.

    Attributes:
        file: relative to the root.
        line: its text, without the blanks around it.
        nth: among those of this file with all else equal.
        kind: what is wrong.
        before: what is there.
        after: what stands in its place.
    """

    file: str
    line: str
    nth: int
    kind: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a mistake is: bytes of a file, and the line for people."""

    mutant: Mutant
    number: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a mistake.

    Attributes:
        outcome: "caught", "survived" or "gone" (its line is no more).
        by: the test that failed or hung.
        reached: how many tests pass by.
        ran: how many of them ran.
    """

    mutant: Mutant
    line_number: int
    outcome: str
    by: str
    reached: int
    ran: int


class Source:
    """A file, its lines, and where its expressions lie."""

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

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()


def places_in(path: Path, root: Path) -> list[Place]:
    """All mistakes that could be made in a file, in order."""
    source = Source(path)
    unused = {  # the calls whose result nobody takes: those can be left out
        statement.value
        for statement in ast.walk(source.tree)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    }
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    found = []
    for node in nodes_that_run(source.tree):
        start, end = source.span(node)
        before = source.text(node)
        line = source.lines[node.lineno - 1].strip()
        wrong = [("call left out", "None")] if node in unused else mistakes(node, source)
        for kind, after in wrong:
            key = (line, kind, before, after)
            mutant = Mutant(
                file=str(path.relative_to(root)),
                line=line,
                nth=counts[key],
                kind=kind,
                before=before,
                after=after,
            )
            counts[key] += 1
            found.append(Place(mutant=mutant, number=node.lineno, start=start, end=end))
    return found


def nodes_that_run(node: ast.AST, *, inside: bool = False) -> Iterator[ast.expr]:
    """Expressions in the bodies of functions: no annotations, defaults, decorators or f-strings."""
    if isinstance(node, ast.expr) and inside:
        yield node
    if isinstance(node, ast.JoinedStr | ast.pattern):
        return
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list") or (is_function and name != "body"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_that_run(child, inside=inside or is_function)


def mistakes(node: ast.expr, source: Source) -> Iterator[tuple[str, str]]:
    """What can be made wrong of an expression: the kind, and the wrong text."""
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


def places(root: Path) -> dict[str, list[Place]]:
    """What could be made wrong in each file of the core."""
    files: list[Path] = []
    for name in CORE:
        path = root / "automicro" / name
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return {str(path.relative_to(root)): places_in(path, root) for path in files}


def pick(root: Path, *, seed: int, count: int) -> list[Mutant]:
    """So many mistakes, of each kind alike, at most one in a statement."""
    by_kind: dict[str, list[Place]] = collections.defaultdict(list)
    for of_file in places(root).values():
        for place in of_file:
            by_kind[place.mutant.kind].append(place)
    random_numbers = random.Random(seed)
    picked: list[Place] = []
    for kind in itertools.cycle(sorted(by_kind)):
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
    """Where they are now; None for what is gone."""
    where = {place.mutant: place for of_file in places(root).values() for place in of_file}
    elsewhere = {  # the file may have another name by now
        dataclasses.replace(mutant, file=""): place for mutant, place in where.items()
    }
    return [
        where.get(mutant) or elsewhere.get(dataclasses.replace(mutant, file=""))
        for mutant in mutants
    ]


def put_to_sleep(root: Path, found: Sequence[Place | None]) -> None:
    """Write every mistake into the tree, each under a condition."""
    by_file: dict[str, list[tuple[int, Place]]] = collections.defaultdict(list)
    for number, place in enumerate(found):
        if place is not None:
            by_file[place.mutant.file].append((number, place))
    for name, there in by_file.items():
        source = (root / name).read_bytes()
        for number, place in sorted(there, key=lambda each: -each[1].start):
            before = source[place.start : place.end].decode()
            switch = f'__import__("{SWITCH}").awake({number})'
            text = f"(({place.mutant.after}) if {switch} else ({before}))"
            source = source[: place.start] + text.encode() + source[place.end :]
        (root / name).write_bytes(source)


class Judge:
    """A plugin of pytest: all tests once, and for each mistake those that pass by.

    Args:
        folder: where the switch keeps what it knows.
        numbers: of the mistakes that are to be judged.
        seconds: of tests, at most, for each mistake.
    """

    def __init__(self, folder: Path, numbers: Sequence[int], seconds: float) -> None:
        self._folder = folder
        self._numbers = numbers
        self._seconds = seconds
        self._failed: list[str] = []
        self._durations: dict[str, float] = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._durations[report.nodeid] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False  # nothing can be said of tests that are not even collected
        passing = self._run_all(session.items)
        verdicts = {}
        for number in self._numbers:
            items = [item for item in session.items if number in passing[item.nodeid]]
            verdicts[number] = self._judge(number, items)
            print(f"\n{number}: {verdicts[number]}", file=sys.__stderr__, flush=True)
        (self._folder / "verdicts.json").write_text(json.dumps(verdicts))
        return True

    def _run_all(self, items: list[pytest.Item]) -> dict[str, set[int]]:
        switch = __import__(SWITCH)
        passing: dict[str, set[int]] = {}
        ends = []
        for item, following in zip(items, [*items[1:], None], strict=True):
            switch.passed.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            passing[item.nodeid] = set(switch.passed)
            ends.append((time.time(), item.nodeid))
        told = self._folder / "passed"
        seen = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
        moments = iter(ends)
        end, name = next(moments)
        for number, when in sorted(seen, key=lambda each: float(each[1])):
            while float(when) > end:
                end, name = next(moments, (float("inf"), name))
            passing[name].add(int(number))
        for name in self._failed:  # what fails without a mistake says nothing about one
            passing[name] = set()
        return passing

    def _judge(self, number: int, items: list[pytest.Item]) -> dict[str, Any]:
        quick_first = sorted(items, key=lambda item: self._durations[item.nodeid])
        chosen: list[list[pytest.Item]] = [[], []]
        total = 0.0
        for item in quick_first:
            total += self._durations[item.nodeid]
            if total > self._seconds:
                break
            chosen[total > self._seconds / 20].append(item)
        order = {item.nodeid: place for place, item in enumerate(items)}
        run = [
            item  # what shares fixtures stays together
            for stage in chosen
            for item in sorted(stage, key=lambda item: order[item.nodeid])
        ]
        told: dict[str, Any] = {"outcome": "survived", "by": "", "reached": len(items)}
        told["ran"] = len(run)
        if run:
            (self._folder / "awake").write_text(str(number))
            (self._folder / "last").write_text("")
            process = os.fork()
            if process == 0:
                self._run_until_one_fails(run)
            if not ended_well(process, within=60 + 4 * self._seconds):
                told |= {"outcome": "caught", "by": (self._folder / "last").read_text()}
        return told

    def _run_until_one_fails(self, run: list[pytest.Item]) -> None:
        os.setpgid(0, 0)
        multiprocessing.forkserver._forkserver = multiprocessing.forkserver.ForkServer()
        server = multiprocessing.forkserver._forkserver
        for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process"):
            setattr(multiprocessing.forkserver, name, getattr(server, name))
        multiprocessing.forkserver.set_forkserver_preload = server.set_forkserver_preload
        with open(os.devnull, "w") as nowhere:
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
        self._failed.clear()
        for item, following in zip(run, [*run[1:], None], strict=True):
            (self._folder / "last").write_text(item.nodeid)
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except BaseException:
                os._exit(1)
            if self._failed:
                os._exit(1)
        os._exit(0)


def ended_well(process: int, *, within: float) -> bool:
    """Wait for a process that leads its group, and end what is left of it."""
    end = time.monotonic() + within
    status = None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(process, os.WNOHANG)
        if done:
            status = code
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status == 0


def run_inside(folder: Path, seconds: float, numbers: list[int], arguments: list[str]) -> int:
    """The part in the copy of the tree."""
    (folder / "awake").write_text("-1")
    source = SWITCH_SOURCE.format(folder=str(folder), main=os.getpid())
    (Path.cwd() / f"{SWITCH}.py").write_text(source)
    judge = Judge(folder, numbers, seconds)
    # The copy's automicro may be without the plugin that is installed beside it.
    left_out = [f"-pno:{each}" for each in ("cacheprovider", "xdist", "automicro")]
    quiet = ["-q", *left_out, "-o", "timeout=60", "--tb=no"]
    return pytest.main([*quiet, *arguments], plugins=[judge])


def measure(
    mutants: Sequence[Mutant], tests: Sequence[str], *, root: Path, seconds: float
) -> list[Verdict]:
    """Judge mistakes in a copy of the tree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "tree"
        unneeded = shutil.ignore_patterns(".git", ".*_cache", ".venv", "__pycache__", ".hypothesis")
        shutil.copytree(root, copy, ignore=unneeded)
        found = find(copy, mutants)
        put_to_sleep(copy, found)
        numbers = [number for number, place in enumerate(found) if place is not None]
        environment = {**os.environ, "PYTHONPATH": str(copy), "CI": "1", "OMP_NUM_THREADS": "1"}
        inside = json.dumps([str(folder), seconds, numbers, list(tests)])
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", inside]
        subprocess.run(command, cwd=copy, env=environment, check=False)
        judged = json.loads((folder / "verdicts.json").read_text())
    verdicts = []
    for number, (mutant, place) in enumerate(zip(mutants, found, strict=True)):
        told = {"outcome": "gone", "by": "", "reached": 0, "ran": 0}
        told |= judged.get(str(number), {})
        line_number = 0 if place is None else place.number
        verdicts.append(Verdict(mutant=mutant, line_number=line_number, **cast(Any, told)))
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    rows = []
    for each in sorted(verdicts, key=lambda verdict: verdict.outcome):
        what = f"{each.mutant.file}:{each.line_number}"
        by = each.by or f"{each.ran} of {each.reached} tests"
        rows.append(f"{each.outcome:8}  {each.mutant.kind:18}  {what:40}  {by}")
        if each.outcome != "caught":
            rows.append(f"          {each.mutant.before!r} → {each.mutant.after!r}")
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    rows.append(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="mistakes in the core that the tests notice")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--tests", default="", help="what pytest is given, as in a shell")
    parser.add_argument("--mutants", type=Path, help="a saved list in place of a seed")
    parser.add_argument("--save-mutants", type=Path, help="write the list and end")
    parser.add_argument("--only-survivors", type=Path, help="of an earlier --json")
    parser.add_argument("--json", type=Path, help="write the verdicts")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree to judge")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each mistake")
    given = parser.parse_args()
    root = given.root.resolve()
    missing = [name for name in CORE if not (root / "automicro" / name).exists()]
    if missing:
        parser.error(f"no longer there: {', '.join(missing)}; say in CORE where the core is now")
    if given.only_survivors:
        earlier = json.loads(given.only_survivors.read_text())
        mutants = [Mutant(**one["mutant"]) for one in earlier if one["outcome"] == "survived"]
    elif given.mutants:
        mutants = [Mutant(**one) for one in json.loads(given.mutants.read_text())]
    else:
        mutants = pick(root, seed=given.seed, count=given.count)
    if given.save_mutants:
        text = json.dumps([dataclasses.asdict(mutant) for mutant in mutants], indent=1)
        given.save_mutants.write_text(text + "\n")
        return
    left_out = [option for name in LEFT_OUT for option in ("--ignore", name)]
    tests = shlex.split(given.tests) or ["tests", *left_out]
    verdicts = measure(mutants, tests, root=root, seconds=given.seconds)
    print(table(verdicts))
    if given.json:
        told = [dataclasses.asdict(verdict) for verdict in verdicts]
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        folder, seconds, numbers, arguments = json.loads(sys.argv[2])
        sys.path.insert(0, str(Path.cwd()))
        sys.exit(run_inside(Path(folder), seconds, numbers, arguments))
    main()
