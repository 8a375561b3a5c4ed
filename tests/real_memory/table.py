"""A readable report of all trials."""

from typing import Any, TypeAlias

Report: TypeAlias = dict[str, list[dict[str, Any]]]


def render(report: Report) -> str:
    """Format one line per scene and peak, and totals."""
    lines = []
    for row in [*report["shrinking"], *report["faults"]]:
        outcomes = ", ".join(f"{count} {name}" for name, count in row["outcomes"].items())
        lines.append(f"{row['scene']:<70} {row['trials']:>5} trials: {outcomes}")
        lines += [f"    {problem}" for problem in row["wrong"]]
    for row in report["peaks"]:
        ratio = row["simulated_bytes"] / row["real_bytes"]
        title = f"{row['subject']}, {row['rows']} rows"
        lines.append(f"{title:<70} simulated / real peak: {ratio:.4f}")
    trials = sum(row["trials"] for row in [*report["shrinking"], *report["faults"]])
    ooms = sum(row["ooms"] for part in ("shrinking", "faults") for row in report[part])
    return "\n".join([*lines, f"{trials} trials and {ooms} real out-of-memory errors"])
