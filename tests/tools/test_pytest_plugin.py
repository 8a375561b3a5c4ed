"""The pytest plugin, in projects of its users."""

import contextlib
import dataclasses
import importlib.metadata
import inspect
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from automicro.tools.plan.plan import plan
from automicro.tools.pytest_plugin import assert_fits
from tests.tools.plan.conftest import adam
from tests.tools.plan.test_plan import LOSS, Blocks, batch

ROOT = Path(__file__).resolve().parents[2]
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


@dataclasses.dataclass(frozen=True)
class Done:
    """What came of a run of pytest: its exit code, and all that it printed."""

    returncode: int
    stdout: str


def run_pytest(folder: Path, test: str, *options: str) -> Done:
    """Run pytest in a project of its own, in this process: another would import torch first."""
    (folder / "test_net.py").write_text(MODEL + test)
    command = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={folder}"]
    installed = importlib.metadata.entry_points(group="pytest11")
    if "automicro" not in installed.names:  # a tree that was not installed since it is there
        command += ["-p", "automicro.tools.pytest_plugin"]
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")  # here they are errors
        patch.setattr(sys, "dont_write_bytecode", True)  # the next text has the same name
        patch.delitem(sys.modules, "test_net", raising=False)
        code = pytest.main([*command, *options, "test_net.py"])
        sys.modules.pop("test_net", None)
    return Done(int(code), printed.getvalue())


MARKED = """
@pytest.mark.fits({arguments})
def test_{name}():
    return {{"model": Net(), "batch": BATCH, "loss_fn": LOSS, "optimizer": torch.optim.AdamW}}
"""
CASES = {
    "fits": ('"64MiB"', None),
    "fits_in_microbatches": ('"8MiB"', None),
    "fits_a_device": ('device="a100-80gb", rows=32', None),
    "not_whole": ('"8MiB", whole=True', "does not fit whole: at most 2180 of its 4096 rows would"),
    "no_row": ('"512KiB"', "Net does not fit: not even one row fits"),
    "no_row_whole": ('"512KiB", whole=True', "whole: not even one of its 4096 rows would"),
    "of_what": ("", 'give it, as in @pytest.mark.fits("24GiB"), or name a device'),
    "typo": ('"8MiB", row=4', "@pytest.mark.fits on test_typo has no option 'row' (did you mean"),
    "unnamed": ('"8MiB", 32', "@pytest.mark.fits('8MiB', 32) on test_unnamed: only the memory"),
    "twice": ('"8MiB", memory=1', "on test_twice names the memory twice, '8MiB' and memory=1"),
    "both_cut": ('"8MiB", whole=True, microbatch_size=4', "leave one of the two out"),
}


def test_marked_tests_fail_where_their_model_does_not_fit(tmp_path: Path) -> None:
    tests = (MARKED.format(name=name, arguments=given) for name, (given, _) in CASES.items())
    done = run_pytest(tmp_path, "".join(tests), "-W", "error", "--strict-markers")
    assert "8 failed, 3 passed" in done.stdout
    assert "Net fits" not in done.stdout  # what does not fit does not say that it does
    assert "def plan(" not in done.stdout  # errors of arguments show none of our lines
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

@pytest.mark.fits("64MiB")
def test_other_key():
    return {"model": Net(), "batch": BATCH, "loss_fn": LOSS, "optim": torch.optim.AdamW}

class Broken(Net):
    def forward(self, x):
        return self.no_such_part(x)

@pytest.mark.fits("64MiB")
def test_broken():
    return {"model": Broken, "batch": BATCH, "loss_fn": LOSS}

@pytest.mark.fits("64MiB")
def test_no_loss():
    return Net(), BATCH

import unittest

class TestOld(unittest.TestCase):
    @pytest.mark.fits("64MiB")
    def test_dropped(self):
        return Net(), BATCH
"""
    done = run_pytest(tmp_path, pair)
    assert "4 failed, 1 passed, 1 error" in done.stdout
    assert "nothing says how to compute a loss" in done.stdout
    assert ">       return self.no_such_part(x)" in done.stdout
    assert "automicro/tools/plan" not in done.stdout  # nor any other line of ours
    assert "returned NoneType; return (model, batch)" in done.stdout
    assert "no use for, 'optim' (did you mean 'optimizer'?)" in done.stdout
    assert "unittest drops what its tests return" in done.stdout


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
    done = run_pytest(tmp_path, before, "--update-fits")
    assert done.returncode == 0
    assert f"{tmp_path}/fits_baseline.json: peaks of a model written; commit it" in done.stdout
    written = json.loads((tmp_path / "fits_baseline.json").read_text())
    assert list(written) == ["test_net.py::test_net::model"]
    assert run_pytest(tmp_path, before).returncode == 0
    done = run_pytest(tmp_path, BASELINE.format(width=512))
    assert done.returncode == 1
    assert "activations of body.*: 8.00 MiB -> 16.00 MiB" in done.stdout
    assert "activations of head" not in done.stdout


@pytest.mark.sweep
def test_what_shrinks_passes(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, BASELINE.format(width=256), "--update-fits").returncode == 0
    assert run_pytest(tmp_path, BASELINE.format(width=64)).returncode == 0


OUTSIDE = """
class Heavy(Net):
    def __init__(self, width):
        super().__init__(width)
        self.table = nn.Parameter(torch.empty(1 << 24))
    def forward(self, x):
        return super().forward(x) + self.table.sum()

def test_net(fits_baseline):
    report = fits_baseline.check(
        lambda: Heavy({width}), BATCH, loss_fn=LOSS, optimizer=torch.optim.AdamW
    )
    assert "activations" not in report.breakdown  # the fullest moment is the optimizer's step
"""


@pytest.mark.sweep
def test_a_part_that_grows_outside_of_the_fullest_moment_is_caught(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, OUTSIDE.format(width=256), "--update-fits").returncode == 0
    assert run_pytest(tmp_path, OUTSIDE.format(width=256)).returncode == 0
    done = run_pytest(tmp_path, OUTSIDE.format(width=512))
    assert done.returncode == 1
    assert "peak: 320." in done.stdout
    assert "activations of body.*: 8.00 MiB -> 16.00 MiB" in done.stdout


RENAMED = """
class Renamed(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.inner = Net(width)
    def forward(self, x):
        return self.inner(x)

def test_net(fits_baseline):
    fits_baseline.check({model}, BATCH, loss_fn=LOSS, optimizer=torch.optim.AdamW)
"""


@pytest.mark.sweep
def test_a_renamed_module_passes_with_a_warning_and_hides_nothing(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, RENAMED.format(model="Net()"), "--update-fits").returncode == 0
    done = run_pytest(tmp_path, RENAMED.format(model="Renamed()"))
    assert "1 passed, 1 warning" in done.stdout
    assert "body.* -> inner.body.*" in done.stdout
    done = run_pytest(tmp_path, RENAMED.format(model="Renamed(512)"))
    assert "1 failed" in done.stdout
    assert "inner.body.* (renamed? it was body.*): 8.00 MiB -> 16.00 MiB" in done.stdout


# As the first version of the plugin wrote it for the model of BASELINE.
OLD = {
    "test_net.py::test_net::model": {
        "activations of body.*": 4194304,
        "activations of the model itself": 1024,
        "batch": 1081344,
        "gradients": 10752,
        "optimizer state": 156672,
        "outputs and loss": 164352,
        "parameters": 77312,
        "peak": 14074368,
        "temporaries of the backward": 8388608,
    }
}


@pytest.mark.sweep
def test_a_file_of_the_first_version_is_compared_at_the_fullest_moment(tmp_path: Path) -> None:
    file = tmp_path / "fits_baseline.json"
    file.write_text(json.dumps(OLD))
    done = run_pytest(tmp_path, BASELINE.format(width=256))
    assert "1 passed, 1 warning" in done.stdout
    assert "fits_baseline.json was written by an older version" in done.stdout
    done = run_pytest(tmp_path, BASELINE.format(width=512))
    assert "1 failed" in done.stdout
    assert "activations of body.*: 4.00 MiB -> 8.00 MiB" in done.stdout
    assert run_pytest(tmp_path, BASELINE.format(width=256), "--update-fits").returncode == 0
    assert "1 passed in" in run_pytest(tmp_path, BASELINE.format(width=256)).stdout


MISTAKES = """
@pytest.mark.parametrize("case", ["a/b", "c/b"])
def test_slash(fits_baseline, case):
    fits_baseline.check(Net(256 if case == "a/b" else 8), BATCH, loss_fn=LOSS)

def test_same_name(fits_baseline):
    fits_baseline.check(Net(), BATCH, loss_fn=LOSS)
    fits_baseline.check(Net(), BATCH, loss_fn=LOSS)

def test_option(fits_baseline):
    fits_baseline.check(Net(), BATCH, los_fn=LOSS)

def test_memory(fits_baseline):
    fits_baseline.check(Net(), BATCH, loss_fn=LOSS, memory="1GiB")

def test_percent(fits_baseline):
    fits_baseline.check(Net(), BATCH, loss_fn=LOSS, share=5)
"""


@pytest.mark.sweep
def test_mistakes_in_a_check_are_named(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, MISTAKES, "--update-fits")
    assert "4 failed, 2 passed" in done.stdout
    for words in (
        "has seen name='model' in this test before",
        "fits_baseline.check() has no argument 'los_fn' (did you mean 'loss_fn'?)",
        "leave memory='1GiB' out, or ask assert_fits",
        "share=5: give a share from 0 to 1, such as 0.05 for 5 %",
    ):
        assert words in done.stdout
    done = run_pytest(tmp_path, MISTAKES, "-k", "slash", "-n", "1", "--update-fits")
    assert "run it without -n of pytest-xdist" in done.stdout
    assert "2 passed" in run_pytest(tmp_path, MISTAKES, "-k", "slash").stdout
    file = tmp_path / "fits_baseline.json"
    for broken in ("<<<<<<< HEAD", '{"test_net.py::test_slash[a/b]::model": {"parts": {}}}'):
        file.write_text(broken)
        done = run_pytest(tmp_path, MISTAKES, "-k", "slash and a/b")
        assert "is no baseline" in done.stdout
        assert "take the file back from version control" in done.stdout


def test_assert_fits_returns_the_plan_or_tells_it() -> None:
    options = {"loss_fn": LOSS, "optimizer": adam}
    assert assert_fits(Blocks(), batch(), "64MiB", **options).microbatch_size == len(batch()[0])
    with pytest.raises(AssertionError, match="not even one row fits"):
        assert_fits(Blocks(), batch(), "1MiB", **options)
    with pytest.raises(ValueError, match=r'assert_fits\(…, "24GiB"\), or name a device'):
        assert_fits(Blocks(), batch(), **options)
    with pytest.raises(TypeError, match=r"assert_fits\(\) has no argument 'row' .*'rows'"):
        assert_fits(Blocks(), batch(), "1MiB", row=4, **options)


def test_the_docs_tell_of_every_argument_that_a_plan_takes() -> None:
    page = (ROOT / "docs" / "fits.md").read_text(encoding="utf-8")
    given = set(inspect.signature(plan).parameters) - {"model", "batch"}
    assert not {name for name in given if f"`{name}`" not in page}


def test_the_plugin_does_not_import_torch() -> None:
    look = "import sys, automicro.tools.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0
