"""Preparation of processes before they connect: devices, names, blocks and errors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from automicro.checkpoints.rng import rng_state
from automicro.torch_private_distributed import HashStore
from automicro.trainer.device import choose_device
from automicro.trainer.parallel import check_parallel, find_blocks
from automicro.trainer.processes import Process, name_of_start, own_device, process_in_environment


def places(count: int) -> list[Process]:
    return [Process(rank=rank, world_size=count, local_rank=rank) for rank in range(count)]


def build_for_cuda(monkeypatch: pytest.MonkeyPatch, *, count: int) -> None:
    """Make torch respond like a CUDA build on a machine with so many GPUs."""
    answers = {
        "torch._C._accelerator_getAccelerator": torch.device("cuda"),
        "torch.cuda.is_available": count > 0,
        "torch.cuda.device_count": count,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(name, lambda answer=answer: answer)


def test_cuda_build_without_gpu_trains_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    build_for_cuda(monkeypatch, count=0)
    for place in places(2):
        assert choose_device(own_device("auto", place)) == torch.device("cpu")
        with pytest.raises(ValueError, match="device='cuda' cannot be used here"):
            choose_device(own_device("cuda", place))
    assert rng_state()["accelerators"] == []


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_process_has_its_own_gpu_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    build_for_cuda(monkeypatch, count=2)
    *two, third = places(3)
    assert [str(own_device(device, each)) for each in two] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r"this machine has 2 cuda devices\. Start at most 2"):
        own_device(device, third)
    assert own_device("cuda:0", third) == "cuda:0"
    build_for_cuda(monkeypatch, count=1)  # a launcher shows each process one GPU
    assert str(own_device(device, places(4)[3])) == "cuda:0"


def in_threads(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the result or the error of each rank."""
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, rank) for rank in range(world_size)]
        return [each.exception(timeout=30) or each.result() for each in futures]


def test_each_start_has_unique_name_despite_leftovers_in_store() -> None:
    store = HashStore()
    # Two ranks of a killed start left unanswered messages.
    store.set("automicro/meeting/hello/1", "killed")
    store.set("automicro/meeting/hello/2", "killed as well")
    starts = [in_threads(3, lambda rank: name_of_start(store, places(3)[rank])) for _ in range(3)]
    assert [len(set(names)) for names in starts] == [1, 1, 1]
    assert len({names[0] for names in starts}) == 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_blocks_are_repeated_layers_in_lists_and_nested_modules() -> None:
    layers = [Layer() for _ in range(3)]
    body = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(layers))
    assert find_blocks(nn.ModuleDict({"embed": nn.Linear(2, 2), "body": body})) == layers
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), Layer())) == []


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two', which is not a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ],
)
def test_invalid_environment_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        process_in_environment()


SGD = torch.optim.SGD(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("parallel", "modules", "options", "message"),
    [
        (None, [nn.Linear(2, 2)], {}, "each process would train its own model"),
        ("fsdp", [nn.Linear(2, 2)], {"compiles": True}, "Use parallel='ddp', or compile each bl"),
        ("fsdp", [nn.Linear(2, 2)], {"optimizer": SGD}, "Pass a callable, such as"),
        ("ddp", [nn.LazyLinear(2)], {}, "Run the model once first"),
        ("ddp", [nn.Linear(2, 2), nn.Linear(2, 2)], {}, "Make it a part of the model"),
    ],
)
def test_unsupported_parallel_setup_is_refused_with_remedy(
    parallel: Any, modules: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_parallel(parallel, modules, places(2)[0], **options)
