"""The files of the package as text: their modules, syntax trees and imports."""

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
    """Return all of a file: walking a tree takes longer than what is asked of it."""
    return list(ast.walk(parsed(path)))


def dotted(path: Path) -> str:
    """Return a file's module name: automicro/policy/policy.py is automicro.policy.policy."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCES}


def unit(module: str) -> str:
    """Return the folder of the package, or the file beside them, that a module lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def imports(path: Path, *, top_only: bool = False) -> frozenset[str]:
    """Return the absolute names of what a file imports; ``from a import b`` gives ``a.b``."""
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
    """Return what runs on import: all but the inside of functions and of ``if TYPE_CHECKING``."""
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
    """Return the module of automicro that an imported name is, or lies in."""
    while name.split(".")[0] == "automicro":
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def loaded_by(module: str) -> set[str]:
    """Return the modules that importing this one loads, parent packages included."""
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
