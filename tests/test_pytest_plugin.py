"""The pytest plugin, in projects of its users."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from automicro.pytest_plugin import assert_fits
from tests.planning.test_plan import LOSS, Blocks, adam, batch

ROOT = Path(__file__).resolve().parent.parent
MODEL = """
import pytest, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.head = nn.Linear(width, 10)
    def forward(self, x):
        return self.head(self.body(x))

LOSS = nn.CrossEntropyLoss()
BATCH = torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long)
"""


def run_pytest(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_net.py").write_text(MODEL + test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    installed = importlib.metadata.entry_points(group="pytest11")
    if "automicro" not in installed.names:  # a tree that was not installed since it is there
        command += ["-p", "automicro.pytest_plugin"]
    command += [*options, "test_net.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


MARKED = """
@pytest.mark.fits({arguments})
def test_{name}():
    return {{"model": Net(), "batch": BATCH, "loss_fn": LOSS, "optimizer": torch.optim.AdamW}}
"""
CASES = {
    "fits": ('"64MiB"', None),
    "fits_in_microbatches": ('"8MiB"', None),
    "fits_a_device": ('device="a100-80gb", rows=32', None),
    "not_whole": ('"8MiB", whole=True', "does not fit whole"),
    "no_row": ('"512KiB"', "Net does not fit: not even one row fits"),
    "of_what": ("", "name a device"),
}


def test_marked_tests_fail_where_their_model_does_not_fit(tmp_path: Path) -> None:
    tests = (MARKED.format(name=name, arguments=given) for name, (given, _) in CASES.items())
    done = run_pytest(tmp_path, "".join(tests), "-W", "error", "--strict-markers")
    assert "3 failed, 3 passed" in done.stdout
    for name, (_, words) in CASES.items():
        assert (f"FAILED test_net.py::test_{name} " in done.stdout) == (words is not None)
        assert words is None or words in done.stdout


def test_a_pair_will_do_and_anything_else_is_refused(tmp_path: Path) -> None:
    pair = """
class Loses(Net):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}

@pytest.mark.fits("64MiB")
def test_pair():
    return Loses(), {"x": BATCH[0]}

@pytest.mark.fits("64MiB")
def test_none():
    Net()
"""
    done = run_pytest(tmp_path, pair)
    assert "1 failed, 1 passed" in done.stdout
    assert "returned NoneType; return (model, batch)" in done.stdout


BASELINE = """
def test_net(fits_baseline):
    fits_baseline.check(
        Net({width}), BATCH, loss_fn=LOSS, optimizer=torch.optim.AdamW
    )
"""


def test_a_planted_regression_is_caught_by_the_modules_name(tmp_path: Path) -> None:
    before = BASELINE.format(width=256)
    done = run_pytest(tmp_path, before)
    assert done.returncode == 1
    assert "write them down with pytest --update-fits" in done.stdout
    assert run_pytest(tmp_path, before, "--update-fits").returncode == 0
    written = json.loads((tmp_path / "fits_baseline.json").read_text())
    assert list(written) == ["test_net.py::test_net::model"]
    assert run_pytest(tmp_path, before).returncode == 0
    done = run_pytest(tmp_path, BASELINE.format(width=512))
    assert done.returncode == 1
    assert "activations of body.*: 4.00 MiB -> 8.00 MiB" in done.stdout
    assert "activations of head" not in done.stdout


def test_what_shrinks_passes(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, BASELINE.format(width=256), "--update-fits").returncode == 0
    assert run_pytest(tmp_path, BASELINE.format(width=64)).returncode == 0


def test_assert_fits_returns_the_plan_or_tells_it() -> None:
    options = {"loss_fn": LOSS, "optimizer": adam}
    assert assert_fits(Blocks(), batch(), "64MiB", **options).microbatch_size == len(batch()[0])
    with pytest.raises(AssertionError, match="not even one row fits"):
        assert_fits(Blocks(), batch(), "1MiB", **options)
    with pytest.raises(ValueError, match="name a device"):
        assert_fits(Blocks(), batch(), **options)


def test_the_plugin_does_not_import_torch() -> None:
    look = "import sys, automicro.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0
