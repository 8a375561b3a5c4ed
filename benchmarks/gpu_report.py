"""Run everything that needs a GPU, and write the results as dated JSON.

    python -m benchmarks.gpu_report [--out FOLDER] [--parts NAME,NAME] [-k EXPRESSION] [--standin]
    python -m benchmarks.gpu_report --show FILE

Each part runs in its own process, the most informative first. The file is rewritten after every
test, so that an interruption loses nothing. Everything takes ten minutes at most. The exit code is
1 if a test failed or a part did not end, but the report is written. See docs/benchmarks.md.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu_page import is_well, page, verdict
from tests.gpu.journal import read_journal

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 600.0  # for everything
SLOWER = 10  # the stand-in is slower: its kernels run on a CPU that might be shared
RESULTS = ROOT / "benchmarks" / "results"
REHEARSALS = ROOT / "build" / "rehearsals"
_SECONDS_BETWEEN_LOOKS = 0.5
_MOST_CHARACTERS = 4000  # of the output of a part that did not end well


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part that runs in its own process.

    Attributes:
        name: name in the report.
        asks: the question that it answers.
        seconds: time limit.
        tests: a file of tests/gpu, whose journal is read …
        script: … or a module that writes its findings with ``--json``, and its arguments.
        rehearsed_with: arguments of the script on the stand-in.
        environment: additional environment variables.
        needs: a feature that only CUDA has, without which it is skipped.
    """

    name: str
    asks: str
    seconds: float
    tests: str = ""
    script: Sequence[str] = ()
    rehearsed_with: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: str = ""


def again(name: str, setting: str, *, seconds: float) -> list[Part]:
    """Return tests that depend on the allocator, with another allocator setting."""
    return [
        Part(
            name=f"{part} with {name}",
            asks=f"does the same hold under {setting}",
            seconds=seconds,
            tests=f"test_{part}_gpu.py",
            environment={"PYTORCH_ALLOC_CONF": setting},
            needs="these settings of the allocator",
        )
        for part in ("oom", "sizes")
    ]


PARTS = [
    Part(
        name="transfer",
        asks="copies that overlap change no bit and wait for nothing",
        seconds=40,
        tests="test_transfer_gpu.py",
    ),
    Part(
        name="optimizer",
        asks="memory of the first step is foretold",
        seconds=60,
        tests="test_optimizer_gpu.py",
    ),
    Part(
        name="oom",
        asks="a step that ran out of memory has the bits of one that did not",
        seconds=90,
        tests="test_oom_gpu.py",
    ),
    Part(
        name="sizes",
        asks="the fewest microbatches are found, and retries are no failures",
        seconds=60,
        tests="test_sizes_gpu.py",
    ),
    Part(
        name="ranks",
        asks="guards and votes on real streams, recovery of two ranks",
        seconds=90,
        tests="test_ranks_gpu.py",
    ),
    Part(
        name="two ranks",
        asks="a recovery of two processes on one device",
        seconds=90,
        tests="test_two_ranks_gpu.py",
    ),
    Part(
        name="fake ranks",
        asks="FSDP2's guards on real streams, with a second rank that is made up",
        seconds=60,
        tests="test_fake_ranks_gpu.py",
    ),
    Part(
        name="waits",
        asks="how often a settled batch waits for the device",
        seconds=60,
        tests="test_waits_gpu.py",
    ),
    Part(
        name="training",
        asks="deterministic, compiled and in half precision",
        seconds=120,
        tests="test_training_gpu.py",
    ),
    Part(
        name="smaller",
        asks="levels and parts with sizes of their own, on a full device",
        seconds=60,
        tests="test_smaller_gpu.py",
    ),
    Part(
        name="memory_limit",
        asks="a limit holds",
        seconds=40,
        tests="test_memory_limit_gpu.py",
    ),
    Part(
        name="exactness",
        asks="the gradient is the whole batch's, in fp64",
        seconds=90,
        tests="test_exactness_gpu.py",
    ),
    Part(
        name="libraries",
        asks="what libraries say on a full device, and whether it is understood",
        seconds=90,
        tests="test_library_errors_gpu.py",
    ),
    Part(
        name="doctor",
        asks="a snapshot of the device's own allocator names the planted culprit",
        seconds=60,
        tests="test_doctor_gpu.py",
        # Otherwise these hold more memory than the culprits.
        environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"},
    ),
    Part(
        name="plan",
        asks="planned peaks beside those that the device's own allocator counts",
        seconds=60,
        tests="test_plan_gpu.py",
    ),
    *again("expandable segments", "expandable_segments:True", seconds=60),
    *again("cudaMallocAsync", "backend:cudaMallocAsync", seconds=40),
    Part(
        name="overhead",
        asks="what a step costs beside one by hand",
        seconds=100,
        script=("benchmarks.overhead", "--device", "cuda", "--pairs", "10"),
        rehearsed_with=("--device", "standin", "--pairs", "2", "--repeats", "1"),
    ),
    Part(
        name="peers",
        asks="what it costs, and what is left after running out of memory, beside others",
        seconds=150,
        script=("benchmarks.gpu_peers", "--device", "cuda"),
        rehearsed_with=("--device", "cpu", "--tiny"),
    ),
    Part(
        name="failures",
        asks="a thousand failures leave no byte behind",
        seconds=150,
        tests="test_thousand_failures_gpu.py",
    ),
]


NOT_STARTED = "not started"


class Report:
    """Results so far, also on disk.

    Args:
        path: path of the file.
        device: torch device type of the report.
        parts: parts that will run.
    """

    def __init__(self, path: pathlib.Path, device: str, parts: Sequence[Part]) -> None:
        self.path = path
        self.parts: list[dict[str, Any]] = [
            {
                "name": part.name,
                "asks": part.asks,
                "state": NOT_STARTED,
                "environment": dict(part.environment),
            }
            for part in parts
        ]
        self.content: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "is_rehearsal": device != "cuda",
            "machine": machine(device),
            "is_whole": False,
            "seconds": 0.0,
            "parts": self.parts,
        }
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def write(self) -> None:
        """Write atomically, so that an interruption loses nothing."""
        with self._lock:
            self.content["seconds"] = round(self.seconds, 1)
            unfinished = self.path.with_suffix(".part")
            text = json.dumps(self.content, indent=1, default=str)
            unfinished.write_text(text + "\n", encoding="utf-8")
            unfinished.replace(self.path)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began


def machine(device: str) -> dict[str, Any]:
    """Describe the machine. A separate process asks the device, so that its context is freed."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    settings = {name: os.environ[name] for name in os.environ if name.endswith("ALLOC_CONF")}
    found["allocator"] = settings or "default"
    if device != "cuda":
        return {"device": "the stand-in, which is none", **found}
    command = [sys.executable, "-c", _DESCRIBE_DEVICE]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if said.returncode:
        return {"device": said.stderr.strip()[-500:], **found}
    return {**json.loads(said.stdout), **found}


_DESCRIBE_DEVICE = """
import json, torch
properties = torch.cuda.get_device_properties(0)
print(json.dumps({
    "device": properties.name,
    "device_bytes": properties.total_memory,
    "capability": f"{properties.major}.{properties.minor}",
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(),
}))
"""


def command_of(part: Part, target: pathlib.Path, *, standin: bool, expression: str) -> list[str]:
    if part.script:
        module, *given = part.script
        arguments = part.rehearsed_with if standin else given
        return [sys.executable, "-m", module, *arguments, "--json", str(target)]
    command = [sys.executable, "-m", "pytest", f"tests/gpu/{part.tests}", "-q", "--tb=short"]
    command += ["-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-p", "tests.gpu.journal", "--journal", str(target)]
    command += ["-p", "tests.standin.plugin"] if standin else []
    return command + (["-k", expression] if expression else [])


def run_part(
    part: Part,
    found: dict[str, Any],
    report: Report,
    seconds: float,
    command: Sequence[str],
    stop: threading.Event,
) -> None:
    """Run a part to its end or time limit, recording its findings meanwhile.

    Args:
        part: the part to run.
        found: its findings, part of the report.
        report: the report to write.
        seconds: time limit.
        command: command of its process.
        stop: event that ends it at once.
    """
    target = pathlib.Path(command[command.index("--journal" if part.tests else "--json") + 1])
    began = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **part.environment}
    found["state"] = "running"
    with tempfile.TemporaryFile() as output:
        # A separate session, so that the processes it started end with it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None and found["state"] == "running":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_BETWEEN_LOOKS)
            found["seconds"] = round(time.monotonic() - began, 1)
            take(found, part, target)
            report.write()
            if stop.is_set():
                found["state"] = "interrupted"
            elif time.monotonic() - began >= seconds and process.poll() is None:
                found["state"] = "cut off"
        end(process)
        take(found, part, target)
        found["exit_code"] = process.returncode
        if found["state"] == "running":
            # pytest: 0 all passed, 1 a test failed, 5 none was selected.
            has_ended = process.returncode in ((0, 1, 5) if part.tests else (0,))
            failed = "failed" if process.returncode == 1 else "died"
            found["state"] = "done" if has_ended else failed
        if not is_well(found):
            output.seek(0)
            found["output"] = output.read().decode(errors="replace")[-_MOST_CHARACTERS:]
        report.write()


def take(found: dict[str, Any], part: Part, target: pathlib.Path) -> None:
    """Copy the findings that a part has written so far."""
    if part.tests:
        found["tests"] = read_journal(target)
        found["outcomes"] = dict(Counter(test["outcome"] for test in found["tests"]))
    elif target.exists():
        with contextlib.suppress(json.JSONDecodeError):  # it is being written
            found["results"] = json.loads(target.read_text(encoding="utf-8"))


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summary_of(found: Mapping[str, Any]) -> str:
    outcomes = ", ".join(f"{count} {name}" for name, count in found.get("outcomes", {}).items())
    seconds = f" in {found['seconds']:.0f} s" if "seconds" in found else ""
    return f"{found['name']}: {found['state']}{seconds}{f' ({outcomes})' if outcomes else ''}"


def run_all(
    parts: Sequence[Part], report: Report, *, seconds: float, standin: bool, expression: str
) -> None:
    """Run parts one after the other within a total time.

    There is one GPU. On the stand-in each process has its own device, so a few run at a time.
    """
    stop = threading.Event()

    def run(part: Part, found: dict[str, Any], target: pathlib.Path) -> None:
        left = seconds - report.seconds
        if standin and part.needs:
            found["state"] = f"left out: only CUDA has {part.needs}"
        elif stop.is_set():
            found["state"] = f"{NOT_STARTED}: the run was interrupted"
        elif left < 1:
            found["state"] = f"{NOT_STARTED}: there was no time left"
        else:
            limit = part.seconds * (SLOWER if standin else 1)
            command = command_of(part, target, standin=standin, expression=expression)
            run_part(part, found, report, min(limit, left), command, stop)
        report.write()
        print(summary_of(found), flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2 if standin else 1) as pool:
        runs = [
            pool.submit(run, part, found, pathlib.Path(folder) / f"{number}.json")
            for number, (part, found) in enumerate(zip(parts, report.parts, strict=True))
        ]
        try:
            for each in runs:
                each.result()
        except BaseException:
            stop.set()
            raise
    report.content["is_whole"] = True
    report.write()


def interrupt(number: int, frame: object) -> None:
    """Treat a scheduler's signal before it ends a process as Ctrl-C."""
    raise KeyboardInterrupt


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="the folder that it is written to")
    parser.add_argument("--seconds", type=float, help=f"that it takes at most (default {SECONDS})")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", default="", help=f"only these, of {', '.join(names)}")
    parser.add_argument("-k", dest="expression", default="", help="only tests that match this")
    parser.add_argument("--standin", action="store_true", help="rehearse it on the stand-in device")
    parser.add_argument("--show", type=pathlib.Path, help="print a report as Markdown, and no more")
    arguments = parser.parse_args(given)
    if arguments.show is not None:
        print(page(json.loads(arguments.show.read_text(encoding="utf-8"))))
        return 0
    wanted = [name.strip() for name in arguments.parts.split(",") if name.strip()] or names
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if not arguments.standin and not torch.cuda.is_available():
        print("torch sees no CUDA device, so there is nothing to report; run this on a GPU machine")
        return 2
    signal.signal(signal.SIGTERM, interrupt)
    folder = arguments.out or (REHEARSALS if arguments.standin else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "rehearsal" if arguments.standin else "gpu"
    target = folder / f"{kind}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M%S}.json"
    parts = [part for part in PARTS if part.name in wanted]
    report = Report(target, "standin" if arguments.standin else "cuda", parts)
    try:
        run_all(
            parts,
            report,
            seconds=arguments.seconds or SECONDS * (SLOWER if arguments.standin else 1),
            standin=arguments.standin,
            expression=arguments.expression,
        )
    except KeyboardInterrupt:
        print("interrupted; what was found until now is written")
    shown = target.with_suffix(".md")
    shown.write_text(page(report.content) + "\n", encoding="utf-8")
    for found in report.parts:  # if only the output is kept, this is the only explanation
        if output := found.get("output"):
            print(f"\n{found['name']}, which did not go well, ended with:\n{output}")
    print(verdict(report.content))
    print(f"written to {target}; to be read in {shown}")
    is_good = report.content["is_whole"] and all(map(is_well, report.content["parts"]))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
