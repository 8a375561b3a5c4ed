"""What the text of a program says of a line: its class, its function, its loop, and its names."""

import ast
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from automicro.tools.doctor.snapshot import Frame

_MOST_SOURCE = 4 << 20  # bytes: no source is larger
_MOST_NESTED = 150
_NO_GRAD = {"no_grad", "inference_mode"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHS = (ast.With, ast.AsyncWith)


def line_of(frame: Frame) -> str:
    """What the source says there; empty where there is no source.

    >>> line_of(Frame("/nowhere/train.py", 30, "main"))
    ''
    """
    lines = _lines(frame.file)
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def class_at(frame: Frame) -> str | None:
    """The innermost class in which a line stands."""
    tree = tree_of(frame.file)
    nodes = [] if tree is None else ast.walk(tree)  # outer ones first
    classes = [each for each in nodes if isinstance(each, ast.ClassDef)]
    return next((each.name for each in reversed(classes) if holds(each, frame.line)), None)


def name_given(frame: Frame) -> str | None:
    """The name that a line gives to what it makes; None where it gives none, or several.

    >>> name_given(Frame("/nowhere/train.py", 30, "main")) is None
    True
    """
    place = Place.of(frame)
    for node in [] if place is None else inside(body_of(place.function)):
        if isinstance(node, ast.Assign) and holds(node, frame.line):
            return node.targets[0].id if isinstance(node.targets[0], ast.Name) else None
    return None


def call_of(name: str, file: str) -> Frame | None:
    """The first line of a file that calls what begins with a name, in whatever case.

    >>> call_of("adam", "/nowhere/train.py") is None
    True
    """
    tree = tree_of(file)
    for node in [] if tree is None else ast.walk(tree):
        if isinstance(node, ast.Call) and called_by(node).lower().startswith(name.lower()):
            place = Place.of(Frame(file, node.lineno, ""))
            return Frame(file, node.lineno, "" if place is None else place.name)
    return None


def optimized_at(frame: Frame) -> set[str]:
    """Names of which the parameters are given to an optimizer, in the function of a line."""
    place = Place.of(frame)
    found: set[str] = set()
    for node in [] if place is None else inside(body_of(place.function)):
        if isinstance(node, ast.Call) and called_by(node)[:1].isupper():
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and each.attr.endswith("parameters"):
                    found.add(str(root_of(each)))
    return found


def loop_at(frame: Frame, lines: Collection[int] = ()) -> Frame | None:
    """The innermost loop around a line, in its function; None where it stands in none.

    Args:
        frame: the line.
        lines: others that the loop has to hold, if any does.
    """
    place = Place.of(frame)
    loops = [] if place is None else place.loops
    wide = [loop for loop in loops if all(holds(loop, line) for line in lines)]
    for loop in reversed(wide or loops):
        return Frame(frame.file, loop.lineno, frame.name)
    return None


def has_source(frame: Frame) -> bool:
    """Whether the text of a line is there."""
    return tree_of(frame.file) is not None


def is_generator(frame: Frame) -> bool:
    """Whether a line is of a function that yields, and so runs within a loop of its caller."""
    place = Place.of(frame)
    nodes = [] if place is None else inside(body_of(place.function))
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes)


def runs_without_grad(chain: Sequence[Frame]) -> bool:
    """Whether a line is reached under ``no_grad`` or ``inference_mode``.

    Args:
        chain: lines that led to it, the innermost first.
    """
    places = [Place.of(frame) for frame in chain]
    return any(place is not None and place.is_without_grad(place.line) for place in places)


@dataclass(frozen=True)
class Place:
    """A line in its function, and in a loop there."""

    file: str
    line: int
    function: ast.AST
    loop: ast.stmt | None = None
    is_round: bool = True  # whether a round runs here, and not in a function that it calls

    @classmethod
    @functools.cache
    def of(cls, frame: Frame) -> "Place | None":
        tree = tree_of(frame.file)
        if tree is None:
            return None
        function: ast.AST = tree
        for node in ast.walk(tree):  # outer ones first
            if isinstance(node, FUNCTIONS) and holds(node, frame.line):
                function = node
        place = cls(frame.file, frame.line, function)
        return dataclasses.replace(place, loop=(None, *place.loops)[-1])

    @property
    def loops(self) -> list[ast.stmt]:
        """Those around the line, the outermost first. What one iterates over runs within it."""
        return [
            node
            for node in inside(body_of(self.function))
            if isinstance(node, _LOOPS)
            and holds(node, self.line)
            and not any(holds(each, self.line) for each in node.orelse)
        ]

    def within(self, loop: Frame | None) -> "Place":
        """The same in a loop around it."""
        wanted = (each for each in self.loops if loop is not None and each.lineno == loop.line)
        return dataclasses.replace(self, loop=next(wanted, self.loop))

    def called(self) -> "Place":
        """The same in a function that each round calls anew: no loop in it is that of rounds."""
        return dataclasses.replace(self, loop=None, is_round=False)

    @property
    def name(self) -> str:
        return str(getattr(self.function, "name", "<module>"))

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """What runs with it or after it."""
        begin = 0 if self.loop is None else self.loop.lineno
        nodes = inside(body_of(self.function))
        return [node for node in nodes if getattr(node, "lineno", 0) >= begin]

    @functools.cached_property
    def _without_grad(self) -> list[ast.AST]:
        is_all = any(names_in(each) & _NO_GRAD for each in decorators_of(self.function))
        return [self.function] * is_all + [
            node
            for node in inside(body_of(self.function))
            if isinstance(node, _WITHS)
            and any(names_in(item.context_expr) & _NO_GRAD for item in node.items)
        ]

    def is_without_grad(self, line: int) -> bool:
        return any(holds(node, line) for node in self._without_grad)

    def outlives(self, name: str, *, is_rebound: bool = False) -> bool:
        """Whether what has this name, or the name itself, is there before and after a round."""
        bound = _bindings(self.function).get(name, ())
        if self.loop is None:
            is_given = name in parameters_of(self.function)
            return not self.is_local(name) and not (is_rebound and is_given)
        in_loop = [each for each in bound if holds(self.loop, each.lineno)]
        is_anew = any(
            not isinstance(each, ast.AugAssign)
            and name not in names_in(getattr(each, "value", None))
            for each in in_loop
        )
        return not is_anew and (len(in_loop) < len(bound) or not in_loop)

    def is_local(self, name: str) -> bool:
        """Whether it is a variable that the function makes."""
        is_given = name in parameters_of(self.function) or _is_declared(self.function, name)
        return name in _bindings(self.function) and not is_given

    def is_carried(self, name: str, statement: ast.stmt) -> bool:
        """Whether the next round reads what this one gives the name."""
        if self.loop is None:
            return False
        bound = _bindings(self.function).get(name, ())
        is_new = all(holds(self.loop, each.lineno) for each in bound)
        if is_new and name not in parameters_of(self.function):
            return False
        reads = [
            node.lineno
            for node in inside(body_of(self.loop))
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        ]
        return any(line <= (statement.end_lineno or 0) for line in reads)


# Of trees


def body_of(node: ast.AST) -> list[ast.AST]:
    """What a function, a loop or a module does."""
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else [body]  # of a lambda


def inside(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """These and all in them, less what is in functions and classes that are defined there."""
    for node in nodes:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from inside(list(ast.iter_child_nodes(node)))


def holds(node: ast.AST, line: int) -> bool:
    """Whether a line is one of its."""
    begin = getattr(node, "lineno", None)
    return begin is not None and begin <= line <= (getattr(node, "end_lineno", None) or begin)


def decorators_of(function: ast.AST) -> list[ast.expr]:
    """Of a function; none of anything else."""
    return list(getattr(function, "decorator_list", ()))


def names_in(node: ast.AST | None) -> set[str]:
    """Of variables, attributes and functions that an expression mentions."""
    nodes = [] if node is None else list(ast.walk(node))
    return {getattr(each, name) for each in nodes for name in ("id", "attr") if hasattr(each, name)}


def called_by(call: ast.Call) -> str:
    """The last name of the function that is called; empty where it has none."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def root_of(node: ast.AST) -> str | None:
    """The variable from which a target or a method is reached."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def parameters_of(function: ast.AST) -> set[str]:
    """Names that a function gets."""
    arguments = getattr(function, "args", None)
    nodes = [] if arguments is None else ast.walk(arguments)
    return {each.arg for each in nodes if isinstance(each, ast.arg)}


def _is_declared(function: ast.AST, name: str) -> bool:
    nodes = inside(body_of(function))
    return any(isinstance(each, ast.Global | ast.Nonlocal) and name in each.names for each in nodes)


@functools.cache
def _bindings(function: ast.AST) -> Mapping[str, Sequence[ast.stmt]]:
    """By name, the statements of a function that give it a value."""
    found: dict[str, list[ast.stmt]] = {}
    for node in inside(body_of(function)):
        targets: list[ast.expr | None] = []
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
            targets.append(node.target)
        elif isinstance(node, ast.With | ast.AsyncWith):
            targets += [item.optional_vars for item in node.items]
        given = (each for target in targets if target is not None for each in ast.walk(target))
        for each in given:
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                found.setdefault(each.id, []).append(node)  # type: ignore[arg-type]
    return found


@functools.cache
def functions_in(file: str) -> dict[str, list[ast.AST]]:
    """Functions and methods of a file by name, less constructors and forwards."""
    found: dict[str, list[ast.AST]] = {}
    tree = tree_of(file)
    for node in [] if tree is None else ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.name not in ("__init__", "forward"):
            found.setdefault(node.name, []).append(node)
    return found


@functools.cache
def tree_of(file: str) -> ast.Module | None:
    """Of a file; None where there is none, or none that can be read."""
    lines = _lines(file)
    try:
        tree = ast.parse("\n".join(lines)) if lines else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes: list[ast.AST] = [] if tree is None else [tree]
    for _ in range(_MOST_NESTED):  # it is walked by functions that call themselves
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
        if not nodes:
            return tree
    return None


@functools.cache
def _lines(file: str) -> list[str]:
    path = Path(file)
    try:
        # A snapshot may come from anybody, and shall not have other files shown.
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MOST_SOURCE:
            return []
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []
