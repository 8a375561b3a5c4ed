"""Start a module in several processes, and read what they found."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 240  # after which a run counts as stuck


def torchrun(module: str, folder: Path, *arguments: object, ranks: int = 2) -> list[Any]:
    """Run a module by torchrun; what each rank found, from ``found.json`` in the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", module, str(folder), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise AssertionError(f"{module} is stuck after {SECONDS} s:\n{said[-4000:]}") from None
    assert process.returncode == 0, said[-4000:]
    found: list[Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found
