"""Finding the newest intact checkpoint, and loading a checkpoint as data."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from automicro.checkpoints.manifest import MANIFEST, verify
from automicro.checkpoints.peers import ALONE, Peers, from_first, together
from automicro.checkpoints.state import name_of_own, put_together, tensors_of
from automicro.checkpoints.writing import list_checkpoints, structure_file
from automicro.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    text_of,
    warn,
)
from automicro.memory.oom import is_out_of_memory
from automicro.torch_private import is_uninitialized

_MOST_NAMED = 3


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe how the tensors of two states differ; empty if they fit.

    >>> saved = {"model": {"w": torch.empty(2, 3), "old": torch.empty(1)}}
    >>> differences(saved, {"model": {"w": torch.empty(2, 4), "new": torch.empty(1)}})
    'it lacks: model.new; only it has: model.old; shapes differ: model.w (2×3, here 2×4)'
    """
    there, here = tensors_of(saved), tensors_of(current)
    # A lazy module takes the saved shape.
    both = [name for name in there if name in here and not is_uninitialized(here[name])]

    def differing(describe: Callable[[torch.Tensor], str]) -> list[str]:
        words = {name: (describe(there[name]), describe(here[name])) for name in both}
        return [f"{name} ({was}, here {now})" for name, (was, now) in words.items() if was != now]

    found = {
        "it lacks": [name for name in here if name not in there],
        "only it has": [name for name in there if name not in here],
        "shapes differ": differing(lambda each: "×".join(map(str, each.shape)) or "one number"),
        "dtypes differ": differing(lambda each: str(each.dtype).removeprefix("torch.")),
    }
    return "; ".join(f"{what}: {_first(names)}" for what, names in found.items() if names)


def _first(names: Sequence[str]) -> str:
    """Join the first few names, and count the remaining ones."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A verified checkpoint: all files match their checksums.

    Attributes:
        path: folder of the checkpoint.
        step: number of optimization batches done.
        metrics: metric values by name, as saved.
        world_size: number of ranks that saved it.
        state: the saved state; empty until it is loaded.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    world_size: int = 1
    state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def at(cls, path: Path, *, peers: Peers = ALONE) -> "FoundCheckpoint":
        """Verify the checkpoint in a folder and return it."""
        # Each rank reads a share of the files, so a shared disk is read once in total.
        share = slice(peers.rank, None, peers.world_size)
        manifest = together(peers, lambda: verify(path, share=share))
        return cls(
            path=path, step=manifest.step, metrics=manifest.metrics, world_size=manifest.world_size
        )

    @functools.cached_property
    def structure(self) -> dict[str, Any]:
        """The saved state with its tensors on the meta device."""
        return _structure_of(self.path / structure_file(0))

    def read(
        self, into: Mapping[str, torch.Tensor], *, keys: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Read the state, including the data of its tensors."""
        structure = {
            key: value for key, value in self.structure.items() if keys is None or key in keys
        }
        return _filled(self.path, structure, into)

    def read_own(self, rank: int) -> dict[str, Any]:
        """Read the state that only this rank had saved; empty for rank 0."""
        if rank == 0:
            return {}
        structure = _structure_of(self.path / structure_file(rank))
        return _filled(self.path, structure, {}, name=partial(name_of_own, rank))


def open_checkpoint(
    checkpoint: FoundCheckpoint | Path | str, *, peers: Peers = ALONE
) -> FoundCheckpoint:
    """Find a checkpoint and read its structure without the data of its tensors."""
    found = _find(checkpoint, peers)
    together(peers, lambda: found.structure)
    return found


def find_newest(folder: Path | str, *, peers: Peers = ALONE) -> FoundCheckpoint | None:
    """Find the newest intact checkpoint; None if the folder has no checkpoints."""
    damages = []
    # Rank 0 lists the folder. If any rank finds a damaged file, all ranks skip that checkpoint.
    for path in from_first(peers, lambda: list_checkpoints(Path(folder))):
        try:
            found = FoundCheckpoint.at(path, peers=peers)
        except DamagedCheckpointError as error:
            # The warning comes later, because it names the checkpoint that is used instead.
            damages.append(str(error))
            continue
        for damage in damages if peers.rank == 0 else ():
            warn(f"{damage}. Resuming from {path.name}, the newest good one", CheckpointWarning)
        return found
    if damages:
        raise CheckpointError(
            f"all {len(damages)} checkpoints in {folder} are damaged: {'; '.join(damages)}. To "
            "start anew, use another folder or resume='never'"
        )
    return None


def load_checkpoint(
    checkpoint: FoundCheckpoint | Path | str,
    *,
    into: Mapping[str, Any] | None = None,
    peers: Peers = ALONE,
) -> FoundCheckpoint:
    """Load a checkpoint as data; no code in it is run.

    Args:
        checkpoint: a found checkpoint, the folder of a checkpoint, or a folder of several, whose
            newest intact checkpoint is loaded.
        into: parts of the current state, such as ``{"model": model.state_dict()}``. Their tensors
            are overwritten in place and must have the saved names, shapes and dtypes. All other
            tensors are allocated on the CPU.
        peers: all ranks (`open_peers`). Each rank calls this and reads its part of sharded
            tensors.

    Returns:
        The checkpoint with its ``state``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, not plain data, of another format, or
            does not fit ``into``. Nothing is overwritten unless the disk fails after the files
            were verified.
    """
    found = open_checkpoint(checkpoint, peers=peers)
    current = dict(into or {})
    # Compare only the requested parts: a checkpoint can hold more, such as an optimizer.
    saved = {name: found.structure.get(name) for name in current}
    together(peers, lambda: refuse_differences(found, saved, current))
    state = together(peers, lambda: found.read(tensors_of(current)))
    return replace(found, state=state)


def refuse_differences(
    found: FoundCheckpoint, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Raise an error if the saved tensors do not fit the current ones."""
    if differing := differences(saved, current):
        raise CheckpointError(
            f"{found.path} does not fit: {differing}. Load it into the objects it was saved from, "
            "or start anew with resume='never'"
        )


def _find(checkpoint: FoundCheckpoint | Path | str, peers: Peers) -> FoundCheckpoint:
    if isinstance(checkpoint, FoundCheckpoint):
        return checkpoint
    path = Path(checkpoint)
    # Only rank 0 checks, because a network disk can show a folder to other ranks later.
    if from_first(peers, (path / MANIFEST).exists):
        return FoundCheckpoint.at(path, peers=peers)
    newest = find_newest(path, peers=peers)
    if newest is None:
        there = "contains no checkpoint" if path.is_dir() else "does not exist"
        there = "is a file" if path.is_file() else there
        raise CheckpointError(f"{path} {there}; pass the folder of one or more checkpoints")
    return newest


def _structure_of(path: Path) -> dict[str, Any]:
    try:
        # The tensors were saved on the meta device, so only their shapes are read.
        structure = torch.load(path, weights_only=True)
        # The file may come from an untrusted source.
        if type(structure) is not dict:
            raise TypeError(f"a {type(structure).__name__} in place of a dict")
    except Exception as error:
        raise _refusal(path, error) from error
    return structure


def _filled(
    path: Path,
    structure: dict[str, Any],
    into: Mapping[str, torch.Tensor],
    name: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Read the tensors of a state, into the given tensors where they exist."""
    # Imported here because the import takes half a second, which only loading should cost.
    from automicro.checkpoints.tensors import read_tensors

    tensors = {
        place: into[place] if place in into else torch.empty_like(tensor, device="cpu")
        for place, tensor in tensors_of(structure).items()
    }
    try:
        read_tensors(path, {name(place): each for place, each in tensors.items()})
    except CheckpointError:
        raise
    except Exception as error:
        # Running out of memory does not mean that the file is damaged.
        if is_out_of_memory(error):
            raise
        raise _refusal(path, error) from error
    return put_together(structure, tensors)


def _refusal(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded as plain tensors and values ({type(error).__name__}: "
        f"{next(iter(text_of(error).splitlines()), 'no reason given')}); load a checkpoint "
        "that automicro wrote"
    )
