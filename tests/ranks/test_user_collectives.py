"""Collectives of users in many places, on one rank or all, and with out-of-memory errors.

Nothing hangs: collectives of all ranks give the exact result, and those of one rank are named.
"""

import inspect
import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory
import torch.distributed.nn.functional as dnn
import torch.distributed.tensor
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from automicro import Callback, Trainer
from automicro.features import RememberSizes
from automicro.ranks.guards import guard
from automicro.torch_private_execution import is_collective
from automicro.values import same_values
from tests.outside import Outside
from tests.ranks.world import World, WorldStuckError, world_of
from tests.ranks.wrapping import raised, whole_parameters
from tests.sweeps import SEED

pytestmark = pytest.mark.sweep


Operation = Callable[[Tensor], object]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _list(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for _ in range(dist.get_world_size())]


def _wide(x: Tensor) -> Tensor:
    return x.repeat(dist.get_world_size(), *[1] * (x.dim() - 1))


def _ring(x: Tensor, *, both: bool = False) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    operations = []
    for step in (1, -1) if both else (1,):
        operations.append(dist.P2POp(dist.isend, x, (rank + step) % size))
        operations.append(dist.P2POp(dist.irecv, torch.empty_like(x), (rank - step) % size))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _pair(send: Any, receive: Any, sent: Any, received: Any) -> None:
    """Ranks 0 and 1 exchange a message, and other ranks take no part."""
    work = None
    if dist.get_rank() < 2:
        work = receive(received, 0) if dist.get_rank() else send(sent, 1)
    if isinstance(work, dist.Work):
        work.wait()


def _objects() -> list[Any]:
    return [None] * dist.get_world_size()


_groups: dict[Any, list[dist.ProcessGroup]] = {}


def _subgroup() -> dist.ProcessGroup:
    """Return the group of this rank, made before training: ranks 0 and 1, or only itself."""
    found = _groups[_world()]
    return found[0] if dist.get_rank() < 2 else found[1]


def make_subgroups() -> None:
    size = dist.get_world_size()
    if _world() not in _groups:
        made = [dist.new_group([0, 1][:size]), *[dist.new_group([r]) for r in range(2, size)]]
        _groups.clear()
        _groups[_world()] = [made[0], made[max(1, dist.get_rank() - 1)] if size > 2 else made[0]]


# Keys are functions of torch.distributed; the text after a space is a variation.
OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce async": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "all_reduce subgroup": lambda x: dist.all_reduce(x, group=_subgroup()),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x, x.clone()]),
    "all_gather": lambda x: dist.all_gather(_list(x), x),
    "all_gather_coalesced": lambda x: dist.all_gather_coalesced([[y] for y in _list(x)], [x]),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(_wide(x), x),
    "all_gather_single": lambda x: dist.all_gather_single(_wide(x), x),
    "all_gather_object": lambda x: dist.all_gather_object(_objects(), dist.get_rank()),
    "all_to_all": lambda x: dist.all_to_all(_list(x), _list(x)),
    "all_to_all_single": lambda x: dist.all_to_all_single(_wide(x), _wide(x)),
    "barrier": lambda x: dist.barrier(),
    "batch_isend_irecv": _ring,
    "batch_isend_irecv both": lambda x: _ring(x, both=True),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "broadcast_object_list": lambda x: dist.broadcast_object_list([3], 0),
    "gather": lambda x: dist.gather(x, _list(x) if dist.get_rank() == 0 else None),
    "gather_object": lambda x: dist.gather_object(1, _objects() if not dist.get_rank() else None),
    "monitored_barrier": lambda x: dist.monitored_barrier(),
    "reduce": lambda x: dist.reduce(x, 0),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, _list(x)),
    "reduce_scatter_single": lambda x: dist.reduce_scatter_single(x, _wide(x)),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, _wide(x)),
    "scatter": lambda x: dist.scatter(x, _list(x) if dist.get_rank() == 0 else None),
    "scatter_object_list": lambda x: dist.scatter_object_list(
        [None], _objects() if dist.get_rank() == 0 else None
    ),
    "send": lambda x: _pair(dist.send, dist.recv, x, torch.empty_like(x)),
    "isend": lambda x: _pair(dist.isend, dist.irecv, x, torch.empty_like(x)),
    "send_object_list": lambda x: _pair(dist.send_object_list, dist.recv_object_list, [3], [None]),
    "nn.all_gather": lambda x: dnn.all_gather(x),
    "nn.all_reduce": lambda x: dnn.all_reduce(x),
    "funcol.all_reduce": lambda x: funcol.all_reduce(x, "sum", _world()).sum(),
    "funcol.all_gather": lambda x: funcol.all_gather_tensor(x, 0, _world()).sum(),
    "funcol.reduce_scatter": lambda x: funcol.reduce_scatter_tensor(
        _wide(x), "sum", 0, _world()
    ).sum(),
}


# Functions that take a group and do not communicate in it, or only at its start.
LOCAL = {
    *("destroy_process_group", "get_backend", "get_backend_config", "get_global_rank"),
    *("get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks"),
    *("get_rank", "get_world_size", "is_backend_available", "new_subgroups", "shrink_group"),
    "reduce_op",  # deprecated, and warns when it is read
}


def test_every_communicating_torch_function_is_covered() -> None:
    known = {name.split()[0] for name in OPERATIONS}
    known |= {name.replace("send", "recv") for name in known}
    for name in sorted({*dist.distributed_c10d.__all__} - LOCAL - known):
        value = getattr(dist.distributed_c10d, name)
        if inspect.isfunction(value):
            assert "group" not in inspect.signature(inspect.unwrap(value)).parameters, name


def test_every_communicating_torch_operator_is_recognized() -> None:
    every = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is not None:
            every[namespace, name, schema.overload_name] = overload
    spaces = (
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d_functional",
        "symm_mem",
    )
    inside = {key: operator for key, operator in every.items() if key[0] in spaces}
    assert len(inside) > 80
    unknown = {key for key, operator in every.items() if not is_collective(operator)}
    assert {key[1] for key in unknown & inside.keys()} == {
        *("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
    }
    for key in unknown - inside.keys():
        of_key = str(getattr(every[key], "_schema", ""))
        assert "ProcessGroup" not in of_key
        assert "group_name" not in of_key


class Where:
    """Runs an operation at one place on some ranks, and runs out of memory on one rank."""

    def __init__(self, name: str, place: str, ranks: Sequence[int], oom: tuple[int, int] | None):
        self._operation, self._place, self._ranks = OPERATIONS[name], place, ranks
        self.is_in_microbatch = False
        self._count, self._oom = Outside(calls=0), oom

    def reach(self, place: str) -> None:
        if place == self._place and dist.get_rank() in self._ranks:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._operation(torch.ones(2, 3))
        if place == "forward" and self.is_in_microbatch:  # checks of the loss do not count
            self._count.calls += 1
            if self._oom == (dist.get_rank(), self._count.calls):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Net(nn.Module):
    def __init__(self, where: Where) -> None:
        super().__init__()
        self.first, self.second, self.where = nn.Linear(4, 4), nn.Linear(4, 2), where

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.where.reach("forward")
        return self.second(torch.tanh(x))  # type: ignore[no-any-return]


class Rows(Dataset[Any]):
    def __init__(self, where: Where, count: int) -> None:
        self.where, self.count = where, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 2:
            self.where.reach("data set")
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), index % 2


class Counting(Metric):
    full_state_update = False
    total: Tensor

    def __init__(self, where: Where) -> None:
        super().__init__()
        self.where = where
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.where.reach("metric")
        self.total += len(outputs)

    def compute(self) -> Tensor:
        self.where.reach("metric's compute")
        return self.total

    def __deepcopy__(self, memo: Any) -> "Counting":
        copy = Counting(self.where)
        copy.total = self.total.clone()
        return copy


class Calling(Callback):
    """Calls the operation in callbacks, and records microbatch sizes."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.sizes: list[int] = []

    def microbatch_start(self, run: Any, cut: Any) -> None:
        self.where.is_in_microbatch = True

    def microbatch_end(self, run: Any, cut: Any) -> None:
        self.where.is_in_microbatch = False

    def batch_start(self, run: Any, batch: Any) -> None:
        self.where.reach("batch_start")

    def batch_end(self, run: Any, result: Any) -> None:
        self.where.reach("callback")
        self.sizes.append(result.microbatch_size)


PLACES = ("forward", "loss", "metric", "callback", "data set", "metric's compute")


def end_of(name: str, place: str, ranks: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
    """Train for three epochs; return the error, or the final parameters and microbatch sizes."""
    make_subgroups()
    guard._opened = None  # a run that ended in an error has no votes left, so all ranks meet again
    where = Where(name, place, ranks, options.get("oom"))
    torch.manual_seed(0)
    net: nn.Module = Net(where)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        where.reach("loss")
        return F.cross_entropy(outputs, targets)

    calling = Calling(where)
    rows = Rows(where, options.get("rows", 4 * dist.get_world_size()))
    nodes = options.get("nodes")
    variables = {"LOCAL_WORLD_SIZE": str(nodes[dist.get_rank()])} if nodes else {}
    with mock.patch.dict(os.environ, variables):
        kind, text = raised(
            lambda: Trainer(
                net,
                DataLoader(rows, batch_size=4),
                loss_fn=loss_fn,
                optimizer=torch.optim.SGD,
                metrics={"counting": Counting(where)},
                callbacks=[calling],
                parallel=options.get("kind", "ddp"),
                max_duration="3ep",
                microbatch_size="auto",
                features=[RememberSizes(False)],
                loss_average="samples",
                device="cpu",
                progress=False,
            ).fit()
        )
    state = [] if kind else [*whole_parameters(net).values()]
    return {"kind": kind, "text": text, "state": state, "sizes": tuple(calling.sizes)}


CASES_OF_A_WORLD = 60
Case = tuple[str, str, bool, dict[str, Any]]


def require_ended(world: World, case: Case) -> str:
    """Check how a case ended, and return "exact" or "named"."""
    name, place, on_all, options = case
    ends = world.run(end_of, name, place, range(world.size) if on_all else [1], options)
    kinds = {end["kind"] for end in ends}
    if not on_all:
        assert kinds <= {"DesyncError", "PeerFailedError"}, ends
        assert any(name_in_errors(name) in end["text"] for end in ends), ends
        return "named"
    if world.size > 2 and name in ("send", "isend", "send_object_list"):
        assert kinds == {"DesyncError"}, ends  # the third rank has nothing to send
        return "named"
    assert kinds == {""}, ends
    assert {end["sizes"] for end in ends} == {ends[0]["sizes"]}
    assert "oom" not in options or min(ends[0]["sizes"]) < 4, "it ran out of memory"
    for end in ends:
        assert same_values(end["state"], ends[0]["state"])
    return "exact"


def name_in_errors(name: str) -> str:
    """Return the name of an operation in error messages."""
    name = name.split()[0].rpartition(".")[2]
    return {
        "all_gather_object": "all_gather",
        "all_gather_single": "all_gather_into_tensor",
        "batch_isend_irecv": "send",
        "broadcast_object_list": "broadcast",
        "gather_object": "all_gather",
        **dict.fromkeys(("isend", "send", "send_object_list"), "recv"),
        "reduce_scatter_single": "reduce_scatter_tensor",
        "scatter_object_list": "broadcast",
    }.get(name, name.removesuffix("_tensor"))


def every_case(world_size: int, nodes: Sequence[int] = ()) -> Iterator[Case]:
    axes = OPERATIONS, PLACES, (True, False), ("ddp", "fsdp")
    for name, place, on_all, kind in itertools.product(*axes):
        options: dict[str, Any] = {"kind": kind, "nodes": nodes}
        yield name, place, on_all, options
        for rank in (0, world_size - 1) if on_all else ():
            yield name, place, on_all, {**options, "oom": (rank, 3)}


@pytest.mark.parametrize("place", PLACES)
def test_few_operations_at_every_place(world2: World, place: str) -> None:
    cases = [case for case in every_case(2) if case[1] == place]
    for case in random.Random(f"{SEED} {place}").sample(cases, 4):
        require_ended(world2, case)


def test_few_operations_on_two_nodes(world3: World) -> None:
    for case in random.Random(SEED).sample(list(every_case(3, (2, 2, 1))), 4):
        require_ended(world3, case)


def test_collective_at_batch_start_missing_on_one_rank_is_named(world2: World) -> None:
    for end in world2.run(end_of, "all_reduce", "batch_start", [0, 1], {"rows": 9}):
        assert end["kind"] == "DesyncError"
        assert "all_reduce" in end["text"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("size", "nodes"), [(2, ()), (3, ()), (3, (2, 2, 1))], ids=["two", "three", "two nodes"]
)
def test_every_operation_at_every_place(size: int, nodes: Sequence[int], kind: str) -> None:
    counts = {"exact": 0, "named": 0}
    cases = [case for case in every_case(size, nodes) if case[3]["kind"] == kind]
    # Groups live as long as their processes and each has threads, so worlds are replaced.
    for first in range(0, len(cases), CASES_OF_A_WORLD):
        with world_of(size) as world:
            for case in cases[first : first + CASES_OF_A_WORLD]:
                try:
                    counts[require_ended(world, case)] += 1
                except (AssertionError, WorldStuckError) as error:
                    raise AssertionError(f"{case} on {size} ranks\n{error}") from error
    print(f"{kind} on {size} ranks, nodes {nodes or 'one'}: {counts}, 0 hangs")
