"""Every operation of torch that needs other ranks is known as one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed._symmetric_memory
import torch.distributed.nn.functional
import torch.distributed.tensor
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from automicro.torch_private import is_collective

NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "symm_mem",
)
LOCAL = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


def operations() -> dict[str, object]:
    """Every operation of torch, by its name."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is not None:
            found[f"{schema.name}.{schema.overload_name}"] = overload
    return found


def test_every_operation_of_the_distributed_namespaces_is_known() -> None:
    every = operations()
    inside = {name: op for name, op in every.items() if name.split("::")[0] in NAMESPACES}
    assert len(inside) > 80
    unknown = {
        name.partition("::")[2].rstrip(".") for name, op in inside.items() if not is_collective(op)
    }
    assert unknown == LOCAL


def test_no_other_namespace_takes_a_process_group() -> None:
    others = {
        name
        for name, op in operations().items()
        if not is_collective(op)
        and any(word in str(getattr(op, "_schema", "")) for word in ("ProcessGroup", "group_name"))
    }
    assert others == set()


def test_what_is_computed_here_is_none() -> None:
    for func in (torch.ops.aten.mm.default, torch.ops.aten.sum.default, len, object()):
        assert not is_collective(func)


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def the_world() -> torch.distributed.ProcessGroup:
    world = torch.distributed.group.WORLD
    assert world is not None
    return world


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_collective(func):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:torch.distributed.nn:FutureWarning")
def test_a_mode_sees_what_people_call() -> None:
    dist = torch.distributed
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x),
        "async": lambda x: dist.all_reduce(x, async_op=True).wait(),
        "all_gather": lambda x: dist.all_gather([x.clone(), x.clone()], x),
        "barrier": lambda x: dist.barrier(),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "send": lambda x: dist.send(x, 1),
        "nn": lambda x: dist.nn.functional.all_gather(x),
        "functional": lambda x: dist._functional_collectives.all_reduce(x, "sum", the_world()).add(
            1
        ),
    }
    for name, call in calls.items():
        with Seen() as seen:
            value: Tensor = torch.ones(2)
            call(value)
        assert seen.names, name
