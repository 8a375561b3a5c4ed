"""The first seeds of the search, in every run of the tests."""

import pytest

from tests.search.oracle import BAD, Verdict
from tests.search.search import search_valid

pytestmark = pytest.mark.sweep

COMBINATIONS = 60


def test_a_sample_of_combinations_is_exact_or_named() -> None:
    judgements = list(search_valid(COMBINATIONS))
    assert [str(each) for each in judgements if each.verdict in BAD] == []
    assert {Verdict.EXACT, Verdict.NAMED} <= {each.verdict for each in judgements}
