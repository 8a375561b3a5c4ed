"""Other things that a loss may be a mean over, to be tried where the one in use is not exact."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from automicro.forward import TARGET_KEYS, Convention
from automicro.slicing import tensor_leaves
from automicro.weighting import IGNORED

_OTHER_IGNORED = (-1, 0, 255)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value for ``loss_average``.

    Attributes:
        code: the value as a user writes it.
        value: the value.
        kind: what the loss would be, in words.
    """

    code: str
    value: Any
    kind: str


def candidates(batch: Any, convention: Convention) -> Iterator[Candidate]:
    """What to try for this batch, the likeliest first."""
    yield Candidate(code="'samples'", value="samples", kind="a mean over samples")
    yield Candidate(code="'none'", value="none", kind="a sum")
    yield Candidate(
        code="'tokens'", value="tokens", kind="a mean over the targets that are not ignored"
    )
    yield from _target_counts(batch, convention)
    for path, leaf in tensor_leaves(batch):
        yield from _leaf_counts(batch, path, leaf)


def named(choice: Mapping[str, Candidate]) -> Candidate:
    """One candidate for each loss by name, as one for all."""
    code = ", ".join(f"{name!r}: {each.code}" for name, each in choice.items())
    kinds = ", ".join(f"{name!r} {each.kind}" for name, each in choice.items())
    return Candidate(
        code=f"{{{code}}}", value={n: each.value for n, each in choice.items()}, kind=kinds
    )


def _target_counts(batch: Any, convention: Convention) -> Iterator[Candidate]:
    try:
        targets = convention.targets(batch)
    except (ValueError, IndexError):
        return
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_nested:
        return
    where = expression(batch, targets)
    if targets.dim() > 1:
        yield Candidate(
            code=f"lambda batch: ({where}[..., 1:] != {IGNORED}).sum()",
            value=lambda part: (convention.targets(part)[..., 1:] != IGNORED).sum(),
            kind="a mean over the targets that are not ignored, the labels shifted by one",
        )
    for ignored in _OTHER_IGNORED:
        if bool((targets == ignored).any()):
            yield Candidate(
                code=f"lambda batch: ({where} != {ignored}).sum()",
                value=_counter(convention.targets, ignored),
                kind=f"a mean over the targets that are not {ignored}",
            )


def _counter(targets: Callable[[Any], Any], ignored: int) -> Callable[[Any], Any]:
    return lambda part: (targets(part) != ignored).sum()


def _leaf_counts(batch: Any, path: str, leaf: Tensor) -> Iterator[Candidate]:
    """Masks, lengths, weights of rows: whatever counts something and is not negative."""
    if leaf.is_nested or leaf.is_sparse or leaf.is_complex() or leaf.dim() == 0:
        return
    where = expression(batch, leaf)
    if not bool((leaf < 0).any()):
        yield Candidate(
            code=f"lambda batch: {where}.sum()",
            value=lambda part: dict(tensor_leaves(part))[path].sum(),
            kind=f"a mean weighted by {path!r}",
        )
    if not leaf.is_floating_point():
        yield Candidate(
            code=f"lambda batch: ({where} != 0).sum()",
            value=lambda part: (dict(tensor_leaves(part))[path] != 0).sum(),
            kind=f"a mean over what is not zero in {path!r}",
        )


def expression(batch: Any, leaf: Tensor) -> str:
    """How to get at a leaf of a batch, in Python."""
    return _find(batch, leaf, "batch") or "batch"


def _find(value: Any, leaf: Tensor, code: str) -> str:
    if value is leaf:
        return code
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: key not in TARGET_KEYS)
        inner = ((value[key], f"{code}[{key!r}]") for key in keys)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        inner = ((part, f"{code}[{index}]") for index, part in enumerate(value))
    else:
        inner = ((part, f"{code}.{name}") for name, part in getattr(value, "__dict__", {}).items())
    return next((found for part, code in inner if (found := _find(part, leaf, code))), "")
