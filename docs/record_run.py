"""Record two runs of `configs/digits.yaml` as pictures: one in the README, one in docs/sizes.md.

    OMP_NUM_THREADS=1 python docs/record_run.py

The first shows what `automicro train` printed after the config, cut to its first and last lines.
The second is the picture of `automicro explore`, on a device that is large enough for its choice
to be smaller than the batch.
"""

import io
import pathlib
import re
import subprocess
import sys

from rich.console import Console
from rich.text import Text

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
TRAINED, EXPLORED = IMAGES / "digits.svg", IMAGES / "explore.svg"
JOB = "configs/digits.yaml"
FIRST, LAST = 9, 16


def automicro(*arguments: str) -> list[str]:
    """The lines that a command printed."""
    command = [sys.executable, "-m", "automicro", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def record_training() -> None:
    lines = automicro("train", JOB)
    start = next(i for i, line in enumerate(lines) if line.startswith("training on"))
    lines = lines[start:]
    if len(lines) > FIRST + LAST:
        lines = [*lines[:FIRST], "…", *lines[-LAST:]]
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(Text(f"$ automicro train {JOB}", style="bold"))
    for line in lines:
        is_news = "out of memory" in line or "OOMs survived" in line
        console.print(Text(line, style="bold yellow" if is_news else ""))
    # Without the web fonts: the picture needs no network.
    svg = re.sub(
        r"@font-face \{.*?\}\s*", "", console.export_svg(title="automicro"), flags=re.DOTALL
    )
    TRAINED.write_text(svg, encoding="utf-8")


def main() -> None:
    record_training()
    automicro("explore", JOB, "memory_limit=40MiB", "--picture", str(EXPLORED))
    for picture in (TRAINED, EXPLORED):
        sys.stdout.write(f"wrote {picture.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
