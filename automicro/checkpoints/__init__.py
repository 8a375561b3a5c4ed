"""Checkpoints that are written completely or not at all, and loaded as data."""

from automicro.checkpoints.peers import open_peers
from automicro.checkpoints.reading import load_checkpoint
from automicro.checkpoints.rng import restore_rng_state, rng_state
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore

__all__ = [
    "CheckpointConfig",
    "CheckpointStore",
    "load_checkpoint",
    "open_peers",
    "restore_rng_state",
    "rng_state",
]
