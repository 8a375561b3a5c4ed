"""Sets the initial state of every test, and checks that no test changes the process."""

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

settings.register_profile("people", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")

# Read when huggingface_hub is imported: otherwise TRL starts a telemetry thread.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# More threads slow down small kernels, and the last bits of sums would then differ between
# machines.
torch.set_num_threads(1)

# A shell starts background jobs with Ctrl-C ignored. Runs keep this setting, and the processes that
# tests start inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set by pytest, by the first use of a compiler, and by importing scikit-learn or Lightning: tests
# cannot avoid these.
VARIABLES_OF_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
}
# Started once and kept until the process ends: tqdm's monitor, the compiler's workers.
THREADS_OF_LIBRARIES = {"tqdm_monitor", "InductorSubproc", "subproc_worker_timer"}


# Seconds for costly tests without their own timeout: the longest take minutes on a slow, busy
# machine.
COSTLY_TIMEOUT = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give costly tests more time than quick ones before they count as hanging."""
    for item in items:
        is_costly = any(item.get_closest_marker(name) for name in ("slow", "sweep"))
        if is_costly and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(COSTLY_TIMEOUT))


@pytest.fixture(autouse=True, scope="module")
def freeze_gc() -> None:
    """Hide objects of imports and earlier modules from the garbage collector.

    automicro collects cycles after each OOM, which happens hundreds of times in these tests.
    """
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def failed_batch_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Save failed batches in the temporary folder of the tests."""
    folder = tmp_path_factory.mktemp("automicro-kept", numbered=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("automicro.trainer.failed_batch.new_folder", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random state."""
    random.seed(0)
    np.random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # manual_seed takes a millisecond: a traceback per missing kind of device
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the test that changes the process, rather than a later test affected by it."""
    before = process_state()
    threads = set(threading.enumerate())
    yield
    after = process_state()
    leaks = [
        f"{name}: {before.get(name, 'unset')} → {after.get(name, 'unset')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    leaks += [f"thread still running: {thread.name}" for thread in lasting_threads(threads)]
    if leaks:
        pytest.fail("the test left the process changed:\n  " + "\n  ".join(leaks), pytrace=False)


def process_state() -> dict[str, object]:
    """Read all global state that a test could change for later tests."""
    state: dict[str, object] = {
        f"${name}": value
        for name, value in os.environ.items()
        if name not in VARIABLES_OF_LIBRARIES
    }
    state["working directory"] = os.getcwd()
    state["default dtype"] = torch.get_default_dtype()
    state["default device"] = torch.get_default_device()
    state["grad mode"] = torch.is_grad_enabled()
    state["inference mode"] = torch.is_inference_mode_enabled()
    state["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    state["anomaly detection"] = torch.is_anomaly_enabled()
    state["torch threads"] = torch.get_num_threads()
    state["active dispatch modes"] = len(_get_current_dispatch_mode_stack())
    if torch.distributed.is_available():
        state["process group"] = torch.distributed.is_initialized()
    return state


def lasting_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the new threads that do not end within a second."""
    new = [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and thread.name not in THREADS_OF_LIBRARIES
        # Threads that Python did not start, such as autograd's, keep running.
        and not isinstance(thread, threading._DummyThread)
    ]
    for thread in new:
        thread.join(timeout=1.0)
    return [thread for thread in new if thread.is_alive()]
