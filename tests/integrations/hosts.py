"""Tests of every host: a module runs in the host alone, and with automicro."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from automicro import MemoryBudget, SampleTooLargeError
from tests.integrations.told import Program, silent
from tests.sweeps import SEED


class Ran(NamedTuple):
    """The results of a run."""

    tensors: list[Tensor]  # parameters, and what steps kept
    logged: list[dict[str, Any]]
    events: Sequence[tuple[str, Sequence[Tensor]]] = ()
    host: Any = None  # the trainer, model or loop
    microbatches: int = 0  # of the last batch
    scale: float | None = None  # of an fp16 loss


# Train a module: without automicro if the options are None.
Run = Callable[[Mapping[str, Any] | None], Ran]


def max_diff(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Return the largest difference between any two tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def check_rows(found: Sequence[Any], expected: Sequence[Any], close: float = 2e-6) -> None:
    """Check that the rows of two logs have the same names and numbers."""
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, number in other.items():
            is_number = isinstance(number, float | int)
            wanted = pytest.approx(number, rel=close, abs=close) if is_number else number
            assert row[name] == wanted, name


def check(ours: Ran, plain: Ran, *, close: float, logged: float = 2e-6) -> None:
    """Compare all results up to rounding, or bit for bit if `close` is 0."""
    if close:
        assert max_diff(ours.tensors, plain.tensors) < close
        check_rows(ours.logged, plain.logged, logged)
    else:
        assert all(map(torch.equal, ours.tensors, plain.tensors))
        assert ours.logged == plain.logged
    assert [name for name, _ in ours.events] == [name for name, _ in plain.events]
    for (name, given), (_, expected) in zip(ours.events, plain.events, strict=True):
        assert len(given) == len(expected), name
        assert all(map(torch.allclose if close else torch.equal, given, expected)), name


def with_and_without(
    run: Run, options: Mapping[str, Any] | None = None, *, close: float = 0.0, logged: float = 2e-6
) -> tuple[Ran, Ran]:
    """Run a module in its host alone and with automicro, and compare all results."""
    plain, ours = run(None), run(options or {})
    check(ours, plain, close=close, logged=logged)
    return plain, ours


def in_less_memory(run: Run, share: float = 0.5) -> tuple[Ran, Ran]:
    """Run the host alone, then automicro under a limit at which the host alone fails."""
    with MemoryBudget("4GiB") as budget:
        plain = run(None)
    limit = int(budget.peak_bytes * share)
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(limit):
        run(None)
    with MemoryBudget(limit):
        return plain, run({})


def at_any_limit(run: Run, *, close: float, limits: int = 12) -> None:
    """Compare runs at shares of the peak: each one matches or cannot fit a single row."""
    with MemoryBudget("4GiB") as budget:
        plain = run(None)
    ended = 0
    for number in range(1, limits + 1):
        try:
            with MemoryBudget(budget.peak_bytes * number // limits):
                ours = run({})
        except SampleTooLargeError:
            assert not ended  # a higher limit never fails after a lower one succeeded
            continue
        ended += 1
        check(ours, plain, close=close)
    assert limits // 3 <= ended


class HostTests:
    """Tests of a host, with its tables.

    Attributes:
        CASES: modules by name, as arguments of `run`.
        TOLERANCES: of the cases in microbatches, and of "any limit", where it is not `CLOSE`.
        EXACT: arguments of a run in float64.
        MIXED: arguments of a run in bfloat16 or float16, and the tolerance of its logs.
        LIMITED: arguments of a run at any limit.
        REFUSED: calls with their errors.
        MISSING: classes of the host, a method, another one, and the error without it.
        TOLD: the host's ways of reporting.
    """

    CASES: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    WHOLE: ClassVar[Sequence[str]] = ()
    TOLERANCES: ClassVar[Mapping[str, float]] = {}
    CLOSE = 1e-12
    SIZES: ClassVar[Mapping[str, Any]] = {"microbatch_size": 3, "eval_microbatch_size": 3}
    DROPOUT: ClassVar[Mapping[str, Any]] = {"dropout": 0.1}
    EXACT: ClassVar[Mapping[str, Any]] = {"dtype": torch.float64}
    MIXED: ClassVar[Sequence[tuple[Mapping[str, Any], float]]] = ()
    LIMITED: ClassVar[Mapping[str, Any]] = {}
    FP16: ClassVar[Mapping[str, Any]] = {}
    REFUSED: ClassVar[Sequence[tuple[Callable[[], Any], Any, str]]] = ()
    MISSING: ClassVar[Sequence[tuple[Any, str, Any, str]]] = ()
    TOLD: ClassVar[Any] = None

    def run(self, folder: Path, options: Mapping[str, Any] | None, **case: Any) -> Ran:
        raise NotImplementedError

    def resumed(self, folder: Path, first: bool, second: bool) -> Ran:
        """Stop a run, and let another one go on, each with automicro or without."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        both = [(True, True), (False, True), (True, False)]
        tables: dict[str, Any] = {
            "name": self.CASES, "name_in_pieces": [e for e in self.CASES if e not in self.WHOLE],
            "mixed": self.MIXED, "size": ["auto", 5] if self.FP16 else [], "first, second": both,
            "wrong, kind, says": self.REFUSED, "seed": range(SEED, SEED + 3 * bool(self.TOLD)),
            "cut": ["size", "oom"] if self.TOLD else [], "missing": self.MISSING,
        }  # fmt: skip
        for names, table in tables.items():
            if names.split(", ")[0] in metafunc.fixturenames:
                metafunc.parametrize(names, table)

    def running(self, folder: Path, **case: Any) -> Run:
        def run(options: Mapping[str, Any] | None) -> Ran:
            return self.run(folder / str(options is None), options, **case)

        return run

    def test_run_without_limit_matches_host_bitwise(self, name: str, tmp_path: Path) -> None:
        with_and_without(self.running(tmp_path, **{**self.DROPOUT, **self.CASES[name]}))

    def test_microbatched_run_matches_host(self, name_in_pieces: str, tmp_path: Path) -> None:
        run = self.running(tmp_path, **{**self.EXACT, **self.CASES[name_in_pieces]})
        close = self.TOLERANCES.get(name_in_pieces, self.CLOSE)
        _, ours = with_and_without(run, self.SIZES, close=close)
        assert ours.microbatches > 1

    def test_run_in_half_memory_matches_host(
        self, mixed: tuple[Mapping[str, Any], float], tmp_path: Path
    ) -> None:
        plain, ours = in_less_memory(self.running(tmp_path, **mixed[0]))
        assert ours.microbatches > 1
        assert ours.scale == plain.scale
        check_rows(losses(ours), losses(plain), mixed[1])

    @pytest.mark.timeout(600)
    def test_run_at_any_limit_matches_or_raises_sample_too_large(self, tmp_path: Path) -> None:
        close = self.TOLERANCES.get("any limit", self.CLOSE)
        at_any_limit(self.running(tmp_path, **{**self.EXACT, **self.LIMITED}), close=close)

    def test_fp16_loss_scale_matches_host(self, size: Any, tmp_path: Path) -> None:
        run = self.running(tmp_path, **self.FP16)
        plain, ours = run(None), run({"microbatch_size": size})
        assert ours.scale == plain.scale
        check_rows(losses(ours), losses(plain), 0.0 if size == "auto" else 1e-3)
        assert size != "auto" or all(map(torch.equal, ours.tensors, plain.tensors))

    def test_resumed_run_matches_host_bitwise(
        self, first: bool, second: bool, tmp_path: Path
    ) -> None:
        found = self.resumed(tmp_path / "ours", first, second)
        check(found, self.resumed(tmp_path / "plain", False, False), close=0.0)

    def test_unsupported_setups_are_rejected(self, wrong: Any, kind: Any, says: str) -> None:
        with pytest.raises(kind, match=says):
            wrong()

    def test_missing_host_method_error_names_version(
        self, missing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, name, other, says = missing
        monkeypatch.setattr(owner, name, other)
        with pytest.raises(ImportError, match=says):
            self.run(tmp_path, {})

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    def test_reported_values_match_host_or_warn(self, seed: int) -> None:
        assert silent(self.TOLD, Program.drawn(self.TOLD, seed)) == []

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    @pytest.mark.timeout(300)
    def test_each_way_of_reporting_matches_host_or_warns(self, cut: str) -> None:
        for program in Program.of_every_way(self.TOLD, cut):
            assert silent(self.TOLD, program) == []


def losses(run: Ran) -> list[dict[str, Any]]:
    """Return what is logged of losses."""
    return [{name: row[name] for name in row if "loss" in name} for row in run.logged]


def on_ranks(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a job on a rank, with the environment of ``torchrun`` and ``accelerate launch``."""
    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", NODE_RANK="0",
    )  # fmt: skip
    return job(int(rank), *args, **kwargs)
