"""Language models of transformers with head and loss in slices: results match, or an error."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

from automicro import Microbatcher
from automicro.errors import UnsplittableModelError
from automicro.features import Nested
from automicro.nested.parts import LanguageTail, MissingLogits, MissingLogitsError
from tests.savers.families import SMALL

transformers = pytest.importorskip("transformers")


def language_model(name, kind="CausalLM") -> Any:
    """Return a small model without dropout whose large logits expose any change to them."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name]()
    more = {"num_hidden_layers": 2, "n_layer": 2, "conv_kernel": 4, "final_logit_softcapping": 30.0}
    options = {key: value for key, value in (SMALL | more).items() if hasattr(config, key)}
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


def batch(count=None):
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (5, 9))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[1, 4:] = labels[3, :2] = -100
    mask[1, 6:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return given | ({"num_items_in_batch": torch.tensor(count)} if count else {})


def loss_and_gradients(model, given):
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: each.grad for name, each in named if each.grad is not None}


def assert_close(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "unit", "count"),
    [
        ("gpt2", "rows", 17),
        ("cohere", "tokens", None),
        ("mixtral", "rows", 17),
        ("mamba", "tokens", None),
        ("modernbert", "rows", None),
    ],
)
def test_sliced_tail_matches_loss_and_gradients(name, unit, count):
    model = language_model(name, "MaskedLM" if name == "modernbert" else "CausalLM")
    given = batch(count)
    if name == "mamba":
        del given["attention_mask"]
    wanted = loss_and_gradients(model, given)
    options = {"microbatch_size": 2, "microbatch_unit": unit}
    microbatcher = Microbatcher(model, microbatch_size=None, features=[Nested({"tail": options})])
    assert_close(loss_and_gradients(model, given), wanted)
    (sizes,) = [part.sizes for part in microbatcher._setup.parts.all() if part.sizes]
    assert max(sizes) == 2


def with_tail(name="llama") -> Any:
    model = language_model(name)
    return model, Microbatcher(model, microbatch_size=2, features=[Nested({"tail": 2})])


def test_softcapped_logits_are_rejected_even_if_small():
    model, _ = with_tail("gemma2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    with pytest.raises(UnsplittableModelError, match="changes its logits"):
        model(**batch())


@pytest.mark.parametrize(("name", "kind"), [("bert", "MaskedLM"), ("bart", "Seq2SeqLM")])
def test_model_with_own_loss_is_rejected(name, kind):
    with pytest.raises(ValueError, match="its forward computes its loss itself"):
        Microbatcher(language_model(name, kind), features=[Nested({"tail": 2})])


def test_use_of_missing_logits_raises_with_advice():
    model, _ = with_tail()
    logits = model(**batch()).logits
    assert isinstance(logits, MissingLogits)
    assert isinstance(model(**batch(), return_dict=False)[1], MissingLogits)
    with pytest.raises(UnsplittableModelError, match="Compute what needs them in evaluation"):
        logits.argmax(-1)
    assert not hasattr(logits, "shape")
    with torch.no_grad():
        assert model(**batch()).logits.shape == (5, 9, SMALL["vocab_size"])


def test_missing_logits_reject_every_operation():
    uses: list[Any] = [
        *(lambda logits: logits == 1, lambda logits: logits != logits, lambda logits: 1 - logits),
        *(float, bool, np.asarray, lambda logits: np.ones(1) == logits),
        *(lambda logits: torch.ones(1) == logits, lambda logits: logits.shape),
    ]
    for use in uses:
        with pytest.raises(MissingLogitsError, match="Compute what needs them in evaluation"):
            use(MissingLogits())


def test_evaluation_and_removal_restore_plain_model():
    model, microbatcher = with_tail("gpt2")
    result = microbatcher.backward(batch())
    with torch.no_grad():
        loss = model(**batch()).loss
    torch.testing.assert_close(torch.as_tensor(result.loss), loss, rtol=1e-5, atol=0)
    microbatcher.remove_parts()
    output = model(**batch())
    assert torch.equal(output.loss, loss)
    assert output.logits.shape == (5, 9, SMALL["vocab_size"])


def test_trained_model_can_be_copied_and_saved():
    model, _ = with_tail()
    wanted, _ = loss_and_gradients(model, batch(17))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(loss_and_gradients(other, batch(17))[0], wanted)


def test_head_replaced_between_steps_is_used_by_tail():
    model, _ = with_tail()
    loss_and_gradients(model, batch())
    model.resize_token_embeddings(120)
    found = loss_and_gradients(model, batch())
    tail = LanguageTail.of(model)
    assert tail is not None
    tail.remove()
    assert_close(found, loss_and_gradients(model, batch()))


@pytest.mark.sweep
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_language_model_keeps_sliced_tail(inside):
    model, given = language_model("llama"), batch()
    wanted = loss_and_gradients(model, given)
    Microbatcher(model, features=[Nested({"tail": 2})])
    try:
        if inside:
            model.model.compile(backend="eager")
        run: Any = model if inside else torch.compile(model, backend="eager")
        model.zero_grad()
        run(**given).loss.backward()
        assert_close((wanted[0], {n: p.grad for n, p in model.named_parameters()}), wanted)
    finally:
        torch.compiler.reset()
