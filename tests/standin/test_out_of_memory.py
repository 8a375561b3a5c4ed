"""Real out-of-memory errors of the device: in forward, in its backward thread, by fragmentation."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, SampleTooLargeError
from automicro.memory import device as libraries
from automicro.memory.oom import Failure, classify
from tests.standin import device as standin
from tests.standin.hungry import MIB, ROWS, Hungry, leave


def train(size: Any, demand: tuple[int, int], device: str = "standin") -> dict[str, Any]:
    torch.manual_seed(1)
    net = Hungry(*demand).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "batchnorm": "ignore"}
    step = Microbatcher(net, microbatch_size=size, optimizer=optimizer, **options)
    ooms = 0
    for _ in range(3):
        result = step.backward((torch.randn(ROWS, 6), torch.arange(ROWS) % 3))
        ooms += result.ooms
        optimizer.step()
        optimizer.zero_grad()
    state = {name: each.cpu() for name, each in net.state_dict().items()}
    state["generator"] = standin.get_rng_state(device)
    return {"state": state, "ooms": ooms, "size": result.microbatch_size, "threads": net.threads}


@pytest.mark.parametrize("device", ["standin:0", "standin:1"])
@pytest.mark.parametrize("demand", [(16, 0), (0, 16)], ids=["forward", "backward"])
def test_training_that_ran_out_of_memory_is_bit_identical_to_training_that_did_not(
    demand: tuple[int, int], device: str
) -> None:
    expected = train(ROWS // 2, demand, device)
    leave(100 * MIB, torch.device(device).index)  # 8 rows need 128 MiB
    found = train("auto", demand, device)
    assert (expected["ooms"], found["ooms"], found["size"]) == (0, 1, ROWS // 2)
    differing = [
        name for name, value in expected["state"].items()
        if not torch.equal(value, found["state"][name])
    ]  # fmt: skip
    assert differing == []
    assert found["threads"]
    assert threading.get_ident() not in found["threads"], "backward ran on the caller's thread"


def test_a_row_that_does_not_fit_is_refused_with_nothing_changed() -> None:
    leave(100 * MIB)
    torch.manual_seed(1)
    net = Hungry(0, 128).to("standin")
    step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), batchnorm="ignore", probe=False)
    before = {name: each.cpu() for name, each in net.state_dict().items()}
    state, held = standin.get_rng_state(), standin.memory_allocated()
    with pytest.raises(SampleTooLargeError):
        step.backward((torch.randn(ROWS, 6), torch.arange(ROWS) % 3))
    assert all(torch.equal(before[name], each.cpu()) for name, each in net.state_dict().items())
    assert torch.equal(standin.get_rng_state(), state)
    assert standin.memory_allocated() == held


def test_its_error_is_one_that_a_smaller_microbatch_may_mend() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, device="standin")
    assert classify(caught.value) is Failure.RETRYABLE


def test_many_failures_in_a_row_leave_no_byte_behind() -> None:
    torch.manual_seed(1)
    net = Hungry(0, 16).to("standin")
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "batchnorm": "ignore"}
    rows = torch.randn(ROWS, 6), torch.arange(ROWS) % 3
    Microbatcher(net, probe=False, **options).backward(rows)
    net.zero_grad()
    baseline, ooms = standin.memory_allocated(), 0
    for number in range(48):
        leave((48 + number) * MIB)
        ooms += Microbatcher(net, probe=False, **options).backward(rows).ooms
        net.zero_grad()
        assert standin.memory_allocated() == baseline
    # 8 rows need 128 MiB, 4 need 64, in addition to a segment or two of 2 MiB.
    assert 48 + 16 <= ooms <= 48 + 24


class OnTwoDevices(nn.Module):
    """Like with a device map: the second device needs the memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 6).to("standin:0")
        self.second = Hungry(16, 0, batchnorm=False).to("standin:1")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).to("standin:1")).to("standin:0")
        return out


def test_where_the_second_device_is_the_full_one_the_fewest_microbatches_are_found() -> None:
    step = Microbatcher(OnTwoDevices(), loss_fn=nn.CrossEntropyLoss(), probe=False)
    leave(150 * MIB, 1)  # a row needs 16 MiB: 9 of 24 fit
    rows = torch.randn(24, 6), torch.arange(24) % 3
    results = [step.backward(rows) for _ in range(5)]
    assert results[0].failed_sizes == (24, 12)
    assert results[0].microbatch_size == 6
    assert results[-1].microbatch_size == 8
    assert sum(each.ooms for each in results[1:]) == 0, "peaks of the second device were not seen"


def test_libraries_are_used_once_on_both_threads_of_each_device_before_the_first_forward(
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
        step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), microbatch_size=8, probe=False)
        step.evaluate((torch.randn(ROWS, 6), torch.arange(ROWS) % 3))
    assert events == [
        "product on standin:0", "backward False",
        "product on standin:1", "backward False",
        "forward", "forward",
    ]  # fmt: skip
    assert all(map(torch.equal, generators, [standin.get_rng_state(i) for i in range(2)]))


def test_libraries_that_find_no_memory_leave_it_to_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "_used", set())
    torch.ops.standin.set_capacity(0, 0)
    with pytest.raises(torch.OutOfMemoryError):
        libraries._multiply(torch.device("standin:0"))
    libraries.use_libraries([torch.device("standin:0")], [nn.Conv1d(1, 1, 1)])
