"""What kills cost, as a table."""

from collections.abc import Sequence

from tests.trainer.resume.trials import KINDS, Kill

HEAD = f"{'killed at':<26}{'kills':>6}{'repeated: mean':>16}{'most':>6}"


def render(kills: Sequence[Kill], *, trials: int, seconds: float) -> str:
    """One line per kind of point, then all together."""
    rows = [
        _row(kind, found)
        for kind in KINDS
        if (found := [kill for kill in kills if kill.kind == kind])
    ]
    damaged = sum(kill.is_damaged for kill in kills)
    anew = sum(kill.resumed_at == 0 for kill in kills)
    return "\n".join(
        [
            HEAD,
            *rows,
            _row("all", kills),
            f"{len(kills)} kills of {trials} runs in {seconds:.0f} s; before {damaged} resumes the "
            f"newest checkpoint was cut short; {anew} began anew, having no checkpoint yet",
        ]
    )


def _row(name: str, kills: Sequence[Kill]) -> str:
    steps = [kill.repeated for kill in kills]
    return f"{name:<26}{len(steps):>6}{sum(steps) / len(steps):>16.1f}{max(steps):>6}"
