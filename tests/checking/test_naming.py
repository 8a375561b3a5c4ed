"""Checks during training: what they report, what they ignore, which rows they take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import (
    BatchError,
    Halving,
    Microbatcher,
    is_extra_pass,
    verify,
)
from automicro.batch.layout import BatchLayout
from automicro.checking.rows import telling_rows
from tests.cases import contrastive, mean_of_tokens
from tests.checking.told import warnings_of
from tests.models import (
    CLASSES,
    IGNORED,
    LENGTH,
    ROWS,
    Encoder,
    Mlp,
    token_targets,
    tokens,
    with_ignored,
    x,
    y,
)
from tests.sweeps import mostly_in_sweeps


def on(model: nn.Module, loss_fn: Callable[..., Any], **options: Any) -> Microbatcher:
    return Microbatcher(model, loss_fn=loss_fn, **{"microbatch_size": 4, **options})


class Causal(nn.Module):
    """Compute the loss on labels, shifted or not, without declaring that."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.encoder, self.shift = Encoder(), shift

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.encoder(input_ids)[:, : LENGTH - self.shift]
        return {"loss": mean_of_tokens(logits, labels[:, self.shift :])}


class DeclaresShift(Causal):
    loss_type = "ForCausalLM"

    def loss_function(self) -> None: ...


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (lambda: Causal(1), "lambda batch: (batch['labels'][..., 1:] != -100).sum()"),
        pytest.param(lambda: Causal(0), "'tokens'", marks=pytest.mark.sweep),
        pytest.param(
            lambda: DeclaresShift(0),
            "lambda batch: (batch['labels'] != -100).sum()",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_suggested_loss_average_for_labels_is_exact(model: Any, remedy: str) -> None:
    batch, net = {"input_ids": tokens(), "labels": token_targets()}, model()
    assert len(warnings_of(Microbatcher(net, microbatch_size=4), batch)) == 1
    assert verify(net, batch).loss_average == remedy
    net.zero_grad()
    declared = Microbatcher(net, microbatch_size=4, loss_average=eval(remedy), probe="error")
    assert torch.allclose(declared.backward(batch).loss, net(**batch)["loss"])


def _of_rows(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def _penalty(model: Any) -> Any:
    return sum(each.square().sum() for each in model.parameters()) / 10


FOLLOWED: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda m, b: _of_rows(m, b).sum(),
    "a sum beside a term without rows": lambda m, b: {
        "rows": _of_rows(m, b).sum(),
        "term": _penalty(m),
    },
    "a mean over other targets than -100": lambda m, b: F.cross_entropy(
        m(b["x"]), b["y"], ignore_index=0
    ),
    "a mean with something added": lambda m, b: (
        (_of_rows(m, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-6)
    ),
    "a sum beside a mean": lambda m, b: {
        "one": _of_rows(m, b).sum(),
        "other": m(b["x"]).square().mean(),
    },
}


@pytest.mark.parametrize(
    "name", mostly_in_sweeps(FOLLOWED, quick=["a mean over other targets than -100"])
)
def test_suggested_loss_average_is_exact_for_other_batches(name: str) -> None:
    forward, model = FOLLOWED[name], nn.Linear(6, 3).double()

    def batch(seed: int, targets: Tensor) -> Any:
        numbers = torch.Generator().manual_seed(seed)
        mask = torch.randint(2, (16,), generator=numbers).double()
        return {"x": x().repeat(2, 1)[:16] + seed, "y": targets, "mask": mask}

    targets = [torch.arange(16) % 3, torch.ones(16).long(), (torch.arange(16) < 3).long()]
    targets += [torch.zeros(16).long()] if "targets" not in name else []
    batches = [batch(seed, each) for seed, each in enumerate(targets, 1)]
    assert warnings_of(Microbatcher(model, forward=forward, microbatch_size=4), batches[0])
    average = eval(verify(model, batches[0], forward=forward).loss_average)
    for each in batches:
        model.zero_grad()
        given = forward(model, each)
        loss: Any = sum(given.values()) if isinstance(given, dict) else given
        wanted = torch.autograd.grad(loss, list(model.parameters()))
        microbatcher = Microbatcher(
            model, forward=forward, microbatch_size=4, loss_average=average, probe="error"
        )
        microbatcher.backward(each)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


class Opaque:
    """An opaque user object that refers to others of its class."""

    def __init__(self, *others: Any) -> None:
        self.others = list(others)


def _siblings() -> Any:
    found = [Opaque() for _ in range(ROWS)]
    for each in found:
        each.others = found
    return found


def _itself_with_a_tensor() -> Any:
    found = Opaque(torch.ones(3))
    found.others += [{"up": found}]
    return found


@pytest.mark.parametrize("make", [_siblings, _itself_with_a_tensor])
def test_cyclic_objects_do_not_hide_wrong_average(make: Any) -> None:
    layout = {} if make is _siblings else {"a": "shared"}
    batch = {"a": make(), "x": x(), "y": y() % 3, "w": torch.linspace(1, 2, ROWS).double()}

    def forward(model: Any, batch: Any) -> Any:
        return (_of_rows(model, batch) * batch["w"]).sum() / batch["w"].sum()

    model = nn.Linear(6, 3).double()
    microbatcher = Microbatcher(model, forward=forward, microbatch_size=2, batch_layout=layout)
    assert len(warnings_of(microbatcher, batch)) == 1


@pytest.mark.parametrize("kind", [dict, list])
def test_container_that_contains_itself_is_rejected(kind: Any) -> None:
    inner: Any = kind()
    inner.update(up=inner) if kind is dict else inner.append(inner)
    layout = {"meta": "shared"}
    microbatcher = Microbatcher(Mlp(), forward=lambda m, b: m(b["x"]).mean(), batch_layout=layout)
    with pytest.raises(BatchError, match=r"holds itself.*leave it out"):
        microbatcher.backward({"x": x(), "meta": inner})


def test_disabled_splitting_skips_probe() -> None:
    model = nn.Sequential(Mlp(), nn.BatchNorm1d(CLASSES).double())
    disabled = on(model, contrastive, microbatch_size="auto", batchnorm="disable")
    assert warnings_of(disabled, (x(), y())) == []


@pytest.mark.parametrize("size", ["auto", Halving(initial=20)])
def test_splittable_batch_is_probed_even_if_it_fits(size: Any) -> None:
    microbatcher = on(Mlp(), contrastive, microbatch_size=size)
    assert warnings_of(microbatcher, (x()[:1], y()[:1])) == []  # one row shows nothing
    assert len(warnings_of(microbatcher, (x(), y()), (x(), y()))) == 1
    assert warnings_of(on(Mlp(), contrastive, microbatch_size=size, probe=False), (x(), y())) == []


def test_oom_in_probe_does_not_affect_step() -> None:
    class NoRoom(Mlp):
        def forward(self, inputs: Tensor) -> Any:
            if is_extra_pass():
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(inputs)

    microbatcher = on(NoRoom(), contrastive, microbatch_size="auto")
    (message,) = warnings_of(microbatcher, *[(x(), y())] * 40)
    assert "there was not enough memory to check" in message
    result = microbatcher.backward((x(), y()))
    assert result.loss_average_is == "unchecked"
    assert (result.num_microbatches, result.ooms) == (1, 0)


def chosen(batch: Any, **options: Any) -> list[list[int]]:
    layout = BatchLayout()
    return telling_rows(layout, batch, layout.num_rows(batch), **options)


def test_parts_differ_in_number_of_valid_targets() -> None:
    targets = with_ignored(tokens())
    small, large = chosen((tokens(), targets))
    valid = (targets != IGNORED).sum(1).float()
    assert valid[small].mean() != valid[large].mean()
    assert valid[small].sum() > 0 < valid[large].sum()


def test_excluded_rows_are_not_chosen_again() -> None:
    batch = (torch.randn(40, 2),)
    first = [row for part in chosen(batch) for row in part]
    again = [row for part in chosen(batch, without=first) for row in part]
    assert len(again) == len(first)
    assert not {*first} & {*again}
