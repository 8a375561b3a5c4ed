"""A module with its own microbatch size returns the same outputs and gradients as in one piece."""

import contextlib
import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_slices_match_whole_part(name, size):
    part, given = make_part(name)
    wanted = gradients(part, part, given)
    nested = split(part, microbatch_size=size)
    for _ in range(2):
        same(gradients(part, part, given), wanted)
    assert sum(nested.sizes) == ROWS
    assert max(nested.sizes) == size


@pytest.mark.parametrize("name", CASES)
def test_dropout_draws_same_numbers_as_manual_slices(name):
    part, given = make_part(name, p=0.5)
    other = copy_of(part)
    split(part, microbatch_size=3, loss_average="samples" if "joint" in name else "auto")
    part(*given)  # the first call checks rows
    torch.manual_seed(5)
    found = gradients(part, part, given)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    same(found, gradients(lambda *each: by_hand(other, each, [3, 2, 2]), other, given))
    assert torch.equal(drawn, torch.rand(1))  # the backward consumes no random numbers


@pytest.mark.parametrize("name", ["mlp", "mlp tail"])
def test_gradients_accumulate_and_hooks_run_once(name):
    part, given = make_part(name)
    split(part, microbatch_size=2)
    of_parameters: list[Any] = gradients(part, part, given)[1][1:]
    seen: list[Any] = []
    for each in part.parameters():
        each.grad = torch.ones_like(each)
        each.register_hook(seen.append)
    output = part(*given)
    ((output if output.dim() == 0 else output.square().sum()) * 3).backward()
    assert len(seen) == len(of_parameters)
    for each, gradient in zip(part.parameters(), of_parameters, strict=True):
        torch.testing.assert_close(each.grad, gradient + 1)


def test_only_middle_part_supports_second_backward_and_derivative():
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
    one: Any
    other: Any


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)

    def forward(self, first, *more, pair, scale=1.0, **rest):
        summed = self.layer(first) * scale + more[0] * pair.one + rest["named"]["x"]
        parts = pair.other[0], summed.argmax(1), [first]
        return {"both": Both(summed, None), "parts": parts, "name": "constant"}


def test_containers_defaults_and_none_pass_through_part():
    part: Any = Structured().double()

    def run(x, y):
        return part(x, y * 1, pair=Both(y, (x * 2, None)), named={"x": x}, scale=2.0)

    given = floats(ROWS, 6), floats(ROWS, 6)
    wanted = gradients(run, part, given)
    nested = split(part, microbatch_size=3)
    found = gradients(run, part, given)
    same(found, wanted)
    assert (found[0]["name"], found[0]["both"].other) == ("constant", None)
    assert part.unused.weight.grad is None  # as without slices
    assert nested.sizes == [3, 2, 2]


def test_outputs_without_grad_get_no_gradient():
    part, (hidden,) = make_part("mlp")
    split(part, microbatch_size=2)
    with torch.no_grad():
        assert not part(hidden).requires_grad
    with torch.inference_mode():
        assert part(hidden.detach()).shape == (ROWS, 3)
    assert part.eval()(hidden.detach()).grad_fn is not None
    part.requires_grad_(False)
    assert not part(hidden.detach()).requires_grad
    part(hidden).sum().backward()
    assert hidden.grad is not None
    assert all(each.grad is None for each in part.parameters())


def test_repeated_and_nested_parts_match_plain_gradients():
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)).double()
    x = floats(ROWS, 6)

    def run(x):
        return torch.cat([model(x), model(x[:3]), inner(x[:5]), model(x[:1])])

    wanted = gradients(run, model, [x])
    split(inner, microbatch_size=2)
    split(model, microbatch_size=4)
    same(gradients(run, model, [x]), wanted)


class First(nn.Sequential):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("is_cached", [False, True])
def test_parametrized_weights_match_plain_gradients(is_cached):
    layers = [parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6)]
    parametrizations.orthogonal(layers[1])
    part, x = First(*layers, nn.LSTM(6, 3, batch_first=True)).double(), floats(ROWS, 2, 6)

    def run(x):
        with parametrize.cached() if is_cached else contextlib.nullcontext():
            return part(x)

    wanted = gradients(run, part, [x])
    split(part, microbatch_size=2)
    same(gradients(run, part, [x]), wanted)


def test_copied_and_saved_models_keep_part_sizes():
    model: Any = nn.Sequential(Mlp(), nn.Linear(3, 2)).double()
    names = list(model.state_dict())
    split(model[0], microbatch_size=2)
    assert list(model.state_dict()) == names
    x = floats(ROWS, 6)
    wanted = gradients(model, model, [x])
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert other[0].forward.nested.part is other[0]
        same(gradients(other, other, [x]), wanted, rtol=0, atol=0)
        assert other[0].forward.nested.sizes == [2, 2, 2, 1]


def test_replaced_forward_is_kept_after_removal():
    part, (x,) = make_part("mlp")
    given = part.forward
    part.forward = mine = lambda hidden: given(hidden) * 2
    wanted = gradients(part, part, [x])
    nested = split(part, microbatch_size=2)
    same(gradients(part, part, [x]), wanted)
    nested.remove()
    assert part.forward is mine


def test_batch_without_targets_gives_zero_loss_and_gradients():
    part, given = make_part("tied tail")
    split(part, microbatch_size=2)
    part(*given)
    loss, found = gradients(part, part, (*given[:-1], torch.full_like(given[-1], -100)))
    assert loss == 0
    assert all(each is not None and not each.any() for each in found)


def test_slice_without_targets_adds_no_nan():
    class Masked(Mlp):
        def forward(self, hidden, targets):  # type: ignore[override]
            losses = F.cross_entropy(self.layers(hidden), targets, reduction="none")
            return losses.sum() / (targets != -100).sum()  # 0 / 0 in a slice without targets

    part = Masked().double()
    given = floats(ROWS, 6), torch.tensor([1, 2, -100, -100, -100, 0, 1])
    wanted = gradients(part, part, given)
    split(part, microbatch_size=1, loss_average="tokens")
    same(gradients(part, part, given), wanted)


def test_nan_loss_stays_nan():
    _, (hidden, targets) = make_part("mlp tail")
    spoiled = hidden.detach().clone()
    spoiled[0] = float("nan")
    for is_checked in (True, False):
        part = MlpTail().double()
        split(part, microbatch_size=2)
        if is_checked:
            part(hidden, targets)
        assert part(spoiled, targets).isnan()


@pytest.mark.parametrize("name", ["mlp", "mlp tail"])
def test_autocast_matches_manual_slices(name):
    part, given = make_part(name)
    part, others = part.float(), given[1:]
    other = copy_of(part)
    split(part, microbatch_size=3)
    leaf, leaf_again = (given[0].detach().float().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = part(leaf, *others)
        # Autocast shares its cached weights between the sliced module and other uses of them.
        beside = part.layers(leaf.detach()).sum()
        wanted = by_hand(other, [leaf_again, *others], [3, 2, 2])
        beside_too = other.layers(leaf.detach()).sum()
    (found.float().sum() + beside).backward()
    (wanted.float().sum() + beside_too).backward()
    torch.testing.assert_close(leaf.grad, leaf_again.grad, rtol=1e-2, atol=1e-4)
    for one, two in zip(part.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=2e-2, atol=1e-2)


def test_small_half_precision_gradients_do_not_underflow_before_scaling():
    part, scale = MlpTail().half(), 2.0**14
    hidden, targets = torch.randn(ROWS, 6).half().requires_grad_(), torch.randint(3, (ROWS,))

    def kept(factor):
        (gradient,) = torch.autograd.grad(part(hidden, targets) * factor * 1e-6, hidden)
        return gradient.double() / factor

    wanted = kept(scale)
    assert (kept(1.0) == 0).any()  # some gradients underflow without scaling
    split(part, microbatch_size=2)
    found = kept(scale)
    assert (found == 0).sum() == (wanted == 0).sum()
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-8)


def test_half_precision_gradients_are_rounded_once():
    part: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    x, wide = torch.randn(256, 8).bfloat16(), copy.deepcopy(part).double()
    wide(x.double()).square().mean().backward()
    split(part, microbatch_size=4)
    part(x).square().mean().backward()
    for each, other in zip(part.parameters(), wide.parameters(), strict=True):
        assert (each.grad - other.grad).norm() < 0.004 * other.grad.norm()  # 0.008 in bfloat16


def test_batchnorm_warns_and_counts_each_slice_once():
    part: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    split(part, microbatch_size=1)  # two rows, because BatchNorm needs them
    with pytest.warns(BatchNormWarning, match="a part with its own size"):
        output = part(torch.randn(ROWS, 6))
    other = copy_of(part)
    output.sum().backward()
    assert part[1].num_batches_tracked == 3
    assert torch.equal(part[1].running_mean, other[1].running_mean)
    part.eval()(torch.randn(ROWS, 6))


class Unknown:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Unknown, "returns no tensor but Unknown"),
        (lambda x: (x, len(x)), "differs between slices"),
        (lambda x: (x, x.sum()), "a tensor of shape"),
        (lambda x: x.mul_(2), "writes into its input 'x'"),
        (lambda x: x.softmax(0), "other values in slices"),
    ],
)
def test_parts_that_slices_would_change_are_rejected(function, why):
    with pytest.raises(UnsplittableModelError, match=why):
        NestedSplit(lambda x: function(x), microbatch_size=2)(torch.randn(ROWS, 6))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer asks for it
@pytest.mark.sweep
def test_compiled_model_breaks_graph_around_part():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())).double()
    x = floats(ROWS, 6)
    wanted = gradients(model, model, [x])
    for how in ("model", "part", "forward"):
        run = other = copy_of(model)
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
    with pytest.raises(Exception, match="a part with its own size"):
        torch.compile(copy_of(other), backend="eager", fullgraph=True)(x)
    torch.compiler.reset()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.last.requires_grad_(False)
        self.double()

    def forward(self, hidden):
        return self.last(torch.tanh(self.drop(self.first(hidden))))


@pytest.mark.filterwarnings("ignore:automicro could not check")
def test_eval_before_backward_does_not_change_gradients():
    part, x = Frozen(), floats(ROWS, 6)
    split(part, microbatch_size=2)
    found = []
    for switches in (False, True):
        part.train().zero_grad()
        torch.manual_seed(3)
        output = part(x)
        part.train(not switches)
        output.square().sum().backward()
        assert part.training is not switches
        found.append(part.first.weight.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_functional_call_parameters_are_used_in_backward():
    part, x = Frozen().eval(), floats(ROWS, 6)
    other = copy_of(part)
    split(other, microbatch_size=2)
    found = []
    for each in (part, other):
        values = {
            name: (2 * value.detach()).requires_grad_(value.requires_grad)
            for name, value in each.named_parameters()
        }
        loss = torch.func.functional_call(each, values, (x,)).square().sum()
        found.append(torch.autograd.grad(loss, [x, values["first.weight"]]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_frozen_parameter_modified_before_backward_is_restored_or_rejected():
    """A small parameter is restored to its value in the forward; a large one is rejected."""
    part, x = Frozen().eval(), floats(ROWS, 6)
    wanted = torch.autograd.grad(part(x).sum(), x)
    split(part, microbatch_size=2)
    output = part(x)
    with torch.no_grad():
        part.last.weight.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x), wanted)
    part.last = nn.Linear(8, 1_100).double().requires_grad_(False)
    output = part(x)
    with torch.no_grad():
        part.last.weight.mul_(2)
    with pytest.raises(UnsplittableModelError, match=r"'last.weight' of a part .* was changed"):
        output.sum().backward()
    part(x).sum().backward()
    output = part.requires_grad_(False)(x)
    part.requires_grad_(True)  # as for a discriminator after the generator loss
    output.sum().backward()


def test_sparse_gradients_stay_sparse():
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 6, sparse=True).double()

        def forward(self, hidden, index):
            return (hidden * self.table(index)).tanh()

    part, x, index = Looking(), floats(ROWS, 6), torch.randint(50, (ROWS,))
    found = []
    for size in (None, 2):
        nested = split(part, microbatch_size=size)
        (gradient,) = torch.autograd.grad(part(x, index).square().sum(), part.table.weight)
        nested.remove()
        assert gradient.is_sparse
        found.append(gradient.to_dense())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_clamping_hook_inside_tail_sees_scaled_gradients():
    head = nn.Linear(6, 5).double()

    def tail(hidden, targets):
        logits = head(hidden)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return F.cross_entropy(logits, targets)

    x, targets = floats(ROWS, 6), torch.randint(5, (ROWS,))
    part = split(tail, microbatch_size=2)
    for factor in (0.01, 1.0):
        wanted = torch.autograd.grad(tail(x, targets) * factor, [x, head.weight])
        found = torch.autograd.grad(part(x, targets) * factor, [x, head.weight])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
