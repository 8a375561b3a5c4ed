"""The pytest plugin in users' projects."""

import contextlib
import importlib.metadata
import inspect
import io
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


def run_pytest(folder: Path, test: str, *options: str) -> str:
    """Run pytest on a new project in this process; another process would have to import torch."""
    (folder / "test_net.py").write_text(MODEL + test)
    command = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={folder}"]
    installed = importlib.metadata.entry_points(group="pytest11")
    if "automicro" not in installed.names:  # installed before it had a plugin
        command += ["-p", "automicro.tools.pytest_plugin"]
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")  # this test suite turns them into errors
        patch.setattr(sys, "dont_write_bytecode", True)  # the next test file has the same name
        patch.delitem(sys.modules, "test_net", raising=False)
        pytest.main([*command, *options, "test_net.py"])
        sys.modules.pop("test_net", None)
    return printed.getvalue()


TESTS = """
def test_fits(assert_fits):
    assert_fits(Net(), BATCH, "8MiB", loss_fn=LOSS, optimizer=torch.optim.AdamW)

def test_not_whole(assert_fits):
    assert_fits(Net(), BATCH, "8MiB", loss_fn=LOSS, optimizer=torch.optim.AdamW, whole=True)

class Broken(Net):
    def forward(self, x):
        return self.no_such_part(x)

def test_broken(assert_fits):
    assert_fits(Broken, BATCH, "64MiB", loss_fn=LOSS)
"""


def test_fixture_fails_if_model_does_not_fit(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, TESTS, "-W", "error", "--strict-markers")
    assert "2 failed, 1 passed" in said
    assert "the batch does not fit whole" in said
    assert "Net fits" not in said  # a model that does not fit is not reported as fitting
    assert "in forward at " in said
    assert "return self.no_such_part(x). Skip that code" in said


@pytest.mark.sweep
def test_assert_fits_returns_plan_or_raises_it() -> None:
    options = {"loss_fn": LOSS, "optimizer": adam}
    assert assert_fits(Blocks(), batch(), "64MiB", **options).microbatch_size == len(batch()[0])
    assert assert_fits(Blocks(), batch(), device="a100-80gb", rows=32, **options).fits
    with pytest.raises(AssertionError, match="not even one row fits"):
        assert_fits(Blocks(), batch(), "1MiB", **options)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'microbatch_size'"):
        assert_fits(Blocks(), batch(), "8MiB", whole=True, microbatch_size=4, **options)
    with pytest.raises(ValueError, match="memory='24GiB', or name a device"):
        assert_fits(Blocks(), batch(), **options)
    with pytest.raises(TypeError, match=r"plan\(\) has no argument 'row' .*'rows'"):
        assert_fits(Blocks(), batch(), "1MiB", row=4, **options)


def test_docstring_of_plan_lists_every_argument() -> None:
    given = inspect.signature(plan).parameters
    assert not {name for name in given if f"    {name}: " not in (plan.__doc__ or "")}


def test_plugin_does_not_import_torch() -> None:
    look = "import sys, automicro.tools.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0
