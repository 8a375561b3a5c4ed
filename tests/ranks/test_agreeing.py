"""All ranks reach the same decision, however their data, limits and settings differ."""

import math
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_module

from automicro import Explore, Microbatcher
from automicro.features import RememberSizes, WhenTooLarge
from automicro.memory.device import OccupiedDevice
from automicro.memory.residents import measure
from automicro.optimizer import step as clipping
from automicro.optimizer.step import GradientScaler, clip_gradients, step_optimizer
from automicro.ranks import warm_up
from automicro.ranks.guards import guard
from automicro.ranks.warm_up import COMMUNICATION_SHARE
from tests.ranks.faulty_models import Faults, build
from tests.ranks.jobs import batch as small_batch
from tests.ranks.steps import Stepper
from tests.ranks.test_uneven import Sum
from tests.ranks.world import on_ranks
from tests.ranks.wrapping import (
    furthest,
    mesh_of,
    raised,
    require_alike,
    require_told,
    whole,
    whole_gradients,
    whole_parameters,
    wrapped,
)
from tests.sweeps import mostly_in_sweeps

CPU = torch.device("cpu")
NORM = "squares_by_layout"  # the step of clipping that allocates memory


def wide(kind: str | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4))
    return wrapped(kind, model.to(dtype), model[2])  # type: ignore[no-any-return]


def batch(
    num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 16, generator=generator, dtype=dtype)
    return x, torch.randn(num_rows, 4, generator=generator, dtype=dtype)


def averaging(model: nn.Module, **options: Any) -> Microbatcher:
    """Return a Microbatcher whose loss averages over rows, without checks."""
    loss: Any = {"loss_average": "samples"} if "forward" in options else {"loss_fn": nn.MSELoss()}
    return Microbatcher(model, probe=False, **loss, **options)


KINDS = ["ddp", "fsdp"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["offload", "auto"])
@on_ranks()
def test_ranks_change_levels_together(kind: str, when: str) -> None:
    """Rank 1 has long rows in every other step, which do not fit at the plain level."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = wrapped(kind, nn.Linear(1, 1))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if x.shape[1] > 8 and policy.level == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss: Tensor = model(x[..., None]).square().mean()
        return loss

    microbatcher = averaging(model, forward=forward, features=[WhenTooLarge(when)])
    policy = microbatcher._train.policy
    levels, failed, gradients = [], [], []
    for step in range(4):
        is_long = rank == 1 and step % 2 == 0
        x = torch.arange(1, 5)[:, None].expand(4, 32 if is_long else 4) / 8
        result = microbatcher.backward(x)
        levels.append(result.level)
        failed.append(len(result.failed_sizes))
        gradients += [whole(each.grad).sum().item() for each in model.parameters()]
        model.zero_grad()
    # Rows differ only in length.
    assert torch.allclose(torch.tensor(gradients[:2]), torch.tensor(gradients[2:4]))
    assert (levels, failed) == (["offload", "plain"] * 2, [3, 0, 0, 0])
    require_alike(policy.state_dict())


@pytest.mark.parametrize(
    ("kind", "what"),
    mostly_in_sweeps(KINDS, ["level", "size"], quick=[("ddp", "level"), ("fsdp", "size")]),
)
@on_ranks()
def test_ranks_settle_on_fastest_level_or_size_together(kind: str, what: str) -> None:
    """At the plain level only single rows fit, and the clocks of ranks differ."""
    torch.manual_seed(0)
    rank, is_level = dist.get_rank(), what == "level"
    model = wrapped(kind, nn.Linear(4, 4))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if is_level and len(x) > 1 and policy.level == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        time.sleep(0.003 * (1 + rank))
        loss: Tensor = model(x).square().mean()
        return loss

    options: dict[str, Any] = {"features": [WhenTooLarge("auto")]}
    if not is_level:
        options = {"microbatch_size": Explore(max_steps=16)}
    microbatcher = averaging(model, forward=forward, **options)
    policy: Any = microbatcher._train.policy
    found, told = [], []
    for _ in range(40):
        result = microbatcher.backward(torch.ones(8 - rank, 4))
        found.append((result.level, result.microbatch_size))
        told.append(str(result.exploration))
        model.zero_grad()
    require_alike((found, told, policy.state_dict()))
    assert len(set(found)) > 1
    assert len(set(found[-8:])) == 1
    assert told[-1] == "None"
    assert any(said.startswith("explored for ") for said in told)
    if is_level:
        assert found[-1] == ("offload", 8)
        assert any("plain" in said for said in told)


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["fsdp"]))
@on_ranks()
def test_ranks_with_different_limits_find_one_size(kind: str) -> None:
    """The run evaluates between steps."""
    model, rank = wide(kind), dist.get_rank()
    limit = ["10MiB", {"ddp": "330KiB", "fsdp": "300KiB"}[kind]][rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    microbatcher = averaging(model, optimizer=optimizer, memory_limit=limit)
    told: list[Any] = []
    num_failed = 0
    for step in range(4):
        result = microbatcher.backward(batch(256 - 2 * rank, 10 * step + rank))
        told += [result.microbatch_size, result.num_microbatches, result.failed_sizes]
        told.append(result.loss.item())
        num_failed += len(result.failed_sizes)
        optimizer.step()
        optimizer.zero_grad()
        evaluated = microbatcher.evaluate(batch(256, rank))
        told += [evaluated.microbatch_size, evaluated.failed_sizes]
    require_alike((told, microbatcher.state_dict(), whole_parameters(model)))
    assert num_failed > 0


@on_ranks()
def test_loss_is_declined_on_all_ranks_together() -> None:
    """The rows of one rank make the total loss infinite."""
    model, metric, seen = wide("fsdp"), Sum(), []
    microbatcher = averaging(model, microbatch_size=3)

    def accept(loss: Tensor) -> bool:
        seen.append(loss.item())
        return math.isfinite(loss.item())

    x, y = batch(8, dist.get_rank())
    if dist.get_rank() == 1:
        y = y + math.inf
    assert not microbatcher.accumulate([(x, y)], metric, accept=accept).is_committed
    assert all(p.grad is None for p in model.parameters())
    assert metric.rows == 0
    assert microbatcher.accumulate([batch(8)], metric, accept=accept).is_committed
    assert metric.rows == 8
    require_alike(seen)


@on_ranks()
def test_remembered_size_comes_from_rank_0(tmp_path: Path) -> None:
    """Each rank has its own cache folder, and only rank 0 writes to its folder."""
    rank = dist.get_rank()
    os.environ["AUTOMICRO_CACHE"] = f"{tmp_path}/{rank}"

    def remembering(model: nn.Module, limit: str) -> Microbatcher:
        return averaging(model, memory_limit=limit, features=[RememberSizes()])

    sizes: list[Any] = []
    for _ in range(2):
        model = wide("ddp")
        microbatcher = remembering(model, ["10MiB", "270KiB"][rank])
        for _ in range(3):
            result = microbatcher.backward(batch(256))
            model.zero_grad()
        sizes.append((result.microbatch_size, microbatcher._train.size))
    assert os.listdir(tmp_path) == ["0"], "only rank 0 writes"
    result = remembering(wide("ddp"), "10MiB").backward(batch(256))
    require_alike((sizes, result.recalled_size))
    assert result.recalled_size == sizes[1][0] < 256
    assert result.failed_sizes == ()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_clipping_uses_norm_of_whole_gradient(kind: str) -> None:
    model, plain = wide(kind, torch.float64), wide(None, torch.float64)
    x, y = batch(11, dtype=torch.float64)
    nn.functional.mse_loss(plain(x), y).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    mine = slice(0, 7) if dist.get_rank() == 0 else slice(7, None)
    microbatcher = averaging(model, microbatch_size=3)
    microbatcher.backward((x[mine], y[mine]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = clip_gradients(optimizer, 0.1, CPU, ranks=microbatcher.ranks)
    found = [norm, *whole_gradients(model)]
    assert furthest(found, [expected, *whole_gradients(plain)]) <= 1e-9


@on_ranks()
def test_pending_gradient_sums_are_reduced_before_clipping() -> None:
    mesh = mesh_of("fsdp")
    model = distribute_module(nn.Linear(4, 2), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        part = torch.full(parameter.shape, 1.0 + dist.get_rank())
        parameter.grad = DTensor.from_local(part, mesh, [Partial()])
    norm = clip_gradients(optimizer, 1.0, CPU)
    assert float(norm) == pytest.approx(3 * 10**0.5)
    clipped = [torch.full(parameter.shape, 0.1**0.5) for parameter in model.parameters()]
    assert furthest(whole_gradients(model), clipped) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_overflow_on_one_rank_skips_step_on_all_ranks(kind: str) -> None:
    model = wide(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradientScaler(CPU, init_scale=1024.0)
    options: Any = {"backward": scaler.backward, "precision": "fp16", "microbatch_size": 4}
    microbatcher = averaging(model, **options)
    scaler._ranks = microbatcher.ranks
    stepped, scales = [], []
    for step in range(3):
        x, y = batch(8, dist.get_rank())
        if step == 1 and dist.get_rank() == 1:
            y = y * 1e30
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            microbatcher.backward((x, y))
        scaler.unscale(optimizer)
        clip_gradients(optimizer, 1.0, CPU, ranks=microbatcher.ranks)
        stepped.append(step_optimizer(optimizer, CPU, scaler=scaler))
        optimizer.zero_grad()
        scales.append(scaler.scale)
    assert (stepped, scales) == ([True, False, True], [1024.0, 512.0, 512.0])
    require_alike(whole_parameters(model))


@on_ranks()
def test_all_ranks_learn_of_out_of_memory_in_clipping() -> None:
    model = wide("fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatcher = averaging(model)
    ranks = microbatcher.ranks
    microbatcher.backward(batch(8))

    def work() -> None:
        try:
            clip_gradients(optimizer, 0.1, CPU, ranks=ranks)
        except Exception as error:
            ranks.fail(error)
            raise

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
    fails = {"side_effect": error} if dist.get_rank() == 1 else {"wraps": getattr(clipping, NORM)}
    told = "rank 1: OptimizerStepError: clipping the gradient ran out of memory"
    with mock.patch.object(clipping, NORM, **fails):
        require_told(work, "OptimizerStepError", told=told)


@on_ranks()
def test_measured_parameters_are_local_shards() -> None:
    model = wide("fsdp", torch.float64)
    residents = measure(OccupiedDevice(CPU, [model], None), training=True)
    parts = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    held = sum(part.numel() * part.itemsize for part in parts)
    assert held <= residents.parameters < 1.2 * held  # each tensor is rounded up to 512 bytes


FEW, MANY = 64, 8 * 2**20
CONNECTED = {
    "ddp": ["all_reduce SUM of 2", "broadcast SUM of 2"],
    "fsdp": [
        "all_reduce SUM of 2",
        "all_gather SUM of 2",
        "reduce_scatter SUM of 2",
        "reduce_scatter AVG of 2",
    ],
}


def connections(kind: str, *, takes_memory: bool, alone: int | None = None) -> dict[str, Any]:
    """Return the connections made before the first forward of three steps, and after it."""
    ran: list[str] = []
    run, use = warm_up._run, warm_up.Use

    def noting(use: warm_up.Use, whole: Tensor, part: Tensor) -> None:
        group = dist.get_process_group_ranks(use.group)
        ran.append(f"{use.kind} {use.op.name} of {len(group)}: {whole.numel()}")
        assert whole.numel() == part.numel() * len(group)
        run(use, whole, part)

    takes = property(lambda _: True) if takes_memory else use.takes_device_memory
    with (
        mock.patch.object(warm_up, "_run", noting),
        mock.patch.object(use, "takes_device_memory", takes),
    ):
        model = build(kind, [Faults()], {})
        opened = guard.opened_state()
        if opened is not None:
            opened.connected.clear()  # from earlier jobs
        before: list[int] = []
        model.register_forward_pre_hook(lambda *_: before.append(len(ran)))
        first, second = (Stepper(model, Faults(), size=3) for _ in range(2))
        ranks: Any = first.microbatcher.ranks
        if dist.get_rank() == alone:
            ranks._warm_up._uses.append(ranks._warm_up._uses[0]._replace(kind="all_gather"))
        votes = ranks.num_votes
        rows = small_batch(0, dist.get_rank(), {})
        kind, failed = raised(lambda: first.train(0, rows))
        votes = ranks.num_votes - votes
        if not failed:
            second.train(0, rows)
            first.train(1, rows)
    share = ranks.communication_share
    return {"ran": ran, "before": before, "votes": votes, "share": share, "failed": failed}


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["ddp"]))
@on_ranks()
def test_communicators_connect_once_before_first_attempt(kind: str) -> None:
    found = connections(kind, takes_memory=True)
    require_alike(found)
    assert found["ran"] == [f"{use}: {count}" for use in CONNECTED[kind] for count in (FEW, MANY)]
    assert set(found["before"]) == {len(found["ran"])}, "a forward came first, or one was repeated"
    assert found["share"] == COMMUNICATION_SHARE
    quiet = connections(kind, takes_memory=False)
    assert (quiet["ran"], quiet["share"]) == ([], 0.0), "gloo has nothing on a device"
    assert quiet["votes"] == found["votes"]


# The next test leaves the world without votes, so it comes last


@on_ranks()
def test_ranks_with_different_connections_fail_without_waiting() -> None:
    found = connections("ddp", takes_memory=True, alone=1)
    assert "first connecting all_reduce of 2, broadcast of 2, all_gather of 2)" in found["failed"]
    assert found["ran"] == []
