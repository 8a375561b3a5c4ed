"""Random steps inside other trainers: which values a step reports, how, and where.

A program draws a few reports. It runs in the host alone, then with automicro in microbatches or
after running out of memory. Each of its numbers must equal that of the host or cause a warning.

    python -m tests.integrations.told lightning 500
"""

import collections
import contextlib
import importlib
import operator
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import AutomicroError
from automicro.loss.passes import is_extra_pass

ROWS, BATCH = 24, 10  # batches of 10, 10 and 4 rows

Values = Mapping[str, Any]
VALUES: dict[str, Callable[[Values], Any]] = {
    "the loss": lambda v: v["loss"].detach(),
    "half of the loss": lambda v: v["loss"].detach() / 2,
    "a mean": lambda v: v["out"].detach()[:, 0].mean(),
    "a mean as a number": lambda v: float(v["out"].detach()[:, 0].mean()),
    "a mean over some entries": lambda v: v["x"][v["x"] > 0].mean(),
    "a sum": lambda v: v["out"].detach().abs().sum(),
    "the most": lambda v: v["out"].detach().max(),
    "the least": lambda v: v["out"].detach().min(),
    "a deviation": lambda v: v["out"].detach().std(),
    "a norm": lambda v: v["out"].detach().norm(),
    "hits": lambda v: (v["out"].detach().argmax(1) == v["y"]).sum(),
    "rows": lambda v: len(v["x"]),
    "a setting": lambda v: 0.5,
    "a share": lambda v: (v["out"].detach().argmax(1) == v["y"]).double().mean(),
}
PER_ROW: dict[str, Callable[[Values], Any]] = {
    "each row's": lambda v: v["out"].detach()[:, 1],
    "each row's several": lambda v: v["out"].detach(),
}


@dataclass(frozen=True)
class Report:
    """One reported value of a step: how it is reported, its content, and the step."""

    way: str
    value: str
    where: str

    def of(self, values: Values) -> Any:
        return (VALUES | PER_ROW)[self.value](values)


@dataclass(frozen=True)
class Program:
    """A few reports, and the reason for splitting batches."""

    tellings: tuple[Report, ...]
    cut: str  # "size" or "oom"
    seed: int

    @classmethod
    def drawn(cls, host: Any, seed: int) -> "Program":
        draw = random.Random(seed)
        tellings = []
        for _ in range(draw.randint(1, 3)):
            way = draw.choice(sorted(host.WAYS))
            values = sorted(PER_ROW if way in host.OF_ROWS else VALUES)
            tellings.append(Report(way, draw.choice(values), draw.choice(host.WHERE)))
        return cls(tuple(tellings), draw.choice(("size", "oom")), seed)

    @classmethod
    def of_every_way(cls, host: Any, cut: str) -> Iterator["Program"]:
        """Return programs of three ways each that cover all ways of the host."""
        tellings = [
            Report(way, "each row's" if way in host.OF_ROWS else "a mean", host.WHERE[nth % 2])
            for nth, way in enumerate(sorted(host.WAYS))
        ]
        for each in range(0, len(tellings), 3):
            yield cls(tuple(tellings[each : each + 3]), cut, each)


class Thing:
    """An object that a module of the host keeps."""

    total: Any = 0.0


def add(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, getattr(owner, name, 0.0) + value)


def set_and_add(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, 0)
    add(owner, name, int(value))


def add_in_dict(owner: Any, name: str, value: Any) -> None:
    table = getattr(owner, name)
    table["total"] = table.get("total", 0.0) + value


# Values that a step keeps itself, in any host.
KEEPING: dict[str, Callable[[Any, str, Any], Any]] = {
    "attribute": setattr,
    "added to an attribute": add,
    "added in a dict": add_in_dict,
    "added to a tensor": lambda m, n, v: getattr(m, n).add_(v),
    "added to an object": lambda m, n, v: add(getattr(m, n), "total", v),
    "added in a list": lambda m, n, v: operator.setitem(getattr(m, n), 0, getattr(m, n)[0] + v),
    "appended": lambda m, n, v: getattr(m, n).append(v),
    "queued": lambda m, n, v: getattr(m, n).append(float(v)),
    "appended in a dict": lambda m, n, v: getattr(m, n)["all"].append(v),
    "rows appended": lambda m, n, v: getattr(m, n).append(v),
    "rows extended": lambda m, n, v: getattr(m, n).extend(v.tolist()),
}
# Whole numbers that are set, whose parts add up to them, and one that accumulates.
SETTING: dict[str, Callable[[Any, str, Any], Any]] = {
    "set to a whole number": lambda m, n, v: setattr(m, n, int(v)),
    "set to 0 and added": set_and_add,
    "set in a tensor": lambda m, n, v: getattr(m, n).fill_(v),
    "added as a whole number": lambda m, n, v: add(m, n, int(v)),
}


class Kept:
    """Values that a program keeps at its owner, created before a run and read after it."""

    _START: Mapping[str, Callable[[], Any]] = {
        "added in a dict": dict,
        "added to a tensor": lambda: torch.zeros((), dtype=torch.float64),
        "set in a tensor": lambda: torch.zeros((), dtype=torch.float64),
        "added to an object": Thing,
        "appended in a dict": lambda: {"all": []},
        "added in a list": lambda: [0.0],
        "appended": list,
        "read again": list,
        "queued": lambda: collections.deque(maxlen=9),
        "rows appended": list,
        "rows extended": list,
    }

    def __init__(self, owner: Any, program: Program) -> None:
        self._owner, self._program = owner, program
        for nth, each in enumerate(program.tellings):
            if each.way in self._START:
                setattr(owner, f"n{nth}", self._START[each.way]())

    def found(self) -> dict[str, Any]:
        """Return the kept values as one list for each report."""
        found, known = {}, KEEPING.keys() | SETTING.keys() | self._START.keys()
        for nth, each in enumerate(self._program.tellings):
            kept = getattr(self._owner, f"n{nth}", None) if each.way in known else None
            kept = kept.total if isinstance(kept, Thing) else kept
            found[f"n{nth}"] = [] if kept is None else [kept]
        return found


class Net(nn.Module):
    """A classifier that may run out of memory above a given number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.most: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.most is not None and len(x) > self.most and not is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found: Tensor = self.net(x)
        return found


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 6, generator=drawn, dtype=torch.float64)
    return x, torch.randint(3, (ROWS,), generator=drawn)


def values_of(x: Tensor, y: Tensor, out: Tensor) -> dict[str, Any]:
    return {"x": x, "y": y, "out": out, "loss": F.cross_entropy(out, y)}


def flat(value: Any) -> list[float]:
    """Return all numbers in a reported value."""
    if isinstance(value, Mapping):
        return [each for key in sorted(value) for each in flat(value[key])]
    if isinstance(value, list | tuple | collections.deque):
        return [each for part in value for each in flat(part)]
    if hasattr(value, "tolist"):
        return flat(value.tolist()) if getattr(value, "ndim", 0) else [float(value)]
    return [float(value)]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a program: "right", "named", "refused" or "silent", with details."""

    kind: str
    about: str = ""


def judge(host: Any, program: Program) -> Verdict:
    """Run a program in a host alone, then with automicro, and compare all reported values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = host.run(program, ours=False)
        except TypeError as error:  # the host does not accept such a value
            return Verdict("the host's own", str(error))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ours = host.run(program, ours=True)
        except AutomicroError as error:
            return Verdict("refused", f"{type(error).__name__}: {error}")
    told = [str(each.message) for each in said if "automicro" in each.category.__module__]
    if any("could not check" in each for each in told):
        return Verdict("silent", f"a check is lost: {told}")
    named = False
    for nth, telling in enumerate(program.tellings):
        one, other = flat(plain[f"n{nth}"]), flat(ours[f"n{nth}"])
        is_close = len(one) == len(other) and all(
            (a != a and b != b) or abs(a - b) <= host.CLOSE * max(1e-3, abs(a))
            for a, b in zip(one, other, strict=True)
        )
        if is_close:
            continue
        # `n1` must not match the beginning of `n10`.
        ends = [re.escape(n) + r"(?!\d)" * n[-1].isdigit() for n in host.names(program, nth)]
        if not any(re.search(end, text) for end in ends for text in told):
            return Verdict("silent", f"{telling}: {one[:4]} became {other[:4]}; said {told}")
        named = True
    return Verdict("named" if named else "right")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        yield


def host_of(name: str) -> Any:
    return importlib.import_module(f"tests.integrations.told_{name}").HOST


def main() -> None:
    host, count = host_of(sys.argv[1]), int(sys.argv[2])
    start = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    kinds: collections.Counter[str] = collections.Counter()
    for seed in range(start, start + count):
        program = Program.drawn(host, seed)
        try:
            with quietly():
                verdict = judge(host, program)
        except Exception as error:
            verdict = Verdict("crash", f"{type(error).__name__}: {error}")
        kinds[verdict.kind] += 1
        if verdict.kind in ("silent", "crash"):
            print(seed, verdict.kind, program, verdict.about, flush=True)
    print(dict(kinds))


if __name__ == "__main__":
    main()
