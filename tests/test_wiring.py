"""Hooks, attacks and foreign leaves are exact, refused or named, and leave no trace.

The oracle checks, for each twist, that a step leaves the same state as plain torch.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import (
    GradientWarning,
    Halving,
    LossError,
    MemoryBudget,
    Microbatcher,
    Policy,
    RollbackError,
)
from automicro.features import GradientSums, with_features
from automicro.torch_private import gradient_hooks
from tests.models import Mlp, numbers, x, y
from tests.outside import Outside

Batch = tuple[Tensor, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def step_of(model: Any, forward: Any = loss_of, size: Any = 4, **options: Any) -> Microbatcher:
    options = {"probe": False, **options}
    return Microbatcher(model, forward=forward, microbatch_size=size, **options)


def out_of_memory(*_: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def fail(_: Any) -> None:
    raise ZeroDivisionError


def hooks(model: nn.Module) -> list[Any]:
    def as_dict(hooks: Any) -> Any:
        return None if hooks is None else (id(hooks), dict(hooks))

    return [(*map(as_dict, gradient_hooks(p)), p.grad_dtype) for p in model.parameters()]


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("call", "when", "earlier", "dtype"),
    [
        (1, "before", False, torch.float64),
        (1, "in the backward", True, torch.bfloat16),
        (2, "before", True, torch.bfloat16),
        (3, "in the backward", False, torch.float64),
    ],
)
def test_failure_restores_gradients_hooks_and_dtypes(
    call: int, when: str, earlier: bool, dtype: torch.dtype
) -> None:
    model: Any = Mlp().to(dtype)
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    model[2].weight.register_hook(lambda gradient: gradient * 2).remove()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if earlier else None
    before = hooks(model), [p.grad for p in model.parameters()]
    outside = Outside(calls=0)

    def forward(model: Any, batch: Any) -> Tensor:
        outside.calls += 1
        if outside.calls == call and when == "before":
            raise KeyboardInterrupt
        loss = loss_of(model, batch)
        if outside.calls == call and loss.requires_grad:
            loss.register_hook(lambda _: fail(_))
        return loss

    microbatcher = step_of(model, forward)
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        microbatcher.backward((x().to(dtype), y()))
    assert hooks(model) == before[0]
    for parameter, gradient in zip(model.parameters(), before[1], strict=True):
        assert parameter.grad is gradient
        assert gradient is None or bool((gradient == 1).all())
    microbatcher.backward((x().to(dtype), y()))
    assert hooks(model) == before[0]


# Hooks


@pytest.mark.parametrize("size", [3, 20])
def test_raising_hook_leaves_no_trace(size: int) -> None:
    model: Any = Mlp()
    model[2].weight.register_hook(lambda gradient: gradient * 2)
    handle = model[0].weight.register_hook(fail)
    model[0].bias.grad = earlier = torch.ones_like(model[0].bias)
    before = hooks(model)
    microbatcher = step_of(model, size=size)
    with pytest.raises(ZeroDivisionError):
        microbatcher.backward((x(), y()))
    assert hooks(model) == before
    assert model[0].bias.grad is earlier
    assert bool((earlier == 1).all())
    assert all(p.grad is None for p in model.parameters() if p is not model[0].bias)
    handle.remove()
    microbatcher.backward((x(), y()))


def test_optimizer_step_before_failed_hook_is_reported() -> None:
    model: Any = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model[0].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(RollbackError, match="changed parameters"):
        step_of(model, size=3).backward((x(), y()))


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_on_node_give_warning_for_split_batch(kind: str) -> None:
    model: Any = Mlp()
    node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
    getattr(node, kind)(lambda *_: None)
    step_of(model, size=None).backward((x(), y()))
    microbatcher = step_of(model)
    with pytest.warns(GradientWarning, match=r"AccumulateGrad node of '0\.weight' get"):
        microbatcher.backward((x(), y()))
    microbatcher.backward((x(), y()))  # warned only once


def test_hooks_registered_by_forward_give_warning() -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        return loss_of(model, batch)

    with pytest.warns(GradientWarning, match=r"registers hooks on '0\.weight'"):
        step_of(Mlp(), forward).backward((x(), y()))


# Computations that cannot be exact


def attack(clear: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Batch], Tensor]:
    """A forward that calls backward for gradients of its inputs, and drops other gradients."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].detach().clone().requires_grad_()
        F.cross_entropy(model(inputs), batch[1], reduction="sum").backward()
        assert inputs.grad is not None
        clear(model)
        return loss_of(model, ((inputs + 0.1 * inputs.grad.sign()).detach(), batch[1]))

    return forward


def after(change: Callable[[Any], Any]) -> Callable[[nn.Module, Batch], Tensor]:
    def forward(model: nn.Module, batch: Batch) -> Tensor:
        change(model)
        return loss_of(model, batch)

    return forward


def lasting_backward(model: nn.Module, batch: Batch) -> Tensor:
    (0.1 * model(batch[0]).pow(2).sum(1).mean()).backward()
    return loss_of(model, batch)


def cached_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A loss without a graph whose hook calls backward."""
    with torch.no_grad():
        outputs = model(batch[0])
    outputs.requires_grad_()
    inner = F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))
    inner.backward()

    @torch.enable_grad()
    def again(gradient: Tensor) -> None:
        (model(batch[0]) * outputs.grad * gradient).sum().backward()

    loss = inner.detach().requires_grad_()
    loss.register_hook(again)
    return loss


REFUSED_WHEN_SPLIT: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "an attack that clears": attack(lambda model: model.zero_grad()),
    "an attack that zeroes": attack(lambda model: model.zero_grad(set_to_none=False)),
    "cleared without a backward": after(lambda model: model.zero_grad()),
    "zeroed without a backward": after(lambda model: model.zero_grad(set_to_none=False)),
    "one parameter cleared": after(lambda model: setattr(model[2].bias, "grad", None)),
    "a backward that stays": lasting_backward,
    "a cached loss": cached_loss,
}
STAY = ("a backward that stays", "an attack that zeroes")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in REFUSED_WHEN_SPLIT), (STAY[0], torch.bfloat16)],
)
def test_forward_changing_gradients_is_refused_at_first_split_batch(
    name: str, dtype: torch.dtype
) -> None:
    model: Any = Mlp().to(dtype)
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)  # of an earlier batch; others have none
    microbatcher = step_of(model, REFUSED_WHEN_SPLIT[name])
    before = gradients_of(model)
    for _ in range(2):
        with pytest.raises(LossError, match=r"changes \.grad of .* itself|has called backward"):
            microbatcher.backward((x().to(dtype), y()))
        torch.testing.assert_close(gradients_of(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", REFUSED_WHEN_SPLIT)
def test_forward_changing_gradients_of_whole_batch_is_exact_or_refused(name: str) -> None:
    forward, model = REFUSED_WHEN_SPLIT[name], Mlp()
    plain = copy.deepcopy(model)
    microbatcher = step_of(model, forward, size=None)
    if name in STAY:
        with pytest.raises(LossError, match=r"torch\.autograd\.grad"):
            microbatcher.backward((x(), y()))
        return
    for _ in range(2):  # the second batch adds to the gradients of the first
        microbatcher.backward((x(), y()))
        forward(plain, (x(), y())).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_first_split_after_whole_batches_is_checked() -> None:
    class ThenSplit(Policy):
        def propose(self, num_rows: int, cost: Any = None) -> int:
            return size

    size = len(y())
    microbatcher = step_of(Mlp(), cached_loss, ThenSplit())
    for _ in range(2):
        microbatcher.backward((x(), y()))
    size = 4
    with pytest.raises(LossError, match="has called backward itself"):
        microbatcher.backward((x(), y()))


def test_parameter_that_grows_before_oom_gets_back_its_shape_and_gradient() -> None:
    model: Any = Mlp()

    seen = Outside(calls=0)

    def grow(model: Any, batch: Batch) -> Tensor:
        seen.calls += 1
        if seen.calls == 2:
            model[0].bias.data = torch.cat([model[0].bias.data] * 2)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss_of(model, batch)

    microbatcher = Microbatcher(
        model, forward=grow, microbatch_size=Halving(), probe=False, loss_average="samples"
    )
    plain = copy.deepcopy(model)
    for ooms in (0, 1):
        loss_of(plain, (x(), y())).backward()
        assert microbatcher.backward((x(), y())).ooms == ooms
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def cleared_first(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()


def clipped(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def scaled(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)  # leaves the version counter unchanged, like fused kernels


@pytest.mark.parametrize("backward", [cleared_first, clipped, scaled])
def test_backward_changing_gradients_is_refused(backward: Callable[..., None]) -> None:
    model: Any = Mlp()
    microbatcher = step_of(model, backward=functools.partial(backward, model))
    with pytest.raises(LossError, match=r"backward=\) changes \.grad of '0\.weight'"):
        microbatcher.backward((x(), y()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_backward_may_clip_whole_batch_without_earlier_gradients() -> None:
    model: Any = Mlp()
    plain = copy.deepcopy(model)
    microbatcher = step_of(model, size=None, backward=functools.partial(clipped, model))
    microbatcher.backward((x(), y()))
    clipped(plain, loss_of(plain, (x(), y())))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    with pytest.raises(LossError, match=r"backward=\) changes \.grad"):
        microbatcher.backward((x(), y()))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=0, atol=0)
    model.zero_grad(set_to_none=False)  # zeros do not count as earlier gradients
    microbatcher.backward((x(), y()))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_late_gradient_write_is_refused_on_failure() -> None:
    writes: list[bool] = []

    def forward(model: Any, batch: Any) -> Tensor:
        if writes:
            model.zero_grad(set_to_none=False)
            out_of_memory()
        return loss_of(model, batch)

    microbatcher = step_of(Mlp(), forward, Halving(initial=4))
    for _ in range(3):
        microbatcher.backward((x(), y()))
    writes.append(True)
    with pytest.raises(RollbackError, match=r"wrote into \.grad tensors of earlier batches"):
        microbatcher.backward((x(), y()))


@pytest.mark.parametrize(("size", "rows"), [(4, ()), (None, ()), (4, (4,))])
def test_loss_without_graph_is_refused(size: int | None, rows: tuple[int, ...]) -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        return loss_of(model, batch) if len(batch[0]) in rows else torch.ones(()).double()

    with pytest.raises(LossError, match="does not depend on any parameter"):
        step_of(Mlp(), forward, size).backward((x(), y()))


def test_leaf_first_used_in_failed_attempt_is_refused() -> None:
    late = nn.Parameter(torch.ones(()).double())
    calls: list[int] = []

    def forward(model: Any, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        if len(calls) == 13:
            out_of_memory()
        return loss_of(model, batch) * (late if len(calls) > 10 else 1)

    microbatcher = step_of(Mlp(), forward, Halving(initial=6, refine=False))
    for _ in range(5):
        microbatcher.backward((x(), y()))
    assert len(calls) == 10
    late.grad = torch.ones_like(late)  # set by other code, or by the failed attempt?
    batch = numbers(18, 6), torch.cat([y(), y()])[:18]
    with pytest.raises(RollbackError, match=r"in a failed attempt the forward used a tensor"):
        microbatcher.backward(batch)


# bf16 and fp16


def narrow_errors(dtype: torch.dtype, num_microbatches: int, **options: Any) -> float:
    """Return the relative error of the gradient compared with float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)).to(dtype)
    inputs, targets = torch.randn(1024, 32).to(dtype), torch.randint(4, (1024,))
    wide = copy.deepcopy(model).double()
    loss_of(wide, (inputs.double(), targets)).backward()
    size = 1024 // num_microbatches
    step_of(model, size=size, **with_features(options)).backward((inputs, targets))
    pairs: Any = list(zip(model.parameters(), wide.parameters(), strict=True))
    assert all(p.grad is not None and p.grad.dtype is dtype for p in model.parameters())
    wrong = sum(float((p.grad.double() - q.grad).pow(2).sum()) for p, q in pairs)
    return math.sqrt(wrong / sum(float(q.grad.pow(2).sum()) for _, q in pairs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_have_error_of_whole_batch(dtype: torch.dtype) -> None:
    whole = narrow_errors(dtype, 1)
    assert narrow_errors(dtype, 16) < 1.3 * whole
    assert narrow_errors(dtype, 128) < 1.3 * whole
    assert narrow_errors(dtype, 128, gradient_sums="native") > 2 * whole


def test_forward_sees_narrow_gradients_in_own_dtype() -> None:
    model: Any = Mlp().bfloat16()
    seen: set[Any] = set()
    model[2].weight.register_hook(lambda gradient: seen.add(gradient.dtype))
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.add(p.grad.dtype))

    def forward(model: Any, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        seen.update(gradient.dtype for gradient in gradients)
        seen.update(parameter.grad_dtype for parameter in model.parameters())
        return loss + sum(gradient.pow(2).sum() for gradient in gradients)

    microbatcher = step_of(model, forward)
    for _ in range(2):
        microbatcher.backward((x().bfloat16(), y()))
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(("sums", "most"), [("fp32", 2.6), ("native", 1.6)])
def test_float32_sums_keep_no_third_set_of_gradients(sums: str, most: float) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12))).bfloat16()
    size = sum(parameter.nbytes for parameter in model.parameters())
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), microbatch_size=1, probe=False, features=[GradientSums(sums)]
    )
    with MemoryBudget(None) as budget:
        budget.track(model)
        before = budget.allocated_bytes
        microbatcher.backward((torch.randn(4, 128).bfloat16(), torch.randn(4, 128).bfloat16()))
        assert budget.peak_bytes - before < most * size
        assert sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == size
