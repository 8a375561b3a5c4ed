"""Checkpoints: written whole or not at all, loaded as data.

::

    config       CheckpointConfig, what a Trainer is told
    store        CheckpointStore: save, find, load, keep the last and the best
    writing      one checkpoint: a temporary folder, the manifest last, a rename
    reading      the newest good one; loading in place or into new tensors
    share        what one rank brings: its state, its parts of sharded tensors
    peers        the ranks that save and load together
    process_group  these, over gloo
    shards       tensors of which each rank has a part
    structure    a state as its structure and its tensors
    tensors      torch.distributed.checkpoint, without its pickle
    manifest     step, metrics and checksums; what makes a folder a checkpoint
    differences  whether a checkpoint fits a model
    files        files that are on the disk when their call returns
    leftovers    temporary folders, and those of killed runs
    retention    which checkpoints stay
    background   one save at a time beside the training
    rng          the states of all random number generators
"""

from automicro.checkpoints.config import CheckpointConfig
from automicro.checkpoints.differences import Differences, differences
from automicro.checkpoints.peers import ALONE, Peers, from_first
from automicro.checkpoints.process_group import open_peers
from automicro.checkpoints.reading import (
    FoundCheckpoint,
    LoadedCheckpoint,
    OpenedCheckpoint,
    find_newest,
    hint_at_composer,
    load_checkpoint,
    open_checkpoint,
    refuse_differences,
)
from automicro.checkpoints.rng import (
    derived_rng_state,
    derived_seed,
    restore_rng_state,
    rng_state,
)
from automicro.checkpoints.store import CheckpointStore
from automicro.checkpoints.structure import take_apart, tensors_of

__all__ = [
    "ALONE",
    "CheckpointConfig",
    "CheckpointStore",
    "Differences",
    "FoundCheckpoint",
    "LoadedCheckpoint",
    "OpenedCheckpoint",
    "Peers",
    "derived_rng_state",
    "derived_seed",
    "differences",
    "find_newest",
    "from_first",
    "hint_at_composer",
    "load_checkpoint",
    "open_checkpoint",
    "open_peers",
    "refuse_differences",
    "restore_rng_state",
    "rng_state",
    "take_apart",
    "tensors_of",
]
