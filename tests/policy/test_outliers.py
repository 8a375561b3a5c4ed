"""One small batch that runs out of memory where larger ones had fitted."""

from automicro.policy.auto import Halving
from automicro.policy.policy import Outcome


def run(policy: Halving, num_rows: int, most: int, *, cost: float | None = None) -> tuple[int, int]:
    """The size that a batch ends with where at most so many rows fit, and how often it failed."""
    failures = 0
    while True:
        size = policy.propose(num_rows, cost)
        fits = size <= most
        policy.record(Outcome(num_rows=num_rows, microbatch_size=size, fits=fits, cost=cost))
        if fits:
            return size, failures
        failures += 1
        assert failures <= num_rows.bit_length()


def sizes(policy: Halving, rows: list[int], most: int = 10**9) -> list[int]:
    return [run(policy, num_rows, most)[0] for num_rows in rows]


def test_small_batches_keep_to_what_fitted_for_a_while_that_doubles() -> None:
    policy, failures = Halving(), 0
    for _ in range(500):
        sizes(policy, [16, 16, 16])
        failures += run(policy, 2, 1)[1]  # the small batch fails whenever it is tried whole
    assert 5 <= failures <= 8


def measured(num_rows: int, size: int, *, fits: bool, peak: int, capacity: int) -> Outcome:
    return Outcome(
        num_rows=num_rows,
        microbatch_size=size,
        fits=fits,
        peak_bytes=peak,
        resident_bytes=0,
        capacity_bytes=capacity,
    )


def test_short_rows_of_a_smaller_batch_do_not_slow_long_ones() -> None:
    policy = Halving()
    run(policy, 16, 16, cost=100)
    run(policy, 4, 1, cost=50)
    assert run(policy, 16, 16, cost=100) == (16, 0)


def test_failures_stay_logarithmic_whatever_fails() -> None:
    policy, failures = Halving(), 0
    for index in range(2000):
        num_rows = (16, 16, 5, 16, 2)[index % 5]
        failures += run(policy, num_rows, 1 if num_rows < 16 else 16)[1]
    assert failures <= 40
