"""Who made a tensor, read off the stack of its allocation and, where it is there, the source.

A stack holds functions and lines and no objects. That a line is a module's computation shows by the
``forward`` that it stands in, an optimizer's state by torch's own file, a gradient by autograd's
engine; of which class a ``forward`` is, and what a line says, is read in the file itself.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from automicro.tools.doctor.snapshot import Frame, Stack
from automicro.tools.doctor.source import class_at, line_of

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, BACKWARD, COPY = "activations", "backward", "copy"
TENSORS, BATCH, EARLIER = "tensors", "batch", "earlier"

_OWN = str(Path(__file__).resolve().parents[2])
_TORCH = re.compile(r"[/\\]torch[/\\](?!.*[/\\]site-packages[/\\])")
_STANDARD = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|^<frozen")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_ENGINE = re.compile(r"autograd::(Engine|python::PythonEngine)")
_OPTIMIZER = re.compile(r"[/\\]optim(izers?)?[/\\](?!lr_scheduler|swa_utils)")
_MODULE = "torch/nn/modules/module.py"
# Methods of a module that allocate parameters and buffers.
_MOVES = {"to", "cuda", "xpu", "half", "float", "double", "bfloat16", "type", "to_empty"}
_MOVES |= {"load_state_dict"}


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    Attributes:
        kind: what it is, one of the names of this module.
        owner: who has it: a module's class, a line, an optimizer.
        where: the line nearest to the allocation that is neither torch's nor Python's own.
        chain: the program's lines that led there, the innermost first.
        part: of a model or its optimizer, what of it: the class of torch that was made, or the
            function of the optimizer.
        is_driven: whether a library called the program's lines, and may do more with them.
    """

    kind: str
    owner: str
    where: Frame | None = None
    chain: Stack = ()
    part: str = ""
    is_driven: bool = False

    @property
    def callers(self) -> Stack:
        """The lines of the chain that are outside of all modules and constructors."""
        return tuple(each for each in self.chain if is_outside(each))

    @property
    def caller(self) -> Frame | None:
        """The innermost of them."""
        return next(iter(self.callers), self.where)


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
    chain = tuple(each for each in frames if _is_program(each))
    caller = next((each for each in chain if is_outside(each)), where)
    part = ""
    kind = _kind(stack, frames, where)
    if kind == ACTIVATIONS:
        owner = module_of(frames)
    elif kind == OPTIMIZER:
        part, owner = next((each.name, _stem(each.file)) for each in frames if _is_optimizer(each))
        if owner == "optimizer" and where is not None:  # a class of the program
            part, owner = where.name, class_at(where) or owner
    elif kind in (PARAMETERS, COPY):
        part = next((_class_of(each) for each in frames if _is_layer(each)), "")
        where = caller
        owner = told(caller)
    else:
        owner = told(where)
    return Origin(kind, owner, where, chain, part, _is_driven(frames, chain))


def _kind(stack: Stack, frames: Stack, where: Frame | None) -> str:
    if not stack:
        return EARLIER
    names = {each.name for each in frames}
    files = [each.file.replace("\\", "/") for each in frames]
    step = next((index for index, each in enumerate(frames) if _is_optimizer(each)), None)
    if step is not None and not {each.name for each in frames[:step]} & {"forward", "closure"}:
        return OPTIMIZER
    copies = ("torch/optim/swa_utils.py", "torch/serialization.py")
    if names & {"deepcopy", "__deepcopy__"} or any(file.endswith(copies) for file in files):
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
    return class_at(frame) or f"{_stem(frame.file)}.{frame.name}"


def told(frame: Frame | None) -> str:
    """A place for people.

    >>> told(Frame("/home/me/project/train.py", 30, "main")), told(None)
    ('train.py:30 (main)', 'a place that nobody wrote down')
    """
    if frame is None:
        return "a place that nobody wrote down"
    return f"{_base(frame.file)}:{frame.line} ({frame.name})"


def _base(file: str) -> str:
    return re.split(r"[/\\]", file)[-1]


def _stem(file: str) -> str:
    return _base(file).removesuffix(".py")


def _is_native(frame: Frame) -> bool:
    return "::" in frame.name or frame.file.endswith((".cpp", ".h", ".c", ".cu", "??"))


def is_outside(frame: Frame) -> bool:
    """Whether it is a line of a program, and of no module that computes or is made."""
    inside = ("forward", "__init__", "__call__", "<genexpr>", "<listcomp>", "<dictcomp>")
    return _is_program(frame) and frame.name not in inside


def _is_program(frame: Frame) -> bool:
    return not _is_plumbing(frame) and not _INSTALLED.search(frame.file)


def _is_driven(frames: Stack, chain: Stack) -> bool:
    """Whether between lines of the program stands a library that is not torch."""
    if not chain:
        return False
    between = frames[frames.index(chain[0]) : frames.index(chain[-1])]
    return any(
        each.file.startswith(_OWN)
        or (_INSTALLED.search(each.file) and not _TORCH.search(each.file))
        for each in between
    )


def _is_optimizer(frame: Frame) -> bool:
    return bool(_OPTIMIZER.search(frame.file)) and frame.name != "zero_grad"


def _is_layer(frame: Frame) -> bool:
    return frame.name == "__init__" and "torch/nn/modules/" in frame.file.replace("\\", "/")


def _is_plumbing(frame: Frame) -> bool:
    return bool(
        _TORCH.search(frame.file)
        or _STANDARD.search(frame.file)
        or frame.file.startswith(_OWN)
        or frame.file.startswith("<")
    )
