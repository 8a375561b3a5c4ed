"""Ctrl-C and SIGTERM: the first is recorded, the second stops, and handlers are restored."""

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

BOTH = [signal.SIGINT, signal.SIGTERM]
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
STOPS: dict[signal.Signals, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: SystemExit,
}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def check_handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in BOTH]
    yield
    after = [signal.getsignal(number) for number in BOTH]
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "saves", "said"),
    [
        (signal.SIGINT, False, "Ctrl-C: finishing this batch, then stopping; press again to stop"),
        (signal.SIGTERM, True, "SIGTERM: finishing this batch, then saving; a second one stops"),
    ],
)
def test_first_signal_is_noted_and_printed(number: signal.Signals, saves: bool, said: str) -> None:
    lines: list[str] = []
    with catching_signals(saves=saves, say=lines.append) as interruption:
        assert interruption.name is None
        send(number)
        assert interruption.name == NAMES[number]
    assert lines == [f"{said} at once"]


@pytest.mark.parametrize("number", BOTH)
def test_second_signal_stops_at_once(number: signal.Signals) -> None:
    with catching_signals(say=lambda line: None):
        send(number)
        with pytest.raises(STOPS[number]) as caught:
            send(number)
    if number == signal.SIGTERM:
        assert isinstance(caught.value, SystemExit)
        assert caught.value.code == 143


def test_ctrl_c_after_sigterm_counts_as_first_one() -> None:
    lines: list[str] = []
    with catching_signals(say=lines.append) as interruption:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert interruption.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert len(lines) == 2


@pytest.mark.parametrize("number", BOTH)
def test_interruption_raises_error_of_signal_with_note(number: signal.Signals) -> None:
    interruption = Interruption()
    interruption.take_note(number)
    with pytest.raises(STOPS[number]) as caught:
        interruption.raise_if_interrupted(where="after batch 12", checkpoint="runs/a/1-step-12")
    assert caught.value.__notes__ == [
        f"automicro: {NAMES[number]}: stopped after batch 12, saved in runs/a/1-step-12"
    ]
    assert number == signal.SIGINT or getattr(caught.value, "code", None) == 143


def test_handlers_are_restored_after_exception() -> None:
    before = signal.getsignal(signal.SIGINT)

    def fit() -> None:
        with catching_signals():
            assert signal.getsignal(signal.SIGINT) is not before
            raise ValueError("in training")

    with pytest.raises(ValueError, match="in training"):
        fit()
    assert signal.getsignal(signal.SIGINT) is before


def test_existing_signal_handler_is_also_called() -> None:
    seen: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with catching_signals(say=lambda line: None) as interruption:
            send(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert interruption.name == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_from_outside_python_is_kept(mocker: Any) -> None:
    mocker.patch("signal.getsignal", return_value=None)
    install = mocker.patch("signal.signal")
    with catching_signals():
        pass
    install.assert_not_called()


def test_nested_catching_signals_notify_both() -> None:
    lines: list[str] = []
    with catching_signals(say=lines.append) as outer:
        with catching_signals(say=lines.append) as inner:
            send(signal.SIGTERM)
        assert outer.name == inner.name == "SIGTERM"
    assert len(lines) == 2


def run(program: str) -> subprocess.CompletedProcess[str]:
    # The new session keeps signals to its process group away from the tests.
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        start_new_session=True,
        check=False,
    )


# Loads only this module, because an import of the whole package takes seconds.
ALONE = """
        import multiprocessing, os, runpy, signal, time
        module = runpy.run_path("automicro/trainer/signals.py")
        catching_signals = module["catching_signals"]
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("number", "code"), [("SIGINT", -signal.SIGINT), ("SIGTERM", 143)])
def test_process_ends_with_code_of_signal(number: str, code: int) -> None:
    done = run(f"""{ALONE}
        with catching_signals(saves=True) as interruption:
            os.kill(os.getpid(), signal.{number})
            print("the batch is finished", flush=True)
        interruption.raise_if_interrupted(where="after batch 1")
        print("unreached")
    """)
    assert done.returncode == code, done.stderr
    assert done.stdout == "the batch is finished\n"
    assert done.stderr.startswith(f"{NAMES[signal.Signals[number]]}: finishing this batch, ")


@pytest.mark.sweep
def test_forked_workers_end_with_sigterm() -> None:
    done = run(f"""{ALONE}
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
    """)
    assert done.stdout == "True\n", done.stderr
    assert done.stderr == ""


@pytest.mark.sweep
def test_forked_workers_survive_ctrl_c_until_batches_end() -> None:
    done = run(f"""{ALONE}
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
    """)
    assert (done.returncode, done.stdout) == (0, "Ctrl-C 20\n"), done.stderr
    assert done.stderr.count("finishing this batch") == 1
