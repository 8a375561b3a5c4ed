"""Which line of a program may keep a tensor that another line made.

No snapshot says which object holds a tensor, and the text often does. A value is followed from the
line that made it, through the names that it gets, to whatever stores it and outlives the round: a
list from before the loop, an attribute, a global, a sum, a cache, an exception with its traceback.
"""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from automicro.tools.doctor.snapshot import Frame
from automicro.tools.doctor.source import (
    FUNCTIONS,
    Place,
    called_by,
    decorators_of,
    functions_in,
    holds,
    names_in,
    parameters_of,
    root_of,
    tree_of,
)

COLLECTS, SUMS, CATCHES, CACHES = "collects", "sums", "catches", "caches"
RETAINS, CARRIES, HANDS_ON, SETS = "retains", "carries", "hands on", "sets"
# The likelier first. The last two keep one value, or none: they count where nothing else does.
_RANK = (COLLECTS, SUMS, CATCHES, CACHES, RETAINS, CARRIES, HANDS_ON, SETS)
_STRONG, _WEAK = (COLLECTS, SUMS, CATCHES, CACHES), (HANDS_ON, SETS)

_NOTHING, _VALUES, _GRAPH = 0, 1, 2  # what of a tensor an expression has
_COLLECTING = {
    "add", "append", "appendleft", "collect", "enqueue", "extend", "heappush", "insert", "log",
    "push", "push_back", "put", "put_nowait", "record", "register", "register_buffer", "remember",
    "save", "setattr", "setdefault", "store", "submit", "track", "update", "write",
}  # fmt: skip
_DRAINING = {"cat", "concat", "deque", "dict", "list", "set", "sorted", "stack", "tuple"}
_NUMBERS = {"item", "tolist", "numpy", "shape", "size", "dim", "ndim", "numel", "dtype", "device"}
_TO_NUMBERS = {"float", "int", "len", "str", "bool", "repr", "print", "isinstance", "range"}
_WITHOUT_GRAPH = {"detach", "detach_", "data", "argmax", "argmin", "eq", "ne", "long"}
_GRADIENTS = {"grad", "jacobian", "hessian", "vjp", "hvp", "vhp", "jvp"}
_BACKWARDS = {"backward", "manual_backward"} | _GRADIENTS
_MADE = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Compare)


@dataclass(frozen=True)
class Keeper:
    """A line that may keep tensors of earlier rounds.

    Attributes:
        frame: where.
        how: ``"collects"``, ``"sums"``, ``"catches"`` (an exception, whose traceback holds what its
            frames held), ``"caches"``, ``"retains"`` (a graph), ``"carries"`` (a state into the
            next round), ``"hands on"`` or ``"sets"``.
        has_graph: whether what it keeps comes with its graph, as far as the text tells.
        is_local: whether a variable of its function keeps it, which later lines may use up.
    """

    frame: Frame
    how: str
    has_graph: bool
    is_local: bool = False

    @property
    def is_strong(self) -> bool:
        """Whether it keeps something of each round, and not of the last."""
        return self.how in _STRONG


def reaches_backward(chain: Sequence[Frame]) -> bool | None:
    """Whether a backward is called for what a line makes, as far as its functions tell.

    Args:
        chain: lines that led to it, the innermost first.

    Returns:
        None where there is no source.
    """
    flows = [_Flow(place) for place in map(Place.of, chain) if place is not None]
    for flow in flows:
        flow.run()
    return any(flow.goes_backward for flow in flows) if flows else None


@functools.cache
def goes_backward(file: str) -> bool:
    """Whether a file calls a backward anywhere."""
    tree = tree_of(file)
    calls = [] if tree is None else [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return any(called_by(call) in _BACKWARDS for call in calls)


def find_keepers(
    chain: Sequence[Frame],
    *,
    loop: Frame | None = None,
    gradients: bool = False,
    graphs: bool = False,
) -> list[Keeper]:
    """What may keep the tensors of a line, the likeliest first.

    Args:
        chain: lines that led to it, the innermost first, to that in the loop of rounds.
        loop: of rounds; the innermost around the last line if None.
        gradients: whether the tensors are gradients, which a backward makes and no line.
        graphs: whether whole graphs are kept, so that lines that detach are less likely.
    """
    places = [place for place in map(Place.of, chain) if place is not None]
    places[-1:] = [place.within(loop) for place in places[-1:]]
    called = [place if place == places[-1] else place.called() for place in places]
    found = _all_of(_Flow(place, gradients=gradients) for place in called)
    if not any(keeper.is_strong for keeper in found):  # a hook is called from where none shows
        files = dict.fromkeys(frame.file for frame in chain)
        found += [keeper for file in files for keeper in _by_hooks(file)]
    if all(keeper.how in _WEAK for keeper in found):  # the loop of rounds may be another
        found += _all_of(_Flow(place, gradients=gradients) for place in places)
    if any(keeper.how not in _WEAK for keeper in found):
        found = [keeper for keeper in found if keeper.how not in _WEAK]
    first: dict[tuple[str, int], Keeper] = {}
    for keeper in found:
        first.setdefault(keeper.frame[:2], keeper)
    return sorted(
        first.values(),
        key=lambda keeper: (graphs and not keeper.has_graph, _RANK.index(keeper.how)),
    )


def _all_of(flows: Iterator["_Flow"]) -> list[Keeper]:
    return [keeper for flow in flows for keeper in flow.run()]


@functools.cache
def _by_hooks(file: str) -> list[Keeper]:
    """What functions of a file would keep of what they get."""
    tree = tree_of(file)
    nodes = [] if tree is None else ast.walk(tree)
    functions = [node for node in nodes if isinstance(node, (*FUNCTIONS, ast.Lambda))]
    found = _all_of(_Flow.through(Place(file, 0, function)) for function in functions)
    return [keeper for keeper in found if keeper.is_strong]


@dataclass
class _Flow:
    """Where a value goes within one function."""

    place: Place
    gradients: bool = False  # whether they are followed, and not what the line makes
    names: dict[str, int] = field(default_factory=dict)  # what each has of the value
    enters: bool = True  # whether functions that get it are looked into
    goes_backward: bool = False
    _caught: set[str] = field(default_factory=set)
    _attributes: set[str] = field(default_factory=set)  # of the names, those with dots
    _found: dict[tuple[str, int], Keeper] = field(default_factory=dict)

    @classmethod
    def through(cls, place: Place, given: Mapping[str, int] | None = None) -> "_Flow":
        """Of what a function gets."""
        if given is None:
            given = dict.fromkeys(parameters_of(place.function), _GRAPH)
        names = {name: level for name, level in given.items() if name not in ("self", "cls")}
        return cls(place, names=names, enters=False)

    def run(self) -> list[Keeper]:
        for decorator in decorators_of(self.place.function):
            if any("cache" in name or "memo" in name for name in names_in(decorator)):
                self._keep(decorator, CACHES, _VALUES)
        known: dict[str, int] | None = None
        while known != self.names:
            known = dict(self.names)
            for node in self.place.nodes:
                self._see(node)
            if isinstance(self.place.function, ast.Lambda):
                self._do(self.place.function.body)
        return list(self._found.values())

    def _see(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._give(target, node.value, node)
            case ast.AugAssign() | ast.AnnAssign() if node.value is not None:
                self._give(node.target, node.value, node)
            case ast.NamedExpr():
                self._have(node.target.id, self._level(node.value))
            case ast.For() | ast.AsyncFor():
                for name in names_in(node.target):
                    self._have(name, self._level(node.iter))
            case ast.Try() if any(holds(each, self.place.line) for each in node.body):
                for name in (handler.name for handler in node.handlers if handler.name):
                    self._caught.add(name)
                    self._have(name, _GRAPH)
            case ast.FunctionDef() | ast.AsyncFunctionDef():  # a closure over it
                closed = names_in(node) & self.names.keys()
                self._have(node.name, max((self.names[each] for each in closed), default=0))
            case ast.Call():
                self._call(node)
                if called_by(node) in _DRAINING:
                    self._comprehend(node)
            case ast.Expr():
                self._do(node.value)
            case ast.ListComp() | ast.DictComp() | ast.SetComp():
                self._comprehend(node)

    def _give(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        level = self._level(value)
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._give(each, value, statement)
        elif isinstance(target, ast.Starred):
            self._give(target.value, value, statement)
        elif level:
            self._store(target, value, level, statement)

    def _store(self, target: ast.expr, value: ast.expr, level: int, statement: ast.stmt) -> None:
        root = root_of(target)
        if root is None:
            return
        is_name = isinstance(target, ast.Name)
        outlives = self.place.outlives(root, is_rebound=is_name)
        is_sum = isinstance(statement, ast.AugAssign)
        is_own = is_sum or ast.unparse(target) in map(ast.unparse, _expressions(value))
        # x + layer(x) carries x on, and total + loss adds up.
        is_sum = is_sum or (isinstance(value, ast.BinOp) and is_own and root not in _given(value))
        if outlives and is_own and _is_list(value):
            self._keep(statement, COLLECTS, level)
        elif outlives and is_sum and level == _GRAPH:
            self._keep(statement, SUMS, level)
        elif level == _GRAPH and (
            self.place.is_carried(root, statement) if is_name else outlives and is_own
        ):
            self._keep(statement, CARRIES, level)
        elif outlives and not is_name and not is_own:
            self._keep(statement, self._how(target, value), level)
        if outlives and not is_name:
            self._attributes.add(ast.unparse(target))
        self._have(ast.unparse(target) if outlives else root, level)

    def _how(self, target: ast.expr, value: ast.expr) -> str:
        if names_in(value) & self._caught:
            return CATCHES
        return COLLECTS if isinstance(target, ast.Subscript) else SETS

    def _call(self, call: ast.Call) -> None:
        if any(
            each.arg in ("retain_graph", "create_graph")
            and not (isinstance(each.value, ast.Constant) and not each.value.value)
            for each in call.keywords
        ):
            self._keep(call, RETAINS, _GRAPH)
        level, name = self._argument_level(call), called_by(call)
        if name in _BACKWARDS and max(level, self._level(call.func)) == _GRAPH:
            self.goes_backward = True
        functions = functions_in(self.place.file).get(name, ())
        for function in functions if level and self.enters else ():
            flow = _Flow.through(Place(self.place.file, 0, function), self._given(call, function))
            found = flow.run() if function is not self.place.function else []
            self._found |= {each.frame[:2]: each for each in found if each.how in (COLLECTS, SUMS)}
            self.goes_backward |= flow.goes_backward

    def _given(self, call: ast.Call, function: ast.AST) -> dict[str, int]:
        """What each parameter of a function has of the value, in this call."""
        arguments: ast.arguments = function.args  # type: ignore[attr-defined]
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        is_method = isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"])
        given = dict.fromkeys(parameters_of(function), _NOTHING)
        rest = [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
        for index, value in enumerate(call.args, start=int(is_method)):
            for name in names[index : index + 1] or rest[:1]:
                given[name] = max(given[name], self._level(value))
        for keyword in call.keywords:
            for name in [keyword.arg] if keyword.arg in given else rest[-1:]:
                given[str(name)] = max(given[str(name)], self._level(keyword.value))
        return given

    def _do(self, call: ast.expr) -> None:
        """A call for its effect alone, which may be to keep what it gets."""
        if not isinstance(call, ast.Call):
            return
        level, name, root = self._argument_level(call), called_by(call), root_of(call.func)
        if not level or root is None or name in _TO_NUMBERS | _BACKWARDS:
            return
        is_method = isinstance(call.func, ast.Attribute) or name == "setattr"
        if not self.place.outlives(root):
            self._have(root, level)
        elif is_method and name in _COLLECTING:
            self._keep(call, CATCHES if names_in(call) & self._caught else COLLECTS, level)
        elif is_method and name.endswith("_") and level == _GRAPH:
            self._keep(call, SUMS, level)
        elif root not in self.names:
            self._keep(call, HANDS_ON, level)

    def _comprehend(self, node: ast.expr) -> None:
        """A loop in one expression that makes a list of what each round makes."""
        is_loop = self.place.is_round and self.place.loop is None
        if is_loop and holds(node, self.place.line) and self._level(node):
            self._keep(node, COLLECTS, self._level(node))

    def _level(self, node: ast.AST | None) -> int:
        """What of the value an expression has: nothing, its values, or these with their graph."""
        name = called_by(node) if isinstance(node, ast.Call) else getattr(node, "attr", "")
        is_number = isinstance(node, ast.Call) and name in _TO_NUMBERS
        if node is None or is_number or name in _NUMBERS or isinstance(node, ast.JoinedStr):
            return _NOTHING
        if isinstance(node, ast.Name):
            return self.names.get(node.id, _NOTHING)
        if self._attributes and isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if path in self._attributes:
                return self.names[path]
        level = max((self._level(each) for each in ast.iter_child_nodes(node)), default=_NOTHING)
        if name in _GRADIENTS if self.gradients else self._is_made_here(node):
            level = _GRAPH
        if name in _WITHOUT_GRAPH or isinstance(node, ast.Compare):
            level = min(level, _VALUES)
        if level and self.place.is_without_grad(getattr(node, "lineno", 0)):
            level = _VALUES
        return _NOTHING if level == _VALUES and _goes_to_host(node) else level

    def _is_made_here(self, node: ast.AST) -> bool:
        return isinstance(node, _MADE) and holds(node, self.place.line)

    def _argument_level(self, call: ast.Call) -> int:
        given = [*call.args, *(each.value for each in call.keywords)]
        return max((self._level(each) for each in given), default=_NOTHING)

    def _have(self, name: str, level: int) -> None:
        if level:
            self.names[name] = max(level, self.names.get(name, _NOTHING))

    def _keep(self, node: ast.AST, how: str, level: int) -> None:
        frame = Frame(self.place.file, getattr(node, "lineno", 0), self.place.name)
        loop = self.place.loop
        if loop is not None and not holds(loop, frame.line):
            return
        root = root_of(node.func if isinstance(node, ast.Call) else getattr(node, "target", node))
        is_local = root is not None and self.place.is_local(root)
        known = self._found.get(frame[:2])
        if known is None or _RANK.index(how) < _RANK.index(known.how):
            self._found[frame[:2]] = Keeper(frame, how, level == _GRAPH, is_local)


def _is_list(value: ast.expr) -> bool:
    """Whether it is a list or tuple, or something and one of them."""
    if isinstance(value, ast.BinOp):
        return _is_list(value.left) or _is_list(value.right)
    return isinstance(value, ast.List | ast.Tuple | ast.ListComp)


def _goes_to_host(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    given = [each.value for each in node.args if isinstance(each, ast.Constant)]
    return called_by(node) == "cpu" or (called_by(node) == "to" and "cpu" in given)


def _given(value: ast.expr) -> set[str]:
    """Names that the calls in an expression get."""
    calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
    return {name for call in calls for each in call.args for name in names_in(each)}


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    return (each for each in ast.walk(node) if isinstance(each, ast.expr))
