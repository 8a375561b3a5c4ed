"""Rows of a batch: count them, take some, split them, join them again.

::

    batch_types counting and cutting values of registered classes, and of known libraries
    kinds       what a value is, by its type; register_batch_type
    containers  opening containers, building new ones of the same type
    nodes       parts of a batch, and the row counts that they have in common
    reading     which row counts each part allows
    decisions   lists that can be read in two ways
    cutting     taking rows out of leaves; ragged: packed, nested and sparse ones
    layout      BatchLayout: whole batches, declarations
    sizes       balanced sizes
    tensors     every tensor of a batch
    contents    what a batch is made of: tensors, elements, objects
    objects     values that nothing tells how to open
    unknown     what to say of a value that nothing tells how to cut
    joining     outputs of microbatches back into one
"""

from automicro.slicing.contents import Contents
from automicro.slicing.joining import concat_rows
from automicro.slicing.kinds import register_batch_type
from automicro.slicing.layout import BatchLayout, num_rows, split_batch
from automicro.slicing.reading import must_hold_rows
from automicro.slicing.sizes import balanced_sizes, check_microbatch_size, describe_cut
from automicro.slicing.tensors import map_tensors, tensor_leaves

__all__ = [
    "BatchLayout",
    "Contents",
    "balanced_sizes",
    "check_microbatch_size",
    "concat_rows",
    "describe_cut",
    "map_tensors",
    "must_hold_rows",
    "num_rows",
    "register_batch_type",
    "split_batch",
    "tensor_leaves",
]
