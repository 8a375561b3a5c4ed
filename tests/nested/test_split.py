"""A module with its own size: loss, outputs and gradients match the module in one piece."""

import threading
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import MemoryBudget, Microbatcher, NestedSplit, split
from automicro.errors import (
    AutomicroWarning,
    BufferWarning,
    GradientWarning,
    LossAverageError,
    UnsplittableModelError,
)
from automicro.features import Nested

ROWS, WIDTH, CLASSES = 10, 8, 50


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    targets = torch.randint(CLASSES, (ROWS,))
    targets[3:5] = -100
    return hidden, targets


def test_loss_that_compares_rows_is_rejected() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))

    with pytest.raises(LossAverageError, match="does not end in"):
        NestedSplit(tail, microbatch_size=2)(*inputs())
    with pytest.raises(LossAverageError, match="do not add up"):
        NestedSplit(tail, microbatch_size=2, loss_average="samples")(*inputs())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_cross_entropy_are_detected(smoothing: float) -> None:
    weight = torch.tensor([1.0, 1.0, 5.0], dtype=torch.double)
    head = nn.Linear(WIDTH, 3).double()

    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden), targets, weight=weight, label_smoothing=smoothing)

    hidden = torch.randn(ROWS, WIDTH, dtype=torch.double)
    part = split(tail, microbatch_size=3)
    if smoothing:  # adds two means
        with pytest.raises(LossAverageError, match="does not end in"):
            part(hidden, torch.randint(2, (ROWS,)))
        average = lambda batch: weight[batch["targets"]].sum()  # noqa: E731
        part = split(tail, microbatch_size=3, loss_average=average)
    for targets in (torch.zeros(ROWS, dtype=torch.long), torch.randint(3, (ROWS,))):
        torch.testing.assert_close(part(hidden, targets), tail(hidden, targets), rtol=1e-9, atol=0)


def test_ctc_loss_is_averaged_over_rows() -> None:
    head = nn.Linear(WIDTH, 5).double()

    def tail(hidden: Tensor, targets: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        scores = head(hidden).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, times, lengths)

    hidden = torch.randn(ROWS, 9, WIDTH, dtype=torch.double, requires_grad=True)
    targets = torch.randint(1, 5, (ROWS, 4))
    part = split(tail, microbatch_size=3)
    for lengths in (torch.full((ROWS,), 4), torch.randint(1, 5, (ROWS,))):
        given = (targets, torch.full((ROWS,), 9), lengths)
        wanted = torch.autograd.grad(tail(hidden, *given), [hidden, head.weight])
        found = torch.autograd.grad(part(hidden, *given), [hidden, head.weight])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Remembering(nn.Module):
    """A middle module that leaves a tensor behind, or reads an earlier one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        if kind == "spectral norm":
            torch.nn.utils.parametrizations.spectral_norm(self.layer)
        if kind == "old spectral norm":
            torch.nn.utils.spectral_norm(self.layer)
        self.kind = kind
        self.losses: list[Tensor] = []
        self.calls = 0

    def forward(self, hidden: Tensor) -> Any:
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
        ("old spectral norm", r"other values"),
        ("count", r"other values"),
    ],
)
def test_part_with_side_effects_is_rejected(kind: str, message: str) -> None:
    part = Remembering(kind)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    nested = split(part, microbatch_size=3)
    part.eval()
    if kind != "list":
        with torch.no_grad():
            assert part(hidden).shape == hidden.shape  # an evaluation before the first step
    part.train()
    with pytest.raises(UnsplittableModelError, match=message):
        part(hidden).sum().backward()
    nested.remove()
    part(hidden).sum().backward()


def test_tensor_that_later_requires_grad_is_detected() -> None:
    embedding = nn.Embedding(11, WIDTH).double().requires_grad_(False)
    norm = nn.LayerNorm(WIDTH).double()
    table = [embedding]

    def head(hidden: Tensor) -> Any:
        return norm(hidden) @ table[0].weight.T

    part = split(head, modules=[norm], microbatch_size=3)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    part(hidden).sum().backward()
    embedding.requires_grad_(True)
    with pytest.raises(UnsplittableModelError, match=r"a tensor of shape \(11, 8\) that needs"):
        part(hidden).sum().backward()


@pytest.mark.parametrize("gives_loss", [True, False])
def test_empty_batch_passes_through_part(gives_loss: bool) -> None:
    head = nn.Linear(WIDTH, 3).double()  # an expert without tokens
    expert = split(lambda x: head(x).sum() if gives_loss else head(x), microbatch_size=3)
    for rows in (0, ROWS, 0):
        output = expert(torch.randn(rows, WIDTH, dtype=torch.double))
        assert output.shape == (() if gives_loss else (rows, 3))
        output.sum().backward()


def test_hooks_inside_part_that_see_slices_warn() -> None:
    part = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())
    seen: list[Tensor] = []
    part[0].register_forward_hook(lambda module, args, output: seen.append(output))
    split(part, microbatch_size=3)
    with (
        pytest.warns(GradientWarning, match=r"forward hooks inside Sequential.* \(0\)"),
        pytest.warns(BufferWarning, match="Sequential.* changes seen once per slice, 4 times"),
    ):
        part(torch.randn(ROWS, WIDTH))


class Counted(nn.Module):
    """Count calls in a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return cast(Tensor, self.linear(x))


def test_buffer_that_counts_slices_warns_once() -> None:
    part = split(Counted(), microbatch_size=3)
    with pytest.warns(BufferWarning, match="Counted.* changes calls once per slice, 4 times"):
        part(torch.randn(ROWS, WIDTH))
    part(torch.randn(ROWS, WIDTH))


class CountsInItsLoss(Counted):
    """Its loss depends on the number of earlier calls from the second step on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.calls * self.linear.bias.detach().abs().sum())


def test_later_difference_is_rejected_on_every_following_call() -> None:
    part = CountsInItsLoss()
    nn.init.zeros_(part.linear.bias)
    sliced = split(part, microbatch_size=3)
    with pytest.warns(BufferWarning):
        sliced(torch.randn(ROWS, WIDTH))
    nn.init.ones_(part.linear.bias)
    for _ in range(2):  # the second call is checked, and the third only because the second failed
        with pytest.raises(UnsplittableModelError, match="other values in slices"):
            sliced(torch.randn(ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_function_transforms_are_rejected_and_traces_use_whole_batch() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    split(model[1], microbatch_size=3)
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, weights, torch.ones(ROWS, WIDTH))
        return found.sum()

    with pytest.raises(UnsplittableModelError, match=r"torch\.func.*\.remove\(\)"):
        torch.func.grad(loss)(weights)
    traced: Any = torch.jit.trace(model.eval(), torch.randn(ROWS, WIDTH))
    rows = torch.randn(4, WIDTH)
    torch.testing.assert_close(traced(rows), model(rows))


class Boxes(nn.Module):
    """A loss divided by the number of boxes of all rows, as in object detection."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4).double()

    def forward(self, hidden: Tensor, targets: list[dict[str, Tensor]]) -> Any:
        found = self.head(hidden).sigmoid()
        losses = [(each - row["boxes"]).abs().sum() for each, row in zip(found, targets)]  # noqa: B905
        return torch.stack(losses).sum() / sum(len(row["boxes"]) for row in targets)


def test_declared_average_is_rechecked_after_equal_box_counts() -> None:
    tail, hidden = Boxes(), torch.randn(ROWS, WIDTH, dtype=torch.double)

    def boxes(*counts: int) -> list[dict[str, Tensor]]:
        return [{"boxes": torch.rand(each, 4).double()} for each in counts]

    alike = boxes(*[2] * ROWS)
    wanted = tail(hidden, alike)
    assumed = split(tail, microbatch_size=3, loss_average="samples")
    for _ in range(3):
        torch.testing.assert_close(tail(hidden, alike), wanted)
    with pytest.raises(LossAverageError, match="do not add up"):  # the fourth call is checked
        tail(hidden, boxes(2, 2, 2, 2, 2, 2, 2, 2, 2, 3))
    assumed.remove()


def test_error_hints_at_shared_argument_with_row_like_shape() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    class Masked(nn.Module):
        def forward(self, hidden: Tensor, mask: Tensor) -> Any:
            return attention(hidden, hidden, hidden, attn_mask=mask)[0]

    part = split(Masked(), microbatch_size=3, modules=[attention])
    with pytest.raises(RuntimeError) as raised:
        part(torch.randn(5, 5, WIDTH), torch.zeros(5, 5))
    assert "batch_layout={'mask': 'shared'}" in raised.value.__notes__[0]


def test_conflicting_nested_sizes_are_rejected() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))
    for _ in range(2):
        Microbatcher(model, loss_fn=nn.MSELoss(), features=[Nested({"1": 2})])
    with pytest.raises(ValueError, match=r"nested gives '1' .*5.*already.*\.remove\(\)"):
        Microbatcher(model, loss_fn=nn.MSELoss(), features=[Nested({"1": 5})])
    wrongs: list[Any] = ["1", model[1]]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"names no size\. Give sizes by the names of modules"):
            Microbatcher(model, loss_fn=nn.MSELoss(), features=[Nested(wrong)])


def test_fixed_nested_size_ignores_loaded_state() -> None:
    def made(size: Any) -> Microbatcher:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))
        return Microbatcher(model, loss_fn=nn.MSELoss(), features=[Nested({"1": size})])

    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 2)
    adapting = made("auto")
    adapting.backward(batch)
    for size in (2, None):
        fixed = made(size)
        fixed.load_state_dict(adapting.state_dict())
        assert fixed.backward(batch).nested_sizes == {"1": size or ROWS}
        made("auto").load_state_dict(fixed.state_dict())


def heavy(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a part that needs nearly all of the memory, and its arguments."""
    wide = nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 32))
    hidden = torch.randn(256, 32, requires_grad=True)
    if kind == "middle":
        return wide, (hidden,)

    class WideTail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = wide

        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.wide(hidden), targets)

    return WideTail(), (hidden, torch.randint(32, (256,)))


@pytest.mark.parametrize("kind", ["tail", "middle"])
def test_peak_memory_shrinks_with_size_of_dominant_part(kind: str) -> None:
    part, given = heavy(kind)

    def peak() -> int:
        with MemoryBudget(None) as budget:
            part(*given).sum().backward()
        part.zero_grad()
        return budget.peak_bytes

    whole = peak()
    rows = len(given[0])
    peaks = []
    for size in (rows // 2, rows // 4, rows // 8):
        nested = split(part, microbatch_size=size)
        part(*given).sum().backward()  # the first call checks rows
        part.zero_grad()
        peaks.append(peak())
        nested.remove()
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[1] < whole / 2
    assert peaks[2] < whole / 2.5


def test_input_view_that_requires_grad_keeps_gradients() -> None:
    layer = nn.Linear(WIDTH, 3).double()

    def features(waves: Tensor) -> Any:
        hidden = waves[:, None]
        if torch.is_grad_enabled():
            hidden.requires_grad = True  # as some models do for checkpointing
        return layer(hidden)

    waves = torch.randn(ROWS, WIDTH, dtype=torch.double)
    wanted = torch.autograd.grad(features(waves).square().sum(), layer.weight)
    found = torch.autograd.grad(
        split(features, microbatch_size=3)(waves).square().sum(), layer.weight
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("value", "width"), [(0.0, 3), (float("nan"), 3), (0.0, 1)])
def test_mean_over_selected_values_must_be_declared(value: float, width: int) -> None:
    head = nn.Linear(WIDTH, width).double()

    def tail(hidden: Tensor, depth: Tensor) -> Tensor:
        there = ~depth.isnan() if value != value else depth != value
        output: Tensor = (head(hidden)[there] - depth[there]).abs().mean()
        return output

    hidden = torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    depth = torch.randn(ROWS, width, dtype=torch.double)
    part = split(tail, microbatch_size=3)
    if width == 1:  # with one value per row, the mean of torch is a mean over rows
        torch.testing.assert_close(part(hidden, depth), tail(hidden, depth), rtol=1e-9, atol=0)
    depth[2:5, -1] = value
    with pytest.raises(LossAverageError, match=r"of this slice is not|does not end in"):
        part(hidden, depth)

    def present(batch: Any) -> Tensor:
        output: Tensor = (~batch["depth"].isnan() & (batch["depth"] != value)).sum()
        return output

    declared = split(tail, microbatch_size=3, loss_average=present)
    torch.testing.assert_close(declared(hidden, depth), tail(hidden, depth), rtol=1e-9, atol=0)
    wanted = torch.autograd.grad(tail(hidden, depth), [hidden, head.weight])
    found = torch.autograd.grad(declared(hidden, depth), [hidden, head.weight])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(32,), (32, 4)])
def test_targets_with_ignore_index_do_not_count(shape: tuple[int, ...]) -> None:
    head = nn.Linear(WIDTH, 100).double()

    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).flatten(0, -2), targets.flatten(), ignore_index=255)

    hidden = torch.randn(*shape, WIDTH, dtype=torch.double)
    targets = torch.arange(hidden[..., 0].numel()).reshape(shape) % 100
    part = split(tail, microbatch_size=3)
    for _ in range(2):
        torch.testing.assert_close(part(hidden, targets), tail(hidden, targets), rtol=1e-9, atol=0)
        targets[5:20] = 255


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_tail_may_return_sum_for_division_outside(dtype: torch.dtype) -> None:
    head = nn.Linear(WIDTH, 3).to(dtype)

    def tail(hidden: Tensor, depth: Tensor) -> Tensor:
        output: Tensor = (head(hidden) - depth).abs()[depth > 0].sum()
        return output

    def loss(compute: Any) -> Tensor:
        output: Tensor = compute(hidden, depth) / (depth > 0).sum()
        return output

    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    depth = torch.randn(ROWS, 3).to(dtype)
    part = split(tail, microbatch_size=3)
    needed = hidden, head.weight
    wanted = torch.autograd.grad(loss(tail), needed)
    found = torch.autograd.grad(loss(part), needed)
    rtol = 1e-9 if dtype is torch.double else 2e-2
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
    assert part.sizes == [3, 3, 2, 2]
    counted = split(lambda *given: (tail(*given), 3), microbatch_size=3, modules=[head])
    with pytest.raises(UnsplittableModelError, match="divide a sum by its count outside"):
        counted(hidden, depth)


def test_targets_modified_by_tail_are_rejected() -> None:
    head = nn.Linear(WIDTH, 5).double()

    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden), targets.clamp(min=0))

    hidden, targets = torch.randn(ROWS, WIDTH).double(), torch.randint(5, (ROWS,))
    hidden.requires_grad_()
    part = split(tail, microbatch_size=3)
    torch.testing.assert_close(part(hidden, targets), tail(hidden, targets), rtol=1e-9, atol=0)
    targets[2:5] = -100
    with pytest.raises(LossAverageError, match="of this slice is not"):
        part(hidden, targets)


def test_numbers_that_differ_between_slices_are_rejected() -> None:
    class Longest(nn.Module):
        def forward(self, hidden: Tensor, lengths: Tensor) -> Any:
            return hidden * 2, int(lengths.max())

    part = Longest()
    split(part, microbatch_size=2)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert part(hidden, torch.full((ROWS,), 4))[1] == 4
    with pytest.raises(UnsplittableModelError, match="something that differs between"):
        part(hidden, torch.arange(ROWS))


def test_list_rows_that_require_grad_are_rejected() -> None:
    def tail(rows: list[Tensor]) -> Tensor:
        return torch.stack([each.square().sum() for each in rows]).sum()

    rows = [torch.randn(size, requires_grad=size == 3) for size in (3, 1, 2, 4)]
    with pytest.raises(UnsplittableModelError, match=r"'rows\.0'.* in a list of rows"):
        split(tail, microbatch_size=2)(rows)
    assert split(tail, microbatch_size=2)([each.detach() for each in rows]).isfinite()


def test_gradient_lost_only_in_later_slice_is_rejected() -> None:
    rare = [nn.Linear(WIDTH, WIDTH)]

    class Rarely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.experts = nn.Linear(WIDTH, WIDTH), (rare,)

        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = self.layer(hidden)
            chosen = (hidden > 50).any(1, keepdim=True)
            return torch.where(chosen, rare[0](hidden), output) if bool(chosen.any()) else output

    part = Rarely()
    split(part, microbatch_size=2)
    hidden = torch.randn(ROWS, WIDTH)
    hidden[-1] = 99
    with pytest.raises(UnsplittableModelError, match="neither an argument nor a parameter"):
        part(hidden).sum().backward()


def test_concurrent_calls_of_part_are_rejected() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            entered.set()
            go_on.wait(20)
            output: Tensor = self.layer(hidden)
            return output

    part = Slow()
    split(part, microbatch_size=2)
    hidden = torch.randn(ROWS, WIDTH)
    thread = threading.Thread(target=lambda: part(hidden))
    thread.start()
    try:
        assert entered.wait(20)
        with pytest.raises(UnsplittableModelError, match="two threads call it at the same time"):
            part(hidden)
    finally:
        go_on.set()
        thread.join()


class SometimesSkipped(nn.Module):
    """A layer that is skipped in half of the training steps."""

    def forward(self, hidden: Tensor) -> Tensor:
        skipped = self.training and bool(torch.rand(()) < 0.5)
        return hidden if skipped else hidden.tanh()


def test_random_layer_skip_is_not_reported_as_difference() -> None:
    for seed in range(12):
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), SometimesSkipped())
        split(part, microbatch_size=2)
        torch.manual_seed(seed)
        part(torch.randn(ROWS, WIDTH)).sum().backward()


def test_uncalled_part_warns_after_eight_steps() -> None:
    class Borrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.used = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return {"loss": F.linear(self.used(x), self.head.weight).square().mean()}

    options: Any = {"microbatch_size": None, "loss_average": "samples"}
    microbatcher = Microbatcher(Borrowed(), features=[Nested({"head": 2, "used": 2})], **options)
    batch = {"x": torch.randn(ROWS, WIDTH)}
    for _ in range(7):
        microbatcher.backward(batch)
    with pytest.warns(AutomicroWarning, match=r"sizes to 'head', but 8 steps have not called it"):
        microbatcher.backward(batch)
    microbatcher.backward(batch)
