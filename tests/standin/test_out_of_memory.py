"""Full devices and library memory on two devices, which few machines with GPUs have.

Recovery itself is tested in tests/gpu, which also runs on the stand-in.
"""

import threading

import pytest
import torch
from torch import Tensor, nn

from automicro.memory import libraries
from tests.gpu.device import MIB, SECOND, room
from tests.gpu.subjects import Hungry, OnTwoDevices, batch, microbatcher
from tests.standin import device as standin


def test_fewest_microbatches_are_found_if_second_device_is_full() -> None:
    step = microbatcher(OnTwoDevices(Hungry(32, 0)), probe=False)
    with room(350 * MIB, SECOND):  # 8 rows need 256 MiB, 12 of 24 need 384
        results = [step.backward(batch(24)) for _ in range(5)]
    assert results[0].failed_sizes == (24, 12)
    assert results[0].microbatch_size == 6
    assert results[-1].microbatch_size == 8
    assert sum(each.ooms for each in results[1:]) == 0, "peaks of the second device were not seen"


def test_libraries_are_warmed_up_once_per_device_and_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "_used", set())
    events: list[str] = []
    multiply = libraries._multiply
    caller = threading.get_ident()

    def noting(device: torch.device) -> Tensor:
        product = multiply(device)
        place = [] if threading.get_ident() == caller else ["elsewhere"]
        events.extend([f"product on {device}", *place])
        product.register_hook(
            lambda _: events.append(f"backward {threading.get_ident() == caller}")
        )
        return product

    monkeypatch.setitem(libraries._WORK, "products", noting)
    net = OnTwoDevices()
    net.register_forward_pre_hook(lambda *_: events.append("forward"))
    generators = [standin.get_rng_state(index) for index in range(2)]
    for _ in range(2):
        microbatcher(net, 16, probe=False).evaluate(batch())
    assert events == [
        "product on standin:0", "backward False",
        "product on standin:1", "backward False",
        "forward", "forward",
    ]  # fmt: skip
    assert all(map(torch.equal, generators, [standin.get_rng_state(i) for i in range(2)]))


def test_oom_during_library_warm_up_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError(str(device))

    monkeypatch.setattr(libraries, "_used", used := set[object]())
    monkeypatch.setattr(libraries, "_WORK", dict.fromkeys(libraries._WORK, fill))
    libraries.use_libraries([torch.device("standin:0")], [nn.Conv1d(1, 1, 1)])
    assert used
