"""Who made a tensor, read off the stack of its allocation and, where it is there, the source.

A stack holds functions and lines and no objects. That a line is a module's computation shows by the
``forward`` that it stands in, an optimizer's state by torch's own file, a gradient by autograd's
engine; of which class a ``forward`` is, and what a line says, is read in the file itself.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from automicro.doctor.snapshot import Frame, Stack

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, BACKWARD, COPY = "activations", "backward", "copy"
TENSORS, BATCH, EARLIER = "tensors", "batch", "earlier"

_OWN = str(Path(__file__).resolve().parents[1])
_TORCH = re.compile(r"[/\\]torch[/\\](?!.*[/\\]site-packages[/\\])")
_STANDARD = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|^<frozen")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_ENGINE = re.compile(r"autograd::(Engine|python::PythonEngine)")
_OPTIMIZER = re.compile(r"[/\\]optim(izers?)?[/\\](?!lr_scheduler|swa_utils)")
_MODULE = "torch/nn/modules/module.py"
# Methods of a module that allocate parameters and buffers.
_MOVES = {"to", "cuda", "xpu", "half", "float", "double", "bfloat16", "type", "to_empty"}
_MOVES |= {"load_state_dict"}
_MOST_SOURCE = 4 << 20  # bytes: no source is larger


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    Attributes:
        kind: what it is, one of the names of this module.
        owner: who has it: a module's class, a line, an optimizer.
        where: the line nearest to the allocation that is neither torch's nor Python's own.
        caller: the line outside of all modules and constructors that led there.
    """

    kind: str
    owner: str
    where: Frame | None = None
    caller: Frame | None = None


@functools.cache
def origin_of(stack: Stack) -> Origin:
    """Tell who made what this stack allocated.

    >>> origin_of((Frame("/p/model.py", 9, "forward"), Frame("/p/train.py", 3, "main"))).kind
    'activations'
    >>> origin_of(()).kind
    'earlier'
    """
    frames = tuple(each for each in stack if not _is_native(each))
    where = next((each for each in frames if not _is_plumbing(each)), None)
    caller = next((each for each in frames if _is_outside(each)), where)
    kind = _kind(stack, frames, where)
    if kind == ACTIVATIONS:
        owner = module_of(frames)
    elif kind == OPTIMIZER:
        owner = next(_stem(each.file) for each in frames if _OPTIMIZER.search(each.file))
    elif kind in (PARAMETERS, COPY):
        where = caller
        owner = told(caller)
    else:
        owner = told(where)
    return Origin(kind, owner, where, caller)


def _kind(stack: Stack, frames: Stack, where: Frame | None) -> str:
    if not stack:
        return EARLIER
    names = {each.name for each in frames}
    files = [each.file.replace("\\", "/") for each in frames]
    if any(_OPTIMIZER.search(each.file) and each.name != "zero_grad" for each in frames):
        return OPTIMIZER
    if names & {"deepcopy", "__deepcopy__"} or any("swa_utils" in file for file in files):
        return COPY
    recomputes = any(file.endswith("torch/utils/checkpoint.py") for file in files)
    if (
        any(_ENGINE.search(each.name) for each in stack)
        or "_engine_run_backward" in names
        or (recomputes and names & {"unpack_hook", "recompute_fn", "recompute"})
    ):
        return BACKWARD
    if any("torch/nn/parallel/" in file for file in files) and "forward" not in names:
        return GRADIENTS
    if not frames:
        return TENSORS
    inside = {each.name for each, file in zip(frames, files, strict=True) if file.endswith(_MODULE)}
    built = where is not None and where.name in ("__init__", "reset_parameters")
    builds = any("torch/nn/" in file for file in files) and "__init__" in names
    if inside & _MOVES or "from_pretrained" in names or built or builds:
        return PARAMETERS
    if "forward" in names or inside:
        return ACTIVATIONS
    if any(file.endswith(("torch/nn/functional.py", "torch/_tensor.py")) for file in files[:3]):
        return ACTIVATIONS
    if where is not None and re.search(r"\.(to|cuda|xpu)\(|device=", line_of(where)):
        return BATCH
    return TENSORS


def module_of(frames: Stack) -> str:
    """The class whose ``forward`` is nearest to the allocation; torch's own only without another.

    >>> module_of((Frame("/p/gone.py", 9, "forward"),))
    'gone.forward'
    """
    forwards = [each for each in frames if each.name == "forward"]
    others = [each for each in forwards if not _is_plumbing(each)]
    if others:
        return _class_of(others[0])
    if forwards:
        return _class_of(forwards[-1])
    outside = next((each for each in frames if not _is_plumbing(each)), None)
    return told(outside)


def _class_of(frame: Frame) -> str:
    for begin, end, name in _classes(frame.file):
        if begin <= frame.line <= end:
            return name
    return f"{_stem(frame.file)}.{frame.name}"


def told(frame: Frame | None) -> str:
    """A place for people.

    >>> told(Frame("/home/me/project/train.py", 30, "main")), told(None)
    ('train.py:30 (main)', 'a place that nobody wrote down')
    """
    if frame is None:
        return "a place that nobody wrote down"
    return f"{_base(frame.file)}:{frame.line} ({frame.name})"


def line_of(frame: Frame) -> str:
    """What the source says there; empty where there is no source.

    >>> line_of(Frame("/nowhere/train.py", 30, "main"))
    ''
    """
    lines = _source(frame.file)
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def keepers_near(frame: Frame) -> list[tuple[int, str]]:
    """Lines of the same function that may keep a tensor: appended, added up, a graph retained.

    Args:
        frame: in the function.
    """
    lines = _source(frame.file)
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = set()
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        begin, end = getattr(scope, "lineno", 1), getattr(scope, "end_lineno", len(lines))
        is_it = getattr(scope, "name", "<module>") == frame.name and begin <= frame.line <= end
        for node in ast.walk(scope) if is_it else ():
            if _may_keep(node):
                found.add(node.lineno)  # type: ignore[attr-defined]
    return [(line, lines[line - 1].strip()) for line in sorted(found)]


def _may_keep(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        retains = any(
            each.arg in ("retain_graph", "create_graph")
            and isinstance(each.value, ast.Constant)
            and each.value.value is True
            for each in node.keywords
        )
        keeps = name in ("append", "extend", "appendleft", "add", "setdefault", "put")
        return retains or (keeps and not _lets_go(node))
    if isinstance(node, ast.AugAssign):
        return not _lets_go(node) and not isinstance(node.value, ast.Constant)
    if not isinstance(node, ast.Assign) or _lets_go(node):
        return False
    target = node.targets[0]
    if isinstance(target, ast.Name):  # total = total + loss
        return isinstance(node.value, ast.BinOp) and target.id in {
            each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)
        }
    return isinstance(target, ast.Subscript | ast.Attribute)


def _lets_go(node: ast.AST) -> bool:
    names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return bool(names & {"item", "tolist", "numpy"})


@functools.cache
def _classes(file: str) -> list[tuple[int, int, str]]:
    """Classes of a file, the inner ones first."""
    try:
        tree = ast.parse("\n".join(_source(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    return sorted(found, key=lambda each: each[1] - each[0])


@functools.cache
def _source(file: str) -> list[str]:
    path = Path(file)
    try:
        # A snapshot may come from anybody, and shall not have other files shown.
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MOST_SOURCE:
            return []
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []


def _base(file: str) -> str:
    return re.split(r"[/\\]", file)[-1]


def _stem(file: str) -> str:
    return _base(file).removesuffix(".py")


def _is_native(frame: Frame) -> bool:
    return "::" in frame.name or frame.file.endswith((".cpp", ".h", ".c", ".cu", "??"))


def _is_outside(frame: Frame) -> bool:
    """Whether it is a line of a program, and of no module that computes or is made."""
    inside = ("forward", "__init__", "__call__", "<genexpr>", "<listcomp>", "<dictcomp>")
    is_theirs = _is_plumbing(frame) or _INSTALLED.search(frame.file)
    return not is_theirs and frame.name not in inside


def _is_plumbing(frame: Frame) -> bool:
    return bool(
        _TORCH.search(frame.file)
        or _STANDARD.search(frame.file)
        or frame.file.startswith(_OWN)
        or frame.file.startswith("<")
    )
