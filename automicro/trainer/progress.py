"""Progress output: a live bar in a terminal, plain lines elsewhere, or nothing.

A line is permanent, and a status is temporary. In a terminal, the status is one line that is
overwritten. Elsewhere (a notebook, a log file, CI, a terminal that cannot move its cursor), it is
printed every few seconds.
"""

import datetime
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import nn

from automicro.durations import Duration, Unit
from automicro.events.run import GlobalBatch, LoopState, Run, Sizes, Window, describe_hours
from automicro.policy.policy import Policy
from automicro.savers.levels import Savers
from automicro.step.results import EvalResult, StepResult
from automicro.torch_private import is_uninitialized
from automicro.trainer.device import describe_device
from automicro.units import count_of

WINDOW_SECONDS = 5.0


class RecentSpeed:
    """The speed of training over the last few seconds, or since the last call.

    >>> recent, state = RecentSpeed(), LoopState()
    >>> state.samples, state.train.seconds = 100, 10.0
    >>> recent.now(state)
    (10.0, None)
    >>> state.samples, state.tokens, state.train.seconds = 400, 8000, 20.0
    >>> recent.now(state)
    (30.0, 800.0)
    """

    # An average since the start would hide for a long time that a smaller microbatch size, or
    # another process, slows training down.

    def __init__(self) -> None:
        self._window = Window(WINDOW_SECONDS, {"seconds": 0.0, "samples": 0, "tokens": 0})

    def now(self, state: LoopState) -> tuple[float, float | None]:
        """Compute rows and tokens per second, without evaluations; None for unknown tokens."""
        seconds = state.train.seconds
        amounts = {"seconds": seconds, "samples": state.samples, "tokens": state.tokens or 0}
        gained = self._window.gained(seconds, amounts)
        if gained["seconds"] <= 0:
            return 0.0, None
        tokens = None if state.tokens is None else gained["tokens"] / gained["seconds"]
        return gained["samples"] / gained["seconds"], tokens


# The minimum width of a window and the width of its bar, in columns.
BARS = ((100, 24), (60, 12), (40, 6))
# An ANSI color that is readable on light and dark backgrounds.
DONE_STYLE = "green"
SEPARATOR = " · "


@dataclass(frozen=True, kw_only=True)
class StatusLine:
    """The current status.

    >>> status = StatusLine(where="batch 3/12", words=["loss 0.5", "9 samples/s"], share=0.25)
    >>> str(status), status.in_window(40, ascii_only=True).plain
    ('batch 3/12 · loss 0.5 · 9 samples/s · 25% done', '#-----  25% - loss 0.5 - 9 samples/s')
    >>> status.in_window(24).plain
    '25% · loss 0.5'
    """

    where: str  # the place in training; log lines begin with it
    words: Sequence[str] = ()  # measured values, most important first; a window drops the last
    share: float | None = None  # completed share of the total, from 0 to 1
    seconds_left: float | None = None

    @property
    def _left(self) -> list[str]:
        if self.seconds_left is None:
            return []
        return [f"{datetime.timedelta(seconds=round(self.seconds_left))} left"]

    def __str__(self) -> str:
        done = [] if self.share is None else [f"{self.share:.0%} done"]
        return SEPARATOR.join([self.where, *self.words, *done, *self._left])

    def in_window(self, columns: int, *, ascii_only: bool = False) -> Text:
        """Format the status as one line of a window, trimmed from the right."""
        text, words = Text(no_wrap=True, overflow="ellipsis"), [*self._left, *self.words]
        words.append(self.where)
        if self.share is not None:
            width = next((bar for least, bar in BARS if columns >= least), 0)
            if width:
                text.append_text(_bar(self.share, width, ascii_only=ascii_only))
            words.insert(0, f"{' ' if width else ''}{self.share:{'>4' if width else ''}.0%}")
        separator = " - " if ascii_only else SEPARATOR
        for number, word in enumerate(words):
            more = (separator if number else "") + word
            # Leave the last column free: some terminals wrap the line when it is written to.
            if number and text.cell_len + cell_len(more) >= columns:
                break
            text.append(more)
        return text


def _bar(share: float, width: int, *, ascii_only: bool) -> Text:
    done = min(width, max(0, math.floor(share * width + 1e-9)))
    full, rest = ("#", "-") if ascii_only else ("━", "╌")  # distinct without colors, too
    return Text.assemble((full * done, DONE_STYLE), rest * (width - done))


class TimeLeft:
    """Estimates the remaining time from the progress since the first call.

    >>> left = TimeLeft(clock=iter([0.0, 10.0]).__next__)
    >>> left.at(0.2), left.at(0.4)
    (None, 30.0)
    """

    # The first estimate is None: time spent before it, such as finding a size, does not predict
    # the rest.

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: tuple[float, float] | None = None

    def at(self, share: float | None) -> float | None:
        """Estimate the seconds until everything is done."""
        if share is None:
            return None
        now = self._clock()
        if self._start is None or share < self._start[1]:
            self._start = now, share
        began, done_then = self._start
        if share <= done_then:
            return None
        return (now - began) / (share - done_then) * max(0.0, 1.0 - share)


_MOST_METRICS = 8  # in one line


def describe_parameters(parameters: Iterable[nn.Parameter]) -> str:
    """Describe the number of parameters; lazy parameters have no shape yet.

    >>> describe_parameters(nn.Linear(999, 2).parameters())
    '2,000 parameters'
    """
    each = list(parameters)
    known = sum(parameter.numel() for parameter in each if not is_uninitialized(parameter))
    more = " and lazy ones" if any(map(is_uninitialized, each)) else ""
    return count_of(known, "parameter") + more


def _describe_size(size: int | str | Policy | None, savers: Savers) -> str:
    """Describe a microbatch size and the memory savers, as given.

    >>> _describe_size("auto", "error"), _describe_size(None, "error"), _describe_size(8, "offload")
    ('auto', 'whole batch', '8, then offload')
    """
    levels = [savers] if isinstance(savers, str) else savers
    after = "" if savers == "error" else f", then {' or '.join(map(str, levels))}"
    return ("whole batch" if size is None else str(size)) + after


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The model, the device and the settings of a run."""

    run: Run
    options: Mapping[str, Any]
    parallel: str | None = None
    expected: GlobalBatch | None = None
    accumulation: str | None = None

    def _told(self) -> list[tuple[str, Any, str | None]]:
        """List name and value for loggers, and text for users, in the order of the line."""
        limit, precision = self.options["memory_limit"], self.options["precision"]
        model, max_duration = self.run.model, self.run.max_duration
        device = describe_device(self.run.device, limit)
        train, evaluation = (
            _describe_size(self.options[name], self.options["when_too_large"])
            for name in ("microbatch_size", "eval_microbatch_size")
        )
        of_data = " of data" if max_duration.unit is Unit.SECONDS else ""
        parameters = describe_parameters(model.parameters())
        sizes = train if train == evaluation else f"{train} in train, {evaluation} in eval"
        return [
            ("device", device, f"training on {device}"),
            *([] if self.parallel is None else [("parallel", self.parallel, self.parallel)]),
            ("memory_limit", limit, None),
            ("precision", precision, f"precision {precision}"),
            ("microbatch_size", train, f"microbatch size {sizes}"),
            ("eval_microbatch_size", evaluation, None),
            ("model", type(model).__name__, parameters),
            ("max_duration", str(max_duration), f"max_duration {max_duration}{of_data}"),
            ("torch", str(torch.__version__), self.accumulation),
        ]

    def line(self, num_batches: int | None) -> str:
        """Format the settings for users, with the number of batches in an epoch if known."""
        parts = [words for _, _, words in self._told() if words is not None]
        if self.expected is not None:
            parts.append(f"average batch {self.expected.average}")
        if num_batches is not None:
            parts.append(f"{count_of(num_batches, 'batch')} per epoch")
        return SEPARATOR.join(parts)

    def values(self) -> dict[str, Any]:
        """Return the settings for loggers."""
        return {name: value for name, value, _ in self._told()}


def position(state: LoopState, max_duration: Duration, num_batches: int | None = None) -> str:
    """Describe the progress of training in the unit of its duration.

    >>> position(LoopState(batch=7, samples=448), Duration.parse("1000sp"))
    'sample 448/1,000, batch 7'
    """
    unit, last = max_duration.unit, max_duration.value
    if unit is Unit.EPOCHS and num_batches is None:
        return f"epoch {state.epoch}/{last}, batch {state.batch}"
    if unit is Unit.EPOCHS:
        return f"epoch {state.epoch + 1}/{last}, batch {state.epoch_batch}/{num_batches}"
    if unit is Unit.BATCHES:
        return f"batch {state.batch}/{last}"
    if unit is Unit.SECONDS:
        done = describe_hours(state.done(unit))
        return f"data {done}/{describe_hours(last)}, batch {state.batch}"
    word = "sample" if unit is Unit.SAMPLES else "token"
    return f"{word} {state.done(unit):,}/{last:,}, batch {state.batch}"


def place_of(state: LoopState) -> str:
    """Describe the place in training, for errors.

    >>> place_of(LoopState(epoch=1, epoch_batch=3, batch=15))
    'epoch 2, batch 4 of the epoch (15 batches done)'
    """
    return (
        f"epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
        f"({count_of(state.batch, 'batch')} done)"
    )


def _share_done(state: LoopState, max_duration: Duration, num_batches: int | None) -> float | None:
    """Compute the completed share of training from 0 to 1; None if an epoch's length is unknown.

    >>> _share_done(LoopState(epoch=1, epoch_batch=3), Duration.parse("4ep"), 12)
    0.3125
    >>> _share_done(LoopState(batch=5), Duration.parse("4ba"), None)
    1.0
    """
    if max_duration.unit is not Unit.EPOCHS:
        return min(1.0, state.done(max_duration.unit) / max_duration.value)
    if not num_batches:
        return None
    return min(1.0, (state.epoch + state.epoch_batch / num_batches) / max_duration.value)


def batch_status(
    state: LoopState,
    max_duration: Duration,
    words: Sequence[str],
    *,
    num_batches: int | None,
    time_left: TimeLeft,
) -> StatusLine:
    """Describe the status of training after a batch."""
    where = position(state, max_duration, num_batches)
    if max_duration.unit is not Unit.EPOCHS:
        where += f", epoch {state.epoch + 1}"
    share = _share_done(state, max_duration, num_batches)
    return StatusLine(where=where, words=words, share=share, seconds_left=time_left.at(share))


def describe_number(value: float) -> str:
    """Format a loss or a metric with four decimals, or in scientific notation.

    >>> describe_number(1.0), describe_number(0.00001234), describe_number(123456.0)
    ('1.0000', '1.234e-05', '1.235e+05')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def size_lines(phase: str, result: StepResult | EvalResult, settled: Sizes | None) -> list[str]:
    """Describe everything unusual about the microbatch size of a batch.

    >>> result = EvalResult(loss=None, num_samples=512, num_global_samples=512,
    ...     microbatch_size=128, num_microbatches=4, attempts=3, failed_sizes=(512, 256))
    >>> size_lines("eval", result, None)
    ['eval: out of memory at microbatch size 512: continued with 128 rows (4 × 128 of 512; ...)']
    """
    cut, lines = Sizes.of(result), []
    size = count_of(result.microbatch_size, result.microbatch_unit.removesuffix("s"))
    if result.recalled_size is not None:
        rows = count_of(result.recalled_size, "row")
        lines.append(f"started from {rows} per microbatch, which an earlier run found")
    if result.nested_ooms:
        times = f"out of memory {count_of(result.nested_ooms, 'time')} in nested modules"
        sizes = [f"{name} {each} at a time" for name, each in result.nested_sizes.items()]
        lines.append(", ".join([times, *sizes]))
    if result.ooms:
        lines.append(
            f"out of memory at microbatch size {result.failed_sizes[0]}: continued with {size} "
            f"({cut}; {count_of(result.ooms, 'attempt')} rolled back)"
        )
    elif result.is_measuring and result.exploration is None:
        lines.append(f"smaller microbatches ({cut}) in this batch only, to measure memory per row")
    elif result.grown_from is not None and (
        settled is None
        or cut.num_microbatches < settled.num_microbatches
        or cut.num_rows > settled.num_rows
    ):
        lines.append(f"more fits, microbatch size {result.grown_from} → {size} ({cut})")
    if result.exploration is not None and result.exploration.is_news:
        lines.append(str(result.exploration))
    return [f"{phase}: {line}" for line in lines]


def evaluation_line(
    values: Mapping[str, float], *, samples: int, cut: Sizes, where: str, name: str = ""
) -> str:
    """Format the line of an evaluation.

    >>> cut = Sizes(num_rows=10, microbatch_size=5, num_microbatches=2)
    >>> evaluation_line({"loss": 0.25, "accuracy": 1.0}, samples=10, cut=cut, where="batch 3")
    'eval after batch 3: loss 0.2500, accuracy 1.0000 · 10 samples · microbatches 2 × 5 of 10'
    """
    after = f"{' ' if name else ''}{name}{f' after {where}' if where else ''}"
    shown = [f"{name} {describe_number(value)}" for name, value in values.items()]
    if len(shown) > _MOST_METRICS:
        shown[_MOST_METRICS:] = [f"and {len(shown) - _MOST_METRICS} more"]
    found = ", ".join(shown) or "nothing to report (no loss, no metrics)"
    return f"eval{after}: {found} · {count_of(samples, 'sample')} · microbatches {cut}"


LIVE_SECONDS = 0.1
PLAIN_SECONDS = 5.0

_ATTEMPTS = logging.getLogger("automicro.attempts")


class Progress:
    """Prints the progress of the trainer while entered; without a console, nothing."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            # No automatic refresh, which would start a thread.
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown_at: float | None = None
        self._retries = _Retries(self.doing)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        # Without a handler, Python's last-resort handler would write each retry to stderr.
        _ATTEMPTS.addHandler(self._retries)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the status; printed lines remain."""
        _ATTEMPTS.removeHandler(self._retries)
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """Print a permanent line."""
        if self._console is not None:
            # soft_wrap, because a log is not 80 columns wide; Text, because "[4]" is not a style.
            self._console.print(Text(text), soft_wrap=self._live is None)

    def status(self, describe: Callable[[], StatusLine | str]) -> None:
        """Show the current status if it is time to; otherwise do not compute it."""
        if self._console is None:
            return
        now, seconds = self._clock(), PLAIN_SECONDS if self._live is None else LIVE_SECONDS
        if self._shown_at is None or now - self._shown_at >= seconds:
            self._shown_at = now
            status = describe()
            if self._live is None:
                self.line(str(status))
            else:
                self._write_over(self._live, status)

    def doing(self, text: str) -> None:
        """Show a slow activity immediately in a terminal; a log has its result later."""
        if self._live is not None:
            self._write_over(self._live, f"{text} …")

    def _write_over(self, live: Live, status: StatusLine | str) -> None:
        if isinstance(status, StatusLine):
            options = live.console.options
            text = status.in_window(options.max_width, ascii_only=options.ascii_only)
        else:
            text = Text(status, no_wrap=True, overflow="ellipsis")
        live.update(text, refresh=True)


class _Retries(logging.Handler):
    """Reports each attempt that ran out of memory, with the next size."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record without the prefix of log lines."""
        self._say(record.getMessage().removeprefix("automicro: "))
