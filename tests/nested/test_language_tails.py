"""Language models of transformers with head and loss in slices: results match, or an error."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from automicro import Microbatcher
from automicro.errors import UnsplittableModelError
from automicro.features import Nested
from automicro.nested.parts import LanguageTail, MissingLogits, MissingLogitsError
from tests.savers.families import SMALL

transformers = pytest.importorskip("transformers")


def language_model(name: str, kind: str = "CausalLM") -> Any:
    """Return a small model without dropout whose large logits expose any change to them."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name]()
    small = {
        **SMALL,
        "num_hidden_layers": 2,
        "n_layer": 2,
        "conv_kernel": 4,
        "final_logit_softcapping": 30.0,
    }
    options = {key: value for key, value in small.items() if hasattr(config, key)}
    config = type(config)(**options)
    if hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits = True
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def batch(*, with_count: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (5, 9))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[1, 4:] = labels[3, :2] = -100
    mask[1, 6:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return given | ({"num_items_in_batch": torch.tensor(17)} if with_count else {})


def loss_and_gradients(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize(("unit", "with_count"), [("rows", True), ("tokens", False)])
@pytest.mark.parametrize("name", ["gpt2", "cohere", "mixtral", "mamba", "modernbert"])
def test_sliced_tail_matches_loss_and_gradients(name: str, unit: str, with_count: bool) -> None:
    model = language_model(name, "MaskedLM" if name == "modernbert" else "CausalLM")
    given = batch(with_count=with_count)
    if name == "mamba":
        del given["attention_mask"]
    wanted_loss, wanted = loss_and_gradients(model, given)
    options = {"microbatch_size": 2, "microbatch_unit": unit}
    microbatcher = Microbatcher(model, microbatch_size=None, features=[Nested({"tail": options})])
    loss, found = loss_and_gradients(model, given)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=2e-6)
    (sizes,) = [part.sizes for part in microbatcher._setup.parts.all() if part.sizes]
    assert max(sizes) == 2


def test_softcapped_logits_are_rejected_even_if_small() -> None:
    model = language_model("gemma2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    Microbatcher(model, features=[Nested({"tail": 2})])
    with pytest.raises(UnsplittableModelError, match="changes its logits"):
        model(**batch(with_count=False))


@pytest.mark.parametrize(("name", "kind"), [("bert", "MaskedLM"), ("bart", "Seq2SeqLM")])
def test_model_with_own_loss_is_rejected(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match="its forward computes its loss itself"):
        Microbatcher(language_model(name, kind), features=[Nested({"tail": 2})])


def test_use_of_missing_logits_raises_with_advice() -> None:
    model = language_model("llama")
    Microbatcher(model, features=[Nested({"tail": 2})])
    given = batch(with_count=False)
    logits = model(**given).logits
    assert isinstance(logits, MissingLogits)
    assert isinstance(model(**given, return_dict=False)[1], MissingLogits)
    with pytest.raises(UnsplittableModelError, match="Compute what needs them in evaluation"):
        logits.argmax(-1)
    assert not hasattr(logits, "shape")
    with torch.no_grad():
        assert model(**given).logits.shape == (5, 9, SMALL["vocab_size"])


def test_missing_logits_reject_every_operation() -> None:
    uses: list[Callable[[Any], Any]] = [
        *(lambda logits: logits == 1, lambda logits: logits != logits, lambda logits: 1 - logits),
        *(float, bool, np.asarray, lambda logits: np.ones(1) == logits),
        *(lambda logits: torch.ones(1) == logits, lambda logits: logits.shape),
    ]
    for use in uses:
        with pytest.raises(MissingLogitsError, match="Compute what needs them in evaluation"):
            use(MissingLogits())


def test_evaluation_and_removal_restore_plain_model() -> None:
    model = language_model("gpt2")
    given = batch(with_count=False)
    with torch.no_grad():
        wanted = model(**given).loss
    microbatcher = Microbatcher(model, microbatch_size=2, features=[Nested({"tail": 2})])
    result = microbatcher.backward(given)
    with torch.no_grad():
        assert torch.equal(model(**given).loss, wanted)
    torch.testing.assert_close(torch.as_tensor(result.loss), wanted, rtol=1e-5, atol=0)
    microbatcher.remove_parts()
    assert model(**given).logits.shape == (5, 9, SMALL["vocab_size"])


def test_trained_model_can_be_copied_and_saved() -> None:
    model, given = language_model("llama"), batch(with_count=True)
    Microbatcher(model, features=[Nested({"tail": 2})])
    wanted, _ = loss_and_gradients(model, given)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(loss_and_gradients(other, given)[0], wanted)


def test_head_replaced_between_steps_is_used_by_tail() -> None:
    model, given = language_model("llama"), batch(with_count=False)
    Microbatcher(model, features=[Nested({"tail": 2})])
    loss_and_gradients(model, given)
    model.resize_token_embeddings(120)
    loss, found = loss_and_gradients(model, given)
    tail = LanguageTail.of(model)
    assert tail is not None
    tail.remove()
    wanted_loss, wanted = loss_and_gradients(model, given)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.sweep
def test_compiled_language_model_keeps_sliced_tail() -> None:
    model, given = language_model("llama"), batch(with_count=False)
    _, wanted = loss_and_gradients(model, given)
    Microbatcher(model, features=[Nested({"tail": 2})])
    try:
        for inside in (False, True):
            run: Any = model if inside else torch.compile(model, backend="eager")
            if inside:
                model.model.compile(backend="eager")
            model.zero_grad()
            run(**given).loss.backward()
            found = {n: each.grad for n, each in model.named_parameters() if each.grad is not None}
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)
    finally:
        torch.compiler.reset()
