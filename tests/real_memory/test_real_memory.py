"""Real out of memory: torch's own allocator refuses before the operation."""

from collections import Counter

import pytest

from tests.real_memory.conftest import Report

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800)]  # all of it takes about four minutes


def test_allocator_raises_oom_before_operation_in_any_thread(report: Report) -> None:
    assert [row["in_thread"] for row in report["refusals"]] == [False, True]
    for row in report["refusals"]:
        assert row["error"] == "OutOfMemoryError"
        assert row["text"].startswith("CAPPED out of memory. Tried to allocate")
        assert not row["changed"], "its arguments"


@pytest.mark.parametrize("part", ["shrinking", "faults"])
def test_trials_recover_bit_identically_or_restore_state(report: Report, part: str) -> None:
    assert sum(row["trials"] for row in report[part]) > 20
    assert {row["scene"]: row["wrong"] for row in report[part] if row["wrong"]} == {}


def test_planted_leak_and_hidden_state_are_detected(report: Report) -> None:
    [row] = report["planted"]
    assert any("bytes kept" in problem for problem in row["wrong"])
    assert any("differs: gradient" in problem for problem in row["wrong"])


def test_shrinking_memory_leads_to_smaller_sizes_then_error(report: Report) -> None:
    for row in report["shrinking"]:
        assert len(row["sizes"]) >= 2, row
        assert row["outcomes"]["recovered"] >= 1, row
    refused = Counter(name for row in report["shrinking"] for name in row["outcomes"])
    assert refused.keys() == {"fits", "recovered", "refused: SampleTooLargeError"}


def test_each_failed_allocation_costs_only_one_attempt(report: Report) -> None:
    for row in report["faults"]:
        if "optimizer step" not in row["scene"]:
            assert row["outcomes"] == {"recovered": row["trials"]}, row


def test_optimizer_step_oom_raises_named_error(report: Report) -> None:
    rows = [row for row in report["faults"] if "optimizer step" in row["scene"]]
    assert rows
    for row in rows:
        assert row["outcomes"].keys() == {"refused: OptimizerStepError"}, row


def test_simulated_budget_matches_real_allocations(report: Report) -> None:
    for row in report["peaks"]:
        ratio = row["simulated_bytes"] / row["real_bytes"]
        # A budget counts neither allocations inside the kernels of convolutions nor those of the
        # model's own threads.
        if row["subject"].startswith("CNN"):
            assert 0.6 < ratio <= 1.0, row
        elif row["subject"] != "forward in threads":
            assert 0.97 < ratio <= 1.0, row
