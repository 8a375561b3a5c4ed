"""Rules of the architecture: permitted imports, and requirements for every file."""

import ast
import gc
import graphlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import automicro
from tests.tree import (
    MODULES,
    PACKAGE,
    ROOT,
    imports,
    loaded_by,
    nodes,
    own_module,
    parameters,
    parsed,
    unit,
)

# From the bottom up. A folder or top-level file imports only from lower layers and from itself.
# Imports within a folder are free unless they form a cycle.
LAYERS = (
    (
        *("accepted_optimizers", "durations", "errors", "files", "sharding", "torch_private"),
        *("torch_private_distributed", "version"),
    ),
    ("showing", "torch_private_execution"),
    ("batchnorm", "loggers", "modules", "policy", "units"),
    ("memory", "options", "values"),
    ("reach", "schedules", "state"),
    ("batch", "checkpoints", "data", "ranks", "transaction"),
    ("compilation",),
    ("loss", "optimizer"),
    ("checking",),
    ("step",),
    ("carry", "lengths", "nested", "remembered"),
    ("contrastive", "savers"),
    ("features",),
    ("microbatcher",),
    ("events",),
    ("callbacks",),
    ("integrations", "trainer"),
    ("demo",),
    ("tools",),
    ("cli",),
)
# These gather names and may import everything; nothing may import them.
GATHERING = ("__init__", "__main__")

# The only places for imports of packages that are slow or not always needed.
ONLY_IN = {"omegaconf": "cli"}
NEVER_AT_MODULE_TOP = (
    *("fsspec", "matplotlib", "shtab", "sklearn", "transformers", "lightning", "accelerate"),
    *("keras", "wandb", "mlflow", "tensorboard"),
)
NEEDED_AS_A_WHOLE = ("demo", "integrations")  # their users need everything in them
# All names that a new version of torch might remove.
PRIVATE_NAMES_OF_TORCH_IN = (
    "torch_private",
    "torch_private_distributed",
    "torch_private_execution",
)

# Modules that each step needs. All others are imported by the batch, metric or failure using them.
NEEDED_BY_EACH_STEP = {
    *("__init__", "batch", "batchnorm", "errors", "loss", "memory"),
    *("microbatcher", "modules", "options", "policy", "ranks", "reach", "sharding", "state"),
    *("step", "torch_private", "transaction", "values", "version"),
}

FORBIDDEN_STEMS = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
MOST_PARAMETERS = 8

# Public constructors may have more parameters. docs/reference.md pins the names of the package.
PUBLIC = {*automicro.__all__, "LengthBatchSampler"}


@pytest.fixture(autouse=True, scope="module")
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector, which would traverse half a million nodes repeatedly."""
    gc.disable()
    yield
    gc.enable()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


PRIVATE_ATTRIBUTES_OF_TORCH = {
    name
    for thing in (
        torch,
        torch.Tensor,
        torch.autograd.Variable,
        torch.ops.aten.add.Tensor,
        torch.nn.Linear(1, 1),
        torch.optim.SGD([torch.zeros(1)]),
        torch.amp.GradScaler("cpu"),
    )
    for name in dir(thing)
    if is_private(name)
}


def layer_of(module: str) -> int:
    """Return the layer of a module or of a name in it, 0 at the bottom."""
    name = unit(module)
    for height, names in enumerate(LAYERS):
        if name in names:
            return height
    raise AssertionError(
        f"{module} stands in no layer: add {name!r} to LAYERS in tests/test_architecture.py, in "
        f"the lowest layer that is above everything it imports"
    )


def layered() -> Iterator[tuple[str, Path]]:
    yield from ((name, path) for name, path in MODULES.items() if unit(name) not in GATHERING)


def test_imports_point_only_downward() -> None:
    names = [name for names in LAYERS for name in names]
    gone = [name for name in names if f"automicro.{name}" not in MODULES]
    assert not gone, f"{gone} stand in LAYERS and are no more: take them out"
    wrong = []
    for module, path in layered():
        layer_of(module)
        for name in imports(path):
            if name.startswith("automicro.tools") and unit(module) not in ("cli", "tools"):
                wrong.append(f"{module} imports {name}: training does without tools")
            if name.split(".")[0] != "automicro" or unit(name) == unit(module):
                continue
            if own_module(name) == "automicro":
                wrong.append(f"{module} imports {name} from the package: name the module with it")
            elif layer_of(name) >= layer_of(module):
                wrong.append(
                    f"{module} imports {name}, which does not lie below it: move what both need "
                    f"into a lower layer, or hand it in as an argument"
                )
    assert not wrong, "\n".join(wrong)


def test_microbatcher_imports_only_step_modules() -> None:
    assert {unit(module) for module in loaded_by("automicro.microbatcher")} == NEEDED_BY_EACH_STEP


def test_modules_have_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        targets = {own_module(name) for name in imports(path, top_only=True)}
        graph[module] = {target for target in targets if target is not None and target != module}
    graphlib.TopologicalSorter(graph).prepare()


def test_optional_packages_are_imported_where_they_are_used() -> None:
    wrong = []
    for module, path in MODULES.items():
        for name in imports(path):
            home = ONLY_IN.get(name.split(".")[0])
            if home is not None and unit(module) != home:
                wrong.append(f"{module} imports {name}: only {home} may")
        if unit(module) in NEEDED_AS_A_WHOLE:
            continue
        wrong += [
            f"{module} imports {name} at its top, so everybody pays for it: import it in the "
            f"function that needs it"
            for name in imports(path, top_only=True)
            if name.split(".")[0] in NEVER_AT_MODULE_TOP
        ]
    assert not wrong, "\n".join(wrong)


def test_private_torch_names_are_in_one_place() -> None:
    wrong = []
    for module, path in MODULES.items():
        if unit(module) in PRIVATE_NAMES_OF_TORCH_IN:
            continue
        found = [
            name
            for name in imports(path)
            if name.split(".")[0] == "torch" and any(map(is_private, name.split(".")))
        ]
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
                found += {node.attr} & PRIVATE_ATTRIBUTES_OF_TORCH
            # getattr(module, "_buffers"), sys.modules["torch._dynamo"]
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str):
                found += {text} & PRIVATE_ATTRIBUTES_OF_TORCH
                found += [text] if text.startswith("torch._") else []
        if found:
            wrong.append(
                f"{module} uses {', '.join(found)} of torch: give it a public name in "
                f"automicro/{PRIVATE_NAMES_OF_TORCH_IN[0]}.py"
            )
    assert not wrong, "\n".join(wrong)


def test_every_module_has_docstring_and_clear_name() -> None:
    for module, path in MODULES.items():
        assert ast.get_docstring(parsed(path)), f"{module} has no docstring"
        assert path.stem not in FORBIDDEN_STEMS, f"{module} does not say what it holds: rename it"


def test_functions_have_few_parameters() -> None:
    functions = (
        (module, scope, function)
        for module, path in MODULES.items()
        for scope in nodes(path)
        if isinstance(scope, ast.Module | ast.ClassDef | ast.FunctionDef)
        for function in scope.body
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    wrong = [
        f"{module}: {function.name} takes {parameters(function)} parameters: an object is missing"
        for module, scope, function in functions
        if parameters(function) > MOST_PARAMETERS
        and (scope.name if isinstance(scope, ast.ClassDef) else function.name) not in PUBLIC
    ]
    assert not wrong, "\n".join(wrong)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in automicro.__all__:
        value = getattr(automicro, name)
        docstring = inspect.getdoc(value) or ""
        # A dataclass without a docstring gets its signature as docstring.
        documented = bool(docstring) and not docstring.startswith(f"{name}(")
        assert documented, f"automicro.{name} has no docstring of its own"


def test_contributing_lists_existing_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)/?`", row)]
    assert {name for layer in LAYERS for name in layer} - {"version"} <= {*names, "data", "resume"}
    paths = [path for path in re.findall(r"`([\w/]+\.(?:py|md|yaml))`", text) if "/" in path]
    gone = [path for path in paths if not any((base / path).exists() for base in (ROOT, PACKAGE))]
    assert (len(paths) > 8, gone) == (True, [])


# Readers should know who does what, and read no sentence twice.
VAGUE = re.compile(r"\b(whoever|nobody|somebody|so-manieth|that is none(?! of))\b", re.IGNORECASE)
NO_PROSE = re.compile(r"```.*?```|^\|.*?$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
MOST_WORDS = 35


def test_prose_has_no_vague_words_or_long_sentences() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (*MODULES.values(), *pages, ROOT / "Makefile")
        for line in path.read_text("utf-8").splitlines()
        if VAGUE.search(line) or line.lstrip().startswith('"""What')
    ]
    for page in pages:
        prose = NO_PROSE.sub("", page.read_text("utf-8"))
        sentences = re.split(r"(?<=[.!?:;·])\s+|\n\s*\n|\n(?=[-#\d])", prose)
        found += [each for each in sentences if len(each.split()) > MOST_WORDS]
    assert not found, "\n".join(found)
