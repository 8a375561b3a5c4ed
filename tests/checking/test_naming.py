"""Checks during training: what they report, what they ignore, which rows they take."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import (
    BatchError,
    Halving,
    LossAverageWarning,
    LossError,
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


def shifted_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return mean_of_tokens(logits[:, :-1], targets[:, 1:])


# Reported


class OwnCausalModel(nn.Module):
    """Compute the loss on shifted labels without declaring that."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": shifted_mean(self.encoder(input_ids), labels)}


def test_suggested_loss_average_for_shifted_labels_is_exact() -> None:
    batch = {"input_ids": tokens(), "labels": token_targets()}
    model = OwnCausalModel()
    assert len(warnings_of(Microbatcher(model, microbatch_size=4), batch)) == 1
    remedy = verify(model, batch).loss_average
    assert remedy == "lambda batch: (batch['labels'][..., 1:] != -100).sum()"
    count = eval(remedy)
    model.zero_grad()
    loss = Microbatcher(model, microbatch_size=4, loss_average=count).backward(batch).loss
    assert torch.allclose(loss, model(**batch)["loss"])
    assert warnings_of(Microbatcher(model, microbatch_size=4, loss_average=count), batch) == []


class Unshifted(OwnCausalModel):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": mean_of_tokens(self.encoder(input_ids), labels)}


class DeclaresShift(Unshifted):
    loss_type = "ForCausalLM"

    def loss_function(self) -> None: ...


@pytest.mark.parametrize(
    ("model", "remedy"),
    [(Unshifted(), "'tokens'"), (DeclaresShift(), "lambda batch: (batch['labels'] != -100).sum()")],
)
@pytest.mark.sweep
def test_unshifted_labels_are_not_treated_as_shifted(model: nn.Module, remedy: str) -> None:
    batch = {"input_ids": tokens(), "labels": token_targets()}
    assert len(warnings_of(Microbatcher(model, microbatch_size=4), batch)) == 1
    assert verify(model, batch).loss_average == remedy
    declared = Microbatcher(model, microbatch_size=4, loss_average=eval(remedy))
    assert warnings_of(declared, batch) == []


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
    "a masked mean beside a term without rows": lambda m, b: {
        "term": _penalty(m),
        "rows": (_of_rows(m, b) * b["mask"]).sum() / b["mask"].sum(),
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


def _child_and_parent() -> Any:
    child = Opaque()
    child.others.append(Opaque(child))
    return child


def _siblings() -> Any:
    found = [Opaque() for _ in range(ROWS)]
    for each in found:
        each.others = found
    return found


def _itself_with_a_tensor() -> Any:
    found = Opaque(torch.ones(3))
    found.others += [{"up": found}]
    return found


@pytest.mark.parametrize("make", [_child_and_parent, _siblings, _itself_with_a_tensor])
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


# Ignored


def test_model_error_propagates_without_warning() -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        return {"logits": model(batch[0])}

    with pytest.raises(LossError, match="logits"):
        Microbatcher(Mlp(), forward=forward, microbatch_size=4).backward((x(), y()))


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


def test_gradients_stay_empty_when_warning_is_raised() -> None:
    model = Mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LossAverageWarning):
            on(model, contrastive).backward((x(), y()))
    assert all(parameter.grad is None for parameter in model.parameters())


# Choice of rows


def chosen(batch: Any, **options: Any) -> list[list[int]]:
    layout = BatchLayout()
    return telling_rows(layout, batch, layout.num_rows(batch), **options)


def test_parts_differ_in_number_of_valid_targets() -> None:
    targets = with_ignored(tokens())
    small, large = chosen((tokens(), targets))
    valid = (targets != IGNORED).sum(1).float()
    assert valid[small].mean() != valid[large].mean()
    assert valid[small].sum() > 0
    assert valid[large].sum() > 0


def test_excluded_rows_are_not_chosen_again() -> None:
    batch = (torch.randn(40, 2),)
    first = [row for part in chosen(batch) for row in part]
    again = [row for part in chosen(batch, without=first) for row in part]
    assert len(again) == len(first)
    assert not {*first} & {*again}
