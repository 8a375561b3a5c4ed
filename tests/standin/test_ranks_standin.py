"""Two ranks on two devices: communicators are connected before the first forward.

Their recovery is tested in tests/gpu/test_two_ranks_gpu.py.
"""

import functools
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from automicro.ranks import coordinated as setup
from automicro.ranks import warm_up
from automicro.ranks.exchange import Exchange
from tests.gpu.device import MIB
from tests.gpu.subjects import batch, microbatcher
from tests.gpu.wrappers import wrapped
from tests.standin import device as standin


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Simulate two ranks in one process: collectives do nothing, but one of them uses memory."""
    spec = "cpu:fake,standin:fake"
    dist.init_process_group(spec, store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_communicators_connect_before_first_forward(
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
    net = wrapped("fsdp", mesh=init_device_mesh("standin", (2,)))
    before: list[tuple[int, int]] = []
    net.register_forward_pre_hook(
        lambda *_: before.append((len(ran), standin.memory_reserved() - standin.memory_allocated()))
    )
    step = microbatcher(net, 4, probe=False)
    for _ in range(2):
        step.backward(batch())
    assert set(ran) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {count for count, _ in before} == {len(ran)}
    assert before[0][1] < 32 * MIB, "what they were given stays cached"
