"""The state of models: parameters, buffers, extra state, and their generators.

Parameters and extra state go through ``load_state_dict``, which a model can override. Shards are
read directly into the existing tensors.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.checkpoints.reading import FoundCheckpoint, refuse_differences
from automicro.checkpoints.rng import derived_seed
from automicro.checkpoints.state import tensors_of
from automicro.errors import CheckpointError, CheckpointWarning, describe_error, warn
from automicro.memory.device import active_budget
from automicro.options import unwrapped
from automicro.reach import Reach
from automicro.sharding import is_sharded
from automicro.torch_private import buffer_table, is_uninitialized
from automicro.trainer.data.loading import Generator, read_generators, write_generators
from automicro.trainer.resume.optimizer import named_parameters
from automicro.values import state_of

MODEL_KEYS = ("modules", "buffers", "generators")

_EXTRA_STATE = "_extra_state"  # torch's key for the value of `Module.get_extra_state`


class ModuleState:
    """Gathers and restores the state of models.

    >>> state = ModuleState([nn.Linear(2, 1)]).gather()
    >>> list(state), list(state["modules"][0])
    (['modules', 'buffers', 'generators'], ['weight', 'bias'])
    """

    def __init__(self, modules: Sequence[nn.Module], reach: Reach | None = None) -> None:
        self._modules = [unwrapped(each) for each in modules]
        named = {f"modules[{i}]" if i else "": each for i, each in enumerate(self._modules)}
        self._reach = reach or Reach(named)

    def gather(self) -> dict[str, Any]:
        """Gather the current state, without copying tensors if possible."""
        return {"modules": [module.state_dict() for module in self._modules], **self.own()}

    def own(self) -> dict[str, Any]:
        """Gather the state that can differ between ranks: generators and all buffers."""
        # Includes buffers that are not persistent, because a forward can change them, too.
        return {
            "buffers": [
                {
                    name: buffer
                    for name, buffer in module.named_buffers()
                    if not is_uninitialized(buffer) and not is_sharded(buffer)
                }
                for module in self._modules
            ],
            "generators": read_generators(self._reach.named_generators()),
        }

    def restore_own(self, saved: Mapping[str, Any]) -> None:
        """Restore the return value of `own`, after the state of all ranks."""
        for module, buffers in zip(self._modules, saved["buffers"], strict=True):
            _load_buffers(module, buffers)
        here = self._reach.named_generators()
        missing = sorted(saved["generators"].keys() - here.keys())
        if missing:
            warn(
                "the checkpoint has random number generators of the model or its loss "
                f"({', '.join(missing)}) that do not exist now, so other numbers are drawn. Make "
                "them before training begins, and keep them in the same place",
                CheckpointWarning,
            )
        write_generators(here, saved["generators"])

    def reseed_generators(self, *, rank: int, world_size: int) -> None:
        """Reseed generators differently on each rank after restoring the states of rank 0."""
        for generator in self._reach.named_generators().values():
            _reseed(generator, rank, world_size)

    def sharded_parameters(self) -> dict[str, Tensor]:
        """Collect the sharded parameters by the names of `optimizer_state`."""
        return {
            name: parameter
            for name, parameter in named_parameters(self._modules)
            if is_sharded(parameter)
        }

    def compare(self, opened: FoundCheckpoint) -> None:
        """Raise an error if the checkpoint has other models."""
        here = [module.state_dict() for module in self._modules]
        refuse_differences(
            opened,
            {"modules": [_without_extra(each) for each in opened.structure["modules"]]},
            {"modules": [_without_extra(each) for each in here]},
        )

    def targets(self) -> dict[str, Tensor]:
        """Collect the shards that are overwritten in place, by their place in the state."""
        state = {"modules": [module.state_dict() for module in self._modules]}
        return {place: each for place, each in tensors_of(state).items() if is_sharded(each)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that was not read in place."""
        for module, state in zip(self._modules, saved["modules"], strict=True):
            _load(module, state)
        self.restore_own(saved)


def _reseed(generator: Generator, rank: int, world_size: int) -> None:
    where = torch.tensor(list(repr(state_of(generator)).encode()), dtype=torch.uint8)
    if isinstance(generator, torch.Generator):
        where = generator.get_state()
    seed = derived_seed(where, rank=rank, world_size=world_size)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)  # the limit of NumPy's RandomState


def _load(module: nn.Module, state: Any) -> None:
    rest = copy.copy(state)  # keeps its metadata, where torch stores the versions of modules
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in state and not is_uninitialized(tensor) and _repeats(tensor):
            _write(name, tensor, rest.pop(name))  # `load_state_dict` cannot write these
    try:
        # Not strict: names were compared before, and a model's state_dict can leave some out.
        module.load_state_dict(rest, strict=False)
    except Exception as error:
        raise CheckpointError(
            f"{type(module).__name__}.load_state_dict fails on its own state_dict "
            f"({describe_error(error)}). Give the model a load_state_dict (or set_extra_state) "
            "that accepts it, or start anew with resume='never'"
        ) from error


def _repeats(tensor: Tensor) -> bool:
    """Whether elements share memory, as after `expand`.

    >>> _repeats(torch.ones(3).expand(2, 3)), _repeats(torch.ones(4, 3).t())
    (True, False)
    """
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in strides)


def _write(name: str, target: Tensor, value: Tensor) -> None:
    """Write into a tensor, with a single write for elements that share memory."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
    with torch.no_grad():
        target[once].copy_(value[once])
    if _repeats(target) and not torch.equal(target.detach().cpu(), value.cpu()):
        raise CheckpointError(
            f"the elements of {name} share memory here, but have different values in the "
            "checkpoint. Make it a separate tensor with .clone()"
        )


def _load_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    here = dict(module.named_buffers())
    for name, value in saved.items():
        old = here.get(name)
        if old is not None and not is_uninitialized(old) and _form(old) == _form(value):
            _write(name, old, value)
            continue
        owner, _, last = name.rpartition(".")
        try:
            holder = module.get_submodule(owner)
        except AttributeError as error:
            raise CheckpointError(
                f"the checkpoint has a buffer {name}, but the model has no module {owner!r}. Use "
                "the model that was saved, or start anew with resume='never'"
            ) from error
        new = _to_device_of(module, value, old)
        if old is None:
            holder.register_buffer(last, new, persistent=False)
        else:
            for each in module.modules():  # all that share it
                table = buffer_table(each)
                table.update({name: new for name, buffer in table.items() if buffer is old})


def _to_device_of(module: nn.Module, value: Tensor, old: Tensor | None) -> Tensor:
    budget = active_budget()
    if budget is not None:
        return budget.transfer(value)
    if old is None:
        old = next(itertools.chain(module.parameters(), module.buffers()), value)
    return value.to(old.device)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _without_extra(state: Mapping[str, Any]) -> dict[str, Any]:
    """Drop extra state, which `set_extra_state` of the model checks itself."""
    return {name: each for name, each in state.items() if not name.endswith(_EXTRA_STATE)}
