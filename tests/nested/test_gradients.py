"""A module with its own microbatch size returns the same outputs and gradients as in one piece."""

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import NestedSplit, split
from automicro.errors import BatchNormWarning, UnsplittableModelError
from tests.nested.parts_in_slices import (
    CASES,
    ROWS,
    Mlp,
    MlpTail,
    by_hand,
    copy_of,
    floats,
    gradients,
    make_part,
    same,
)


@pytest.mark.parametrize(("size", "ragged"), [(1, True), (3, False)])
@pytest.mark.parametrize("name", CASES)
def test_slices_match_whole_part(name: str, size: int, ragged: bool) -> None:
    part, given = make_part(name, ragged=ragged)
    wanted = gradients(part, part, given)
    nested = split(part, microbatch_size=size)
    for _ in range(2):
        same(gradients(part, part, given), wanted)
    assert sum(nested.sizes) == ROWS
    assert max(nested.sizes) == size


@pytest.mark.parametrize("name", CASES)
def test_dropout_draws_same_numbers_as_manual_slices(name: str) -> None:
    part, given = make_part(name, p=0.5)
    other = copy_of(part)
    split(
        part,
        microbatch_size=3,
        loss_average="samples" if "joint" in name else "auto",
    )
    part(*given)  # the first call checks rows
    torch.manual_seed(5)
    found = gradients(part, part, given)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    same(found, gradients(lambda *each: by_hand(other, each, [3, 2, 2]), other, given))
    assert torch.equal(drawn, torch.rand(1))  # the backward consumes no random numbers


@pytest.mark.parametrize("name", ["mlp", "mlp tail"])
def test_gradients_accumulate_and_hooks_run_once(name: str) -> None:
    part, given = make_part(name)
    split(part, microbatch_size=2)
    _, [of_input, *of_parameters] = gradients(part, part, given)
    seen: list[Tensor] = []
    for each in part.parameters():
        each.grad = torch.ones_like(each)
        each.register_hook(lambda gradient: seen.append(gradient))
    output = part(*given)
    ((output if output.dim() == 0 else output.square().sum()) * 3).backward()
    assert len(seen) == len(of_parameters)
    for each, gradient in zip(part.parameters(), of_parameters, strict=True):
        assert gradient is not None
        torch.testing.assert_close(each.grad, gradient + 1)
    assert of_input is not None


def test_only_middle_part_supports_second_backward_and_derivative() -> None:
    part, given = make_part("mlp tail")
    split(part, microbatch_size=2)
    loss = part(*given)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Call backward once"):
        loss.backward()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(part(*given), given[0], create_graph=True)
    middle, given = make_part("mlp")
    split(middle, microbatch_size=2)
    output = middle(*given).sum()
    output.backward(retain_graph=True)
    first = given[0].grad.clone()
    output.backward()
    torch.testing.assert_close(given[0].grad, 2 * first)
    slopes = []
    for each in (middle, middle.forward.nested.part.layers):  # in slices, and unsplit
        (slope,) = torch.autograd.grad(each(*given).sum(), given[0], create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), given[0])[0])
    torch.testing.assert_close(*slopes)


@dataclass
class Both:
    one: Tensor
    other: Any


class Structured(nn.Module):
    """Take and return nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)

    def forward(
        self, first: Tensor, *more: Tensor, pair: Both, scale: float = 1.0, **rest: Any
    ) -> Any:
        summed = self.layer(first) * scale + more[0] * pair.one + rest["named"]["x"]
        return {
            "both": Both(summed, None),
            "parts": (pair.other[0], summed.argmax(1), [first]),
            "name": "constant",
        }


def test_containers_defaults_and_none_pass_through_part() -> None:
    torch.manual_seed(0)
    part = Structured().double()
    x, y = floats(ROWS, 6), floats(ROWS, 6)

    def run(*given: Tensor) -> Any:
        x, y = given
        return part(x, y * 1, pair=Both(y, (x * 2, None)), named={"x": x}, scale=2.0)

    wanted = gradients(run, part, (x, y))
    nested = split(part, microbatch_size=3)
    found = gradients(run, part, (x, y))
    same(found, wanted)
    assert found[0]["name"] == "constant"
    assert found[0]["both"].other is None
    assert part.unused.weight.grad is None  # as without slices
    assert nested.sizes == [3, 2, 2]


def test_outputs_without_grad_get_no_gradient() -> None:
    part, (hidden,) = make_part("mlp")
    split(part, microbatch_size=2)
    with torch.no_grad():
        assert not part(hidden).requires_grad
    with torch.inference_mode():
        assert part(hidden.detach()).shape == (ROWS, 3)
    assert part.eval()(hidden.detach()).grad_fn is not None
    for each in part.parameters():
        each.requires_grad_(False)
    assert not part(hidden.detach()).requires_grad
    part(hidden).sum().backward()
    assert hidden.grad is not None
    assert all(each.grad is None for each in part.parameters())


def test_complex_output_keeps_gradient() -> None:
    class Fourier(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.fft.fft(x)

    part, x = Fourier(), floats(ROWS, 4)
    part(x).abs().sum().backward()
    wanted, x.grad = x.grad, None
    split(part, microbatch_size=2)
    part(x).abs().sum().backward()
    torch.testing.assert_close(x.grad, wanted)


def test_repeated_and_nested_parts_match_plain_gradients() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)).double()
    x = floats(ROWS, 6)

    def run(x: Tensor) -> Tensor:
        return torch.cat([model(x), model(x[:3]), inner(x[:5]), model(x[:1])])

    wanted = gradients(run, model, [x])
    split(inner, microbatch_size=2)
    split(model, microbatch_size=4)
    same(gradients(run, model, [x]), wanted)


def test_parametrized_weights_match_plain_gradients() -> None:
    torch.manual_seed(0)
    part = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
        nn.LSTM(6, 3, batch_first=True),
    ).double()
    x = floats(ROWS, 2, 6)

    def run(x: Tensor) -> Any:
        return part(x)[0]

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Any:
            return run(x)

    outer = Outputs()
    wanted = gradients(outer, outer, [x])
    split(outer, microbatch_size=2)
    same(gradients(outer, outer, [x]), wanted)


def test_copied_and_saved_models_keep_part_sizes() -> None:
    model: Any = nn.Sequential(Mlp(0.0), nn.Linear(3, 2)).double()
    names = list(model.state_dict())
    split(model[0], microbatch_size=2)
    assert list(model.state_dict()) == names
    x = floats(ROWS, 6)
    wanted = gradients(model, model, [x])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert other[0].forward.nested.part is other[0]
        same(gradients(other, other, [x]), wanted, rtol=0, atol=0)
        assert other[0].forward.nested.sizes == [2, 2, 2, 1]


def test_replaced_forward_is_kept_after_removal() -> None:
    part, (x,) = make_part("mlp")
    given = part.forward
    part.forward = lambda hidden: given(hidden) * 2
    mine = part.forward
    wanted = gradients(part, part, [x])
    nested = split(part, microbatch_size=2)
    same(gradients(part, part, [x]), wanted)
    nested.remove()
    assert part.forward is mine


@pytest.mark.parametrize("name", ["mlp tail", "tied tail"])
def test_batch_without_targets_gives_zero_loss_and_gradients(name: str) -> None:
    part, given = make_part(name)
    split(part, microbatch_size=2)
    part(*given)
    loss, found = gradients(part, part, (*given[:-1], torch.full_like(given[-1], -100)))
    assert loss == 0
    assert all(each is not None and not each.any() for each in found)


def test_slice_without_targets_adds_no_nan() -> None:
    class Masked(Mlp):
        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
            losses = F.cross_entropy(self.layers(hidden), targets, reduction="none")
            return losses.sum() / (targets != -100).sum()  # 0 / 0 in a slice without targets

    torch.manual_seed(0)
    part = Masked(0.0).double()
    given = floats(ROWS, 6), torch.tensor([1, 2, -100, -100, -100, 0, 1])
    wanted = gradients(part, part, given)
    split(part, microbatch_size=1, loss_average="tokens")
    same(gradients(part, part, given), wanted)


def test_nan_loss_stays_nan() -> None:
    part, (hidden, targets) = make_part("mlp tail")
    split(part, microbatch_size=2)
    part(hidden, targets)
    spoiled = hidden.detach().clone()
    spoiled[0] = float("nan")
    assert part(spoiled, targets).isnan()
    fresh = MlpTail(0.0).double()
    split(fresh, microbatch_size=2)
    assert fresh(spoiled, targets).isnan()


def test_autocast_matches_manual_slices() -> None:
    for name in ("mlp", "mlp tail"):
        part, doubles = make_part(name)
        part = part.float()
        given = [each.detach().float() if each.is_floating_point() else each for each in doubles]
        other = copy_of(part)
        split(part, microbatch_size=3)
        leaf, leaf_again = (given[0].clone().requires_grad_() for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16):
            found = part(leaf, *given[1:])
            # Autocast shares its cached weights between the sliced module and other uses of them.
            beside = part.layers(given[0]).sum()
            wanted = by_hand(other, [leaf_again, *given[1:]], [3, 2, 2])
            beside_too = other.layers(given[0]).sum()
        (found.float().sum() + beside).backward()
        (wanted.float().sum() + beside_too).backward()
        torch.testing.assert_close(leaf.grad, leaf_again.grad, rtol=1e-2, atol=1e-4)
        for one, two in zip(part.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=2e-2, atol=1e-2)


def test_small_half_precision_gradients_do_not_underflow_before_scaling() -> None:
    torch.manual_seed(0)
    part = MlpTail(0.0).half()
    given = torch.randn(ROWS, 6).half().requires_grad_(), torch.randint(3, (ROWS,))
    scale = 2.0**14

    def kept(each: nn.Module, factor: float) -> Tensor:
        given[0].grad = None
        (each(*given) * factor * 1e-6).backward()
        assert given[0].grad is not None
        return given[0].grad.double() / factor

    wanted = kept(part, scale)
    assert (kept(part, 1.0) == 0).any()  # some gradients underflow without scaling
    split(part, microbatch_size=2)
    found = kept(part, scale)
    assert (found == 0).sum() == (wanted == 0).sum()
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-8)


def test_half_precision_gradients_are_rounded_once() -> None:
    torch.manual_seed(0)
    part: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    x, wide = torch.randn(256, 8).bfloat16(), copy.deepcopy(part).double()
    wide(x.double()).square().mean().backward()
    split(part, microbatch_size=4)
    part(x).square().mean().backward()
    for each, other in zip(part.parameters(), wide.parameters(), strict=True):
        assert (each.grad - other.grad).norm() < 0.004 * other.grad.norm()  # 0.008 in bfloat16


def test_batchnorm_warns_and_counts_each_slice_once() -> None:
    part: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    split(part, microbatch_size=1)  # two rows, because BatchNorm needs them
    with pytest.warns(BatchNormWarning, match="a part with its own size"):
        output = part(torch.randn(ROWS, 6))
    other = copy_of(part)
    output.sum().backward()
    assert part[1].num_batches_tracked == 3
    assert torch.equal(part[1].running_mean, other[1].running_mean)
    part.eval()(torch.randn(ROWS, 6))


def test_parts_that_slices_would_change_are_rejected() -> None:
    class Unknown:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    def refused(function: Any, match: str) -> None:
        with pytest.raises(UnsplittableModelError, match=match):
            NestedSplit(function, microbatch_size=2)(torch.randn(ROWS, 6))

    refused(lambda x: Unknown(x), "returns no tensor but Unknown")
    refused(lambda x: (x, len(x)), "differs between slices")
    refused(lambda x: (x, x.sum()), "a tensor of shape")
    refused(lambda x: x.mul_(2), "writes into its input 'x'")
    refused(lambda x: x.softmax(0), "other values in slices")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer asks for it
@pytest.mark.sweep
def test_compiled_model_breaks_graph_around_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())).double()
    x = floats(ROWS, 6)
    wanted = gradients(model, model, [x])
    for how in ("model", "part", "forward"):
        other = copy_of(model)
        run: Any = other
        if how == "part":
            other[1].compile(backend="aot_eager")
        if how == "forward":
            other[1].forward = torch.compile(other[1].forward, backend="aot_eager")
        split(other[1], microbatch_size=3)
        if how == "model":
            run = torch.compile(other, backend="aot_eager")
        for _ in range(2):
            same(gradients(run, other, [x]), wanted)
    torch.compiler.reset()
    whole = copy_of(model)
    split(whole[1], microbatch_size=3)
    with pytest.raises(Exception, match="a part with its own size"):
        torch.compile(whole, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()


class Noisy(nn.Module):
    """Dropout between layers; the last layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.last.requires_grad_(False)
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.drop(self.first(hidden))))
        return output


@pytest.mark.filterwarnings("ignore:automicro could not check")
def test_eval_before_backward_does_not_change_gradients() -> None:
    part, x = Noisy(), floats(ROWS, 6)
    split(part, microbatch_size=2)
    found = []
    for switches in (False, True):
        part.train().zero_grad()
        torch.manual_seed(3)
        output = part(x)
        if switches:
            part.eval()
        output.square().sum().backward()
        assert part.training is not switches
        assert part.first.weight.grad is not None
        found.append(part.first.weight.grad.clone())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_functional_call_parameters_are_used_in_backward() -> None:
    part, x = Noisy().eval(), floats(ROWS, 6)
    other = copy_of(part)
    split(other, microbatch_size=2)
    found = []
    for each in (part, other):
        x.grad = None
        values = {
            name: (2 * value.detach()).requires_grad_(value.requires_grad)
            for name, value in each.named_parameters()
        }
        output = torch.func.functional_call(each, values, (x,))
        output.square().sum().backward()
        found.append([x.grad, values["first.weight"].grad])
    same(found[1], found[0])


def test_frozen_parameter_modified_before_backward_is_restored_or_rejected() -> None:
    """A small parameter is restored to its value in the forward; a large one is rejected."""
    part, x = Noisy().eval(), floats(ROWS, 6)
    plain = copy.deepcopy(part)
    split(part, microbatch_size=2)
    for last, width in ((part.last, 3), (nn.Linear(8, 1_100).double(), 1_100)):
        part.last = last.requires_grad_(False)
        output = part(x)
        assert output.shape == (ROWS, width)
        with torch.no_grad():
            part.last.weight.mul_(2)
        if width == 3:
            output.sum().backward()
            plain(x).sum().backward()
            torch.testing.assert_close(part.first.weight.grad, plain.first.weight.grad)
            continue
        with pytest.raises(UnsplittableModelError, match=r"'last.weight' of a part .* was changed"):
            output.sum().backward()
    part(x).sum().backward()
    output = part.requires_grad_(False)(x)
    part.requires_grad_(True)  # as for a discriminator after the generator loss
    output.sum().backward()


def test_cached_parametrized_weights_keep_gradients() -> None:
    part, given = make_part("mlp")
    for layer in [each for each in part.modules() if isinstance(each, nn.Linear)]:
        torch.nn.utils.parametrizations.weight_norm(layer)

    def run(*given: Tensor) -> Any:
        with torch.nn.utils.parametrize.cached():
            return part(*given)

    wanted = gradients(run, part, given)
    split(part, microbatch_size=2)
    same(gradients(run, part, given), wanted)


def test_sparse_gradients_stay_sparse() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 6, sparse=True).double()

        def forward(self, hidden: Tensor, index: Tensor) -> Tensor:
            output: Tensor = (hidden * self.table(index)).tanh()
            return output

    part, x, index = Looking(), floats(ROWS, 6), torch.randint(50, (ROWS,))
    optimizer = torch.optim.SparseAdam(part.parameters())
    found = []
    for size in (None, 2):
        part.zero_grad()
        nested = split(part, microbatch_size=size)
        part(x, index).square().sum().backward()
        nested.remove()
        assert part.table.weight.grad is not None
        assert part.table.weight.grad.is_sparse
        found.append(part.table.weight.grad.to_dense())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    optimizer.step()


def test_clamping_hook_inside_tail_sees_scaled_gradients() -> None:
    head = nn.Linear(6, 5).double()

    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        logits: Tensor = head(hidden)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return F.cross_entropy(logits, targets)

    x, targets = floats(ROWS, 6), torch.randint(5, (ROWS,))
    part = split(tail, microbatch_size=2)
    for factor in (0.01, 1.0):
        wanted = torch.autograd.grad(tail(x, targets) * factor, [x, head.weight])
        found = torch.autograd.grad(part(x, targets) * factor, [x, head.weight])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
