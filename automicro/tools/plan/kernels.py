"""Memory of kernels that operations on tensors without data do not show.

A `StepRecorder` records a planned step, including properties of its device: the workspaces of
kernels, and the kernels that compute attention, dropout and normalization.
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
from automicro.torch_private import FakeTensor
from automicro.torch_private_execution import (
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    WHOLE_ATTENTION,
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
    """Records a step of a plan."""

    def __init__(self, *, on_accelerator: bool = False, before_ampere: bool = False) -> None:
        super().__init__()
        self._on_accelerator = on_accelerator
        self._before_ampere = before_ampere
        self.parameters: frozenset[int] = frozenset()  # ids, so that casts of them are identified
        self.assumptions: set[str] = set()  # sentences about kernels
        self._after_last_part = 0  # number of storages when the last submodule ended

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and record the memory that its kernel keeps and temporarily uses."""
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
        """Compute attention, dropout and normalization as the device would."""
        if not self._on_accelerator:
            yield
            return
        # Stand-ins are on the CPU, so torch would choose CPU kernels, whose memory differs.
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
            # Kernels add a mask to the scores, so a boolean mask becomes numbers, which are larger.
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
            # Not at the end of the model itself: operations after its last part count as the loss.
            self._after_last_part = len(self.ledger.owners)

    def forward_ended(self, outputs: Sequence[Tensor]) -> None:
        """Attribute the outputs, and bytes since the last submodule ended, to the loss."""
        for number in range(self._after_last_part, len(self.ledger.owners)):
            if self.ledger.owners[number].kind == ACTIVATIONS:
                self.ledger.owners[number] = Owner(TAIL)
        for output in outputs:
            self.ledger.give(output, Owner(TAIL))

    def hold(self, num_bytes: int, owner: Owner) -> int:
        """Count memory that has no tensor, and return its number."""
        number = self.ledger.new(owner)
        self.ledger.write(number, num_bytes)
        return number

    def take(self, num_bytes: int, owner: Owner) -> None:
        """Count memory only for a moment, so that it shows in the peak."""
        self.ledger.write(self.hold(num_bytes, owner), -num_bytes)


_FUSED = "attention by a GPU's fused kernels (flash, memory-efficient), which store no score matrix"
_NOT_FUSED = "attention stores whole matrices of scores, because a GPU has no fused kernel for {}"
_PADDED_TO = 8  # multiple for head sizes in flash attention, and for lengths of a mask
_HALF = (torch.float16, torch.bfloat16)
_Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


def _is_for_flash(given: _Heads, *, is_causal: bool, grouped: bool) -> bool:
    """Whether CUDA, from Ampere on, uses flash attention if there is no mask."""
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
    """Return why CUDA has no memory-efficient attention, or an empty string if it does."""
    dtype = given[0].dtype
    if not torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
        return "what sdpa_kernel leaves"
    if not _is_dense(given) or (mask is not None and mask.stride(-1) != 1):
        return "tensors that are not of rows, heads, positions and contiguous features"
    if dtype not in (*_HALF, torch.float32):
        return str(dtype)
    if len({each.shape[:2] for each in given}) > 1:
        return f"fewer keys than queries in {dtype}{'' if mask is None else ' with a mask'}"
    alignment = 8 if dtype in _HALF else 4
    odd = [each.shape[-1] for each in given if each.shape[-1] % alignment]
    return f"heads of size {odd[0]} in {dtype}" if odd else ""


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
    """Drop with a mask of one byte per number; on the CPU, masks have the type of the input."""
    if not (train and 0 < p < 1 and isinstance(x, FakeTensor)):
        return None
    dropped: Tensor = torch.native_dropout(x, p, train)[0]
    return dropped


def _in_float32(name: str) -> Callable[..., Tensor | None]:
    """Return a normalization as under a GPU's autocast; the CPU's stays in half precision."""
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
    # If a backward follows, the kernel keeps the logarithms of its sums.
    is_differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    found: Tensor = EFFICIENT_ATTENTION(
        *given, mask, is_differentiated, dropout_p, is_causal, scale=scale
    )[0]
    return found


_CAST = torch.ops.aten._to_copy.default
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_SUM = torch.ops.aten.sum.dim_IntList
_SUMMED_BY_BLOCKS = 2048  # smallest column length
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_KEPT_STATES, _KEPT_STATES_OF_HALF = 16, 22  # kept by an LSTM for its backward, over all times


def _with_kept(output: Any) -> Any:
    """Add to an LSTM's output the memory that its kernel keeps, if fake tensors omit it."""
    if output[3].numel():
        return output
    states = output[0]
    times = _KEPT_STATES_OF_HALF if states.itemsize == 2 else _KEPT_STATES
    num_bytes = times * states.nbytes
    kept = output[3].new_empty(num_bytes // output[3].itemsize)
    return (*output[:3], kept)


def _workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the workspace of a kernel while it runs, in addition to arguments and results."""
    # Fused attention sums the queries' gradient in float32, padded to the tiles of its kernel.
    if func is FLASH_ATTENTION_BACKWARD:
        query: Tensor = args[1]
        return 4 * query.numel() + _padded_bytes(query, 128, -(-query.shape[-1] // 32) * 32)
    if func is EFFICIENT_ATTENTION_BACKWARD:
        size = args[1].shape[-1]
        return _padded_bytes(args[1], *((64, 64) if size <= 64 else (128, -(-size // 128) * 128)))
    if func is _SUM and args[0].itemsize == 2:
        summed = args[0].numel() // max(1, args[0][0].numel()) if args[0].dim() == 2 else 0
        return 8 * args[0].numel() if summed >= _SUMMED_BY_BLOCKS else 0
    # A convolution might copy its inputs and its weight into another memory format.
    if func is _CONVOLUTION:
        return int(args[0].nbytes + args[1].nbytes)
    if func is _CONVOLUTION_BACKWARD:
        of_y, x, weight = args[:3]
        # The gradient of a half-precision weight is summed in an additional copy.
        copies = 2 if weight.itemsize == 2 else 1
        return int(of_y.nbytes + x.nbytes + copies * weight.nbytes)
    # The margin covers other kernels.
    return 0


def _padded_bytes(query: Tensor, places: int, size: int) -> int:
    """Return the bytes of a padded float32 gradient of queries (rows, heads, places, size)."""
    rows, heads, length, _ = query.shape
    return 4 * rows * heads * -(-length // places) * places * size
