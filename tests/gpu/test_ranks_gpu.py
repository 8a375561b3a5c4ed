"""One rank on NCCL with all guards: what fails on autograd's device threads, and nothing waits.

The votes go through a gloo group of one, so every exchange is made that several ranks would make.
"""

import datetime
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from automicro import Fixed, Halving, Microbatcher
from automicro.distributed import CoordinatedRanks, setup
from automicro.distributed.exchange import TreeExchange
from automicro.distributed.groups import GlooGroup
from automicro.memory import device_identity
from automicro.torch_private_distributed import HashStore
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    accelerator,
    differences,
    only_cuda,
    room,
    snapshot,
    to_device,
)
from tests.gpu.subjects import ROWS, Blocks, Hungry, batch, microbatcher, model
from tests.gpu.test_oom_gpu import PHASES, ROOM

pytestmark = [
    *GPU,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not dist.is_nccl_available(),
        reason="this torch is built without NCCL",
    ),
]

KINDS = [
    "ddp",
    pytest.param(
        "fsdp",
        marks=pytest.mark.skipif(
            not hasattr(FSDPModule, "reset_iter_state"), reason="fully_shard needs torch 2.13"
        ),
    ),
]
HALF = ROWS // 2
PLENTY = 64 * 1024 * MIB


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    accelerator.set_device(DEVICE)
    is_cuda = DEVICE.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=HashStore(),
        rank=0,
        world_size=1,
        device_id=DEVICE if is_cuda else None,
        timeout=datetime.timedelta(minutes=5),
    )
    if DEVICE.type == "standin":
        accelerator.join(dist.distributed_c10d._get_default_group())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def votes_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange() -> TreeExchange:
        group = GlooGroup([0], timeout_seconds=60)
        return TreeExchange([group], height=1, rank=0, world_size=1)

    monkeypatch.setattr(setup, "open_exchange", exchange)


def wrapped(kind: str, *hungry: nn.Module) -> nn.Module:
    net = model(*hungry)
    if kind == "ddp":
        return DistributedDataParallel(net, device_ids=[DEVICE.index])
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


def whole(net: nn.Module) -> Blocks:
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    assert isinstance(inner, Blocks)
    return inner


def whole_snapshot(net: nn.Module) -> dict[str, torch.Tensor]:
    found = snapshot(net)
    local = {name: getattr(value, "_local_tensor", value) for name, value in found.items()}
    return {name: value.to("cpu", copy=True) for name, value in local.items()}


def votes_of(step: Microbatcher) -> int:
    assert isinstance(step.ranks, CoordinatedRanks)
    return step.ranks.num_votes


@pytest.mark.parametrize("failing_step", [0, 2], ids=["guarded", "replayed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_a_wrapped_model_that_ran_out_of_memory_ends_with_the_same_bits(
    kind: str, phase: str, failing_step: int
) -> None:
    found = []
    for is_scripted in (True, False):
        net = wrapped(kind, PHASES[phase])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        policy = Halving(refine=False, grow=False)
        step = microbatcher(net, policy, optimizer=optimizer, probe=False)
        torch.manual_seed(3)
        failures = []
        for index in range(4):
            has_little_room = index >= failing_step
            if is_scripted:
                step._train.policy = Fixed(HALF if has_little_room else ROWS)
            with room(ROOM if has_little_room and not is_scripted else PLENTY):
                failures.append(step.backward(to_device(batch(seed=index))).ooms)
            optimizer.step()
            optimizer.zero_grad()
        assert sum(failures) == failures[failing_step] == (not is_scripted)
        found.append(whole_snapshot(net))
    assert differences(*found) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_an_error_on_autograds_device_thread_is_raised_and_leaves_no_trace(kind: str) -> None:
    net = wrapped(kind)
    step = microbatcher(net, HALF, probe=False)
    threads = set()

    def fail(gradient: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        raise ValueError("a mistake of the user's")

    def fail_in_backward(_: nn.Module, __: object, out: torch.Tensor) -> None:
        out.register_hook(fail)

    step.backward(to_device(batch()))
    net.zero_grad()
    torch.manual_seed(3)
    before = whole_snapshot(net)
    handle = whole(net).blocks[0].register_forward_hook(fail_in_backward)
    with pytest.raises(ValueError, match="a mistake of the user's"):
        step.backward(to_device(batch()))
    handle.remove()
    assert threads
    assert threading.get_ident() not in threads, "the backward ran on the caller's thread"
    assert differences(before, whole_snapshot(net)) == []


def settled(kind: str) -> tuple[nn.Module, Microbatcher]:
    net = wrapped(kind)
    step = microbatcher(net, HALF // 2, probe=False, loss_average="samples")
    for seed in range(3):
        step.backward(to_device(batch(seed=seed)))
        net.zero_grad()
    return net, step


@pytest.mark.parametrize("kind", KINDS)
def test_a_settled_step_of_a_wrapped_model_never_waits_for_the_device(
    kind: str, record_property: Record
) -> None:
    _, step = settled(kind)
    rows = to_device(batch(seed=4))
    before = votes_of(step)
    accelerator.set_sync_debug_mode("error")
    try:
        result = step.backward(rows)
    finally:
        accelerator.set_sync_debug_mode("default")
    votes = votes_of(step) - before
    record_property("votes", votes)
    assert votes == (2 if kind == "ddp" else result.num_microbatches + 1)


@only_cuda("such traces")
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_of_a_settled_step_shows_no_more_waiting_than_the_wrapper_has(
    kind: str, record_property: Record
) -> None:
    _, step = settled(kind)
    plain, loss_fn = wrapped(kind), nn.CrossEntropyLoss()
    inputs, targets = to_device(batch(seed=5))

    def by_hand() -> None:
        for start in range(0, ROWS, HALF // 2):
            part = slice(start, start + HALF // 2)
            loss_fn(plain(inputs[part]), targets[part]).backward()

    by_hand()
    ours = waits(lambda: step.backward((inputs, targets)))
    theirs = waits(by_hand)
    record_property("waits", {"automicro": ours, "wrapper": theirs})
    assert len(ours) <= len(theirs)


def waits(run: Callable[[], Any]) -> list[str]:
    """The calls by which the host waited for the device meanwhile, as a trace shows them."""
    accelerator.synchronize(DEVICE)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("measured"):
            run()
        accelerator.synchronize(
            DEVICE
        )  # the profiler would wait as well; this is outside the range
    events = trace.events()
    assert events is not None
    [measured] = [each for each in events if each.name == "measured" and not is_kernel(each)]
    return [
        each.name
        for each in events
        if each.name.startswith("cuda")
        and each.name.endswith("Synchronize")
        and measured.time_range.start <= each.time_range.start <= measured.time_range.end
    ]


def is_kernel(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


@pytest.mark.usefixtures("deterministic")
def test_a_vote_that_is_cast_on_a_device_thread_stops_a_guarded_step() -> None:
    net = wrapped("ddp", Hungry(0, 64))
    step = microbatcher(net, "auto", probe=False)
    with room(ROOM):
        result = step.backward(to_device(batch()))
    assert (result.ooms, result.microbatch_size) == (1, HALF)
    assert all(parameter.grad is not None for parameter in net.parameters())


@only_cuda("a name of its own on each device, the same in all processes")
def test_another_process_knows_the_device_by_the_same_name() -> None:
    program = (
        "import sys, torch; from automicro.memory import device_identity; "
        "print(device_identity(sys.argv[1]), flush=True)"
    )
    command = [sys.executable, "-c", program, str(DEVICE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == device_identity(DEVICE) != "None"
