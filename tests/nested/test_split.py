"""A module with its own size: what is checked, refused and named, and averages of its losses."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from automicro import MemoryBudget, Microbatcher, NestedSplit, split
from automicro.errors import (
    AutomicroWarning,
    BufferWarning,
    GradientWarning,
    LossAverageError,
    UnsplittableModelError,
)
from automicro.features import Nested

ROWS, WIDTH = 10, 8


def hidden(*more):
    return torch.randn(ROWS, *more, WIDTH, dtype=torch.double, requires_grad=True)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def linear(outputs) -> Any:
    return nn.Linear(WIDTH, outputs).double()


# Averages of losses


@pytest.mark.parametrize(
    ("average", "why"), [("auto", "does not end in"), ("samples", "do not add up")]
)
def test_loss_that_compares_rows_is_rejected(average, why):
    def tail(hidden):
        return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))

    with pytest.raises(LossAverageError, match=why):
        NestedSplit(tail, microbatch_size=2, loss_average=average)(hidden())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_cross_entropy_are_detected(smoothing):
    weight, head, x = torch.tensor([1.0, 1.0, 5.0]).double(), linear(3), hidden()

    def tail(hidden, targets):
        return F.cross_entropy(head(hidden), targets, weight=weight, label_smoothing=smoothing)

    part = split(tail, microbatch_size=3)
    if smoothing:  # adds two means
        with pytest.raises(LossAverageError, match="does not end in"):
            part(x, torch.randint(2, (ROWS,)))
        average = lambda batch: weight[batch["targets"]].sum()  # noqa: E731
        part = split(tail, microbatch_size=3, loss_average=average)
    for targets in (torch.zeros(ROWS).long(), torch.randint(3, (ROWS,))):
        close(part(x, targets), tail(x, targets))


def test_ctc_loss_is_averaged_over_rows():
    head, x, targets = linear(5), hidden(9), torch.randint(1, 5, (ROWS, 4))

    def tail(hidden, lengths):
        scores = head(hidden).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets[: len(hidden)], torch.full_like(lengths, 9), lengths)

    part = split(tail, microbatch_size=3)
    for lengths in (torch.full((ROWS,), 4), torch.randint(1, 5, (ROWS,))):
        targets[:] = targets[0]
        wanted, found = (torch.autograd.grad(f(x, lengths), [x, head.weight]) for f in (tail, part))
        close(found, wanted)


@pytest.mark.parametrize(("value", "width"), [(0.0, 3), (float("nan"), 3), (0.0, 1)])
def test_mean_over_selected_values_must_be_declared(value, width):
    head, x, depth = linear(width), hidden(), torch.randn(ROWS, width).double()

    def present(depth):
        return ~depth.isnan() & (depth != value)

    def tail(hidden, depth):
        there = present(depth)
        return (head(hidden)[there] - depth[there]).abs().mean()

    part = split(tail, microbatch_size=3)
    if width == 1:  # with one value per row, the mean of torch is a mean over rows
        close(part(x, depth), tail(x, depth))
    depth[2:5, -1] = value
    with pytest.raises(LossAverageError, match=r"of this slice is not|does not end in"):
        part(x, depth)
    count = lambda batch: present(batch["depth"]).sum()  # noqa: E731
    declared = split(tail, microbatch_size=3, loss_average=count)
    close(declared(x, depth), tail(x, depth))
    wanted, found = (torch.autograd.grad(f(x, depth), [x, head.weight]) for f in (tail, declared))
    close(found, wanted)


def test_targets_with_ignore_index_do_not_count():
    head, x, targets = linear(100), hidden(4), torch.arange(4 * ROWS).reshape(ROWS, 4)

    def tail(hidden, targets):
        return F.cross_entropy(head(hidden).flatten(0, -2), targets.flatten(), ignore_index=255)

    part = split(tail, microbatch_size=3)
    for _ in range(2):
        close(part(x, targets), tail(x, targets))
        targets[5:8] = 255


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_tail_may_return_sum_for_division_outside(dtype):
    head, x = linear(3).to(dtype), hidden().detach().to(dtype).requires_grad_()
    depth = torch.randn(ROWS, 3).to(dtype)

    def tail(hidden, depth):
        return (head(hidden) - depth).abs()[depth > 0].sum()

    part = split(tail, microbatch_size=3)
    wanted, found = (
        torch.autograd.grad(f(x, depth) / (depth > 0).sum(), [x, head.weight]) for f in (tail, part)
    )
    rtol = 1e-9 if dtype is torch.double else 2e-2
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
    assert part.sizes == [3, 3, 2, 2]
    counted = split(lambda *given: (tail(*given), 3), microbatch_size=3, modules=[head])
    with pytest.raises(UnsplittableModelError, match="divide a sum by its count outside"):
        counted(x, depth)


def test_targets_modified_by_tail_are_rejected():
    head, x, targets = linear(5), hidden(), torch.randint(5, (ROWS,))

    def tail(hidden, targets):
        return F.cross_entropy(head(hidden), targets.clamp(min=0))

    part = split(tail, microbatch_size=3)
    close(part(x, targets), tail(x, targets))
    targets[2:5] = -100
    with pytest.raises(LossAverageError, match="of this slice is not"):
        part(x, targets)


def test_declared_average_is_rechecked_after_equal_box_counts():
    head, x = linear(4), hidden()

    def tail(hidden, targets):  # divided by the number of boxes of all rows
        found = head(hidden).sigmoid()
        losses = [(each - row["boxes"]).abs().sum() for each, row in zip(found, targets)]  # noqa: B905
        return torch.stack(losses).sum() / sum(len(row["boxes"]) for row in targets)

    def boxes(*counts):
        return [{"boxes": torch.rand(each, 4).double()} for each in counts]

    part = split(tail, microbatch_size=3, loss_average="samples", modules=[head])
    alike = boxes(*[2] * ROWS)
    for _ in range(3):
        close(part(x, alike), tail(x, alike))
    with pytest.raises(LossAverageError, match="do not add up"):  # the fourth call is checked
        part(x, boxes(*[2] * 9, 3))


# State and side effects


class Remembering(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.losses, self.calls = linear(WIDTH), kind, list[Any](), 0
        if kind == "spectral norm":
            parametrizations.spectral_norm(self.layer)

    def forward(self, hidden):
        hidden = self.layer(hidden)
        if self.kind == "attribute":
            self.loss = hidden.square().mean()
        if self.kind == "list":
            self.losses.append(hidden.square().mean())
        if self.kind == "count":
            self.calls += self.training
            hidden = hidden * self.calls
        return hidden.tanh()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("attribute", r"keeps a tensor with a gradient in the attribute 'loss' of itself"),
        ("list", r"keeps a tensor with a gradient in the attribute 'losses'"),
        ("spectral norm", r"returns .*other values .*\.eval\(\)"),
        ("count", r"other values"),
    ],
)
def test_part_with_side_effects_is_rejected(kind, message):
    part, x = Remembering(kind), hidden()
    nested = split(part, microbatch_size=3)
    part.eval()
    if kind != "list":
        with torch.no_grad():
            assert part(x).shape == x.shape  # an evaluation before the first step
    part.train()
    with pytest.raises(UnsplittableModelError, match=message):
        part(x).sum().backward()
    nested.remove()
    part(x).sum().backward()


def test_tensor_that_later_requires_grad_is_detected():
    embedding = nn.Embedding(11, WIDTH).double().requires_grad_(False)
    norm, table = nn.LayerNorm(WIDTH).double(), [embedding]
    part = split(lambda x: norm(x) @ table[0].weight.T, modules=[norm], microbatch_size=3)
    part(hidden()).sum().backward()
    embedding.requires_grad_(True)
    with pytest.raises(UnsplittableModelError, match=r"a tensor of shape \(11, 8\) that needs"):
        part(hidden()).sum().backward()


def test_gradient_lost_only_in_later_slice_is_rejected():
    rare, layer = [nn.Linear(WIDTH, WIDTH)], nn.Linear(WIDTH, WIDTH)

    def forward(hidden):
        chosen = (hidden > 50).any(1, keepdim=True)
        output = layer(hidden)
        return torch.where(chosen, rare[0](hidden), output) if bool(chosen.any()) else output

    part = split(forward, microbatch_size=2, modules=[layer])
    x = torch.randn(ROWS, WIDTH)
    x[-1] = 99
    with pytest.raises(UnsplittableModelError, match="neither an argument nor a parameter"):
        part(x).sum().backward()


@pytest.mark.parametrize("gives_loss", [True, False])
def test_empty_batch_passes_through_part(gives_loss):
    head = linear(3)  # an expert without tokens
    expert = split(lambda x: head(x).sum() if gives_loss else head(x), microbatch_size=3)
    for rows in (0, ROWS, 0):
        output = expert(torch.randn(rows, WIDTH).double())
        assert output.shape == (() if gives_loss else (rows, 3))
        output.sum().backward()


def test_hooks_inside_part_that_see_slices_warn():
    part, seen = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()), list[Any]()
    part[0].register_forward_hook(lambda module, args, output: seen.append(output))
    split(part, microbatch_size=3)
    with (
        pytest.warns(GradientWarning, match=r"forward hooks inside Sequential.* \(0\)"),
        pytest.warns(BufferWarning, match="Sequential.* changes seen once per slice, 4 times"),
    ):
        part(torch.randn(ROWS, WIDTH))


class Counted(nn.Module):
    calls: Tensor
    factor = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + self.factor * self.calls)


def test_counting_buffer_warns_once_and_is_rejected_when_it_affects_results():
    part, x = Counted(), torch.randn(ROWS, WIDTH)
    split(part, microbatch_size=3)
    with pytest.warns(BufferWarning, match="Counted.* changes calls once per slice, 4 times"):
        part(x)
    part.factor = 1
    for _ in range(2):  # the second call is checked, and the third only because the second failed
        with pytest.raises(UnsplittableModelError, match="other values in slices"):
            part(x)


def test_random_layer_skip_is_not_reported_as_difference():
    class SometimesSkipped(nn.Linear):
        def forward(self, hidden):
            skipped = self.training and bool(torch.rand(()) < 0.5)
            return hidden if skipped else super().forward(hidden)

    for seed in range(12):
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), SometimesSkipped(WIDTH, WIDTH))
        split(part, microbatch_size=2)
        torch.manual_seed(seed)
        part(torch.randn(ROWS, WIDTH)).sum().backward()


# Calls


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_function_transforms_are_rejected_and_traces_use_whole_batch():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    split(model[1], microbatch_size=3)
    rows = torch.randn(4, WIDTH)

    def loss(weights):
        return torch.func.functional_call(model, weights, rows).sum()

    with pytest.raises(UnsplittableModelError, match=r"torch\.func.*\.remove\(\)"):
        torch.func.grad(loss)(dict(model.named_parameters()))
    traced: Any = torch.jit.trace(model.eval(), torch.randn(ROWS, WIDTH))
    torch.testing.assert_close(traced(rows), model(rows))


def test_error_hints_at_shared_argument_with_row_like_shape():
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    part = split(
        lambda hidden, mask: attention(hidden, hidden, hidden, attn_mask=mask)[0],
        microbatch_size=3,
        modules=[attention],
    )
    with pytest.raises(RuntimeError) as raised:
        part(torch.randn(5, 5, WIDTH), torch.zeros(5, 5))
    assert "batch_layout={'mask': 'shared'}" in raised.value.__notes__[0]


def test_numbers_that_differ_between_slices_are_rejected():
    part = split(lambda x, lengths: (x * 2, int(lengths.max())), microbatch_size=2)
    assert part(hidden(), torch.full((ROWS,), 4))[1] == 4
    with pytest.raises(UnsplittableModelError, match="something that differs between"):
        part(hidden(), torch.arange(ROWS))


def test_list_rows_that_require_grad_are_rejected():
    part = split(
        lambda rows: torch.stack([each.square().sum() for each in rows]).sum(), microbatch_size=2
    )
    rows = [torch.randn(size, requires_grad=size == 3) for size in (3, 1, 2, 4)]
    with pytest.raises(UnsplittableModelError, match=r"'rows\.0'.* in a list of rows"):
        part(rows)
    assert part([each.detach() for each in rows]).isfinite()


def test_concurrent_calls_of_part_are_rejected():
    entered, go_on = threading.Event(), threading.Event()

    def slow(x):
        entered.set()
        go_on.wait(20)
        return x * 2

    part, x = split(slow, microbatch_size=2), hidden()
    thread = threading.Thread(target=lambda: part(x))
    thread.start()
    try:
        assert entered.wait(20)
        with pytest.raises(UnsplittableModelError, match="two threads call it at the same time"):
            part(x)
    finally:
        go_on.set()
        thread.join()


# Sizes


def nested(model, sizes, **options):
    return Microbatcher(model, loss_fn=nn.MSELoss(), features=[Nested(sizes)], **options)


def test_conflicting_nested_sizes_are_rejected():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))
    for _ in range(2):
        nested(model, {"1": 2})
    with pytest.raises(ValueError, match=r"nested gives '1' .*5.*already.*\.remove\(\)"):
        nested(model, {"1": 5})
    for wrong in ("1", model[1]):
        with pytest.raises(TypeError, match=r"names no size\. Give sizes by the names of modules"):
            nested(model, wrong)


def test_fixed_nested_size_ignores_loaded_state():
    def made(size):
        return nested(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2)), {"1": size})

    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 2)
    adapting = made("auto")
    adapting.backward(batch)
    for size in (2, None):
        fixed = made(size)
        fixed.load_state_dict(adapting.state_dict())
        assert fixed.backward(batch).nested_sizes == {"1": size or ROWS}
        made("auto").load_state_dict(fixed.state_dict())


@pytest.mark.parametrize("is_tail", [True, False])
def test_peak_memory_shrinks_with_size_of_dominant_part(is_tail):
    wide = nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 32))
    x = torch.randn(256, 32, requires_grad=True)

    def forward(hidden):
        return wide(hidden).square().mean() if is_tail else wide(hidden)

    peaks = []
    for size in (None, 128, 64, 32):
        part = split(forward, microbatch_size=size, modules=[wide])
        for _ in range(2):  # the first call checks rows
            with MemoryBudget(None) as budget:
                part(x).sum().backward()
            wide.zero_grad()
        peaks.append(budget.peak_bytes)
    whole, half, quarter, eighth = peaks
    assert half > quarter > eighth
    assert quarter < whole / 2
    assert eighth < whole / 2.5


def test_uncalled_part_warns_after_eight_steps():
    class Borrowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.used = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return {"loss": F.linear(self.used(x), self.head.weight).square().mean()}

    options: Any = {"microbatch_size": None, "loss_average": "samples"}
    microbatcher = Microbatcher(Borrowed(), features=[Nested({"head": 2, "used": 2})], **options)
    batch = {"x": torch.randn(ROWS, WIDTH)}
    for _ in range(7):
        microbatcher.backward(batch)
    with pytest.warns(AutomicroWarning, match=r"sizes to 'head', but 8 steps have not called it"):
        microbatcher.backward(batch)
    microbatcher.backward(batch)
