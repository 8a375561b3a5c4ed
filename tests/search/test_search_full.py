"""The whole search: `make search`, some minutes."""

import os

import pytest

from tests.search.oracle import BAD, Verdict
from tests.search.search import causes, search_valid, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

COMBINATIONS = 2000
# The same each time, unless `make nightly` says otherwise.
FIRST = int(os.environ.get("AUTOMICRO_SEED", "0"))


def test_every_combination_is_exact_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    judgements = list(search_valid(COMBINATIONS, FIRST))
    bad = [each for each in judgements if each.verdict in BAD]
    with capsys.disabled():
        print("\n" + table(judgements))
        print(causes(bad[:200]))
    assert sum(each.verdict is not Verdict.INVALID for each in judgements) >= COMBINATIONS
    assert [str(each) for each in bad] == []
