"""The table of a sweep: operations, faults, what came of them, bytes alive."""

from collections import Counter
from collections.abc import Sequence

from tests.torture.sweep import Row


def render(rows: Sequence[Row]) -> str:
    """One line for each row and one for all."""
    total = Row("all", sum(row.operations for row in rows))
    total.faults = sum(row.faults for row in rows)
    total.outcomes = sum((row.outcomes for row in rows), Counter())
    total.bytes_alive = max((row.bytes_alive for row in rows), default=0)
    total.wrong = [each for row in rows for each in row.wrong]
    lines = [f"{'operations':>10} {'plans':>6} {'faults':>6} {'bytes alive':>11} {'wrong':>5}"]
    for row in [*rows, total]:
        counts = f"{row.operations:>10} {row.outcomes.total():>6} {row.faults:>6} "
        lines.append(f"{counts}{row.bytes_alive:>11} {len(row.wrong):>5}  {row.scene}")
        lines += [
            f"{' ' * 16}{count:>6}  {outcome}" for outcome, count in row.outcomes.most_common()
        ]
    return "\n".join(lines)
