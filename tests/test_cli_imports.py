"""The command line imports heavy packages only when needed, so help does not wait for torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from automicro.cli.commands import COMMANDS

pytestmark = pytest.mark.sweep

HEAVY = ("torch", "torchmetrics", "numpy", "omegaconf", "yaml", "transformers", "matplotlib")
LIGHT = (
    "--help",
    "--version",
    *(f"{name} --help" for name in COMMANDS),
    "",
    "trian job.yaml",
    "train job.yaml --learning-rate=1",
    "train",
    "train no-such-file.yaml seed=1",
    "eval no-such-file.yaml",
    "verify",
    "config no-such-file.yaml",
    "config --template",
    "cache",
    "cache --json",
    "cache --clear",
    "cache --json --clear",
    "explore",
)
# All commands share one process; each reports the heavy modules that it imports.
LIST_IMPORTS = """\
import contextlib, io, json, sys
heavy, commands = json.loads(sys.argv[1])
from automicro.cli import main
found = {}
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = main(command.split())
    found[command] = [code, [name for name in heavy if name in sys.modules]]
    for name in found[command][1]:
        del sys.modules[name]
print(json.dumps(found))
"""


def run_python(code: str, *arguments: str, folder: Path) -> str:
    """Return the output of a new Python process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return done.stdout


def test_help_errors_and_cache_import_nothing_heavy(tmp_path: Path, own_cache: Path) -> None:
    asked = json.dumps([HEAVY, LIGHT])
    found = json.loads(run_python(LIST_IMPORTS, asked, folder=tmp_path))
    assert {command: names for command, (_, names) in found.items() if names} == {}
    ended = {command: code for command, (code, _) in found.items()}
    assert ended["--help"] == ended["cache"] == ended["config --template"] == 0
    assert ended["train"] == ended["trian job.yaml"] == ended["cache --json --clear"] == 2


def test_errors_import_torch_only_for_sample_too_large(tmp_path: Path) -> None:
    code = "import sys, automicro.errors as e; e.ConfigError; print('torch' in sys.modules)"
    assert run_python(code, folder=tmp_path) == "False\n"
    code = """\
import pickle, torch
from automicro.errors import SampleTooLargeError
import automicro, automicro.errors
assert automicro.SampleTooLargeError is automicro.errors.SampleTooLargeError is SampleTooLargeError
assert issubclass(SampleTooLargeError, (automicro.AutomicroError, torch.OutOfMemoryError))
print(repr(pickle.loads(pickle.dumps(SampleTooLargeError("one row")))))
"""
    assert run_python(code, folder=tmp_path) == "SampleTooLargeError('one row')\n"


# Packages that training in one process does not need; importing them takes seconds.
UNNEEDED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchmetrics",
    "scipy",
    "sklearn",
    "nltk",
    "matplotlib",
    "transformers",
)
RECORD_IMPORTERS = """\
import json, sys
watched = json.loads(sys.argv[1])
importers = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in watched and name not in importers:
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            importers[name] = frame.f_code.co_filename
sys.meta_path.insert(0, Watch())
"""


def test_trainer_does_not_import_distributed_or_metrics(
    tmp_path: Path,
) -> None:
    code = f"""{RECORD_IMPORTERS}
import automicro, automicro.cli.config.build, automicro.cli.job
automicro.Trainer, automicro.Microbatcher, automicro.verify
print([name for name in watched if name in sys.modules])
"""
    assert run_python(code, json.dumps(UNNEEDED), folder=tmp_path) == "[]\n"


def test_digits_training_imports_no_unneeded_packages(tmp_path: Path) -> None:
    # torch's optimizers import its compiler, which imports FSDP; torchmetrics imports much else.
    digits = str(Path(__file__).resolve().parent.parent / "configs" / "digits.yaml")
    code = f"""{RECORD_IMPORTERS}
from automicro.cli import main
assert main(["train", {digits!r}, "metrics={{}}", "max_duration=1ba", "eval_interval=null"]) == 0
print(json.dumps({{name: by for name, by in importers.items() if name in sys.modules}}))
"""
    last = run_python(code, json.dumps(UNNEEDED), folder=tmp_path).splitlines()[-1]
    importers = json.loads(last)
    assert set(importers) <= {"torch.distributed.fsdp", "torch.distributed.tensor"}
    for path in importers.values():
        assert "torch" in Path(path).parts
        assert "automicro" not in Path(path).parts[-3:-1]


@pytest.mark.parametrize("name", ["SampleTooSmallError", "torch_"])
def test_unknown_error_name_raises_attribute_error(name: str) -> None:
    import automicro.errors

    with pytest.raises(AttributeError, match=f"'automicro.errors' has no attribute '{name}'"):
        getattr(automicro.errors, name)
