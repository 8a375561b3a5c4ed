"""What holds for tests and doctests alike: none of them touches what the user's runs have found."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def folder_of_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Remember microbatch sizes elsewhere, also in fixtures that serve several tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMICRO_CACHE_DIR", str(folder / "shared"))
        yield folder


@pytest.fixture(autouse=True)
def own_cache(folder_of_caches: Path) -> Iterator[Path]:
    """Let no test start with the sizes that another one found. The folder does not exist yet."""
    folder = folder_of_caches / str(next(_numbers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMICRO_CACHE_DIR", str(folder))
        yield folder
