"""Which module's output for a row depends on the other rows."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.slicing import tensor_leaves
from automicro.verification.laboratory import Conditions, Laboratory
from automicro.verification.state import named_modules

# By module and number of the call: tensors of the inputs, tensors of the output.
_Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def modules_across_rows(
    laboratory: Laboratory, conditions: Conditions, rows: Sequence[int], tolerance: float
) -> list[str]:
    """Names of the innermost modules that get the same rows, but make something else of them.

    A module can be judged where rows can be found in its outputs: the dimension in which the whole
    batch's differs from a part's.
    """
    half = len(rows) // 2
    parts = [rows[:half], rows[half:]]
    whole = _calls(laboratory, conditions, rows)
    pieces = [_calls(laboratory, conditions, part) for part in parts]
    guilty = []
    for key, (inputs, outputs) in whole.items():
        if any(key not in piece for piece in pieces):
            continue
        given = [_agree(inputs, [piece[key][0] for piece in pieces], tolerance)]
        made = _agree(outputs, [piece[key][1] for piece in pieces], tolerance)
        is_root = key[0] == ""
        if made is False and (given[0] is True or (is_root and given[0] is None)):
            guilty.append(key[0])
    names = list(dict.fromkeys(guilty))
    inner = [
        n for n in names if not any(o != n and (not n or o.startswith(f"{n}.")) for o in names)
    ]
    model = type(laboratory.subject.model).__name__
    return [name or model for name in inner]


def _calls(laboratory: Laboratory, conditions: Conditions, rows: Sequence[int]) -> _Calls:
    with laboratory.stage(conditions) as stage, _recording(stage.roots) as calls:
        laboratory.run_whole(stage, laboratory.on_device(laboratory.batch(rows)))
    return calls


@contextlib.contextmanager
def _recording(roots: dict[str, nn.Module]) -> Iterator[_Calls]:
    calls: _Calls = {}
    counts: dict[str, int] = defaultdict(int)
    handles = []

    def record(name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Before the forward: it may write into its input.
            waiting.append(_tensors((args, kwargs)))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = waiting.pop()
            calls[name, counts[name]] = (inputs, _tensors(output))
            counts[name] += 1

        return before, after

    waiting: list[list[Tensor]] = []
    try:
        for name, module in named_modules(roots):
            before, after = record(name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[Tensor]:
    leaves = [leaf for _, leaf in tensor_leaves(value)]
    return [leaf.detach().to("cpu", copy=True) for leaf in leaves if not leaf.is_nested]


def _agree(
    whole: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]], tolerance: float
) -> bool | None:
    """Whether all rows are the same; None where no rows can be found."""
    verdict: bool | None = None
    for index, tensor in enumerate(whole):
        if any(len(piece) != len(whole) for piece in pieces):
            return None
        parts = [piece[index] for piece in pieces]
        joined = _joined(tensor, parts)
        if joined is None:
            continue
        scale = tensor.abs().max() if tensor.is_floating_point() and tensor.numel() else 1
        gap = (joined.to(torch.float64) - tensor.to(torch.float64)).abs()
        if bool((gap > tolerance * scale).any()):
            return False
        verdict = True
    return verdict


def _joined(whole: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """The parts along the one dimension in which they are parts of the whole."""
    if whole.is_complex() or any(part.dim() != whole.dim() for part in parts):
        return None
    differing = [d for d in range(whole.dim()) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if (
        len(differing) != 1
        or sum(p.shape[differing[0]] for p in parts) != whole.shape[differing[0]]
    ):
        return None
    return torch.cat(list(parts), differing[0])
