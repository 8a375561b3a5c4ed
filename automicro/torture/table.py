"""The table of a sweep: operations, faults, what came of them, bytes alive."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: of the model.
        what: the call and the kinds of faults.
        operations: of the call without faults.
        plans: trials, of one fault or more.
        faults: errors that were planned.
        outcomes: how many trials ended how.
        bytes_alive: the most that a failed attempt left behind.
        wrong: what is not as promised.
    """

    name: str
    what: str
    operations: int
    plans: int = 0
    faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_alive: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> int:
        """Trials that went on as if nothing had been."""
        return sum(
            count
            for outcome, count in self.outcomes.items()
            if outcome.startswith(("recovered", "no attempt lost"))
        )


def add_up(name: str, rows: Sequence[Row]) -> Row:
    """Several rows as one."""
    total = Row(name, "", sum(row.operations for row in rows))
    total.plans = sum(row.plans for row in rows)
    total.faults = sum(row.faults for row in rows)
    total.outcomes = sum((row.outcomes for row in rows), Counter())
    total.bytes_alive = max((row.bytes_alive for row in rows), default=0)
    total.wrong = [each for row in rows for each in row.wrong]
    return total


def render(rows: Sequence[Row], *, by_model: bool = False) -> str:
    """One line for each row or model, one for all, and the outcomes by cause.

    Args:
        rows: of the table.
        by_model: whether to add up what belongs to one model.
    """
    total = add_up("all", rows)
    lines = rows
    if by_model:
        names = dict.fromkeys(row.name for row in rows)
        lines = [add_up(name, [row for row in rows if row.name == name]) for name in names]
    titles = [f"{row.name}: {row.what}" if row.what else row.name for row in lines]
    width = max(map(len, titles), default=3)
    heads = ("operations", "plans", "faults", "recovered", "refused", "bytes alive", "wrong")
    text = [f"{'':{width}}  " + "  ".join(heads)]
    for title, row in zip([*titles, "all"], [*lines, total], strict=True):
        refused = row.plans - row.recovered
        numbers = (
            row.operations, row.plans, row.faults, row.recovered, refused, row.bytes_alive,
            len(row.wrong),
        )  # fmt: skip
        cells = (f"{each:>{len(head)}}" for each, head in zip(numbers, heads, strict=True))
        text.append(f"{title:{width}}  " + "  ".join(cells))
    text.append("")
    text += [f"{count:>8}  {outcome}" for outcome, count in total.outcomes.most_common()]
    text += [f"WRONG  {each}" for each in total.wrong[:MOST_SHOWN]]
    if len(total.wrong) > MOST_SHOWN:
        text.append(f"and {len(total.wrong) - MOST_SHOWN} more")
    return "\n".join(text)


MOST_SHOWN = 20
