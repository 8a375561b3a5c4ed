"""Ranks with different numbers of rows and tokens train as one process on all rows."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from automicro import Microbatcher
from automicro.errors import BufferWarning, PeerFailedError
from automicro.features import RankReduction
from tests.ranks.world import World, on_ranks
from tests.ranks.wrapping import furthest, require_alike, whole_gradients, wrapped
from tests.sweeps import mostly_in_sweeps

WORDS, LENGTH = 7, 5


class Tagger(nn.Module):
    """Predicts a word at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.inner(self.embedding(words)))
        return scores.transpose(1, 2)


def tagger(kind: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = Tagger().double()
    return wrapped(kind, model, model.inner)  # type: ignore[no-any-return]


def words(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return sequences with growing ignored tails; the last two rows ignore all targets."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(WORDS, (num_rows, LENGTH), generator=generator)
    targets = torch.randint(WORDS, (num_rows, LENGTH), generator=generator)
    for row in range(num_rows):
        targets[row, LENGTH - row % LENGTH :] = -100
    targets[-2:] = -100
    return inputs, targets


def two_losses(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    outputs = model(batch[0])
    return {"words": F.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


LOSSES: dict[str, dict[str, Any]] = {
    "tokens": {"loss_fn": F.cross_entropy, "loss_average": "tokens"},
    "samples": {
        "forward": lambda model, batch: model(batch[0]).square().mean(),
        "loss_average": "samples",
    },
    "two": {"forward": two_losses, "loss_average": {"words": "tokens", "size": "samples"}},
    "sum": {"forward": summed, "loss_average": "none"},
    "counted": {
        "forward": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "loss_average": lambda batch: int((batch[1] != -100).sum()),
    },
}


def train_on_words(
    kind: str | None,
    loss: str,
    rows: Sequence[int],
    parts: int = 1,
    earlier: bool = False,
    sync: str = "each",
) -> list[Tensor]:
    """Return loss and whole gradient of a step, for so many rows per rank, given in parts."""
    model = tagger(kind)
    microbatcher = Microbatcher(
        model, microbatch_size=3, probe=False, features=[RankReduction(sync)], **LOSSES[loss]
    )
    inputs, targets = words(sum(rows))
    rank = dist.get_rank() if kind else 0
    if 0 in rows:
        microbatcher.accumulate([(inputs[:4], targets[:4])])
        model.zero_grad()
    start, end = sum(rows[:rank]), sum(rows[: rank + 1])
    mine = (inputs[start:end], targets[start:end])
    batches = list(zip(*(each.tensor_split(parts) for each in mine), strict=True))
    batches = [batch for batch in batches if len(batch[0])]
    if earlier:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    result = microbatcher.accumulate(batches)
    assert result.num_samples == rows[rank]
    assert result.num_global_samples == sum(rows)
    return [result.loss, *result.losses.values(), *whole_gradients(model)]


ROWS = {"hsdp": [[5, 1, 4, 3], [6, 0, 0, 7]]}
ROWS["ddp"] = ROWS["fsdp"] = [[9, 4], [3, 10], [13, 0]]


@pytest.mark.parametrize(
    ("kind", "sync", "loss"),
    mostly_in_sweeps(
        ROWS,
        ["each", "auto"],
        LOSSES,
        quick=[("fsdp", "auto", "tokens"), *(("ddp", "each", each) for each in LOSSES)],
        few=12,
    ),
)
def test_gradients_and_losses_match_one_process(
    worlds: Callable[[int], World], kind: str, sync: str, loss: str
) -> None:
    expected = train_on_words(None, loss, [13])
    for rows in ROWS[kind]:
        for found in worlds(len(rows)).run(train_on_words, kind, loss, rows, sync=sync):
            assert furthest(found, expected) <= 1e-9


@pytest.mark.parametrize(
    ("kind", "sync"), [("ddp", "each"), pytest.param("fsdp", "auto", marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize(("rows", "earlier"), [([9, 4], True), ([4, 1], False)])
def test_accumulated_batches_add_to_earlier_gradients(
    world2: World, kind: str, sync: str, rows: list[int], earlier: bool
) -> None:
    expected = train_on_words(None, "tokens", [sum(rows)], 1, earlier)
    for found in world2.run(train_on_words, kind, "tokens", rows, 3, earlier, sync):
        assert furthest(found, expected) <= 1e-9


class Sum:
    """A user's own metric."""

    def __init__(self) -> None:
        self.rows = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.rows += len(targets)


class Noisy(nn.Module):
    """Draws random numbers and counts the rows of its forwards, including fillers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        output: Tensor = F.dropout(self.norm(self.linear(x)), 0.3, self.training)
        return output


@on_ranks()
def test_fillers_leave_no_trace() -> None:
    torch.manual_seed(0)
    inner = Noisy()
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    rank, metric = dist.get_rank(), Sum()
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), microbatch_size=4, batchnorm="ignore", probe=False
    )
    rows = [12, 3][rank]
    x, y = torch.randn(rows, 4), torch.randn(rows, 2)
    microbatcher.backward((x, y), metric)
    before = torch.get_rng_state()
    microbatcher.evaluate((x, y), metric)
    ended = microbatcher.backward(None if rank else (x, y), metric)
    assert inner.seen == [24, 3][rank]
    assert metric.rows == [36, 6][rank]
    has_drawn = not torch.equal(before, torch.get_rng_state())
    assert has_drawn is (rank == 0), "of the last step rank 1 ran nothing but fillers"
    assert (ended.num_samples, ended.num_global_samples) == ([12, 0][rank], 12)
    require_alike(whole_gradients(model))


@pytest.mark.parametrize("changes", [False, True])
@on_ranks()
def test_fillers_trigger_no_wrong_buffer_warnings(changes: bool) -> None:
    """In later batches, the first rank runs fillers."""

    class Scaled(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Scaled.calls += 1
            if changes and Scaled.calls > 3:
                self.get_buffer("scale").mul_(0.9)
            return super().forward(x) * self.get_buffer("scale")

    rank, net = dist.get_rank(), Scaled(4, 2)
    net.register_buffer("scale", torch.ones(()))
    model = DistributedDataParallel(net)
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4, probe=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (12, [2, 12][rank], [2, 12][rank]):
            microbatcher.backward((torch.randn(rows, 4), torch.randn(rows, 2)))
    told = [str(each.message) for each in caught if issubclass(each.category, BufferWarning)]
    assert all("the training forward changes buffers" in each for each in told)
    assert not told if not changes else told or rank == 1


@on_ranks()
def test_ranks_continue_until_all_data_end() -> None:
    """Data run out at different times, and a stop request on one rank reaches all ranks."""
    rank, model = dist.get_rank(), tagger("fsdp")
    microbatcher = Microbatcher(model, probe=False, **LOSSES["tokens"])
    told = []
    for index in range(4):
        microbatcher.wants_to_stop = rank == 1 and index == 1
        result = microbatcher.accumulate([words(5)] if index < [3, 1][rank] else [])
        told.append((result.num_global_samples, result.stops))
        model.zero_grad()
    assert told == [(10, False), (5, True), (5, False), (0, False)]
    evaluated = microbatcher.evaluate(words(4) if rank == 0 else None)
    assert (evaluated.num_samples, evaluated.num_global_samples) == ([4, 0][rank], 4)
    assert (evaluated.loss is None) is (rank == 1)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "scales", "fails"),
    [("ddp", False, True), ("fsdp", False, True), ("ddp", True, False)],
)
@on_ranks()
def test_gradient_matches_wrapper_alone_unless_scaled(kind: str, scales: bool, fails: bool) -> None:
    """The scale is the number of targets on all ranks, which have different numbers."""
    rank = dist.get_rank()
    model, plain = tagger(kind), tagger(kind)
    inputs, targets = (part[6 * rank :][:6] for part in words(12))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails and rank == 1 and len(outputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(9 * outputs, targets)

    step = Microbatcher(
        model,
        loss_fn=loss_fn,
        loss_average="tokens",
        microbatch_size="auto",
        features=[RankReduction(scales=scales)],
        probe=False,
    )
    result = step.backward((inputs, targets))
    own = F.cross_entropy(9 * plain(inputs), targets)
    own.backward()
    mean = own.detach().clone()
    dist.all_reduce(mean)
    differs = furthest(whole_gradients(model), whole_gradients(plain))
    is_mean = float(result.loss) == pytest.approx(float(mean) / 2, rel=1e-3 if scales else 1e-14)
    assert result.ooms == int(fails)
    assert differs > 1e-3 if scales else differs < 1e-15
    assert is_mean is not scales
    assert float(result.rank_loss) == pytest.approx(float(own.detach()), rel=1e-14)


@pytest.mark.parametrize("kind", ["bucket views", "sparse"])
@on_ranks()
def test_bucket_view_and_sparse_gradients_add_up_over_batches(kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(WORDS, 6, sparse=kind == "sparse"), nn.Linear(6, 3))
    model = copy.deepcopy(plain)
    wrapper = wrapped("ddp", model, bucket_cap_mb=1e-5, gradient_as_bucket_view=kind != "sparse")
    ooms = 0

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if ooms < 2 and dist.get_rank() == 1 and len(outputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(outputs, targets)

    step = Microbatcher(
        wrapper, loss_fn=loss_fn, loss_average="tokens", microbatch_size="auto", probe=False
    )
    for _ in range(3):
        for rows in (13, 9, 7):
            inputs, targets = (each[:, 0] for each in words(rows))
            halves = slice(None, 4) if dist.get_rank() == 0 else slice(4, None)
            ooms += step.backward((inputs[halves], targets[halves].clamp(min=0) % 3)).ooms
            F.cross_entropy(plain(inputs), targets.clamp(min=0) % 3).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert furthest([one.grad.to_dense()], [other.grad.to_dense()]) < 1e-6
        model.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
    assert ooms == 2


@pytest.mark.sweep
@on_ranks()
def test_sharded_model_without_gradient_sync_is_refused() -> None:
    model: Any = tagger("fsdp")
    step = Microbatcher(model, probe=False, **LOSSES["tokens"])
    model.set_requires_gradient_sync(False)
    with pytest.raises((ValueError, PeerFailedError), match=r"set_requires_gradient_sync\(False\)"):
        step.backward(words(5))
