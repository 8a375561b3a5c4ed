"""Work in a fork of the process."""

import threading

import pytest

from tests.torture.engine import forks
from tests.torture.engine.faults import Fault
from tests.torture.engine.subject import differences, values
from tests.torture.engine.trials import Scene, Trials, attempt
from tests.torture.subjects import batchnorm_and_dropout

# Workers of pytest-xdist have a second thread, which waits.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def test_fork_leaves_parent_unchanged() -> None:
    numbers = [1]

    def work() -> list[int]:
        numbers.append(2)
        return numbers

    assert forks.in_fork(work) == [1, 2]
    assert numbers == [1]


def test_error_in_fork_is_raised_in_parent() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        forks.in_fork(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="in a process of its own"):
        forks.in_fork(threading.Lock)  # cannot be pickled


def test_process_with_several_threads_cannot_fork() -> None:
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    thread.start()
    try:
        assert not forks.can_fork()
    finally:
        going.set()
        thread.join()


@pytest.mark.sweep
def test_trial_in_fork_matches_trial_in_new_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(name="BatchNorm and dropout", make=batchnorm_and_dropout)
    monkeypatch.setattr("tests.torture.engine.trials.can_fork", lambda: True)
    trials = Trials(scene)
    trials.get_ready()
    prepared = trials._prepared
    assert prepared is not None
    before = values(prepared.take())
    for plan in [Fault(60)], [Fault(60, kind="boom")], [Fault(60, after=True), Fault(120)]:
        assert trials.attempt(plan) == attempt(Trials(scene), plan)
        assert differences(before, values(prepared.take())) == []
