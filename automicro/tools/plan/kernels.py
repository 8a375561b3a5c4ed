"""The memory of kernels that operations on tensors without data do not show.

A `StepRecorder` writes down a planned step, with what only its device knows: the workspaces of
kernels, and which of them compute attention, dropout and normalisation.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from automicro.memory.timeline import (
    ACTIVATIONS,
    BACKWARD,
    BATCH,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Owner,
    Recorder,
)
from automicro.torch_private import (
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    WHOLE_ATTENTION,
    FakeTensor,
    computing,
)

TAIL = "outputs and loss"
STEP = "temporaries of the optimizer's step"
WORKSPACE = "workspace of kernels"
GATHERED = "gathered from other ranks"
CASTS = "parameters in half precision"
KINDS = (
    PARAMETERS, CASTS, GRADIENTS, OPTIMIZER, GATHERED, BUFFERS, BATCH, ACTIVATIONS, TAIL,
    BACKWARD, STEP, WORKSPACE,
)  # fmt: skip
STAYING = frozenset((PARAMETERS, CASTS, GRADIENTS, OPTIMIZER, GATHERED, BUFFERS))
"""Kinds whose size does not depend on the microbatch."""


class StepRecorder(Recorder):
    """Writes down a step of a plan.

    Attributes:
        parameters: their ids; what they are cast to is told apart.
        assumptions: about kernels, in sentences.
    """

    def __init__(self, *, on_accelerator: bool = False, before_ampere: bool = False) -> None:
        super().__init__()
        self._on_accelerator = on_accelerator
        self._before_ampere = before_ampere
        self.parameters: frozenset[int] = frozenset()
        self.assumptions: set[str] = set()
        self._after_last_part = 0  # storages that were there when the last submodule ended

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and write down what its kernel keeps and takes, too."""
        output = super().run(func, types, args, kwargs)
        if func is _LSTM:
            output = _with_kept(output)
            self.ledger.see(output, [])
        workspace_bytes = _workspace_bytes(func, args)
        if workspace_bytes:
            self.take(workspace_bytes, Owner(WORKSPACE, self.ledger.owner.module))
        return output

    def _owner_of(self, func: Any, args: tuple[Any, ...]) -> Owner:
        owner = super()._owner_of(func, args)
        # Autocast keeps casts of parameters until it ends, so they do not grow with the rows.
        is_cast = func is _CAST and id(args[0]) in self.parameters
        return Owner(CASTS, owner.module) if is_cast else owner

    @contextlib.contextmanager
    def choosing_kernels(self) -> Iterator[None]:
        """Compute attention, dropout and normalisation as the device would."""
        if not self._on_accelerator:
            yield
            return
        # Stand-ins lie on the CPU, whose kernels torch would take, and whose memory is another.
        norms = {name: _in_float32(name) for name in ("layer_norm", "group_norm")}
        with computing({"scaled_dot_product_attention": self._attend, "dropout": _drop, **norms}):
            yield

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        if not isinstance(query, FakeTensor):
            return None
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # Kernels add a mask to the scores, so a boolean one becomes numbers, which take more.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        given = (query, key, value)
        may_flash = attn_mask is None and not self._before_ampere
        if may_flash and _is_for_flash(given, is_causal=is_causal, grouped=enable_gqa):
            self.assumptions.add(_FUSED)
            return _flash(given, dropout_p, is_causal, scale)
        lacking = _lacks_efficient(given, attn_mask)
        if self._before_ampere and query.dtype is torch.bfloat16:
            lacking = "bfloat16 before Ampere"
        if not lacking:
            self.assumptions.add(_FUSED)
            return _efficient(given, attn_mask, dropout_p, is_causal, scale)
        self.assumptions.add(_NOT_FUSED.format(lacking))
        found: Tensor = WHOLE_ATTENTION(
            *given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return found

    def _left(self, name: str) -> None:
        if name:
            # Not where the model itself ends: what it computes behind its last part is told as the
            # loss's.
            self._after_last_part = len(self.ledger.owners)

    def forward_ended(self, outputs: Sequence[Tensor]) -> None:
        """Count the bytes since the last submodule ended, and the outputs, as the loss's."""
        for number in range(self._after_last_part, len(self.ledger.owners)):
            if self.ledger.owners[number].kind == ACTIVATIONS:
                self.ledger.owners[number] = Owner(TAIL)
        for output in outputs:
            self.ledger.give(output, Owner(TAIL))

    def hold(self, num_bytes: int, owner: Owner) -> int:
        """Count something of which there is no tensor; returns its number."""
        number = self.ledger.new(owner)
        self.ledger.write(number, num_bytes)
        return number

    def take(self, num_bytes: int, owner: Owner) -> None:
        """Count it for a moment, so that it shows in the peak."""
        self.ledger.write(self.hold(num_bytes, owner), -num_bytes)


_FUSED = (
    "attention by a GPU's fused kernels (flash, memory-efficient), which keep no matrix of scores"
)
_NOT_FUSED = "attention with whole matrices of scores, as a GPU has no fused kernel for {}"
_PADDED_TO = 8  # numbers of a head for flash attention, places of a mask
_HALF = (torch.float16, torch.bfloat16)
_Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


def _is_for_flash(given: _Heads, *, is_causal: bool, grouped: bool) -> bool:
    """Whether CUDA, from Ampere on, takes flash attention where there is no mask."""
    query, key, _ = given
    sizes = {each.shape[-1] for each in given}
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and _is_dense(given)
        and query.dtype in _HALF
        and len(sizes) == 1
        and max(sizes) <= 256
        and (not is_causal or query.shape[-2] == key.shape[-2])
        and (grouped or len({each.shape[:2] for each in given}) == 1)
    )


def _lacks_efficient(given: _Heads, mask: Tensor | None) -> str:
    """For what CUDA has no memory-efficient attention; empty where it has."""
    dtype = given[0].dtype
    if not torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
        return "what sdpa_kernel leaves"
    if not _is_dense(given) or (mask is not None and mask.stride(-1) != 1):
        return "tensors other than of rows, heads, places and adjacent numbers"
    if dtype not in (*_HALF, torch.float32):
        return str(dtype)
    if len({each.shape[:2] for each in given}) > 1:
        return f"fewer keys than queries in {dtype}{'' if mask is None else ' with a mask'}"
    alignment = 8 if dtype in _HALF else 4
    odd = [each.shape[-1] for each in given if each.shape[-1] % alignment]
    return f"heads of {odd[0]} numbers in {dtype}" if odd else ""


def _is_dense(given: _Heads) -> bool:
    return all(each.dim() == 4 and each.numel() and each.stride(-1) == 1 for each in given)


def _flash(given: _Heads, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    size = given[0].shape[-1]
    missing = -size % _PADDED_TO
    found: Tensor = FLASH_ATTENTION(
        *(pad(each, (0, missing)) if missing else each for each in given),
        dropout_p,
        is_causal,
        scale=scale,
    )[0]
    return found[..., :size]


def _drop(x: Tensor, p: float, train: bool) -> Tensor | None:
    """With a mask of a byte per number, where the CPU's has the type of its input."""
    if not (train and 0 < p < 1 and isinstance(x, FakeTensor)):
        return None
    dropped: Tensor = torch.native_dropout(x, p, train)[0]
    return dropped


def _in_float32(name: str) -> Callable[..., Tensor | None]:
    """A normalisation under a GPU's autocast, where the CPU's stays in half precision."""
    normalize = getattr(torch, name)

    def run(x: Tensor, *args: Any, **options: Any) -> Tensor | None:
        is_cast = x.dtype in _HALF and torch.is_autocast_enabled("cpu")
        found: Tensor | None = normalize(x.float(), *args, **options) if is_cast else None
        return found

    return run


def _efficient(
    given: _Heads, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    query, key, _ = given
    if mask is not None:
        size = mask.shape[-1]
        if size % _PADDED_TO:
            mask = pad(mask, (0, -size % _PADDED_TO))[..., :size]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    # Where a backward follows, the kernel keeps the logarithms of its sums.
    is_differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    found: Tensor = EFFICIENT_ATTENTION(
        *given, mask, is_differentiated, dropout_p, is_causal, scale=scale
    )[0]
    return found


_CAST = torch.ops.aten._to_copy.default
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_SUM = torch.ops.aten.sum.dim_IntList
_SUMMED_BY_BLOCKS = 2048  # so many numbers, and more, of a column
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_KEPT_STATES, _KEPT_STATES_OF_HALF = 16, 22  # over all times, that an LSTM keeps for its backward


def _with_kept(output: Any) -> Any:
    """An LSTM's output, with what its kernel keeps, where fake tensors do not tell."""
    if output[3].numel():
        return output
    states = output[0]
    times = _KEPT_STATES_OF_HALF if states.itemsize == 2 else _KEPT_STATES
    num_bytes = times * states.nbytes
    kept = output[3].new_empty(num_bytes // output[3].itemsize)
    return (*output[:3], kept)


def _workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """The workspace of a kernel while it runs, beside its arguments and results."""
    # Fused attention sums up the queries' gradient in float32, padded to the tiles of its kernel.
    if func is FLASH_ATTENTION_BACKWARD:
        query: Tensor = args[1]
        return 4 * query.numel() + _padded_bytes(query, 128, -(-query.shape[-1] // 32) * 32)
    if func is EFFICIENT_ATTENTION_BACKWARD:
        size = args[1].shape[-1]
        return _padded_bytes(args[1], *((64, 64) if size <= 64 else (128, -(-size // 128) * 128)))
    if func is _SUM and args[0].itemsize == 2:
        summed = args[0].numel() // max(1, args[0][0].numel()) if args[0].dim() == 2 else 0
        return 8 * args[0].numel() if summed >= _SUMMED_BY_BLOCKS else 0
    # A convolution may copy its inputs and its weight in another order.
    if func is _CONVOLUTION:
        return int(args[0].nbytes + args[1].nbytes)
    if func is _CONVOLUTION_BACKWARD:
        of_y, x, weight = args[:3]
        # The gradient of a weight in half precision is summed up in one more copy.
        copies = 2 if weight.itemsize == 2 else 1
        return int(of_y.nbytes + x.nbytes + copies * weight.nbytes)
    # What other kernels take is left to the margin.
    return 0


def _padded_bytes(query: Tensor, places: int, size: int) -> int:
    """Of a float32 gradient of queries of ``(rows, heads, places, size)``, padded so."""
    rows, heads, length, _ = query.shape
    return 4 * rows * heads * -(-length // places) * places * size
