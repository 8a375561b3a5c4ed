"""One rank on NCCL with all guards: failures on autograd's device threads, and no extra waits.

The votes go through a gloo group of one, so that every exchange of several ranks takes place.
"""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from automicro import Fixed, Halving
from automicro.ranks import coordinated as setup
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.exchange import Ballot, Exchange, failed, fold
from automicro.ranks.interface import Status
from tests.gpu.conftest import Record
from tests.gpu.device import GPU, accelerator, differences, to_device
from tests.gpu.subjects import HALF, PHASES, batch, microbatcher
from tests.gpu.wrappers import (
    KINDS,
    WITH_NCCL,
    exchange_over_gloo,
    final_snapshots,
    group_of_one,
    votes_of,
    whole,
    whole_snapshot,
    wrapped,
)
from tests.outside import Outside

pytestmark = [*GPU, WITH_NCCL]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.fixture(autouse=True)
def votes_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "open_exchange", exchange_over_gloo)


@pytest.mark.parametrize("failing_step", [0, 2], ids=["guarded", "replayed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_wrapped_model_recovers_bit_identically_from_oom(
    kind: str, phase: str, failing_step: int
) -> None:
    found = final_snapshots(
        lambda: wrapped(kind, PHASES[phase]), failing_step=failing_step, num_batches=4
    )
    assert differences(*found) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_device_thread_error_is_raised_and_rolled_back(kind: str) -> None:
    net = wrapped(kind)
    step = microbatcher(net, HALF, probe=False)
    seen = Outside(threads=set())

    def fail(gradient: torch.Tensor) -> None:
        seen.threads.add(threading.get_ident())
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
    assert seen.threads
    assert threading.get_ident() not in seen.threads, "the backward ran on the caller's thread"
    assert differences(before, whole_snapshot(net)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_settled_step_of_wrapped_model_never_syncs(kind: str, record_property: Record) -> None:
    net = wrapped(kind)
    step = microbatcher(net, HALF // 2, probe=False, loss_average="samples")
    for seed in range(3):
        step.backward(to_device(batch(seed=seed)))
        net.zero_grad()
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


class PeerFails(Exchange):
    """Simulate a second rank that reports out of memory in the first vote on another thread."""

    def __init__(self, inner: Exchange) -> None:
        self.__dict__.update(inner.__dict__)
        self.thread = threading.get_ident()
        self.has_failed = False

    def ballots(self, ballot: Ballot) -> Ballot:
        together = super().ballots(ballot)
        if self.has_failed or threading.get_ident() == self.thread:
            return together
        self.has_failed = True
        return fold([together, failed(Status.OUT_OF_MEMORY, 1)])


@pytest.mark.usefixtures("deterministic")
def test_peer_failure_seen_on_device_thread_causes_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error goes from Python through autograd's and DDP's C++ and back."""
    found = []
    for policy in (Fixed(HALF), Halving(refine=False)):
        net = wrapped("ddp")
        step = microbatcher(net, policy, probe=False)
        exchange = PeerFails(exchange_over_gloo())
        if not isinstance(policy, Fixed):
            assert isinstance(step.ranks, CoordinatedRanks)
            monkeypatch.setattr(step.ranks._votes, "_exchange", exchange)
        torch.manual_seed(3)
        result = step.backward(to_device(batch()))
        assert result.microbatch_size == HALF
        found.append(whole_snapshot(net))
    assert exchange.has_failed
    assert (result.attempts, result.ooms) == (2, 1)
    assert differences(*found) == []
