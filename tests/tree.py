"""Files of the package as text: modules, syntax trees and imports."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "automicro"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, cached because walking a tree is slow."""
    return list(ast.walk(parsed(path)))


def dotted(path: Path) -> str:
    """Return a file's module name: automicro/policy/policy.py is automicro.policy.policy."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCES}


def unit(module: str) -> str:
    """Return the folder or top-level file of the package that contains a module."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def imports(path: Path, *, top_only: bool = False) -> frozenset[str]:
    """Return the absolute names that a file imports; ``from a import b`` gives ``a.b``."""
    statements = top_level_statements(parsed(path)) if top_only else nodes(path)
    found: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively: name it whole"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def top_level_statements(tree: ast.Module) -> list[ast.AST]:
    """Return the code that runs on import: no functions, no ``if TYPE_CHECKING``."""
    statements: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            continue  # no expression imports
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        statements.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return statements


def own_module(name: str) -> str | None:
    """Return the module of automicro that an imported name is or belongs to."""
    while name.split(".")[0] == "automicro":
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def loaded_by(module: str) -> set[str]:
    """Return the modules loaded by importing this one, including parent packages."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in loaded:
            continue
        loaded.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        found = (own_module(each) for each in imports(MODULES[name], top_only=True))
        waiting += [each for each in found if each is not None]
    return loaded


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    taken = function.args
    names = [each.arg for each in taken.posonlyargs + taken.args + taken.kwonlyargs]
    return len([name for name in names if name not in ("self", "cls")])
