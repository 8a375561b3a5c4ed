"""Run the long stages that CI skips, one after another, and keep the last result of each.

    python -m benchmarks.nightly [--only STAGE …] [--seed 20261125]

Property tests, the search, the kills and the torture of ranks draw by the seed, by default today's
date. It is printed, so that a failure can be repeated. A stage that fails does not stop the others.
benchmarks/results/nightly.md records when each stage ran last, on which commit, and its result; run
all stages before a release.
"""

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "nightly.md"
# Targets of the Makefile.
STAGES = (
    "check",
    "gpu-rehearsal",
    "hosts-oldest",
    "libraries-oldest",
    "test-published",
    "job",
    "acceptance",
    "search",
    "torture",
    "torture-ranks",
    "torture-resume",
    "mutants",
)
HEAD = """# The last nightly run of each stage

Written by `make nightly`. A stage without a row has not run yet.

| Stage | Date | Commit | Seed | Result | Minutes | Closing line |
|---|---|---|---|---|---|---|
"""


def rows() -> dict[str, str]:
    """Return the table's rows by stage."""
    if not RESULT.exists():
        return {}
    lines = RESULT.read_text(encoding="utf-8").splitlines()
    return {line.split("|")[1].strip("` "): line for line in lines if line.startswith("| `")}


def run(stage: str, seed: int) -> tuple[int, float, str]:
    """Run a target; return its exit status, minutes, and last line of output."""
    # Without CI, so that property tests draw new cases by the seed (tests/conftest.py).
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment["AUTOMICRO_SEED"] = str(seed)
    started = time.monotonic()
    last = ""
    with subprocess.Popen(
        ["make", stage],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip().replace(f"{ROOT}/", "") or last
    return process.returncode, (time.monotonic() - started) / 60, last


def main() -> int:
    """Run the stages; return 1 if one of them failed."""
    today = datetime.date.today()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nightly")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--seed", type=int, default=int(f"{today:%Y%m%d}"))
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    table = rows()
    failed: list[str] = []
    print(f"seed {arguments.seed}: again with --seed {arguments.seed}", flush=True)
    for stage in arguments.only:
        print(f"\n== {stage}", flush=True)
        status, minutes, last = run(stage, arguments.seed)
        failed += [stage] * (status != 0)
        result = "passed" if status == 0 else "**failed**"
        closing = last.strip("= ").replace("|", "/")[:120]
        table[stage] = (
            f"| `{stage}` | {today} | {commit} | {arguments.seed} | {result} | {minutes:.1f} "
            f"| {closing} |"
        )
        ordered = [table[each] for each in STAGES if each in table]
        RESULT.write_text(HEAD + "\n".join(ordered) + "\n", encoding="utf-8")
    print(f"\n{len(arguments.only) - len(failed)} of {len(arguments.only)} stages passed", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
