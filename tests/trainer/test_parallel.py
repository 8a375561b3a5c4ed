"""Preparation of processes before they connect: devices, blocks, samplers and errors."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from automicro import Trainer
from automicro.checkpoints.rng import rng_state
from automicro.errors import ConfigError
from automicro.torch_private_distributed import HashStore
from automicro.trainer.data.sharing import LoaderSharing
from automicro.trainer.device import choose_device
from automicro.trainer.parallel import check_parallel, find_blocks
from automicro.trainer.processes import Process, name_of_start, own_device, process_in_environment
from tests.config_jobs import load_config
from tests.sweeps import mostly_in_sweeps

ROWS = TensorDataset(torch.arange(11))
TWO = Process(rank=0, world_size=2)


def share(loader: Any, rank: int, world_size: int, **options: Any) -> Any:
    place = Process(rank=rank, world_size=world_size, local_rank=rank)
    sharing = LoaderSharing(place, seed=3)
    return sharing.share(loader, "train_dataloader", **options)


def rows_of(loader: Any) -> list[list[int]]:
    return [rows.tolist() for (rows,) in loader]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("epoch", mostly_in_sweeps([0, 1], quick=[1]))
def test_ranks_together_get_batches_of_one_process(world_size: int, epoch: int) -> None:
    def loader(batch_size: int) -> DataLoader[Any]:
        return DataLoader(ROWS, batch_size=batch_size, shuffle=True)

    shared = [share(loader(12 // world_size), rank, world_size) for rank in range(world_size)]
    alone = share(loader(12), 0, 1)
    for each in (*shared, alone):
        each.batch_sampler.set_epoch(epoch)
    parts = [rows_of(each) for each in shared]
    whole = [
        [row for part in parts if index < len(part) for row in part[index]]
        for index in range(len(parts[0]))
    ]
    assert whole == rows_of(alone)
    assert sorted(row for batch in whole for row in batch) == list(range(11))
    assert {len(each) for each in shared} == {len(alone)}


def build_for_cuda(monkeypatch: pytest.MonkeyPatch, *, count: int) -> None:
    """Make torch respond like a CUDA build on a machine with so many GPUs."""
    answers = {
        "torch._C._accelerator_getAccelerator": torch.device("cuda"),
        "torch.cuda.is_available": count > 0,
        "torch.cuda.device_count": count,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(name, lambda answer=answer: answer)


@pytest.mark.parametrize("rank", [0, 1])
def test_cuda_build_without_gpu_trains_on_cpu(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build_for_cuda(monkeypatch, count=0)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    place = Process(rank=rank, world_size=2, local_rank=rank)
    assert choose_device(own_device("auto", place)) == torch.device("cpu")
    assert rng_state()["accelerators"] == []
    with pytest.raises(ValueError, match="device='cuda' cannot be used here"):
        choose_device(own_device("cuda", place))


def test_each_process_has_its_own_gpu_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build_for_cuda(monkeypatch, count=2)
    places = [Process(rank=rank, world_size=3, local_rank=rank) for rank in range(3)]
    for device in ("auto", "cuda"):
        assert [str(own_device(device, each)) for each in places[:2]] == ["cuda:0", "cuda:1"]
        with pytest.raises(ValueError, match=r"this machine has 2 cuda devices\. Start at most 2"):
            own_device(device, places[2])
    assert own_device("cuda:0", places[2]) == "cuda:0"


def test_process_that_sees_one_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build_for_cuda(monkeypatch, count=1)
    place = Process(rank=3, world_size=4, local_rank=3)
    assert [str(own_device(each, place)) for each in ("auto", "cuda")] == ["cuda:0", "cuda:0"]


def in_threads(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the result or the error of each rank."""
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, rank) for rank in range(world_size)]
        return [each.exception(timeout=30) or each.result() for each in futures]


def test_each_start_has_unique_name_despite_leftovers_in_store() -> None:
    store = HashStore()

    def begin(rank: int) -> str:
        return name_of_start(store, Process(rank=rank, world_size=3))

    # Two ranks of a killed start left unanswered messages.
    store.set("automicro/meeting/hello/1", "killed")
    store.set("automicro/meeting/hello/2", "killed as well")
    starts = [in_threads(3, begin) for _ in range(3)]
    assert [len(set(names)) for names in starts] == [1, 1, 1]
    assert len({names[0] for names in starts}) == 3


def test_order_differs_between_epochs() -> None:
    loader = share(DataLoader(ROWS, batch_size=11, shuffle=True), 0, 1)
    first = rows_of(loader)
    loader.batch_sampler.set_epoch(1)
    assert rows_of(loader) != first


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"batch_size": 3, "shuffle": True},
        {"batch_sampler": [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10]]},
        {"batch_size": None},
        {"batch_size": None, "sampler": RandomSampler(ROWS)},
    ],
)
@pytest.mark.parametrize("world_size", mostly_in_sweeps([2, 3], quick=[3]))
def test_every_row_comes_exactly_once(options: dict[str, Any], world_size: int) -> None:
    seen: Counter[int] = Counter()
    for rank in range(world_size):
        for (rows,) in share(DataLoader(ROWS, **options), rank, world_size):
            seen.update(rows.reshape(-1).tolist())
    assert seen == dict.fromkeys(range(11), 1)


def test_sharing_draws_no_global_random_numbers() -> None:
    loader = share(DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 11, 11)), 0, 2)
    here = torch.get_rng_state()
    list(loader.batch_sampler)
    assert torch.equal(torch.get_rng_state(), here)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Stream())])
def test_loader_that_gives_all_rows_to_each_rank_is_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match="each of 2 ranks would get all of its rows"):
        share(loader, 0, 2)


def test_loader_marked_as_sharded_is_kept() -> None:
    loader = DataLoader(Stream())
    loader.is_sharded = True
    assert share(loader, 0, 2) is loader


def test_distributed_sampler_with_repeated_rows_warns_or_fails() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=2, rank=0)
    loader = DataLoader(ROWS, batch_size=2, sampler=sampler)
    with pytest.warns(UserWarning, match="1 of its 11 rows are repeated in every epoch"):
        assert share(loader, 0, 2) is loader
    with pytest.raises(ValueError, match=r"are repeated in every epoch\. Leave it out"):
        share(loader, 0, 2, is_evaluated=True)


def test_sampler_without_length_is_refused() -> None:
    class Endless(SequentialSampler):
        def __len__(self) -> int:
            raise TypeError

    with pytest.raises(ValueError, match="has no length"):
        share(DataLoader(ROWS, sampler=Endless(ROWS)), 0, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_blocks_are_found_in_lists_and_nested_modules() -> None:
    layers = [Layer() for _ in range(3)]
    model = nn.ModuleDict(
        {"embed": nn.Linear(2, 2), "body": nn.Sequential(nn.Linear(2, 2), nn.ModuleList(layers))}
    )
    assert find_blocks(model) == layers


def test_model_without_repeated_layers_has_no_blocks() -> None:
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": None}, "each process would train its own model"),
        ({"parallel": "fsdp", "compiles": True}, "Use parallel='ddp', or compile each block"),
        ({"parallel": "ddp", "model": nn.LazyLinear(2)}, "Run the model once first"),
        ({"parallel": "ddp", "more": [nn.Linear(2, 2)]}, "Make it a part of the model"),
    ],
)
def test_unsupported_parallel_setup_is_refused_with_remedy(
    options: dict[str, Any], message: str
) -> None:
    model = options.pop("model", None) or nn.Linear(2, 2)
    more = options.pop("more", [])
    with pytest.raises(ValueError, match=message):
        check_parallel(options.pop("parallel"), [model, *more], TWO, **options)


def test_prebuilt_optimizer_is_refused_with_fsdp() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="Pass a callable, such as"):
        check_parallel("fsdp", [model], TWO, optimizer=optimizer)


def test_unknown_parallel_option_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'ddp'"):
        Trainer(nn.Linear(2, 2), parallel="dpp")


def test_global_batch_is_divided_by_number_of_processes() -> None:
    config = load_config("configs/digits.yaml", num_devices=4)
    assert config.train_dataloader["args"]["batch_size"] == 128
    with pytest.raises(ConfigError, match="512 cannot be divided into 3 × 1"):
        load_config("configs/digits.yaml", num_devices=3)
