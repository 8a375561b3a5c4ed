"""Record `automicro train configs/digits.yaml` as the picture in the README.

    python docs/record_run.py

What the picture shows is what the command printed after the config, cut to its first and last
lines.
"""

import io
import pathlib
import re
import subprocess
import sys

from rich.console import Console
from rich.text import Text

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "digits.svg"
FIRST, LAST = 9, 16


def main() -> None:
    command = [sys.executable, "-m", "automicro", "train", "configs/digits.yaml"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("training on"))
    lines = lines[start:]
    if len(lines) > FIRST + LAST:
        lines = [*lines[:FIRST], "…", *lines[-LAST:]]
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(Text("$ automicro train configs/digits.yaml", style="bold"))
    for line in lines:
        is_news = "out of memory" in line or "OOMs survived" in line
        console.print(Text(line, style="bold yellow" if is_news else ""))
    PICTURE.parent.mkdir(exist_ok=True)
    # Without the web fonts: the picture needs no network.
    svg = re.sub(
        r"@font-face \{.*?\}\s*", "", console.export_svg(title="automicro"), flags=re.DOTALL
    )
    PICTURE.write_text(svg, encoding="utf-8")
    sys.stdout.write(f"wrote {PICTURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
