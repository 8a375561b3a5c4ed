"""Measure the figures in docs/recipes/README.md, and write that page.

    OMP_NUM_THREADS=1 python docs/measure_recipes.py

Each recipe has a plain loop and a microbatched one. Both run as they stand, on a device that is
large enough; then in float64 and without dropout, on a device in which the plain loop dies.
"""

import ast
import contextlib
import difflib
import importlib.util
import logging
import math
import pathlib
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automicro import AutomicroWarning, MemoryBudget

DOCS = pathlib.Path(__file__).resolve().parent
PAGE = DOCS / "recipes" / "README.md"
LOOPS = ("plain", "microbatched")
# What a difference under a limit must stay below: the loops run in float64 there.
TOLERANCE = 1e-11
HEAD = """\
# Recipes

Thirteen training loops modeled on well-known scripts, each written plainly and with automicro. They
run on data that come with Python and scikit-learn: `python docs/recipes/mnist.py`.

{table}

Measured by `python docs/measure_recipes.py` on a CPU with torch {torch}. The tests run shortened
loops.

- *Lines changed*: in the training code, without imports.
- *Whole*: the largest difference between the two loops, in printed values and final weights, if
  nothing is split.
- *Limit*: a simulated device on which the plain loop dies. The other runs out of memory as often as
  *OOMs* says, and completes.
- *Split*: the largest difference between that run and the plain loop without a limit, in float64,
  without dropout.

## What does not split

BatchNorm averages over the rows it sees, so the recipes use GroupNorm. With BatchNorm a warning
names the layers:

{batchnorm}

[What to do about BatchNorm](../checks.md#batchnorm).

## Changed lines

<!-- generated: changed_lines -->
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a recipe is run.

    Attributes:
        name: of its file in docs/recipes.
        limit: of the device in which the plain loop dies.
        changed: what its diff is of, plain and microbatched.
        has_norm: whether its ``norm`` stands where the original has BatchNorm.
    """

    name: str
    limit: str
    changed: tuple[tuple[str, str], ...] = (LOOPS,)
    has_norm: bool = False


RECIPES = (
    Recipe(name="mnist", limit="6MiB"),
    Recipe(name="vae", limit="4MiB"),
    Recipe(name="super_resolution", limit="3MiB"),
    Recipe(name="siamese", limit="8MiB", has_norm=True),
    Recipe(name="word_language_model", limit="4MiB"),
    Recipe(name="dcgan", limit="4MiB", has_norm=True),
    Recipe(name="time_sequence", limit="4MiB"),
    Recipe(name="gat", limit="4MiB"),
    Recipe(name="mingpt", limit="10MiB", changed=(("PlainTrainer", "MicrobatchedTrainer"),)),
    Recipe(name="nanogpt", limit="8MiB"),
    Recipe(name="glue", limit="10MiB"),
    Recipe(name="diffusion", limit="6MiB"),
    Recipe(
        name="torchvision_train",
        limit="8MiB",
        changed=(
            ("train_one_epoch", "train_one_epoch_microbatched"),
            LOOPS,
        ),
        has_norm=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a loop reported and left.

    Attributes:
        history: what it reported, number by number.
        weights: final parameters and buffers.
        ooms: how many times memory ran out.
        warnings: what it warned of.
    """

    history: Sequence[float]
    weights: Sequence[Tensor]
    ooms: int
    warnings: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is measured of a recipe.

    Attributes:
        whole: the largest difference where nothing is split.
        split: the largest difference under the limit.
        ooms: how many times memory ran out under it.
        batchnorm: the same as ``split`` with BatchNorm, of what was reported, and the warnings.
    """

    whole: float
    split: float
    ooms: int
    batchnorm: tuple[float, Sequence[str]] | None = None


def path_of(recipe: Recipe) -> pathlib.Path:
    return DOCS / "recipes" / f"{recipe.name}.py"


def load(recipe: Recipe) -> types.ModuleType:
    """A recipe as a new module, whose constants may be changed."""
    spec = importlib.util.spec_from_file_location(recipe.name, path_of(recipe))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    recipe: Recipe,
    loop: str,
    length: Sequence[int] = (),
    *,
    exact: bool = False,
    limit: str | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Run:
    """Run one loop of a recipe.

    Args:
        recipe: which.
        loop: ``"plain"`` or ``"microbatched"``.
        length: of the run, in whatever the loop counts; empty for its own.
        exact: in float64 and without dropout.
        limit: of the device.
        constants: of the recipe's file, by name, in place of its own.
    """
    module = load(recipe)
    if exact and "DROPOUT" in vars(module):
        vars(module)["DROPOUT"] = 0.0
    vars(module).update(constants or {})
    budget = None if limit is None else MemoryBudget(limit)
    with (
        double_precision() if exact else contextlib.nullcontext(),
        budget or contextlib.nullcontext(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", AutomicroWarning)
        model, history = getattr(module, loop)(*length)
    assert all(map(math.isfinite, history)), f"{recipe.name} diverged: {history}"
    return Run(
        history=history,
        weights=[tensor.detach() for tensor in model.state_dict().values()],
        ooms=0 if budget is None else budget.num_ooms,
        warnings=[str(warning.message) for warning in caught],
    )


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def largest_difference(run: Run, other: Run) -> float:
    """Of everything that two runs reported and left; 0.0 where all bits are the same."""
    differences = [largest_report_difference(run, other)]
    for tensor, another in zip(run.weights, other.weights, strict=True):
        if not torch.equal(tensor, another):
            differences.append((tensor.double() - another.double()).abs().max().item())
    return max(differences)


def largest_report_difference(run: Run, other: Run) -> float:
    return max(abs(a - b) for a, b in zip(run.history, other.history, strict=True))


def measure(recipe: Recipe, length: Sequence[int] = ()) -> Figures:
    """Run both loops of a recipe in every way.

    Raises:
        AssertionError: the plain loop ends under the limit, or something was warned of.
    """
    whole = [run(recipe, loop, length) for loop in LOOPS]
    with contextlib.suppress(torch.OutOfMemoryError):
        run(recipe, "plain", length, exact=True, limit=recipe.limit)
        raise AssertionError(f"the plain loop of {recipe.name} ends in {recipe.limit}")
    split = with_and_without_limit(recipe, length)
    assert not [warning for each in (*whole, *split) for warning in each.warnings]
    batchnorm = None
    if recipe.has_norm:
        other = with_and_without_limit(recipe, length, constants={"norm": nn.BatchNorm2d})
        batchnorm = largest_report_difference(*other), other[1].warnings
    return Figures(
        whole=largest_difference(*whole),
        split=largest_difference(*split),
        ooms=split[1].ooms,
        batchnorm=batchnorm,
    )


def with_and_without_limit(
    recipe: Recipe, length: Sequence[int] = (), *, constants: Mapping[str, Any] | None = None
) -> tuple[Run, Run]:
    """The plain loop on a device that is large enough, and the microbatched one in the limit."""
    return (
        run(recipe, "plain", length, exact=True, constants=constants),
        run(recipe, "microbatched", length, exact=True, constants=constants, limit=recipe.limit),
    )


def diff(recipe: Recipe, context: int = 1) -> list[str]:
    """What changes from the plain loop to the microbatched one, without the lines that name it."""
    lines: list[str] = []
    for names in recipe.changed:
        plain, microbatched = (body(recipe, name) for name in names)
        for line in list(difflib.unified_diff(plain, microbatched, n=context, lineterm=""))[2:]:
            lines.append(" …" if line.startswith("@@") else line)
    return lines[1:]


def body(recipe: Recipe, name: str) -> list[str]:
    """The lines of a function or class below its head."""
    source = path_of(recipe).read_text(encoding="utf-8")
    [node] = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = source.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
    return [line for line in textwrap.dedent("\n".join(lines)).splitlines() if line.strip()]


def lines_changed(recipe: Recipe) -> str:
    signs = [line[0] for line in diff(recipe, context=0)]
    return f"+{signs.count('+')} -{signs.count('-')}"


def special(recipe: Recipe) -> str:
    """What is special in a recipe: the first line of its text."""
    return (load(recipe).__doc__ or "").splitlines()[0].removesuffix(".")


def section(recipe: Recipe) -> str:
    """A recipe's text, and its diff."""
    text = (load(recipe).__doc__ or "").split("\n\n", 1)[1].strip()
    changes = "\n".join(diff(recipe))
    return f"### {recipe.name}\n\n{text}\n\n```diff\n{changes}\n```\n"


def row(recipe: Recipe, figures: Figures) -> str:
    cells = (
        f"[{recipe.name}]({recipe.name}.py)",
        special(recipe),
        lines_changed(recipe),
        f"{figures.whole:.2g}" if figures.whole else "0.0",
        recipe.limit.replace("MiB", " MiB"),
        f"{figures.split:.0e}",
        str(figures.ooms),
    )
    return f"| {' | '.join(cells)} |"


def page(figures: Sequence[Figures]) -> str:
    """The text of docs/recipes/README.md."""
    measured = list(zip(RECIPES, figures, strict=True))
    head = ("Recipe", "What is special", "Lines changed", "Whole", "Limit", "Split", "OOMs")
    table = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|---|"]
    table += [row(recipe, each) for recipe, each in measured]
    batchnorm = ["| Recipe | Split |", "|---|---|"]
    for recipe, each in measured:
        if each.batchnorm is not None:
            batchnorm.append(f"| {recipe.name} | {each.batchnorm[0]:.0e} |")
    return HEAD.format(
        table="\n".join(table), batchnorm="\n".join(batchnorm), torch=torch.__version__
    )


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("automicro").setLevel(logging.ERROR)
    warnings.simplefilter("error")
    figures = []
    for recipe in RECIPES:
        figures.append(measure(recipe))
        sys.stdout.write(f"{row(recipe, figures[-1])}\n")
        sys.stdout.flush()
    PAGE.write_text(page(figures), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
