"""The walls of the house: which module may import which, what every file must have."""

import ast
import graphlib
import importlib
import inspect
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "automicro"

# From the ground up. A module imports only from layers below its own; the modules of one layer do
# not know each other. A name stands for a file or for a folder with all in it.
LAYERS = (
    (
        "byte_sizes",
        "errors",
        "origins",
        "scalars",
        "shards",
        "showing",
        "synonyms",
        "torch_private",
        "torch_private_compiler",
        "torch_private_distributed",
        "version",
    ),
    (
        "checks",
        "content",
        "duration",
        "extra_passes",
        "memory",
        "module_index",
        "observer",
        "oom",
        "ranks",
        "reach",
        "results",
        "slicing",
        "warn",
        "weighting",
        "wrapped",
    ),
    (
        "batchnorm",
        "checkpoints",
        "compilation",
        "distributed",
        "forward",
        "inputs",
        "loggers",
        "model_modes",
        "optimization",
        "policy",
        "schedules",
        "size_cache",
        "transaction",
        "transfer",
    ),
    ("attempts", "metric_guard", "passes", "probe", "splitting"),
    ("filling", "finding_ranks", "sharing"),
    ("kept",),
    ("work",),
    ("microbatcher",),
    ("events",),
    ("callbacks",),
    ("demo", "torture", "trainer", "verification"),
    ("cli",),
)
# These gather names and may import everything; nothing may import them.
GATHERING = ("__init__", "__main__")

# Where each import of a package that not everybody needs, or that is slow to import, may stand.
ONLY_IN = {"omegaconf": "cli"}
NEVER_AT_MODULE_TOP_OUTSIDE_DEMO = ("matplotlib", "sklearn", "transformers")
# Where everything stands that a new version of torch may take away.
PRIVATE_NAMES_OF_TORCH_IN = (
    "torch_private",
    "torch_private_compiler",
    "torch_private_distributed",
)

FORBIDDEN_STEMS = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
MOST_LINES = 600

# The public names are a contract: adding one is a decision, removing one breaks somebody.
PUBLIC_NAMES = [
    "AutomicroError",
    "AutomicroWarning",
    "BatchError",
    "BatchNormWarning",
    "BufferWarning",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "DataLoaderError",
    "EvalResult",
    "Evaluator",
    "FitSummary",
    "Fixed",
    "DeterminismWarning",
    "GradientWarning",
    "Halving",
    "LoggerWarning",
    "LossAverageWarning",
    "LossError",
    "MemoryBudget",
    "MetricWarning",
    "Microbatcher",
    "NonFiniteLossError",
    "OptimizerStepError",
    "Outcome",
    "Policy",
    "RollbackError",
    "Run",
    "SampleTooLargeError",
    "SchedulerWarning",
    "SizeCacheWarning",
    "StepResult",
    "Trainer",
    "UnsplittableModelError",
    "VerifyReport",
    "find_batchnorm",
    "is_extra_pass",
    "is_out_of_memory",
    "num_rows",
    "register_batch_type",
    "split_batch",
    "verify",
]

SOURCES = sorted(PACKAGE.rglob("*.py"))


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


def dotted(path: Path) -> str:
    """Return a file's module name: automicro/policy/fixed.py is automicro.policy.fixed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCES}


def unit(module: str) -> str:
    """Return the name by which a module stands in LAYERS."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Return the absolute names of what a file imports; ``from a import b`` gives ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = top_level_statements(tree) if top_only else list(ast.walk(tree))
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively: name it whole"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_level_statements(tree: ast.Module) -> list[ast.AST]:
    """Return what runs on import: all but the inside of functions and of ``if TYPE_CHECKING``."""
    statements: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        statements.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return statements


def own_module(name: str) -> str | None:
    """Return the module of automicro that an imported name is, or lies in."""
    while name.split(".")[0] == "automicro":
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def layer_of(module: str) -> int:
    """Return the height of a module, or of a name in it, 0 at the ground."""
    name = unit(module)
    for height, names in enumerate(LAYERS):
        if name in names:
            return height
    raise AssertionError(
        f"{module} stands in no layer: add {name!r} to LAYERS in tests/test_architecture.py, in "
        f"the lowest layer that is above everything it imports"
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_module_stands_in_a_layer(module: str) -> None:
    if unit(module) not in GATHERING:
        layer_of(module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    if unit(module) in GATHERING:
        return
    for name in imports(MODULES[module]):
        if name.split(".")[0] != "automicro" or unit(name) == unit(module):
            continue
        assert any(unit(name) in names for names in LAYERS), (
            f"{module} imports {name} from the package itself: name the module that has it"
        )
        assert layer_of(name) < layer_of(module), (
            f"{module} imports {name}, which does not lie below it: move what both need into a "
            f"lower layer, or hand it in as an argument"
        )


def test_no_module_imports_itself_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        targets = {own_module(name) for name in imports(path, top_only=True)}
        graph[module] = {target for target in targets if target is not None and target != module}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_are_imported_where_they_are_used(module: str) -> None:
    for name in imports(MODULES[module]):
        home = ONLY_IN.get(name.split(".")[0])
        assert home is None or unit(module) == home, f"{module} imports {name}: only {home} may"
    if unit(module) == "demo":
        return
    for name in imports(MODULES[module], top_only=True):
        assert name.split(".")[0] not in NEVER_AT_MODULE_TOP_OUTSIDE_DEMO, (
            f"{module} imports {name} at its top, so everybody pays for it: import it in the "
            f"function that needs it"
        )


@pytest.mark.parametrize("module", MODULES)
def test_private_names_of_torch_stand_in_one_file(module: str) -> None:
    if unit(module) in PRIVATE_NAMES_OF_TORCH_IN:
        return
    found = [
        name
        for name in imports(MODULES[module])
        if name.split(".")[0] == "torch" and any(map(is_private, name.split(".")))
    ]
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found += {node.attr} & PRIVATE_ATTRIBUTES_OF_TORCH
        # getattr(module, "_buffers"), sys.modules["torch._dynamo"]
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str):
            found += {text} & PRIVATE_ATTRIBUTES_OF_TORCH
            found += [text] if text.startswith("torch._") else []
    assert not found, (
        f"{module} uses {', '.join(found)} of torch: give it a public name in "
        f"automicro/{PRIVATE_NAMES_OF_TORCH_IN[0]}.py"
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_every_file_has_one_subject(module: str) -> None:
    path = MODULES[module]
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{module} has {lines} lines, at most {MOST_LINES}: split it"
    assert path.stem not in FORBIDDEN_STEMS, f"{module} does not say what it holds: rename it"


def test_public_names_are_pinned() -> None:
    automicro = importlib.import_module("automicro")
    assert sorted(automicro.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(importlib.import_module("automicro"), name)
    docstring = inspect.getdoc(value) or ""
    # A dataclass without a docstring gets its signature for one.
    documented = bool(docstring) and not docstring.startswith(f"{name}(")
    assert documented, f"automicro.{name} has no docstring of its own"


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
