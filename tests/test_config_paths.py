"""Missing config files, and import errors of the code that configs name."""

import re
from pathlib import Path

import pytest

from automicro.errors import ConfigError
from tests.config_jobs import build_trainer, job, load_config


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    {
        "jobs.yaml": "there is no file 'jobs.yaml': did you mean 'job.yaml'?",
        "configs/digitz.yaml": (
            "there is no file 'configs/digitz.yaml': did you mean 'configs/digits.yaml'?"
        ),
        "nothing.txt": (
            "there is no file 'nothing.txt': give the path of a YAML file, such as "
            "configs/digits.yaml, job.yaml"
        ),
        ".": ". cannot be read ([Errno 21] Is a directory: '.'): give a YAML file",
    }.items(),
)
def test_missing_file_error_lists_existing_files(path: str, message: str) -> None:
    Path("configs").mkdir()
    Path("configs/digits.yaml").touch()
    Path("job.yaml").touch()
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_config(path)


def test_import_error_of_module_propagates_with_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("broken_job.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(".")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere") as caught:
        build_trainer(job("model.call=broken_job.Model"))
    assert caught.value.__notes__ == ["while importing model.call (broken_job.Model)"]
