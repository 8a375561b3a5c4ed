"""Random steps in the trainers of others; five hundred of each by ``told.main``."""

import pytest

from tests.integrations.told import Program, host_of, quietly, with_and_without

pytest.importorskip("transformers")
pytest.importorskip("lightning")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_what_a_step_tells_is_the_hosts_own_or_named(name: str, seed: int) -> None:
    host = host_of(name)
    with quietly():
        verdict = with_and_without(host, Program.drawn(host, seed))
    assert verdict.kind != "silent", verdict.about
