"""A report of `benchmarks.gpu_report` as Markdown.

Tests record measurements by name. Some names have a meaning here: ``costs_us``, ``gb_per_s``,
``held_bytes`` and ``waits`` map names to numbers, ``texts`` lists error messages, and ``counters``
are those of the allocator during a test.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Sequence[object]

NUMBERS = {
    "costs_us": ("What calls cost", "µs"),
    "gb_per_s": ("How fast copies are", "GB/s"),
    "held_bytes": ("What is held outside of torch's allocator, and by libraries in it", "bytes"),
    "waits": ("What waits for the device in a settled step", "calls"),
}
SPECIAL = {*NUMBERS, "texts", "counters"}
BAD = ("failed", "error", "began")


def is_well(part: Mapping[str, Any]) -> bool:
    """Return whether a part ended without any failure."""
    is_left_out = part["state"].startswith("left out")
    return is_left_out or (
        part["state"] == "done" and not any(map(part.get("outcomes", {}).get, BAD))
    )


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    parts = report["parts"]
    what = "A rehearsal on the stand-in device" if report["is_rehearsal"] else "On a GPU"
    sections = [
        f"# {what}, {report['date']}",
        verdict(report),
        table(("machine", ""), report["machine"].items()),
        section("What ran", table(("part", "state", "tests", "s", "asks"), map(row_of, parts))),
        section("What did not go well", "\n\n".join(trouble(parts))),
        section("Texts of errors", table(("where", "type", "understood as", "text"), texts(parts))),
        *(numbers(parts, name, *said) for name, said in NUMBERS.items()),
        section("Beside a loop by hand", overhead(parts)),
        section("Beside others", peers(parts)),
        section("The passes under other allocators", passes(parts)),
        section("The allocator's counters", counters(parts)),
        section("What else was measured", table(("test", "what", ""), others(parts))),
        section("Left out, and why", table(("reason", "tests"), skipped(parts))),
    ]
    return "\n\n".join(filter(None, sections))


def verdict(report: Mapping[str, Any]) -> str:
    """Return a summary in a few sentences."""
    parts, outcomes = report["parts"], Counter[str]()
    for part in parts:
        outcomes.update(part.get("outcomes", {}))
    bad = [part["name"] for part in parts if not is_well(part)]
    counted = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())) or "none"
    said = [f"{sum(outcomes.values())} tests in {report['seconds']:.0f} s: {counted}."]
    if report["is_rehearsal"]:
        said.append("No second and no rate on this page is a GPU's.")
    if not report["is_whole"]:
        said.append("**It was cut off.**")
    said.append(f"Not well: {', '.join(bad)}." if bad else "All parts went well.")
    return " ".join(said)


def section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def table(heads: Sequence[str], rows: Iterable[Row]) -> str:
    """Return rows as Markdown, or nothing without rows."""
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines])


def cell(value: object) -> str:
    """Format a value on one line."""
    if isinstance(value, bool) or value is None:
        text = {True: "yes", False: "no", None: ""}[value]
    elif isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(
            f"({cell(each)})" if isinstance(each, list | tuple) else cell(each) for each in value
        )
    else:
        text = str(value)
    return " ".join(text.split()).replace("|", "\\|")


def row_of(part: Mapping[str, Any]) -> Row:
    outcomes = ", ".join(f"{count} {name}" for name, count in part.get("outcomes", {}).items())
    return part["name"], part["state"], outcomes, part.get("seconds"), part["asks"]


def short(name: str) -> str:
    """Return the name of a test without its file."""
    return name.rpartition("::")[2]


def tests_of(parts: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for part in parts:
        for test in part.get("tests", ()):
            yield part["name"], test


def measured(
    parts: Iterable[Mapping[str, Any]], name: str
) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Yield everything recorded under a name: part, test, value."""
    for part, test in tests_of(parts):
        if name in test.get("measured", {}):
            yield part, test, test["measured"][name]


def trouble(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each test that did not pass and each part that did not end, with its output."""
    for part in parts:
        if is_well(part):
            continue
        yield f"### {part['name']}: {part['state']}"
        for test in part.get("tests", ()):
            if test["outcome"] in BAD:
                said = "cut off, or it ended the process"
                state = said if test["outcome"] == "began" else test["outcome"]
                yield f"{short(test['name'])}: {state}" + block(test.get("message", ""))
        if part["state"] in ("failed", "died", "cut off", "interrupted"):
            yield f"exit code {part.get('exit_code')}; its last output:" + block(
                part.get("output", "")
            )


def block(text: str) -> str:
    return f"\n\n```\n{text.strip()}\n```" if text.strip() else ""


def numbers(parts: Sequence[Mapping[str, Any]], name: str, title: str, unit: str) -> str:
    rows = [
        (what, value, short(test["name"]))
        for _, test, found in measured(parts, name)
        for what, value in found.items()
    ]
    return section(title, table(("what", unit, "test"), rows))


def texts(parts: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for _, _, found in measured(parts, "texts"):
        for text in found:
            yield text["where"], text["type"], text["means"], text["text"]


def overhead(parts: Iterable[Mapping[str, Any]]) -> str:
    heads = ("job", "microbatches", "by hand, ms", "automicro, ms", "ratio", "95 % interval")
    keys = ("job", "microbatches", "hand_ms", "automicro_ms", "median_ratio", "interval_95")
    return table(
        heads,
        (
            [each[key] for key in keys]
            for part in parts
            if part["name"] == "overhead"
            for each in part.get("results", {}).get("results", ())
        ),
    )


def peers(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return two tables: with room for all, and without."""
    found = [part.get("results", {}) for part in parts if part["name"] == "peers"]
    rows = [row for each in found for row in each.get("rows", ())]
    absent = [item for each in found for item in each.get("absent", {}).items()]
    kinds = {
        "overhead": ("job", "with", "microbatch", "ms_per_batch", "ratio", "error"),
        "recovery": (
            *("job", "with", "ended", "batch", "microbatch", "steps", "steps_due"),
            *("failures", "parameters_differ", "seconds", "error"),
        ),
    }
    shown = [
        f"{kind}:\n\n" + table(keys, ([row.get(key) for key in keys] for row in chosen))
        for kind, keys in kinds.items()
        if (chosen := [row for row in rows if row["kind"] == kind])
    ]
    if absent:
        shown.append("Absent: " + "; ".join(f"{name} ({why})" for name, why in absent) + ".")
    return "\n\n".join(shown)


def passes(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return each test that ran under several allocators, with its outcome and measurements."""
    names = [part["name"] for part in parts]
    under = {name: name.partition(", ")[2] or "default" for name in names}
    repeated = {name.partition(", ")[0] for name in names if ", " in name}
    columns = list(dict.fromkeys(under[name] for name in names if under[name] != "default"))
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, test in tests_of(parts):
        if name.partition(", ")[0] in repeated:
            found.setdefault(short(test["name"]), {})[under[name]] = test
    rows: list[Row] = []
    for name, by_pass in found.items():
        if len(by_pass) > 1:
            values = [by_pass.get(each) for each in ("default", *columns)]
            rows.append([name, *("" if each is None else outcome(each) for each in values)])
    return table(("test", "default", *columns), rows)


def outcome(test: Mapping[str, Any]) -> str:
    own = {k: v for k, v in test.get("measured", {}).items() if k not in SPECIAL}
    return f"{test['outcome']}{f': {cell(own)}' if own else ''}"


def counters(parts: Iterable[Mapping[str, Any]]) -> str:
    found = [(part, test, each) for part, test, each in measured(parts, "counters") if each]
    names = list(dict.fromkeys(name for _, _, each in found for name in each))
    return table(
        ("part", "test", *names),
        ([part, short(test["name"]), *map(each.get, names)] for part, test, each in found),
    )


def others(parts: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for _, test in tests_of(parts):
        for name, value in test.get("measured", {}).items():
            if name not in SPECIAL:
                yield short(test["name"]), name, value


def skipped(parts: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    reasons = Counter(
        test["message"] for _, test in tests_of(parts) if test["outcome"] == "skipped"
    )
    yield from reasons.most_common()
    for part in parts:
        if part["state"].startswith(("left out", "not started")):
            yield f"{part['name']}: {part['state']}", "all"
