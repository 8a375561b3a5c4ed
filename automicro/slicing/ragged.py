"""Rows of tensors that ``Tensor.split`` cannot cut: packed, nested and sparse ones.

`selections` are the rows of each piece: a ``range`` for neighbours, else a list of indices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

Selections = Sequence[Sequence[int]]
# Offsets of the pieces, by the identity of the offsets of the whole.
OffsetsCache = dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]]


def packed_num_rows(value: PackedSequence) -> int:
    """The number of sequences in a PackedSequence."""
    return int(value.batch_sizes[0])


def cut_packed(value: PackedSequence, selections: Selections) -> list[PackedSequence]:
    """Pieces of a PackedSequence. Rows count in the caller's order, not the sorted one."""
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    pieces = []
    for selection in selections:
        rows = torch.as_tensor(list(selection))
        piece_lengths = lengths[rows]
        if isinstance(selection, range):
            piece = padded[selection.start : selection.stop]
        else:
            piece = padded.index_select(0, rows.to(padded.device))
        # Sequences that were packed as sorted carry no indices, and stay so where they can.
        in_order = value.sorted_indices is None and bool(torch.all(piece_lengths.diff() <= 0))
        pieces.append(
            pack_padded_sequence(piece, piece_lengths, batch_first=True, enforce_sorted=in_order)
        )
    return pieces


def concat_packed(values: Sequence[PackedSequence]) -> PackedSequence:
    """The rows of all of `values` as one PackedSequence."""
    rows = [row for value in values for row in unpack_sequence(value)]
    lengths = [len(row) for row in rows]
    unsorted = any(value.sorted_indices is not None for value in values)
    in_order = not unsorted and lengths == sorted(lengths, reverse=True)
    return pack_sequence(rows, enforce_sorted=in_order)


def cut_nested(
    value: torch.Tensor, selections: Selections, cache: OffsetsCache
) -> list[torch.Tensor]:
    """Pieces of a nested tensor, of the same layout."""
    if value.layout is torch.jagged:
        return _cut_jagged(value, selections, cache)
    rows = value.unbind()
    return [torch.nested.as_nested_tensor([rows[i] for i in chosen]) for chosen in selections]


def concat_nested(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all of `values` as one nested tensor of the same layout."""
    rows = [row for value in values for row in value.unbind()]
    return torch.nested.as_nested_tensor(rows, layout=values[0].layout)


def _cut_jagged(value: Any, selections: Selections, cache: OffsetsCache) -> list[torch.Tensor]:
    # The one dimension that has no number: its size is a symbol, bound to the offsets tensor.
    ragged_dim = next(i for i, size in enumerate(value.shape) if not isinstance(size, int))
    values, offsets, lengths = value.values(), value.offsets(), value.lengths()
    starts: list[int] = offsets.tolist()
    row_lengths: list[int] = (offsets.diff() if lengths is None else lengths).tolist()
    # Tensors that share offsets in the batch must share them in a microbatch, or torch takes
    # their ragged dimensions for different ones and refuses to add them.
    pieces_offsets = cache.get(id(offsets))
    if pieces_offsets is None:
        pieces_offsets = [
            _piece_offsets(chosen, offsets, lengths, starts, row_lengths) for chosen in selections
        ]
        cache[id(offsets)] = pieces_offsets
    pieces = []
    for chosen, (new_offsets, new_lengths) in zip(selections, pieces_offsets, strict=True):
        if isinstance(chosen, range):
            start, stop = starts[chosen.start], starts[chosen.stop]
            rows = values.narrow(ragged_dim - 1, start, stop - start)
        else:
            parts = [values.narrow(ragged_dim - 1, starts[i], row_lengths[i]) for i in chosen]
            rows = torch.cat(parts, dim=ragged_dim - 1)
        pieces.append(
            torch.nested.nested_tensor_from_jagged(
                rows, new_offsets, lengths=new_lengths, jagged_dim=ragged_dim
            )
        )
    return pieces


def _piece_offsets(
    chosen: Sequence[int],
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    starts: list[int],
    row_lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(chosen, range):
        start, stop = chosen.start, chosen.stop
        new_lengths = None if lengths is None else lengths[start:stop]
        return offsets[start : stop + 1] - starts[start], new_lengths
    ends = [0]
    for i in chosen:
        ends.append(ends[-1] + row_lengths[i])
    return torch.tensor(ends, dtype=offsets.dtype, device=offsets.device), None


def cut_sparse(value: torch.Tensor, selections: Selections, dim: int) -> list[torch.Tensor]:
    """Pieces of a sparse COO, CSR or CSC tensor, of the same layout."""
    whole = value.to_sparse(layout=torch.sparse_coo)
    return [
        whole.index_select(dim, torch.as_tensor(list(chosen), device=value.device)).to_sparse(
            layout=value.layout
        )
        for chosen in selections
    ]


def concat_sparse(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all of `values` as one sparse tensor of the same layout."""
    joined = torch.cat([value.to_sparse(layout=torch.sparse_coo) for value in values])
    return joined.to_sparse(layout=values[0].layout)
