"""What integrations share: imports and seams of hosts, options, places of methods, reports."""

import functools
import importlib
import importlib.metadata
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from automicro.batch.tensors import tensor_leaves
from automicro.checking.reading import LOSS, Reading, relative_errors
from automicro.features import WORDS
from automicro.loss.conventions import Output
from automicro.microbatcher import Microbatcher

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Batches that one optimizer step of a host's was made of, beside their rows at once.

    Attributes:
        place: in an epoch: ``"the first"`` or ``"the last"``.
        rows: of each batch.
        divisor: how many batches a step has, as a rule.
        loss: that the host has added up.
        whole_loss: of all rows in one batch.
        error: relative, of the worst parameter's gradient.
        ratio: of the norms of the gradients, the host's by that of one batch.
    """

    place: str
    rows: tuple[int, ...]
    divisor: int
    loss: float
    whole_loss: float
    error: float
    ratio: float

    @classmethod
    def of(
        cls, place: str, found: Reading, whole: Reading, *, rows: tuple[int, ...], divisor: int
    ) -> "Group":
        """What the host's gradient, and that of one batch, come to."""
        return cls(
            place=place,
            rows=rows,
            divisor=divisor,
            loss=found.numbers[LOSS],
            whole_loss=whole.numbers[LOSS],
            error=max(relative_errors(found, whole).values()),
            ratio=found.norm / whole.norm if whole.norm else 1.0,
        )

    def __str__(self) -> str:
        counts = " + ".join(map(str, self.rows))
        text = (
            f"{self.place} step of an epoch, of {counts} rows: the loss is {self.loss:.6g} and of "
            f"one batch {self.whole_loss:.6g}, the gradient differs by {self.error:.1e}"
        )
        if len(self.rows) < self.divisor:
            text += (
                f"; it has {len(self.rows)} of {self.divisor} batches, and is {self.ratio:.2f} "
                "as long"
            )
        return text


@dataclass(frozen=True, kw_only=True)
class AccumulationReport:
    """Whether a host's own accumulation gives the gradient of the full batch.

    Attributes:
        groups: that were compared.
        tolerance: relative errors up to this one are rounding.
        remedy: what to do where it does not.
    """

    groups: tuple[Group, ...]
    tolerance: float
    remedy: str

    @property
    def is_exact(self) -> bool:
        """Whether every gradient is that of its rows in one batch."""
        return all(each.error <= self.tolerance for each in self.groups)

    def __str__(self) -> str:
        listed = "".join(f"\n  {each}" for each in self.groups)
        if self.is_exact:
            return f"exact: accumulated gradients are those of one batch{listed}"
        return (
            f"not exact: accumulated gradients are not those of one batch{listed}\n  {self.remedy}"
        )


def check_options(taken: str, options: Mapping[str, Any], *, own: Sequence[str], who: str) -> None:
    """Refuse an option of ``enable`` that there is not, or that the host says.

    Args:
        taken: what ``enable`` takes, in a word.
        options: that were given beside it.
        own: names of those that the host says.
        who: says them.

    Raises:
        TypeError: one of these was given.

    Example:
        >>> check_options("model", {"microbatch_size": 4}, own=["forward"], who="the host")
    """
    for name in own:
        if name in options:
            raise TypeError(f"enable({taken}, {name}=…): {who} says that itself; leave it out")
    unknown = set(options) - {*inspect.signature(Microbatcher).parameters, *WORDS}
    if unknown:
        raise TypeError(
            f"enable has no option {', '.join(sorted(unknown))}; use those of Microbatcher: "
            "microbatch_size, eval_microbatch_size, loss_average, memory_limit …"
        )


def import_host(name: str, *, extra: str) -> ModuleType:
    """A module of a host's.

    Args:
        name: of the module.
        extra: of automicro, which installs it.

    Raises:
        ImportError: it is not there; the message says how to get it.

    Example:
        >>> import_host("json", extra="json").__name__
        'json'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # it is there, and lacks something else
        raise ImportError(
            f"automicro.integrations.{extra} works inside {name.partition('.')[0]}, which is not "
            f"installed; pip install 'automicro[{extra}]'",
            name=error.name,
        ) from error


def require_seam(
    owner: Any, name: str, parameters: Sequence[str] = (), *, host: str, supported: str
) -> Any:
    """A method of the host's that an integration stands on.

    Args:
        owner: the object or module that has it.
        name: of the method.
        parameters: that it has to take by these names.
        host: the package, as it is installed.
        supported: which versions are, in words.

    Raises:
        ImportError: this version of the host has it no more, or it takes other parameters.

    Example:
        >>> import json
        >>> require_seam(json, "dumps", ["obj"], host="json", supported="json 2") is json.dumps
        True
    """
    found: Any = getattr(owner, name, None)
    place = getattr(owner, "__name__", type(owner).__name__)
    lacks = [] if callable(found) else [f"{place}.{name}"]
    if not lacks:
        taken = inspect.signature(found).parameters
        lacks = [f"the parameter {each!r} of {name}" for each in parameters if each not in taken]
    if not lacks:
        return found
    try:
        version = importlib.metadata.version(host)
    except importlib.metadata.PackageNotFoundError:
        version = "of no known version"
    raise ImportError(
        f"{host} {version} lacks {', '.join(lacks)}, which automicro stands on; use {supported}, "
        "or tell automicro's developers",
        name=host,
    )


def seen_of(loss: Tensor | None, outputs: Any, logged: Mapping[str, Any], *, rows: int) -> Output:
    """What a look sees of a host's step: its loss, outputs with rows, and numbers.

    Hosts give such numbers as means over microbatches, weighted by rows. Those that are always the
    loss are none of them: they are what the loss comes to.

    Args:
        loss: of these rows.
        outputs: that the step gives.
        logged: numbers that it logs, by name.
        rows: how many there are.

    Example:
        >>> import torch
        >>> outputs = {"logits": torch.zeros(4, 2), "most": torch.tensor(3.0)}
        >>> seen = seen_of(None, outputs, {"accuracy": 0.5}, rows=4)
        >>> list(seen.outputs), list(seen.told.items())
        (['logits'], [("the output 'most'", (3.0, 4)), ("log('accuracy')", (0.5, 4))])
    """
    leaves = dict(tensor_leaves(outputs))
    numbers = {f"the output {path!r}": each for path, each in leaves.items() if each.dim() == 0}
    numbers |= {f"log({name!r})": each for name, each in logged.items()}
    values = {name: _number(each) for name, each in numbers.items()}
    told = {name: (each, rows) for name, each in values.items() if each is not None}
    own = _number(loss)
    return Output(
        loss,
        {},
        {path: each for path, each in leaves.items() if each.dim()},
        told=told,
        told_as_loss=frozenset(name for name in told if values[name] == own),
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex()
        value = value.detach()
    return float(value) if is_number else None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not hold its object; any other function is as it was.

    Example:
        >>> class Host:
        ...     def step(self):
        ...         return "done"
        >>> host = Host()
        >>> step = weakly(host.step)
        >>> step()
        'done'
        >>> del host
        >>> step()
        Traceback (most recent call last):
        ...
        ReferenceError: the object of Host.step is there no more
    """
    if not inspect.ismethod(method):
        return method
    reference, name = weakref.WeakMethod(method), method.__qualname__

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError(f"the object of {name} is there no more")
        return found(*args, **kwargs)

    return call


class Replacements:
    """Methods of one object or another that stand in for the host's own, until they are undone.

    On the instance, so that subclasses keep theirs and other objects of the class are left alone.

    Example:
        >>> class Host:
        ...     def step(self):
        ...         return "the host's"
        >>> host, replacements = Host(), Replacements()
        >>> own = replacements.put(host, "step", lambda: "ours, around " + own())
        >>> host.step()
        "ours, around the host's"
        >>> replacements.undo()
        >>> host.step(), vars(host)
        ("the host's", {})
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> Any:
        """Let a function stand in the place of a method; returns that."""
        own = getattr(owner, name)
        earlier = vars(owner).get(name, _MISSING)
        self._undo.append(functools.partial(_put_back, owner, name, earlier))
        setattr(owner, name, _StandIn(function))
        return own

    def undo(self) -> None:
        """Give every place back, the last first."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Replacements":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


class _StandIn:
    """A function, of which another for each batch is no news to what captures its owner."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _put_back(owner: Any, name: str, earlier: Any) -> None:
    if earlier is _MISSING:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, earlier)
