"""The sweep: every kind of fault, in every call, of one model."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from automicro.showing import html_text
from automicro.torture.plans import Plan, double_faults, sample, single_faults
from automicro.torture.scene import CALLS, Scene
from automicro.torture.subject import MakeSubject, check_subject
from automicro.torture.table import Row, render
from automicro.torture.trials import Trials
from automicro.torture.verdict import attempt

QUICK_PLANS = 12  # of each row of the table


@dataclass(frozen=True, repr=False)
class TortureReport:
    """What a sweep found."""

    rows: list[Row]

    @property
    def wrong(self) -> list[str]:
        """Everything that is not as promised."""
        return [each for row in self.rows for each in row.wrong]

    @property
    def exit_code(self) -> int:
        """0 where nothing is wrong, else 1."""
        return 1 if self.wrong or not any(row.plans for row in self.rows) else 0

    def __repr__(self) -> str:
        plans = sum(row.plans for row in self.rows)
        return f"TortureReport({plans:,} trials, {len(self.wrong)} wrong)"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_text(f"{self!r}\n{self}")

    def __str__(self) -> str:
        return render(self.rows)


def torture(
    make_subject: MakeSubject,
    *,
    name: str = "",
    calls: Sequence[str] = CALLS,
    most_plans: int | None = None,
    every_operation: bool = False,
    seed: int = 0,
    show: Callable[[Row], None] = lambda row: None,
) -> TortureReport:
    """Fail every operation of a model's step once, and look whether anything is lost.

    Sets the global generators, before each trial, to the same seed.

    Args:
        make_subject: builds the `Subject`, always the same from the same random state.
        name: of the model; the function's unless given.
        calls: what to disturb, of ``"backward"``, ``"evaluate"``, ``"unscale"`` (where there is a
            loss scaler), ``"clip"``, ``"step"``.
        most_plans: trials of each row of the table; all unless given.
        every_operation: at every operation of a later step's ``backward`` and ``evaluate``, run out
            of memory before it and after it, and raise a foreign error and Ctrl-C before it,
            whatever ``most_plans`` says.
        seed: of the choice among trials.
        show: called with each row of the table as soon as it is there.

    Raises:
        TypeError: the function returns no `Subject`.
        ValueError: an unknown call, or a subject with too few batches or rows.

    Example:
        >>> import torch
        >>> from automicro.torture import Subject
        >>> def linear() -> Subject:
        ...     model = torch.nn.Linear(3, 2)
        ...     return Subject(
        ...         model=model,
        ...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...         batches=[(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)],
        ...         options={"loss_fn": torch.nn.MSELoss()},
        ...     )
        >>> torture(linear, calls=["step"], most_plans=3).wrong
        []
    """
    unknown = [call for call in calls if call not in CALLS]
    if unknown or not calls:
        raise ValueError(f"calls={list(calls)!r}: choose some of {', '.join(CALLS)}")
    name = name or getattr(make_subject, "__name__", "model")
    rows: list[Row] = []
    with quiet():
        for trials, what, plans in _work(
            make_subject, name, calls, most_plans, every_operation, seed
        ):
            rows.append(sweep(trials, what, plans))
            show(rows[-1])
    return TortureReport(rows)


def scenes(name: str, make: MakeSubject, calls: Sequence[str]) -> list[Scene]:
    """Every call, in the first step and later, and on a simulated device."""
    found = []
    if "backward" in calls:
        found += [Scene(name=name, make=make, warm_steps=warm) for warm in (0, 1)]
        found.append(Scene(name=name, make=make, in_budget=True))
    found += [
        Scene(name=name, make=make, call=call, warm_steps=warm)
        for call, warms in (
            ("evaluate", (1,)),
            ("unscale", (1,)),
            ("clip", (1,)),
            ("step", (0, 1)),
        )
        for warm in warms
        if call in calls and (call != "unscale" or check_subject(make()).scaler is not None)
    ]
    return found


def _work(
    make: MakeSubject,
    name: str,
    calls: Sequence[str],
    most: int | None,
    every_operation: bool,
    seed: int,
) -> Iterator[tuple[Trials, str, list[Plan]]]:
    for scene in scenes(name, make, calls):
        trials = Trials(scene)
        plans = single_faults(trials, ["oom"])
        is_settled = scene.is_transaction and scene.warm_steps > 0 and not scene.in_budget
        is_whole = every_operation and is_settled
        if not is_whole:
            plans = sample(trials, plans, most, seed, "one")
        yield trials, "one out of memory", plans
        if not scene.is_transaction or scene.in_budget:
            continue
        plans = single_faults(trials, ["boom", "interrupt"])
        if is_whole:
            plans = [plan for plan in plans if not plan[0].after]
        else:
            plans = sample(trials, plans, most, seed, "foreign")
        yield trials, "foreign errors", plans
        plans = double_faults(trials, ["oom", "boom", "interrupt"], num_first=3, seed=seed)
        yield trials, "two faults", sample(trials, plans, most, seed, "two")


def sweep(trials: Trials, what: str, plans: Sequence[Plan]) -> Row:
    """Try every plan and add up."""
    title = str(trials.scene).removeprefix(f"{trials.scene.name}: ")
    row = Row(trials.scene.name, f"{title}, {what}", trials.num_operations)
    gc.freeze()  # what was imported on the way; automicro collects after each failure
    for plan in plans:
        verdict = attempt(trials, plan)
        row.plans += 1
        row.faults += len(plan)
        row.outcomes[verdict.outcome] += 1
        row.bytes_alive = max(row.bytes_alive, verdict.bytes_alive)
        if verdict.faults:
            found = "; ".join(verdict.faults)
            row.wrong.append(f"{trials.scene}: {plan}: {verdict.outcome}: {found}")
    return row


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log no retry, and keep what exists out of each collection: most of it is torch itself."""
    logger = logging.getLogger("automicro")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        logger.setLevel(level)
