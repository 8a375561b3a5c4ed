"""Run everything that needs a GPU, and write what came of it as a dated JSON.

    python benchmarks/gpu_report.py [--out benchmarks/results] [-k EXPRESSION]

The tests of tests/gpu with what each measured, and the overhead against a hand-written loop on the
device. Ends with 1 where a test failed, the report written all the same. See docs/gpu.md.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS_FOR_TESTS = 420
SECONDS_FOR_OVERHEAD = 120


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
    }


def run(command: list[str], seconds: int) -> tuple[int, str]:
    """Show what a command prints while it runs; its exit code, 124 when it took too long."""
    # The tests import `tests`, and the package where it is not installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    try:
        finished = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"not done after {seconds} s"
    return finished.returncode, ""


def run_tests(folder: pathlib.Path, expression: str) -> dict[str, Any]:
    """The outcome of each test, and what it recorded."""
    xml = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={xml}"]
    command += ["-k", expression] if expression else []
    code, problem = run(command, SECONDS_FOR_TESTS)
    found: dict[str, Any] = {"exit_code": code, "problem": problem, "outcomes": {}, "tests": []}
    if xml.exists():
        found["tests"] = [read_case(case) for case in ElementTree.parse(xml).iter("testcase")]
    found["outcomes"] = dict(Counter(test["outcome"] for test in found["tests"]))
    return found


def read_case(case: ElementTree.Element) -> dict[str, Any]:
    outcome, message = "passed", ""
    for kind in ("failure", "error", "skipped"):
        element = case.find(kind)
        if element is not None:
            outcome = "failed" if kind == "failure" else kind
            message = (element.text or element.get("message") or "")[-2000:]
    measured = {each.get("name"): each.get("value") for each in case.iter("property")}
    return {
        "name": f"{case.get('classname')}::{case.get('name')}",
        "outcome": outcome,
        "seconds": float(case.get("time") or 0),
        "measured": measured,
        "message": message,
    }


def run_overhead(folder: pathlib.Path) -> dict[str, Any]:
    target = folder / "overhead.json"
    command = [sys.executable, "benchmarks/overhead.py", "--device", "cuda", "--json", str(target)]
    code, problem = run(command, SECONDS_FOR_OVERHEAD)
    results = json.loads(target.read_text())["results"] if target.exists() else []
    return {"exit_code": code, "problem": problem, "results": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("-k", dest="expression", default="", help="only tests that match this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device, so there is nothing to report; run this on a GPU machine")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    report: dict[str, Any] = {"date": now.isoformat(timespec="seconds"), "machine": machine()}
    target = arguments.out / f"gpu-{now:%Y-%m-%d-%H%M%S}.json"
    with tempfile.TemporaryDirectory() as name:
        # After each part, so that what was found survives being stopped.
        report["tests"] = run_tests(pathlib.Path(name), arguments.expression)
        target.write_text(json.dumps(report, indent=2) + "\n")
        report["overhead"] = run_overhead(pathlib.Path(name))
        target.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['machine']['device']}, torch {report['machine']['torch']}")
    print(f"tests: {report['tests']['outcomes']}; written to {target}")
    for test in report["tests"]["tests"]:
        if test["measured"] or test["outcome"] in ("failed", "error"):
            print(f"  {test['outcome']}: {test['name']} {test['measured']}")
    return 0 if report["tests"]["exit_code"] == report["overhead"]["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
