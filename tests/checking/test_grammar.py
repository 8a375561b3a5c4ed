"""What `grammar` draws: a sample; ``python -m tests.checking.grammar 0 2000`` judges more."""

from collections import Counter

import pytest

from tests.checking.grammar import judge

pytestmark = pytest.mark.sweep


@pytest.mark.filterwarnings("ignore")
def test_each_loss_that_splitting_changes_is_named_and_no_other() -> None:
    judged = [judge(seed) for seed in range(60)]
    outcomes = Counter(each.outcome for each in judged)
    others = [each for each in judged if each.outcome not in ("named", "right")]
    assert others == []
    assert min(outcomes.values()) >= 20
