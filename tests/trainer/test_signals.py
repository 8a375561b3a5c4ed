"""SIGTERM and Ctrl-C: the first one is noted, the second one stops, and handlers are restored."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from automicro.trainer.signals import Interruption, catching_signals

SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM
BOTH = pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=lambda number: number.name)
NAMES = {SIGINT: "Ctrl-C", SIGTERM: "SIGTERM"}
STOPS: dict[signal.Signals, Any] = {SIGINT: KeyboardInterrupt, SIGTERM: SystemExit}


@pytest.fixture(autouse=True)
def check_handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NAMES]
    yield
    after = [signal.getsignal(number) for number in NAMES]
    for number, handler in zip(NAMES, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "saves", "said"),
    [
        (SIGINT, False, "Ctrl-C: finishing this batch, then stopping; press again to stop at once"),
        (SIGTERM, True, "SIGTERM: finishing this batch, then saving; a second one stops at once"),
    ],
)
def test_first_signal_is_noted_and_second_stops(
    number: signal.Signals, saves: bool, said: str
) -> None:
    lines: list[str] = []
    with catching_signals(saves=saves, say=lines.append) as interruption:
        assert interruption.name is None
        send(number)
        assert interruption.name == NAMES[number]
        with pytest.raises(STOPS[number]) as caught:
            send(number)
    assert lines == [said]
    assert getattr(caught.value, "code", 143) == 143


def test_ctrl_c_after_sigterm_counts_as_first_one() -> None:
    lines: list[str] = []
    with catching_signals(say=lines.append) as interruption:
        send(SIGTERM)
        send(SIGINT)
        assert interruption.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            send(SIGINT)
    assert len(lines) == 2


@BOTH
def test_interruption_raises_error_of_signal_with_note(number: signal.Signals) -> None:
    interruption = Interruption()
    interruption.take_note(number)
    with pytest.raises(STOPS[number]) as caught:
        interruption.raise_if_interrupted(where="after batch 12", checkpoint="runs/a/1-step-12")
    assert caught.value.__notes__ == [
        f"automicro: {NAMES[number]}: stopped after batch 12, saved in runs/a/1-step-12"
    ]
    assert getattr(caught.value, "code", 143) == 143


def test_handlers_are_replaced_only_inside() -> None:
    seen: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(SIGTERM, own)
    try:
        with contextlib.suppress(ValueError), catching_signals(say=print) as one:
            send(SIGTERM)
            raise ValueError("in training")
        assert signal.getsignal(SIGTERM) is own
    finally:
        signal.signal(SIGTERM, before)
    assert (seen, one.name) == ([SIGTERM], "SIGTERM")  # an existing handler is also called


def test_handler_from_outside_python_is_kept(mocker: Any) -> None:
    mocker.patch("signal.getsignal", return_value=None)
    install = mocker.patch("signal.signal")
    with catching_signals():
        pass
    install.assert_not_called()


def test_nested_catching_signals_notify_both() -> None:
    lines: list[str] = []
    with catching_signals(say=lines.append) as outer, catching_signals(say=lines.append) as inner:
        send(SIGTERM)
    assert outer.name == inner.name == "SIGTERM"
    assert len(lines) == 2


# Loads only this module, because an import of the whole package takes seconds.
ALONE = """
import multiprocessing, os, runpy, signal, time
catching_signals = runpy.run_path("automicro/trainer/signals.py")["catching_signals"]
"""
FORKED = {
    "end with SIGTERM": (
        """
        def work(is_there):
            is_there.set()
            time.sleep(60)

        with catching_signals():
            context = multiprocessing.get_context("fork")
            is_there = context.Event()
            worker = context.Process(target=work, args=(is_there,), daemon=True)
            worker.start()
            is_there.wait(30)
            worker.terminate()
            worker.join(timeout=30)
            print(worker.exitcode == -signal.SIGTERM)
        """,
        ("True\n", 0),
    ),
    "survive Ctrl-C until batches end": (
        """
        from torch.utils.data import DataLoader

        with catching_signals() as interruption:
            loader = DataLoader(
                range(40), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            batches = iter(loader)
            next(batches)
            os.killpg(0, signal.SIGINT)
            time.sleep(0.3)
            print(interruption.name, 1 + sum(1 for _ in batches), flush=True)
        """,
        ("Ctrl-C 20\n", 1),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("program", "expected"), FORKED.values(), ids=FORKED)
def test_forked_workers(program: str, expected: tuple[str, int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,  # keeps its signals away from the tests
        check=True,
    )
    assert (done.stdout, done.stderr.count("finishing this batch")) == expected, done.stderr
