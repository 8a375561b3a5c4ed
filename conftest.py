"""What holds for tests and doctests alike: nothing of whoever runs them matters to them."""

import gc
import itertools
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Of whoever runs the tests: where programs, libraries, devices and temporary files are, and what
# is told to the tests themselves.
KEPT_VARIABLES = (
    *("HOME", "PATH", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CC", "CXX"),
    *(
        "PIP_*",
        "SSL_CERT_*",
        "LD_*",
        "DYLD_*",
        "CUDA_*",
        "CUBLAS*",
        "NVIDIA_*",
        "HIP_*",
        "ROCR_*",
        "PYTEST_*",
        "COVERAGE_*",
    ),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("CI", "AUTOMICRO_SEED", "PYTORCH_*ALLOC_CONF"),
)
# The same terminal everywhere, and the same threads in every process.
SET_VARIABLES = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "OMP_NUM_THREADS": "1"}

# Keras reads its backend when it is imported: tests/integrations/test_keras.py runs this elsewhere.
collect_ignore = (
    []
    if os.environ.get("KERAS_BACKEND") == "torch"
    else ["automicro/integrations/keras.py", "tests/integrations/told_keras.py"]
)

_numbers = itertools.count()

# What is imported stays. While hundreds of modules are, the collector of cycles takes a fifth of
# the time and finds nothing.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let the collector begin with the tests, without what has been imported for them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def same_environment() -> Iterator[None]:
    """Run tests alike in an editor's dumb shell, on a cluster and in CI."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if not any(fnmatchcase(name, kept) for kept in KEPT_VARIABLES):
                patch.delenv(name)
        for name, value in SET_VARIABLES.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True, scope="session")
def folder_of_caches(
    same_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Remember microbatch sizes elsewhere, also in fixtures that serve several tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMICRO_CACHE", str(folder / "shared"))
        yield folder


@pytest.fixture(autouse=True)
def own_cache(folder_of_caches: Path) -> Iterator[Path]:
    """Let no test start with the sizes that another one found. The folder does not exist yet."""
    folder = folder_of_caches / str(next(_numbers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMICRO_CACHE", str(folder))
        yield folder
