"""BatchNorm in sliced modules: statistics, outputs and gradients match the whole batch."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from automicro import Halving, MemoryBudget, Microbatcher, split
from automicro.checking.bench import foreign_states
from automicro.errors import UnsplittableModelError
from automicro.features import Nested, WhenTooLarge, with_features
from tests.outside import Outside
from tests.torture.engine.faults import Fault, FaultMode
from tests.torture.engine.subject import begin_at_level

ROWS, CHANNELS, CLASSES = 7, 4, 5


def images(rows: int = ROWS) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, CHANNELS, 6, 6, dtype=torch.double) * 2 + 3


def labels(rows: int = ROWS) -> Tensor:
    return torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(2))


def conv(stride: int = 1) -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, stride, 1, bias=False)


class Block(nn.Module):
    """A residual block with a second BatchNorm on the shortcut and in-place operations."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(), conv()
        self.bn1, self.bn2 = norm(CHANNELS), norm(CHANNELS)
        self.shortcut = nn.Sequential(conv(), norm(CHANNELS))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return cast(Tensor, self.relu(out))


class PreActivation(nn.Module):
    """Use the input of a BatchNorm again after it; the image has its own BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn0, self.bn1, self.bn2 = (nn.BatchNorm2d(CHANNELS) for _ in range(3))
        self.conv1, self.conv2 = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.bn0(x))
        return cast(Tensor, x + self.conv2(F.relu(self.bn1(x))) + self.bn2(x))


class Dense(nn.Module):
    """Join branches of different depths, with computed sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(2 * CHANNELS)
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        once = torch.cat([x, self.bn1(self.conv(x))], 1)
        half, other = self.bn2(once).chunk(2, dim=1)
        rows, size = x.shape[0], x.shape[-2:]  # a tuple of numbers crosses the BatchNorms
        return F.interpolate((half * other + x).view(rows, CHANNELS, -1, 3), size)


class Tokens(nn.Module):
    """BatchNorm over rows and positions, with a parameter outside any submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return cast(Tensor, self.bn(hidden.flatten(0, 2)).reshape_as(hidden) * self.scale)


class Activated(nn.BatchNorm2d):
    """Apply an activation after normalization."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.act = nn.PReLU()

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, self.act(super().forward(input)))


class Twice(nn.Module):
    """Call one BatchNorm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(self.conv(F.relu(self.bn(self.conv(x))))))


def without(norm: Any, **options: Any) -> nn.Module:
    return nn.Sequential(conv(), norm(CHANNELS, **options), nn.ReLU(), conv())


def frozen() -> nn.Module:
    block = Block()
    block.bn1.eval()
    cast(Any, block.bn2).weight.requires_grad_(requires_grad=False)
    return block


BODIES: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: nn.Sequential(conv(), Block(), Block()),
    "pre-activation": PreActivation,
    "branches": Dense,
    "tokens": Tokens,
    "derived": lambda: Block(Activated),
    "derived, without scale": lambda: without(Activated, affine=False),
    "twice": Twice,
    "last": lambda: nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS)),
    "first": lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), conv()),
    "frozen": frozen,
    "without scale": lambda: without(nn.BatchNorm2d, affine=False),
    "cumulative": lambda: without(nn.BatchNorm2d, momentum=None),
    "without statistics": lambda: without(nn.BatchNorm2d, track_running_stats=False),
    "statistics in evaluation": lambda: without(nn.BatchNorm2d, track_running_stats=False).eval(),
}


class Net(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.body(x).tanh(), 2).flatten(1)[:, :CLASSES]


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net(BODIES[name]())
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return model.double()


def found(model: nn.Module, x: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the loss, the gradients of the input and of the parameters, and the buffers."""
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), targets)
    loss.backward()
    assert x.grad is not None
    return [
        loss.detach(),
        x.grad,
        *(each.grad for each in model.parameters() if each.grad is not None),
        *(each.double() for each in model.buffers()),
    ]


def assert_same(some: list[Tensor], others: list[Tensor], share: float = 1e-10) -> None:
    assert len(some) == len(others)
    size = max(float(each.abs().max()) for each in others)
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=share, atol=share * size)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 3) for name in BODIES), ("residual", 1), ("tokens", 1)]
)
def test_slices_match_whole_batch(name: str, size: int) -> None:
    whole = net(name)
    sliced = copy.deepcopy(whole)
    nested = split(sliced, microbatch_size=size, batchnorm="exact")
    for _ in range(2):  # the second batch starts from the running statistics of the first
        assert_same(found(sliced, images(), labels()), found(whole, images(), labels()))
    assert sum(nested.sizes) == ROWS
    assert max(nested.sizes) <= size


def test_large_means_keep_precision() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    wanted = F.batch_norm(x.double(), None, None, training=True)
    split(model, microbatch_size=5, batchnorm="exact")
    whole_error = (F.batch_norm(x, None, None, training=True) - wanted).norm()
    assert (model(x) - wanted).norm() < 4 * whole_error


def test_rows_that_differ_by_rounding_are_not_taken_for_another_forward() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = 1e4 + 0.1 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    batch = x, torch.arange(64) % 3
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), batchnorm="exact", microbatch_size=16
    )
    assert microbatcher.backward(batch).nested_sizes == {"model": 16}


def test_dropout_masks_are_drawn_per_slice_and_replayed() -> None:
    torch.manual_seed(0)
    first, norm, last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    part = nn.Sequential(first, nn.Dropout(0.5), norm, nn.Dropout(0.3), last).double()
    x = torch.randn(6, 3, dtype=torch.double)

    def in_step(x: Tensor) -> Tensor:
        hidden = torch.cat([F.dropout(rows, 0.5) for rows in first(x).split(2)])
        hidden = F.batch_norm(hidden, None, None, norm.weight, norm.bias, training=True)
        return cast(Tensor, last(torch.cat([F.dropout(rows, 0.3) for rows in hidden.split(2)])))

    outcomes = []
    for run in (in_step, split(part, microbatch_size=2, batchnorm="exact")):
        part.zero_grad()
        torch.manual_seed(3)
        output = run(x)
        (output**3).sum().backward()
        gradients = [cast(Tensor, each.grad) for each in part.parameters()]
        outcomes.append([output.detach(), *gradients, torch.rand(1, dtype=torch.double)])
    assert_same(outcomes[1], outcomes[0])


def test_backward_uses_autocast_of_forward() -> None:
    whole, sliced = net("residual").float(), net("residual").float()
    split(sliced, microbatch_size=2, batchnorm="exact")
    exact = found(net("residual"), images(), labels())
    far = []
    for model in (whole, sliced):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images().float()), labels())
        loss.backward()
        gradients = [cast(Tensor, each.grad).flatten() for each in model.parameters()]
        assert {each.dtype for each in gradients} == {torch.float32}
        right = torch.cat([each.flatten() for each in exact[2 : 2 + len(gradients)]])
        far.append(float((torch.cat(gradients) - right).norm() / right.norm()))
    assert far[1] < 2 * far[0]


@pytest.mark.parametrize("given", ["whole", "rows"])
def test_single_row_with_transposed_gradient_matches_whole_batch(given: str) -> None:
    """The kernel of torch computes a different gradient for this memory layout."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS))

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.body(x)).flatten(2).transpose(1, 2)

    torch.manual_seed(0)
    whole = Turned().double()
    sliced = copy.deepcopy(whole)
    split(sliced, microbatch_size=2 if given == "rows" else 1, batchnorm="exact")
    for model in (whole, sliced):
        (model(images(3)) ** 3).sum().backward()
    assert_same(
        [cast(Tensor, each.grad) for each in sliced.parameters()],
        [cast(Tensor, each.grad) for each in whole.parameters()],
    )


def test_forward_runs_twice_per_row() -> None:
    counts = []
    for size in (None, 2):
        model = net("residual")
        split(model, microbatch_size=size, batchnorm="exact")
        for _ in range(2):  # the first calls also check rows
            model(images())
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(images()), labels()).backward()
        counts.append(counter.get_total_flops())
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        net("residual")(images())
    assert counts[1] == counts[0] + forward.get_total_flops()


def test_running_statistics_match_whole_batch_under_no_grad() -> None:
    whole, sliced = net("residual"), net("residual")
    split(sliced, microbatch_size=2, batchnorm="exact")
    with torch.no_grad():
        wanted, output = whole(images()), sliced(images())
    assert_same([output, *sliced.buffers()], [wanted, *whole.buffers()])


def test_backward_repeats_but_double_backward_is_rejected() -> None:
    model, x = net("residual"), images().requires_grad_()
    split(model, microbatch_size=2, batchnorm="exact")
    loss = model(x).sum()
    assert torch.equal(*(torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)))
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


# Memory


def wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (conv(), nn.BatchNorm2d(CHANNELS), nn.ReLU())]
    return Net(nn.Sequential(*layers)).double()


def test_device_holds_one_slice_of_one_stage() -> None:
    peaks = []
    for size in (None, 4):
        model = wide()
        split(model, microbatch_size=size, batchnorm="exact")
        with MemoryBudget(None) as budget:
            with budget.host():
                x = images(64)
            found(model, budget.transfer(x), labels(64))
        peaks.append(budget.peak_bytes)
    assert peaks[1] < peaks[0] / 3


@pytest.mark.parametrize("limit", ["900KiB", "300KiB"])
def test_oom_leads_to_smaller_slices_and_exact_results(limit: str) -> None:
    whole, sliced = wide(), wide()
    wanted = found(whole, images(64), labels(64))
    microbatcher = Microbatcher(
        sliced, loss_fn=nn.CrossEntropyLoss(), batchnorm="exact", memory_limit=limit
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = microbatcher.backward((images(64), labels(64)))
    assert result.num_microbatches == 1
    assert result.nested_sizes["model"] < 64
    gradients = [cast(Tensor, each.grad) for each in sliced.parameters()]
    buffers = [each.double() for each in sliced.buffers()]
    assert_same([result.loss.double(), *gradients, *buffers], [wanted[0], *wanted[2:]])
    again = microbatcher.backward((images(64), labels(64)))
    assert again.attempts == 1
    assert again.nested_sizes == result.nested_sizes


def test_oom_at_single_rows_leaves_state_unchanged() -> None:
    model = wide()
    before = copy.deepcopy(model.state_dict())
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), batchnorm="exact", memory_limit="60KiB"
    )
    with pytest.raises(torch.OutOfMemoryError):
        microbatcher.backward((images(64), labels(64)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_model_in_eval_mode_uses_plain_microbatches() -> None:
    model = net("residual")
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), batchnorm="exact", microbatch_size=2
    )
    model.eval()
    whole = copy.deepcopy(model)
    cast(Any, whole).__dict__.pop("forward")
    wanted = found(whole, images(), labels())
    result = microbatcher.backward((images(), labels()))
    assert result.num_microbatches == 4
    torch.testing.assert_close(result.loss.double(), wanted[0])


# Rejected forwards


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(CHANNELS)


class Branches(WithNorm):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(x)) if x.sum() > 0 else x


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = self.bn(x)
        return cast(Tensor, F.relu_(x) + y)


class Counts(WithNorm):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return cast(Tensor, self.bn(x))


class Noisy(WithNorm):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(x + torch.rand(6)))


class RandomlySkipped(WithNorm):
    def forward(self, x: Tensor) -> Tensor:
        kept = random.random() + np.random.rand() < 3  # a trace would keep the first result
        return cast(Tensor, self.bn(x)) if kept else x


class ReadsStatistics(WithNorm):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(x)) - cast(Tensor, self.bn.running_mean).view(1, -1, 1, 1)


class ScaledFromOutside(nn.Module):
    """Multiply by a number and a buffer that change between batches."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(CHANNELS)
        self.share = 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(self.conv(x))) * (self.share * (self.scale + 1))


def test_changes_between_batches_apply_to_next_batch() -> None:
    whole = Net(ScaledFromOutside()).double()
    sliced = copy.deepcopy(whole)
    split(sliced, microbatch_size=2, batchnorm="exact")
    for step in range(3):
        for model in (whole, sliced):
            body: Any = model.body
            body.share, body.scale = 1.0 + (step == 1), torch.full((), 1.0 + (step == 2)).double()
            model.zero_grad()
        x, targets = images(), torch.randint(CLASSES, (len(images()),))
        assert_same(found(sliced, x, targets), found(whole, x, targets))


class ScaledInTraining(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (0.5 if self.training else 1.0)


class WithConv(WithNorm):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()


class WithoutGradient(WithConv):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.conv(x)
        return cast(Tensor, self.bn(self.conv(x) + fixed))


class FrozenInForward(WithConv):
    def forward(self, x: Tensor) -> Tensor:
        self.bn.eval()
        output = self.bn(self.conv(x))
        self.bn.train()
        return cast(Tensor, output)


class MoreDropoutForAWhile(WithNorm):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.dropout.p = 0.5
        output = self.dropout(self.bn(x))
        self.dropout.p = 0.1
        return cast(Tensor, output)


class WithLoss(WithNorm):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(x)).square().mean()


def hooked() -> nn.Module:
    model = nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS))
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Branches, r"torch\.fx cannot trace it"),
        (lambda: nn.Sequential(Functional(), nn.BatchNorm2d(CHANNELS)), "as a function"),
        (WritesInPlace, "writes into conv, which bn also reads"),
        (lambda: nn.Sequential(ScaledInTraining(CHANNELS)), "another result than its forward"),
        (WithoutGradient, "another gradient than its forward"),
        (FrozenInForward, "another result than its forward"),
        (MoreDropoutForAWhile, "another dropout than its forward"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(CHANNELS)), "is a SyncBatchNorm"),
        (Counts, "its forward changes 'seen', and a trace does not"),
        (Noisy, "draws random numbers that do not depend on its input"),
        (RandomlySkipped, "draws random numbers that do not depend on its input"),
        (ReadsStatistics, "another result than its forward"),
        (WithLoss, "its loss exists before"),
        (hooked, "'0' has hooks"),
    ],
)
def test_unsplittable_forwards_are_rejected(make: Callable[[], nn.Module], why: str) -> None:
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    split(model, microbatch_size=2, batchnorm="exact")
    x, drawn, others = images(), torch.get_rng_state(), foreign_states()
    with pytest.raises(UnsplittableModelError, match=why):
        model(x)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert foreign_states() == others
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_function_with_batchnorm_is_rejected() -> None:
    norm = nn.BatchNorm2d(CHANNELS).double()
    part = split(lambda x: norm(x), microbatch_size=2, batchnorm="exact", modules=[norm])
    with pytest.raises(UnsplittableModelError, match="it is not a module"):
        part(images())


def test_tensors_nested_in_argument_are_rejected() -> None:
    class Pair(WithNorm):
        def forward(self, pair: dict[str, Tensor]) -> Tensor:
            return cast(Tensor, self.bn(pair["x"]))

    model = Pair().double()
    split(model, microbatch_size=2, batchnorm="exact")
    with pytest.raises(UnsplittableModelError, match="takes tensors inside of a dict, as 'pair'"):
        model({"x": images(), "y": images()})


def test_one_value_per_channel_raises_error_of_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    split(model, microbatch_size=1, batchnorm="exact")
    model(torch.ones(2, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.ones(1, 3))


class Normalized(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(torch.relu(self.norm(self.linear(x))))
        return out


def combined(freezes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 6),
        nn.Sequential(*(Normalized() for _ in range(3))),
        nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)),
        nn.Linear(6, 3),
    ).double()
    if freezes:
        model.get_submodule("1.1.norm").eval()
    return model


def some_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_rows)
    return torch.randn(num_rows, 5, dtype=torch.double), torch.randint(3, (num_rows,))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.clone() for name, each in model.named_buffers()}
    return found | {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


def train_whole_batches(model: nn.Module, *sizes: int) -> dict[str, Tensor]:
    for size in sizes:
        rows, targets = some_rows(size)
        (F.cross_entropy(model(rows), targets) * size / sum(sizes)).backward()
    return snapshot(model)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-9, atol=1e-12, msg=name)


LEVELS = ["recompute", "offload"]
COMBINED: dict[str, dict[str, Any]] = {
    "a part, all rows first": {"nested": {"2": "auto"}, "microbatch_size": None},
    "frozen, a part, several batches": {"nested": {"2": 2}, "freezes": True, "sizes": (9, 13)},
    "both": {"when_too_large": LEVELS, "level": 2, "microbatch_size": None},
    "offload in slices": {"when_too_large": "offload", "level": 1},
}


@pytest.mark.parametrize("name", COMBINED)
def test_combination_with_other_features_matches_whole_batch(name: str) -> None:
    options = {"microbatch_size": 4, **COMBINED[name]}
    sizes, freezes = options.pop("sizes", (13,)), options.pop("freezes", False)
    level = options.pop("level", 0)
    model = combined(freezes)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        batchnorm="exact",
        probe=False,
        **with_features(options),
    )
    begin_at_level(microbatcher, level)
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    result = microbatcher.accumulate([some_rows(size) for size in sizes], metrics=metric)
    assert result.level in ("plain" if level == 0 else " + ".join(LEVELS[:level]), "offload")
    assert metric._update_count == len(sizes)
    assert_equal(snapshot(model), train_whole_batches(combined(freezes), *sizes))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_matches_whole_batch_up_to_rounding(precision: Any) -> None:
    model, whole = combined().float(), combined().float()
    rows, targets = some_rows(13)
    scale = 1024.0 if precision == "fp16" else 1.0
    Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        batchnorm="exact",
        microbatch_size=4,
        precision=precision,
        backward=lambda loss: (loss * scale).backward(),
        probe=False,
    ).backward((rows.float(), targets))
    with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        loss = F.cross_entropy(whole(rows.float()), targets)
    (loss * scale).backward()
    found, wanted = (
        torch.cat([each.flatten() for each in snapshot(one).values()]) for one in (model, whole)
    )
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    assert (found - wanted).norm() < 4 * rounding * wanted.norm()


@pytest.mark.parametrize("options", [3, {"microbatch_size": 3, "batchnorm": "exact"}])
def test_nested_part_with_batchnorm_in_exact_mode_is_rejected(options: Any) -> None:
    microbatcher = Microbatcher(
        combined(),
        loss_fn=nn.CrossEntropyLoss(),
        batchnorm="exact",
        features=[Nested({"1": options})],
    )
    with pytest.raises(
        UnsplittableModelError, match=r"'1' has its own size and contains BatchNorm"
    ):
        microbatcher.backward(some_rows(13))


@pytest.mark.sweep
@pytest.mark.parametrize("nested", [{}, {"2": "auto"}])
def test_oom_at_any_operation_gives_exact_or_no_gradients(nested: Any) -> None:
    wanted = train_whole_batches(combined(), 13)

    def run(*failing: int) -> tuple[nn.Module, FaultMode, Any]:
        model = combined()
        microbatcher = Microbatcher(
            model,
            loss_fn=nn.CrossEntropyLoss(),
            batchnorm="exact",
            microbatch_size="auto",
            features=[Nested(nested)],
            memory_limit="1GiB",
            probe=False,
        )
        with FaultMode([Fault(each) for each in failing]) as mode:
            try:
                return model, mode, microbatcher.backward(some_rows(13))
            except torch.OutOfMemoryError:
                return model, mode, None

    _, mode, _ = run()
    outcomes: set[object] = set()
    for seed in range(48):
        numbers = random.Random(seed).sample(range(mode.num_operations), 1 + seed % 2)
        model, _, result = run(*sorted(numbers))
        if result is None:
            assert_equal(snapshot(model), snapshot(combined()))
        else:
            assert_equal(snapshot(model), wanted)
        outcomes.add(None if result is None else result.nested_sizes["model"])
    assert len(outcomes) > 2


def test_oom_during_tracing_is_retried() -> None:
    trigger = Outside(has_failed=False)

    class Scaled(Normalized):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, torch.fx.Proxy) and not trigger.has_failed:
                trigger.has_failed = True
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x)

    model, twin = (nn.Sequential(nn.Linear(5, 6), make()).double() for make in (Scaled, Normalized))
    twin.load_state_dict(model.state_dict())
    rows = torch.randn(7, 5, dtype=torch.double)
    twin(rows).square().mean().backward()
    microbatcher = Microbatcher(
        model,
        loss_fn=lambda output, _: output.square().mean(),
        microbatch_size="auto",
        features=[
            Nested({"1": {"microbatch_size": Halving(initial=3), "batchnorm": "exact"}}),
            WhenTooLarge({"recompute": ["1"]}),
        ],
        batchnorm="disable",
    )
    microbatcher.backward((rows, torch.zeros(7)))
    assert trigger.has_failed
    assert_equal(snapshot(model), snapshot(twin))


def test_memory_levels_work_with_whole_batches() -> None:
    """Layers that average over the batch keep it whole; recomputation does not change results."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8), nn.BatchNorm1d(8))
        for _ in range(4)
    ]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 3)).double()
    whole = copy.deepcopy(model)
    rows = torch.randn(256, 8, dtype=torch.double), torch.randint(3, (256,))
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        batchnorm="disable",
        features=[WhenTooLarge(["recompute", "offload"])],
        memory_limit="4MiB",
        probe=False,
    )
    for _ in range(2):
        result = microbatcher.backward(rows)
        assert (result.num_microbatches, result.level) == (1, "recompute")
        F.cross_entropy(whole(rows[0]), rows[1]).backward()
    assert result.attempts == 1
    assert_equal(snapshot(model), snapshot(whole))


def test_unsplit_part_is_split_after_oom_in_later_layer() -> None:
    """The module keeps its activations until the later failure."""

    class Hungry(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            if part.forward.nested.sizes == [32]:
                raise torch.OutOfMemoryError("beside the activations of the part")
            return F.cross_entropy(logits, targets)

    model = combined()
    part: Any = model.get_submodule("1")
    microbatcher = Microbatcher(
        model,
        loss_fn=Hungry(),
        microbatch_size=None,
        features=[Nested({"1": {"microbatch_size": "auto", "batchnorm": "exact"}})],
        loss_average="samples",
        probe=False,
    )
    result = microbatcher.backward(some_rows(32))
    assert (result.attempts, result.ooms, result.nested_ooms) == (2, 1, 1)
    assert result.nested_sizes == {"1": 16}
    assert_equal(snapshot(model), train_whole_batches(combined(), 32))
