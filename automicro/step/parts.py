"""Parts of a model that are computed in slices of their own sizes, as a step uses them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from automicro.errors import AutomicroWarning, warn

_PATIENCE = 8  # steps until a part that nothing calls is named


class SizedPart(Protocol):
    """A part of a model with a size of its own; see `NestedSplit`."""

    name: str
    sizes: list[int]  # rows of each slice of its last call
    ooms: int  # how often memory ran out inside it
    finer: int  # the factor by which its slices are smaller than necessary

    @property
    def adapts(self) -> bool:
        """Whether its size may change."""

    def took_shortage(self) -> bool:
        """Whether it ran out of memory itself, and has a smaller size now."""

    def cut_what_was_whole(self) -> bool:
        """Whether it ran in one piece, keeping its activations, and is cut from now on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far, as plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Resume from sizes that were found earlier."""


class _Attached(Protocol):
    """A replacement of a module's forward that a `SizedParts` removes at its end."""

    @property
    def name(self) -> str: ...

    @property
    def has_run(self) -> bool:
        """Whether it has been called."""

    @property
    def is_attached(self) -> bool:
        """Whether it still replaces the module's forward."""

    def remove(self) -> None:
        """Restore the module's own forward."""


def attached_to(module: Any) -> Any:
    """Return the part that replaces a module's forward, or None."""
    return getattr(getattr(module, "__dict__", {}).get("forward"), "nested", None)


_attachments = 0


def count_attachment() -> None:
    """Count that a module received or lost a size of its own."""
    global _attachments
    _attachments += 1


def num_attachments() -> int:
    """Return the number of such changes: while it is constant, the set of parts is, too."""
    return _attachments


class SizedParts:
    """All parts of a model with sizes of their own, given in any way."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._given: dict[str, SizedPart] = {}
        self._own: list[_Attached] = []
        self._unseen: list[_Attached] = []
        self._attached: tuple[int, Mapping[str, SizedPart]] | None = None
        self._unseen_steps: int | None = None

    def give(self, name: str, part: SizedPart) -> None:
        """Add a part that replaces no module's forward."""
        self._given[name] = part
        self._attached = None

    def own(self, part: _Attached, *, is_named: bool = False) -> None:
        """Register an attached part that `remove` removes."""
        self._own.append(part)
        if is_named:
            self._unseen.append(part)
            self._unseen_steps = 0

    def remove(self) -> None:
        """Let parts that were attached here run in one piece again."""
        for part in self._own:
            # A part that was already removed, or covered by another one, is not ours to remove.
            if part.is_attached:
                part.remove()
        self._own.clear()

    def all(self) -> Collection[SizedPart]:
        """Return all parts."""
        return self.by_name().values()

    def by_name(self) -> Mapping[str, SizedPart]:
        """Return all parts, by the names of their modules."""
        # Walking through all modules at each step is slow; the count shows when it is necessary.
        if self._attached is None or self._attached[0] != _attachments:
            attached = {
                name: part
                for root in self._modules
                for name, module in root.named_modules()
                if (part := attached_to(module)) is not None
            }
            self._attached = _attachments, self._given | attached
        return self._attached[1]

    def notice_step(self) -> None:
        """Warn, after a few steps, of parts that no step has called: their sizes have no effect."""
        if self._unseen_steps is None:
            return
        self._unseen = [each for each in self._unseen if not each.has_run]
        self._unseen_steps += 1
        if not self._unseen:
            self._unseen_steps = None
        elif self._unseen_steps == _PATIENCE:
            self._unseen_steps = None
            names = ", ".join(repr(each.name) for each in self._unseen)
            warn(
                f"nested gives sizes to {names}, but {_PATIENCE} steps have not called it, so the "
                "size has no effect. Name a module that the forward calls: it does not call a "
                "list of modules, or a layer of which only the weight is used. The tail of a "
                "language model runs only if the model receives labels",
                AutomicroWarning,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far, as plain values."""
        return {name: each.state_dict() for name, each in self.by_name().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from sizes that were found earlier; ignore those of parts that are gone."""
        for name, each in self.by_name().items():
            if name in state:
                each.load_state_dict(state[name])

    def took_shortage(self) -> bool:
        """Whether any part ran out of memory itself, and has a smaller size now."""
        took = [each.took_shortage() for each in self.all()]  # a list, so that all are called
        return any(took)

    def cut_what_was_whole(self) -> bool:
        """Whether any part ran in one piece, keeping its activations, and is cut from now on."""
        cut = [each.cut_what_was_whole() for each in self.all()]  # a list, so that all are called
        return any(cut)
