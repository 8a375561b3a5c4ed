"""The loops in docs/recipes match the plain ones, even where those run out of memory."""

import importlib.util
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.sweep

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHORT = [1]  # one epoch, or one step


def load_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("measure_recipes", DOCS / "measure_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
each_recipe = pytest.mark.parametrize("recipe", SCRIPT.RECIPES, ids=lambda recipe: recipe.name)
with_norm = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(each, marks=[] if each.name == "siamese" else pytest.mark.slow, id=each.name)
        for each in SCRIPT.RECIPES
        if each.has_norm
    ],
)


def test_recipes_match_files() -> None:
    files = {path.stem for path in (DOCS / "recipes").glob("*.py")}
    assert files == {recipe.name for recipe in SCRIPT.RECIPES}
    assert len(files) == 13


def assert_same_bits(recipe, **options) -> None:
    plain, microbatched = (SCRIPT.run(recipe, loop, SHORT, **options) for loop in SCRIPT.LOOPS)
    assert microbatched.history == plain.history
    assert all(map(torch.equal, microbatched.weights, plain.weights))
    assert not microbatched.warnings


@each_recipe
def test_whole_batches_match_plain_loop_bit_for_bit(recipe) -> None:
    assert_same_bits(recipe)


@each_recipe
def test_microbatched_loop_matches_plain_loop_under_limit(recipe) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Simulated device"):
        SCRIPT.run(recipe, "plain", SHORT, exact=True, limit=recipe.limit)
    plain, microbatched = SCRIPT.with_and_without_limit(recipe, SHORT)
    assert microbatched.ooms >= 1
    assert not microbatched.warnings
    assert SCRIPT.largest_difference(plain, microbatched) < SCRIPT.TOLERANCE


@with_norm
def test_batchnorm_gives_warning_and_other_results(recipe) -> None:
    constants = {"norm": torch.nn.BatchNorm2d}
    plain, microbatched = SCRIPT.with_and_without_limit(recipe, SHORT, constants=constants)
    assert microbatched.warnings
    assert all("GroupNorm" in text for text in microbatched.warnings)
    assert SCRIPT.largest_report_difference(plain, microbatched) > 1e-6


def test_one_hop_is_too_few_for_two_attention_layers() -> None:
    recipe = by_name("gat")
    plain, microbatched = SCRIPT.with_and_without_limit(recipe, SHORT, constants={"HOPS": 1})
    assert 1e-4 < SCRIPT.largest_report_difference(plain, microbatched) < 1e-2


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("nanogpt", {"DTYPE": "bfloat16"}),
        pytest.param("torchvision_train", {"AMP": True}, marks=pytest.mark.slow),
    ],
)
def test_autocast_and_gradient_scaler_match_bit_for_bit(name, constants) -> None:
    assert_same_bits(by_name(name), constants=constants)


def test_recipe_runs_as_script(capsys) -> None:
    runpy.run_path(str(SCRIPT.path_of(by_name("gat"))), run_name="__main__")
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert losses == list(SCRIPT.run(by_name("gat"), "plain").history)


def by_name(name: str):
    return next(recipe for recipe in SCRIPT.RECIPES if recipe.name == name)


@each_recipe
def test_page_shows_changed_lines_and_limit(recipe) -> None:
    page = (DOCS / "recipes" / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| [{recipe.name}]")]
    _, _, special, changed, whole, limit, *_ = (cell.strip() for cell in row.split("|"))
    assert special == SCRIPT.special(recipe)
    assert changed == SCRIPT.lines_changed(recipe)
    assert whole == "0.0"
    assert limit.replace(" ", "") == recipe.limit


@pytest.mark.slow
@each_recipe
def test_whole_run_matches_page(recipe) -> None:
    figures = SCRIPT.measure(recipe)
    assert figures.whole == 0.0
    assert figures.split < SCRIPT.TOLERANCE
    assert figures.ooms >= 1
