"""FSDP2's guards on real streams in one process: torch's fake group simulates two ranks.

In a world of one, `fully_shard` runs no collectives and no guards. In the fake group it runs all of
them, with streams and events. Their results are invented, and the same each time.
"""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from automicro.ranks import coordinated as setup
from automicro.ranks.exchange import Exchange
from automicro.ranks.guards.fsdp import Collective, FsdpGuard
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, accelerator, differences
from tests.gpu.subjects import PHASES
from tests.gpu.wrappers import WITH_FSDP, final_snapshots, wrapped

pytestmark = [*GPU, WITH_FSDP]


def with_agreeing_peer() -> Exchange:
    """Return an exchange in which the other rank agrees."""
    return Exchange([], height=0, rank=0, world_size=2)


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    accelerator.set_device(DEVICE)
    backend = f"cpu:fake,{DEVICE.type}:fake"
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def votes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "open_exchange", with_agreeing_peer)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kinds of collectives that a guard has seen."""
    kinds: list[str] = []
    before = FsdpGuard.before

    def seen(self: FsdpGuard, step: Collective, *args: object, **kwargs: object) -> object:
        kinds.append(step.kind)
        return before(self, step, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(FsdpGuard, "before", seen)
    return kinds


@pytest.mark.parametrize("failing_step", [0, 2], ids=["guarded", "replayed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.usefixtures("deterministic")
def test_sharded_model_recovers_bit_identically_from_oom(
    phase: str, failing_step: int, guarded: list[str], record_property: Record
) -> None:
    mesh = init_device_mesh(DEVICE.type, (2,))
    found = final_snapshots(
        lambda: wrapped("fsdp", PHASES[phase], mesh=mesh), failing_step=failing_step, num_batches=3
    )
    counts = {kind: guarded.count(kind) for kind in dict.fromkeys(guarded)}
    record_property("guarded", counts)
    assert len(counts) >= 2
    assert differences(*found) == []
