"""BatchNorm in sliced modules: statistics, outputs and gradients match the whole batch."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from automicro import Halving, MemoryBudget, Microbatcher, split
from automicro.checking.bench import foreign_states
from automicro.errors import UnsplittableModelError
from automicro.features import Nested, WhenTooLarge, with_features
from tests.outside import Outside
from tests.torture.engine.subject import begin_at_level

ROWS, CHANNELS, CLASSES = 7, 4, 5


def images(rows=ROWS):
    torch.manual_seed(1)
    return torch.randn(rows, CHANNELS, 6, 6, dtype=torch.double) * 2 + 3


def labels(rows=ROWS):
    return torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(2))


def conv():
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)


class Layers(nn.Module):
    def __init__(self, function: Any, norm: Any = nn.BatchNorm2d, **options: Any):
        super().__init__()
        self.function, self.relu = function, nn.ReLU(inplace=True)
        self.conv, self.conv2, self.conv3 = conv(), conv(), conv()
        self.bn, self.bn2, self.bn3 = (norm(CHANNELS, **options) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.function(self, x)


def simple(m, x):
    return m.bn(m.conv(x))


def residual(m, x):
    """Add a shortcut with a BatchNorm of its own, with operations in place."""
    out = m.bn2(m.conv2(m.relu(m.bn(m.conv(x)))))
    out += m.bn3(m.conv3(x))
    return m.relu(out)


def pre_activation(m, x):
    """Use the input of a BatchNorm again after it; the image has its own BatchNorm."""
    x = m.conv(m.bn(x))
    return x + m.conv2(F.relu(m.bn2(x))) + m.bn3(x)


def branches(m, x):
    """Join branches of different depths, with computed sizes."""
    once = torch.cat([x, m.bn(m.conv(x))], 3)
    half, other = m.bn2(once).chunk(2, dim=3)
    rows, size = x.shape[0], x.shape[-2:]  # a tuple of numbers crosses the BatchNorms
    return F.interpolate((half * other + x).view(rows, CHANNELS, -1, 3), size)


class Tokens(nn.Module):
    """BatchNorm over rows and positions, with a parameter outside any submodule."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x):
        hidden = self.linear(x)
        return self.bn(hidden.flatten(0, 2)).reshape_as(hidden) * self.scale


class Activated(nn.BatchNorm2d):
    def __init__(self, channels, **options: Any):
        super().__init__(channels, **options)
        self.act = nn.PReLU()

    def forward(self, input):
        return self.act(super().forward(input))


def frozen():
    block = Layers(residual)
    block.bn.eval()
    block.bn2.weight.requires_grad_(requires_grad=False)
    return block


BODIES: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: Layers(residual),
    "pre-activation": lambda: Layers(pre_activation),
    "branches": lambda: Layers(branches),
    "tokens": Tokens,
    "derived, without scale": lambda: Layers(residual, Activated, affine=False),
    "twice": lambda: Layers(lambda m, x: simple(m, F.relu(simple(m, x)))),
    "frozen": frozen,
    "cumulative": lambda: Layers(simple, momentum=None),
    "without statistics": lambda: Layers(simple, track_running_stats=False),
    "statistics in evaluation": lambda: Layers(simple, track_running_stats=False).eval(),
}


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.body(x).tanh(), 2).flatten(1)[:, :CLASSES]


def net(name) -> Any:
    model = Net(BODIES[name]() if isinstance(name, str) else name)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return model.double()


def sliced(model, size=2) -> Any:
    other = copy.deepcopy(model)
    split(other, microbatch_size=size, batchnorm="exact")
    return other


def found(model, x, targets):
    """Return the loss, the gradients of the input and of the parameters, and the buffers."""
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), targets)
    loss.backward()
    return [loss.detach(), x.grad, *snapshot(model)]


def snapshot(model) -> list[Any]:
    return [
        *(each.grad for each in model.parameters()),
        *(each.clone() for each in model.buffers()),
    ]


def assert_same(some, others, share=1e-10):
    size = max(float(each.abs().max()) for each in others if each is not None)
    torch.testing.assert_close(some, others, rtol=share, atol=share * size)


@pytest.mark.parametrize(("name", "size"), [*((name, 3) for name in BODIES), ("residual", 1)])
def test_slices_match_whole_batch(name, size):
    whole = net(name)
    part = sliced(whole, size)
    for _ in range(2):  # the second batch starts from the running statistics of the first
        assert_same(found(part, images(), labels()), found(whole, images(), labels()))
    with torch.no_grad():
        assert_same([part(images()), *part.buffers()], [whole(images()), *whole.buffers()])
    sizes = part.forward.nested.sizes
    assert sum(sizes) == ROWS
    assert max(sizes) <= size


def test_large_means_keep_precision():
    x = torch.randn(64, 3) + 1e4
    wanted = F.batch_norm(x.double(), None, None, training=True)
    whole_error = (F.batch_norm(x, None, None, training=True) - wanted).norm()
    model = sliced(nn.Sequential(nn.BatchNorm1d(3, affine=False)), 5)
    assert (model(x) - wanted).norm() < 4 * whole_error


def test_rows_that_differ_by_rounding_are_not_refused():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = 1e4 + 0.1 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), batchnorm="exact", microbatch_size=16
    )
    assert microbatcher.backward((x, torch.arange(64) % 3)).nested_sizes == {"model": 16}


def test_dropout_masks_are_drawn_per_slice_and_replayed():
    first, norm, last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    part = nn.Sequential(first, nn.Dropout(0.5), norm, nn.Dropout(0.3), last).double()
    x = torch.randn(6, 3, dtype=torch.double)

    def in_step(x):
        hidden = torch.cat([F.dropout(rows, 0.5) for rows in first(x).split(2)])
        hidden = F.batch_norm(hidden, None, None, norm.weight, norm.bias, training=True)
        return last(torch.cat([F.dropout(rows, 0.3) for rows in hidden.split(2)]))

    outcomes = []
    for run in (in_step, split(part, microbatch_size=2, batchnorm="exact")):
        part.zero_grad()
        torch.manual_seed(3)
        output = run(x)
        (output**3).sum().backward()
        gradients = [each.grad for each in part.parameters()]
        outcomes.append([output.detach(), *gradients, torch.rand(1, dtype=torch.double)])
    assert_same(*outcomes)


@pytest.mark.parametrize("size", [1, 2])
def test_single_row_with_transposed_gradient_matches_whole_batch(size):
    """The kernel of torch computes a different gradient for this memory layout."""

    whole = Layers(lambda m, x: simple(m, x).flatten(2).transpose(1, 2)).double()
    part = sliced(whole, size)
    for model in (whole, part):
        (model(images(3)) ** 3).sum().backward()
    assert_same(snapshot(part), snapshot(whole))


def test_forward_runs_twice_per_row():
    counts = []
    for size in (None, 2):
        model = sliced(net("residual"), size)
        for _ in range(2):  # the first calls also check rows
            model(images())
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(images()), labels()).backward()
        counts.append(counter.get_total_flops())
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        net("residual")(images())
    assert counts[1] == counts[0] + forward.get_total_flops()


def test_backward_repeats_but_double_backward_is_rejected():
    model, x = sliced(net("residual")), images().requires_grad_()
    loss = model(x).sum()
    assert torch.equal(*(torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)))
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_changes_between_batches_apply_to_next_batch():
    body: Any = Layers(lambda m, x: simple(m, x) * (m.share * (m.scale + 1)))
    body.share = 1.0
    body.register_buffer("scale", torch.ones(()))
    whole = net(body)
    part = sliced(whole)
    for step in range(3):
        for model in (whole, part):
            model.body.share = 1.0 + (step == 1)
            model.body.scale = torch.full((), 1.0 + (step == 2)).double()
            model.zero_grad()
        assert_same(found(part, images(), labels()), found(whole, images(), labels()))


# Memory


def wide():
    layers = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
    return net(nn.Sequential(*(copy.deepcopy(each) for each in layers * 6)))


def exact(model, size: Any = "auto", **options: Any):
    given = {"loss_fn": nn.CrossEntropyLoss(), "batchnorm": "exact", **options}
    return Microbatcher(model, microbatch_size=size, **with_features(given))


def test_device_holds_one_slice_of_one_stage():
    peaks = []
    for size in (None, 4):
        model = sliced(wide(), size)
        with MemoryBudget(None) as budget:
            with budget.host():
                x = images(64)
            found(model, budget.transfer(x), labels(64))
        peaks.append(budget.peak_bytes)
    assert peaks[1] < peaks[0] / 3


@pytest.mark.parametrize("limit", ["900KiB", "300KiB"])
def test_oom_leads_to_smaller_slices_and_exact_results(limit):
    whole = wide()
    model, batch = copy.deepcopy(whole), (images(64), labels(64))
    wanted = found(whole, *batch)
    microbatcher = exact(model, memory_limit=limit)
    result = microbatcher.backward(batch)
    assert result.num_microbatches == 1
    assert result.nested_sizes["model"] < 64
    assert_same([result.loss, *snapshot(model)], [wanted[0], *wanted[2:]])
    again = microbatcher.backward(batch)
    assert (again.attempts, again.nested_sizes) == (1, result.nested_sizes)


def test_oom_at_single_rows_leaves_state_unchanged():
    model = wide()
    before = copy.deepcopy(snapshot(model))
    with pytest.raises(torch.OutOfMemoryError):
        exact(model, memory_limit="60KiB").backward((images(64), labels(64)))
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def test_oom_during_tracing_is_retried():
    trigger = Outside(has_failed=False)

    def forward(m, x):
        if isinstance(x, torch.fx.Proxy) and not trigger.has_failed:
            trigger.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return simple(m, x)

    whole = nn.Sequential(conv(), Layers(forward)).double()
    model = copy.deepcopy(whole)
    part = {"microbatch_size": Halving(initial=3), "batchnorm": "exact"}
    microbatcher = Microbatcher(
        model,
        loss_fn=lambda output, _: output.square().mean(),
        microbatch_size="auto",
        features=[Nested({"1": part}), WhenTooLarge({"recompute": ["1"]})],
        batchnorm="disable",
    )
    microbatcher.backward((images(), torch.zeros(ROWS)))
    assert trigger.has_failed
    whole(images()).square().mean().backward()
    assert_same(snapshot(model), snapshot(whole))


def test_unsplit_part_is_split_after_oom_in_later_layer():
    """The module keeps its activations until the later failure."""
    model: Any = nn.Sequential(conv(), Layers(simple), nn.Flatten()).double()
    whole, batch = copy.deepcopy(model), (images(32), torch.randint(16, (32,)))
    F.cross_entropy(whole(batch[0]), batch[1]).backward()

    def hungry(logits, targets):
        if model[1].forward.nested.sizes == [32]:
            raise torch.OutOfMemoryError("beside the activations of the part")
        return F.cross_entropy(logits, targets)

    part = Nested({"1": {"microbatch_size": "auto", "batchnorm": "exact"}})
    options: Any = {"batchnorm": "warn", "features": [part], "loss_average": "samples"}
    result = exact(model, None, loss_fn=hungry, probe=False, **options).backward(batch)
    assert (result.attempts, result.ooms, result.nested_ooms) == (2, 1, 1)
    assert result.nested_sizes == {"1": 16}
    assert_same(snapshot(model), snapshot(whole))


# Combined with other features


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


def combined(freezes=False) -> Any:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Normalized() for _ in range(3)))
    wide = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    model = nn.Sequential(nn.Linear(5, 6), blocks, wide, nn.Linear(6, 3)).double()
    if freezes:
        model.get_submodule("1.1.norm").eval()
    return model


def some_rows(num_rows):
    torch.manual_seed(num_rows)
    return torch.randn(num_rows, 5, dtype=torch.double), torch.randint(3, (num_rows,))


LEVELS = ["recompute", "offload"]
COMBINED: dict[str, dict[str, Any]] = {
    "a part, all rows first": {"nested": {"2": "auto"}, "size": None},
    "frozen, a part, several batches": {"nested": {"2": 2}, "freezes": True, "sizes": (9, 13)},
    "both": {"when_too_large": LEVELS, "level": 2, "size": None},
    "offload in slices": {"when_too_large": "offload", "level": 1},
}


@pytest.mark.parametrize("name", COMBINED)
def test_combination_with_other_features_matches_whole_batch(name):
    options = {"sizes": (13,), "freezes": False, "level": 0, "size": 4, **COMBINED[name]}
    sizes, freezes, level = (options.pop(each) for each in ("sizes", "freezes", "level"))
    model, whole = combined(freezes), combined(freezes)
    microbatcher = exact(model, probe=False, **options)
    begin_at_level(microbatcher, level)
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    result = microbatcher.accumulate([some_rows(size) for size in sizes], metrics=metric)
    assert result.level in ("plain" if level == 0 else " + ".join(LEVELS[:level]), "offload")
    assert metric._update_count == len(sizes)
    for size in sizes:
        rows, targets = some_rows(size)
        (F.cross_entropy(whole(rows), targets) * size / sum(sizes)).backward()
    assert_same(snapshot(model), snapshot(whole))


@pytest.mark.parametrize(
    ("precision", "dtype", "scale"),
    [("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 1024.0)],
)
def test_half_precision_matches_whole_batch_up_to_rounding(precision, dtype, scale):
    model, whole = combined().float(), combined().float()
    rows, targets = some_rows(13)
    backward = lambda loss: (loss * scale).backward()  # noqa: E731
    options: Any = {"precision": precision, "backward": backward, "probe": False}
    exact(model, 4, **options).backward((rows.float(), targets))
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(whole(rows.float()), targets)
    backward(loss)
    one, other = (torch.cat([e.flatten() for e in snapshot(each)]) for each in (model, whole))
    assert (one - other).norm() < 2 * torch.finfo(dtype).eps * other.norm()


def test_model_in_eval_mode_uses_plain_microbatches():
    whole = net("residual").eval()
    model = copy.deepcopy(whole)
    microbatcher = exact(model.train(), 2)
    model.eval()
    result = microbatcher.backward((images(), labels()))
    assert result.num_microbatches == 4
    wanted = found(whole, images(), labels())
    assert_same([result.loss, *snapshot(model)], [wanted[0], *wanted[2:]])


# Refused


def writes(m, x):
    x = m.conv(x)
    y = m.bn(x)
    return F.relu_(x) + y


def counts(m, x):
    m.seen += 1
    return m.bn(x)


def sometimes(m, x):
    kept = random.random() + np.random.rand() < 3  # a trace would keep the first result
    return m.bn(x) if kept else x


class ScaledInTraining(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) * (0.5 if self.training else 1.0)


def without_gradient(m, x):
    with torch.no_grad():
        fixed = m.conv(x)
    return m.bn(m.conv(x) + fixed)


class MoreDropoutForAWhile(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.dropout = nn.BatchNorm2d(CHANNELS), nn.Dropout(0.1)

    def forward(self, x):
        self.dropout.p = 0.5
        x = self.dropout(self.bn(x))
        self.dropout.p = 0.1
        return x


def hooked():
    model = nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS))
    model[0].register_forward_hook(lambda *_: None)
    return model


RANDOM = "draws random numbers that do not depend on its input"
REFUSED: dict[str, Any] = {
    r"torch\.fx cannot trace it": lambda m, x: m.bn(x) if x.sum() > 0 else x,
    "as a function": lambda m, x: m.bn(F.batch_norm(x, None, None, training=True)),
    "writes into conv, which bn also reads": writes,
    "another gradient than its forward": without_gradient,
    "its forward changes 'seen', and a trace does not": counts,
    f"{RANDOM}": lambda m, x: m.bn(x + torch.rand(6)),
    f".* {RANDOM}": sometimes,
    "its loss exists before": lambda m, x: m.bn(x).square().mean(),
    "takes tensors inside of a dict, as 'x'": lambda m, x: m.bn(x["x"]),
    "another result than its forward": nn.Sequential(ScaledInTraining(CHANNELS)),
    "is a SyncBatchNorm": nn.Sequential(nn.SyncBatchNorm(CHANNELS)),
    "'0' has hooks": hooked(),
    "another dropout than its forward": MoreDropoutForAWhile(),
}


@pytest.mark.parametrize("why", REFUSED)
def test_unsplittable_forwards_are_rejected(why):
    body = REFUSED[why]
    model = copy.deepcopy(body if isinstance(body, nn.Module) else Layers(body)).double()
    before = copy.deepcopy(snapshot(model))
    split(model, microbatch_size=2, batchnorm="exact")
    x, drawn, others = images(), torch.get_rng_state(), foreign_states()
    with pytest.raises(UnsplittableModelError, match=why):
        model({"x": x, "y": x} if "dict" in why else x)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert foreign_states() == others
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def test_function_with_batchnorm_is_rejected():
    norm = nn.BatchNorm2d(CHANNELS).double()
    part = split(lambda x: norm(x), microbatch_size=2, batchnorm="exact", modules=[norm])
    with pytest.raises(UnsplittableModelError, match="it is not a module"):
        part(images())


def test_one_value_per_channel_raises_error_of_torch():
    model = sliced(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), 1)
    model(torch.ones(2, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.ones(1, 3))


@pytest.mark.parametrize("options", [3, {"microbatch_size": 3, "batchnorm": "exact"}])
def test_nested_part_with_batchnorm_in_exact_mode_is_rejected(options):
    microbatcher = exact(combined(), nested={"1": options})
    with pytest.raises(UnsplittableModelError, match="'1' has its own size and contains BatchNorm"):
        microbatcher.backward(some_rows(13))
