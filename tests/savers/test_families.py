"""Levels on models of other libraries: no bit changes, and each level saves memory."""

import contextlib
import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from automicro import Microbatcher
from automicro.errors import UnsplittableModelError
from automicro.features import WhenTooLarge
from automicro.memory.budget import MemoryBudget
from automicro.savers import offload
from tests.savers.families import LANGUAGE, OTHERS, Family
from tests.savers.steps import StepResults, results_of, seed_all
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.subject import begin_at_level

pytest.importorskip("transformers")

FEW = ("mistral",)
LEVELS = {"recompute": 1, "offload": 1, "recompute + offload": 2}
EVERY = LANGUAGE | OTHERS


@pytest.fixture(autouse=True)
def small_tensors_are_offloaded(monkeypatch):
    """Lower the size limit, because small models would offload nothing otherwise."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 1 << 10)


def trained(
    family: Family, when: Any, level: int, *, is_measured=True
) -> tuple[StepResults, Microbatcher]:
    """Train on two optimization batches of two microbatches each at a level."""
    model = family.make()
    options = {"microbatch_size": 2, "probe": False, "forward": family.forward, **family.options}
    microbatcher = Microbatcher(model, features=[WhenTooLarge(when)], **options)
    if level:
        begin_at_level(microbatcher, level)
    seed_all()
    losses, peak = [], 0
    for _ in range(2):
        with MemoryBudget(None).track(model) if is_measured else contextlib.nullcontext() as budget:
            losses.append(microbatcher.backward(family.batch()).loss)
        # Without parameters and gradients, which exist from the start in the second batch.
        kept = 2 * sum(each.nbytes for each in model.parameters())
        peak = budget.peak_bytes - kept if budget else 0
    return results_of(model, losses, peak), microbatcher


def plain_of(family: Family, **options: Any) -> StepResults:
    return trained(family, "error", 0, **options)[0]


def assert_bit_identical(family: Family, *, is_measured=True):
    """Check bit identity, and that each level saves memory."""
    plain = plain_of(family, is_measured=is_measured)
    assert any(each is not None and each.any() for each in plain.gradients.values())
    for level, index in LEVELS.items():
        found, _ = trained(family, level.split(" + "), index, is_measured=is_measured)
        assert plain.differences(found) == [], level
        assert not is_measured or found.peak_bytes < 0.96 * plain.peak_bytes, level


def assert_tail_runs_in_slices(family: Family):
    if family.refusal:
        with pytest.raises(UnsplittableModelError, match=family.refusal):
            trained(family, "nested", 1)
        return
    plain, (found, _) = plain_of(family), trained(family, "nested", 1)
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
    largest = max(float(each.abs().max()) for each in plain.gradients.values() if each is not None)
    torch.testing.assert_close(found.gradients, plain.gradients, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.filterwarnings("ignore")  # from transformers' models, and BatchNorm on two rows
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in FEW
        else pytest.param(name, marks=pytest.mark.slow if number % 8 else pytest.mark.sweep)
        for number, name in enumerate(EVERY)
    ],
)
def test_levels_save_memory_and_change_no_bit(name):
    assert_bit_identical(EVERY[name])
    if EVERY[name].has_tail:
        assert_tail_runs_in_slices(EVERY[name])


def changed(name: str, change: Any = None, **options: Any) -> Family:
    """Return a family whose model is changed, in place or by its replacement."""
    family = EVERY[name]

    def make():
        model = family.make()
        return (change(model) if change else None) or model

    return dataclasses.replace(family, make=make, options=options)


def with_peft(config: str, **options: Any) -> Any:
    def change(model):
        peft = importlib.import_module("peft")
        torch.manual_seed(4)
        return peft.get_peft_model(model, getattr(peft, config)(**options)).train()

    return change


ADAPTERS = with_peft(
    "LoraConfig", r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False
)
PREFIX = with_peft("PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4)


def with_frozen_ends(model):
    for each in (model.get_input_embeddings(), model.model.layers[0], model.model.layers[-1]):
        each.requires_grad_(False)


def with_tied_head(model):
    model.config.tie_word_embeddings = True
    model.tie_weights()


def first_output(model, batch):
    return model(**batch, output_hidden_states=True, return_dict=False)[0]


def loss_of_second_layer(model, batch):
    return model(**batch, output_hidden_states=True).hidden_states[1].square().mean()


VARIANTS: dict[str, Family] = {
    "frozen ends": changed("mistral", with_frozen_ends),
    "a cache": changed("mistral", lambda model: setattr(model.config, "use_cache", True)),
    "a tied head": changed("llama", with_tied_head),
    "adapters, vit, bf16": changed("vit", ADAPTERS, precision="bf16"),
    "mixtral, bf16": changed("mixtral", precision="bf16"),
    "outputs in tuples": changed("gpt2", forward=first_output),
    "a loss of the second layer": changed("llama", forward=loss_of_second_layer),
}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_customized_models_train_bit_identically(name):
    assert_bit_identical(VARIANTS[name])


def compiled_blocks(model):
    for block in model.model.layers:
        block.compile(backend="aot_eager")


def compiled_in_place(model):
    blocks: Any = [torch.compile(each, backend="aot_eager") for each in model.model.layers]
    model.model.layers = nn.ModuleList(blocks)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [compiled_blocks, compiled_in_place])
def test_compiled_blocks_train_bit_identically(change):
    torch._dynamo.reset()
    try:
        # Even a budget without a limit disables the compiler.
        assert_bit_identical(changed("mistral", change), is_measured=False)
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("name", mostly_in_sweeps(["bart", "gpt2", "mistral"], quick=["gpt2"]))
def test_enabled_gradient_checkpointing_is_rejected_by_recompute(name):
    family = changed(name, lambda model: model.gradient_checkpointing_enable())
    with pytest.raises(
        ValueError, match=r"\(gradient checkpointing is on\).*turn gradient checkpointing off"
    ):
        trained(family, "recompute", 1)
    assert plain_of(family).differences(trained(family, "offload", 1)[0]) == []


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", "[02]"), ("llama", "[12]"), pytest.param("prefix", "*", marks=pytest.mark.sweep)],
)
def test_recomputing_some_layers_keeps_shared_cache_correct(name, layers):
    family = EVERY["llama"]
    when: Any = {"recompute": [f"model.layers.{layers}"]}
    if name == "prefix":
        pytest.importorskip("peft")
        family, when = changed("mistral", PREFIX), "recompute"
    found, microbatcher = trained(family, when, 1)
    assert plain_of(family).differences(found) == []
    level: Any = microbatcher._levels[1]
    assert [block.turn > 0 for block in level.savers[0].blocks] == [True] * (2 + (layers == "*"))
