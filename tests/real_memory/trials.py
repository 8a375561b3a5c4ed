"""Trials of one call with too little memory: recovery or error, and the remaining state."""

import functools
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from automicro import Fixed, Halving, OptimizerStepError, Policy
from automicro.memory.oom import is_out_of_memory
from tests.real_memory.allocator import CappedAllocator
from tests.real_memory.scenes import Scene, call, go_on, prepare
from tests.torture.engine.subject import TortureRun, differences, values


@dataclass
class Row:
    """One line of the report: the results of many trials of one scene.

    ``ooms`` counts refused allocations, ``sizes`` has the final microbatch sizes of trials, and
    ``wrong`` lists all violations (empty if everything is correct).
    """

    scene: str
    trials: int = 0
    ooms: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """The results of the same call at a fixed size with enough memory."""

    after: dict[str, Any]
    later: dict[str, Any]
    kept_bytes: int
    allocations: int


class Laboratory:
    """Trials of scenes on one allocator."""

    def __init__(self, allocator: CappedAllocator) -> None:
        self.allocator = allocator
        self._reference = functools.cache(self._run_reference)

    def shrink(self, scene: Scene, num_limits: int) -> Row:
        """Try shrinking budgets, from the peak of the whole batch to less than one row needs."""
        row = Row(str(scene))
        most = self._peak_bytes(scene, Halving(), looks=True)
        least = int(0.9 * self._peak_bytes(scene, Fixed(1), looks=False))
        for index in range(num_limits):
            room = most - (most - least) * index // (num_limits - 1)
            disturb = functools.partial(self._leave_room, room)
            self._try(row, scene, None, f"{room} bytes of room", disturb)
        return row

    def fail_each(self, scene: Scene, size: int, every: int = 1) -> Row:
        """Refuse each allocation of a call once, or one in every few."""
        row = Row(str(scene))
        for index in range(1, self._reference(scene, size, size).allocations + 1, every):
            what = f"allocation {index}"
            disturb = functools.partial(self.allocator.fail_at, index)
            self._try(row, scene, size, what, disturb)
            if self.allocator.fault_is_pending:
                row.wrong.append(f"{what} never came")
                self.allocator.relent()
        return row

    def _leave_room(self, num_bytes: int) -> None:
        self.allocator.limit(self.allocator.used_bytes + num_bytes)

    def _peak_bytes(self, scene: Scene, policy: Policy, *, looks: bool) -> int:
        """Return the peak at these sizes; checks use several rows at once."""
        run = prepare(scene, None)
        run.microbatcher._train.policy = run.microbatcher._eval.policy = policy
        if not looks:
            checks = run.microbatcher._engine.checks
            checks._train.is_over = checks._eval.is_over = True
            checks._off = True
        base_bytes = self.allocator.used_bytes
        self.allocator.reset_peak()
        call(scene, run)
        return self.allocator.peak_bytes - base_bytes

    def _run_reference(self, scene: Scene, size: int, warm_size: int | None) -> Reference:
        """Run the clean call at a size, after warm steps at another."""
        run = prepare(scene, warm_size)
        run.microbatcher._train.policy = run.microbatcher._eval.policy = Fixed(size)
        gc.collect()
        base_bytes, before = self.allocator.used_bytes, self.allocator.allocations
        result = call(scene, run)
        allocations = self.allocator.allocations - before
        gc.collect()
        kept_bytes = self.allocator.used_bytes - base_bytes
        after, later = _after(run, result), go_on(scene, run)
        gc.freeze()  # skips imported objects when automicro collects after each failure
        return Reference(after, later, kept_bytes, allocations)

    def _try(
        self, row: Row, scene: Scene, size: int | None, what: str, disturb: Callable[[], None]
    ) -> None:
        """Run one trial: disturb the call, and compare the remaining state."""
        run = prepare(scene, size)
        run.microbatcher._train.policy = Halving(initial=size)
        run.microbatcher._eval.policy = Halving(initial=size)
        before = values(run)
        gc.collect()
        base_bytes, refusals = self.allocator.used_bytes, self.allocator.refusals
        refusal = result = None
        disturb()
        try:
            result = call(scene, run)
        except Exception as error:
            refusal = judge_refusal(error)
        if not self.allocator.fault_is_pending:
            self.allocator.relent()
        gc.collect()
        kept_bytes = self.allocator.used_bytes - base_bytes
        ooms = self.allocator.refusals - refusals
        row.trials += 1
        row.ooms += ooms
        if refusal is not None:
            name, is_allowed, is_restored = refusal
            outcome = f"refused: {name}"
            problems = [] if is_allowed else ["of another kind"]
            if is_allowed and is_restored:
                problems = _named("changed", before, values(run))
                problems += [f"{kept_bytes} bytes alive"] if kept_bytes > 0 else []
        else:
            outcome = "recovered" if ooms else "fits"
            used = result.microbatch_size if result is not None else size or scene.rows
            row.sizes[used] += 1
            problems = self._judge_success(scene, run, result, kept_bytes, (used, size))
        row.outcomes[outcome] += 1
        if problems:
            row.wrong.append(f"{what}: {outcome}: {'; '.join(problems)}")

    def _judge_success(
        self, scene: Scene, run: TortureRun, result: Any, kept_bytes: int, sizes: Any
    ) -> list[str]:
        after, later = _after(run, result), go_on(scene, run)
        clean = self._reference(scene, *sizes)  # last, because its first use reseeds the generators
        problems = _named("differs", clean.after, after)
        problems += _named("differs later", clean.later, later)
        if kept_bytes != clean.kept_bytes:
            problems.append(f"{kept_bytes} bytes kept, not {clean.kept_bytes}")
        return problems


def judge_refusal(error: Exception) -> tuple[str, bool, bool]:
    """Return how an error is named, whether it may end a call, and whether state must be as before.

    The error itself would keep the frames that it passed, and their closures, alive.
    """
    is_allowed = is_out_of_memory(error) or isinstance(
        error, torch.OutOfMemoryError | OptimizerStepError
    )
    # A step that may be half applied guarantees only the error.
    return type(error).__name__, is_allowed, "may be half applied" not in repr(error)


def _after(run: TortureRun, result: Any) -> dict[str, Any]:
    found = values(run)
    if result is not None:
        found["loss"] = result.loss.numpy().tobytes()
    return found


def _named(word: str, one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [f"{word}: {name}" for name in differences(one, other)]
