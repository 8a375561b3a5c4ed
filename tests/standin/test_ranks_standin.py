"""Two ranks on two devices: one runs out of memory, in forward or on its backward thread."""

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from automicro import Microbatcher
from automicro.ranks import coordinated as setup
from automicro.ranks import warm_up
from automicro.ranks.exchange import Exchange
from tests.ranks.world import World, world_of
from tests.standin import device as standin
from tests.standin.hungry import MIB, ROWS, Hungry
from tests.standin.rank_jobs import train


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as world:
        yield world


@pytest.mark.parametrize("short_rank", [0, 1])
@pytest.mark.parametrize("demand", [(16, 0), (0, 16)], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_where_one_rank_runs_out_of_memory_both_end_with_the_bits_of_a_run_at_the_same_sizes(
    kind: str, demand: tuple[int, int], short_rank: int, world: World
) -> None:
    expected = world.run(train, kind, demand, None, ROWS // 2)
    found = world.run(train, kind, demand, short_rank, None)
    for one, other in zip(expected, found, strict=True):
        assert one["ooms"] == [0, 0, 0]
        assert other["ooms"] == [0, 1, 0]
        assert other["size"] == ROWS // 2
        state = other["state"]
        differing = [
            name for name, each in one["state"].items() if not torch.equal(each, state[name])
        ]
        assert differing == []


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Simulate two ranks in one process: collectives do nothing, except that one uses memory."""
    spec = "cpu:fake,standin:fake"
    dist.init_process_group(spec, store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_communicators_with_memory_on_the_device_are_connected_before_the_first_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = functools.partial(Exchange, [], height=0, rank=0, world_size=2)
    monkeypatch.setattr(setup, "open_exchange", two)
    ran: list[str] = []
    run = warm_up._run

    def noting(use: warm_up.Use, whole: Tensor, part: Tensor) -> None:
        assert whole.device.type == part.device.type == "standin"
        ran.append(use.kind)
        run(use, whole, part)

    monkeypatch.setattr(warm_up, "_run", noting)
    net = Hungry(1, 0, batchnorm=False).to("standin")
    fully_shard(net, mesh=init_device_mesh("standin", (2,)))
    before: list[tuple[int, int]] = []
    net.register_forward_pre_hook(
        lambda *_: before.append((len(ran), standin.memory_reserved() - standin.memory_allocated()))
    )
    step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), microbatch_size=4, probe=False)
    for _ in range(2):
        step.backward((torch.randn(ROWS, 6), torch.arange(ROWS) % 3))
    assert set(ran) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {count for count, _ in before} == {len(ran)}
    assert before[0][1] < 32 * MIB, "what they were given stays cached"
