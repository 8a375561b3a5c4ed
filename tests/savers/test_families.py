"""Levels on models of other libraries: no bit changes, and each level saves memory."""

import contextlib
import dataclasses
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.errors import UnsplittableModelError
from automicro.features import WhenTooLarge
from automicro.memory.budget import MemoryBudget
from automicro.savers import offload
from automicro.savers.levels import Level
from automicro.savers.recompute import Recompute
from tests.savers.families import LANGUAGE, OF_TORCHVISION, OTHERS, Family
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.subject import begin_at_level

pytest.importorskip("transformers")

FEW = ("mistral",)
LEVELS = {"recompute": 1, "offload": 1, "recompute + offload": 2}
EVERY = LANGUAGE | OTHERS | OF_TORCHVISION


class StepResults(NamedTuple):
    """The results of two steps."""

    losses: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generators: list[Any]
    peak_bytes: int  # without parameters and gradients
    microbatcher: Microbatcher


@pytest.fixture(autouse=True)
def small_tensors_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size limit, because small models would offload nothing otherwise."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 1 << 10)


def trained(family: Family, when: Any, level: int, *, is_measured: bool = True) -> StepResults:
    """Train on two optimization batches of two microbatches each at a level."""
    model = family.make()
    options = {"microbatch_size": 2, "probe": False, "forward": family.forward, **family.options}
    microbatcher = Microbatcher(model, features=[WhenTooLarge(when)], **options)
    if level:
        begin_at_level(microbatcher, level)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    losses, peaks = [], [0]
    for _ in range(2):
        with MemoryBudget(None).track(model) if is_measured else contextlib.nullcontext() as budget:
            result = microbatcher.backward(family.batch())
        losses.append(result.loss)
        if budget is not None:
            peaks.append(budget.peak_bytes)
    # In the second batch, gradients exist from the start.
    kept = 2 * sum(each.nbytes for each in model.parameters())
    return StepResults(
        losses,
        {name: each.grad for name, each in model.named_parameters()},
        dict(model.named_buffers()),
        [torch.get_rng_state(), random.getstate(), np.random.random()],
        peaks[-1] - kept,
        microbatcher,
    )


def differing(one: StepResults, other: StepResults) -> list[str]:
    """Return the names of results that are not bit-identical."""
    found = [
        name
        for name, gradient in one.gradients.items()
        if not same(gradient, other.gradients[name])
    ]
    found += [name for name, each in one.buffers.items() if not same(each, other.buffers[name])]
    found += ["loss"] * (not all(map(same, one.losses, other.losses)))
    found += ["torch's generator"] * (not same(one.generators[0], other.generators[0]))
    return found + ["other generators"] * (one.generators[1:] != other.generators[1:])


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def asked(level: str) -> Any:
    return level.split(" + ")


def assert_bit_identical(family: Family, least: float | None = 0.96, **options: Any) -> None:
    """Check bit identity, and that the peak at each level is below a share of the plain peak."""
    plain = trained(family, "error", 0, **options)
    assert any(each is not None and each.any() for each in plain.gradients.values())
    for level, index in LEVELS.items():
        found = trained(family, asked(level), index, **options)
        assert differing(plain, found) == [], level
        share = found.peak_bytes / plain.peak_bytes
        assert least is None or share < least, (level, share)


def assert_tail_runs_in_slices(family: Family) -> None:
    if family.refusal:
        with pytest.raises(UnsplittableModelError, match=family.refusal):
            trained(family, "nested", 1)
        return
    plain, found = trained(family, "error", 0), trained(family, "nested", 1)
    for one, other in zip(plain.losses, found.losses, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=0)
    largest = max(float(each.abs().max()) for each in plain.gradients.values() if each is not None)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.filterwarnings("ignore")  # from transformers' models, and BatchNorm on two rows
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in FEW
        else pytest.param(name, marks=pytest.mark.slow if number % 8 else pytest.mark.sweep)
        for number, name in enumerate(LANGUAGE | OTHERS)
    ]
    + [pytest.param(name, marks=pytest.mark.slow) for name in OF_TORCHVISION],
)
def test_levels_save_memory_and_change_no_bit(name: str) -> None:
    # Most memory of torchvision's models is parameters, which have their full size.
    assert_bit_identical(EVERY[name], least=1.0 if name in OF_TORCHVISION else 0.96)
    if EVERY[name].has_tail:
        assert_tail_runs_in_slices(EVERY[name])


def changed_family(name: str, change: Callable[[Any], Any], **options: Any) -> Family:
    family = EVERY[name]
    return dataclasses.replace(family, make=lambda: change(family.make()), options=options)


def with_adapters(model: Any) -> Any:
    peft = importlib.import_module("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, config).train()


def with_prefix(model: Any) -> Any:
    peft = importlib.import_module("peft")
    torch.manual_seed(4)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(model, config).train()


def with_frozen_ends(model: Any) -> Any:
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[-1].requires_grad_(False)
    return model


def with_cache(model: Any) -> Any:
    model.config.use_cache = True
    return model


def with_tied_head(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def unchanged(model: Any) -> Any:
    return model


VARIANTS: dict[str, Callable[[], Family]] = {
    "frozen ends": lambda: changed_family("mistral", with_frozen_ends),
    "a cache": lambda: changed_family("mistral", with_cache),
    "a tied head": lambda: changed_family("llama", with_tied_head),
    "adapters, t5": lambda: changed_family("t5", with_adapters),
    "adapters, vit, bf16": lambda: changed_family("vit", with_adapters, precision="bf16"),
    "mixtral, bf16": lambda: changed_family("mixtral", unchanged, precision="bf16"),
    "resnet, bf16": lambda: changed_family("resnet", unchanged, precision="bf16"),
    "outputs in tuples": lambda: changed_family(
        "gpt2",
        unchanged,
        forward=lambda model, batch: model(**batch, output_hidden_states=True, return_dict=False)[
            0
        ],
    ),
    "a loss of the second layer": lambda: changed_family(
        "llama",
        unchanged,
        forward=lambda model, batch: (
            model(**batch, output_hidden_states=True).hidden_states[1].square().mean()
        ),
    ),
}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_customized_models_train_bit_identically(name: str) -> None:
    assert_bit_identical(VARIANTS[name]())


@contextlib.contextmanager
def uncompiled_afterwards() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def compiled_blocks(model: Any) -> Any:
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    return model


def compiled_in_place(model: Any) -> Any:
    blocks: Any = [torch.compile(each, backend="aot_eager") for each in model.model.layers]
    model.model.layers = nn.ModuleList(blocks)
    return model


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [compiled_blocks, compiled_in_place])
def test_compiled_blocks_train_bit_identically(change: Callable[[Any], Any]) -> None:
    with uncompiled_afterwards():
        # Even a budget without a limit disables the compiler.
        assert_bit_identical(changed_family("mistral", change), least=None, is_measured=False)


def checkpointed(model: Any) -> Any:
    """Enable checkpointing in a way that older versions of transformers support, too."""
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("name", mostly_in_sweeps(["bart", "gpt2", "mistral"], quick=["gpt2"]))
def test_enabled_gradient_checkpointing_is_rejected_by_recompute(name: str) -> None:
    family = changed_family(name, checkpointed)
    with pytest.raises(
        ValueError, match=r"\(gradient checkpointing is on\).*turn gradient checkpointing off"
    ):
        trained(family, "recompute", 1)
    plain, found = trained(family, "error", 0), trained(family, "offload", 1)
    assert differing(plain, found) == []


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.sweep
def test_blocks_with_cached_prefix_are_recomputed() -> None:
    pytest.importorskip("peft")
    family = changed_family("mistral", with_prefix)
    plain, found = trained(family, "error", 0), trained(family, "recompute", 1)
    assert differing(plain, found) == []
    level = found.microbatcher._levels[1]
    assert isinstance(level, Level)
    (saver,) = level.savers
    assert isinstance(saver, Recompute)
    assert [block.turn > 0 for block in saver.blocks] == [True] * 3


@pytest.mark.parametrize("which", ["[02]", "[12]"])
def test_recomputing_some_layers_keeps_shared_cache_correct(which: str) -> None:
    family = EVERY["llama"]
    plain = trained(family, "error", 0)
    found = trained(family, {"recompute": [f"model.layers.{which}"]}, 1)
    assert differing(plain, found) == []
    level = found.microbatcher._levels[1]
    assert isinstance(level, Level)
    (saver,) = level.savers
    assert isinstance(saver, Recompute)
    assert [block.turn > 0 for block in saver.blocks] == [True, True]
