"""Parts of a model that are computed in slices of their own sizes, as a step sees them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from automicro.errors import AutomicroWarning, warn

_PATIENCE = 8  # steps until a part that nothing calls is named


class SizedPart(Protocol):
    """A part of a model with a size of its own; see `NestedSplit`.

    Attributes:
        name: in messages and results.
        sizes: rows of each slice of its last call.
        ooms: how often memory ran out inside of it.
        finer: the factor by which its slices are smaller than they need be.
    """

    name: str
    sizes: list[int]
    ooms: int
    finer: int

    @property
    def adapts(self) -> bool:
        """Whether its size may change."""

    def took_shortage(self) -> bool:
        """Whether the memory that has run out was its own, and its size is smaller now."""

    def cut_what_was_whole(self) -> bool:
        """Whether it ran in one piece, kept what it computed, and is cut from now on."""

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found, as plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Go on with sizes that were found earlier."""


class _Attached(Protocol):
    """A replacement of a module's forward that a `SizedParts` undoes at its end."""

    @property
    def name(self) -> str: ...

    @property
    def has_run(self) -> bool:
        """Whether it has been called."""

    @property
    def is_attached(self) -> bool:
        """Whether it still stands in the place of the module's forward."""

    def remove(self) -> None:
        """Give the module its own forward again."""


class Source(Protocol):
    """Gives parts that stand in no module's place, by their names."""

    @property
    def splits(self) -> Mapping[str, SizedPart]: ...


def attached_to(module: Any) -> Any:
    """The part that stands in the place of a module's forward; None for none."""
    return getattr(getattr(module, "__dict__", {}).get("forward"), "nested", None)


_attachments = 0


def count_attachment() -> None:
    """A module was given a size of its own, or lost it."""
    global _attachments
    _attachments += 1


def num_attachments() -> int:
    """How often a part was given a size of its own, or lost it: while it stays, parts do."""
    return _attachments


class SizedParts:
    """All parts of a model with sizes of their own, wherever these were given."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._given: dict[str, SizedPart] = {}
        self._sources: list[Source] = []
        self._own: list[_Attached] = []
        self._unseen: list[_Attached] = []
        self._attached: tuple[int, Mapping[str, SizedPart]] | None = None
        self._unseen_steps: int | None = None

    def give(self, name: str, part: SizedPart) -> None:
        """Count a part that stands in no module's place."""
        self._given[name] = part

    def add(self, source: Source) -> None:
        """Count the parts that a source gives, now and later."""
        self._sources.append(source)

    def own(self, part: _Attached, *, is_named: bool = False) -> None:
        """Undo what was attached when `remove` is called."""
        self._own.append(part)
        if is_named:
            self._unseen.append(part)
            self._unseen_steps = 0

    def remove(self) -> None:
        """Let parts that were attached here run in one piece again."""
        for part in self._own:
            # One that was taken away meanwhile, or covered by another, is not ours to undo.
            if part.is_attached:
                part.remove()
        self._own.clear()

    def all(self) -> Collection[SizedPart]:
        """All of them."""
        return self.by_name().values()

    def by_name(self) -> Mapping[str, SizedPart]:
        """All of them, by the names of their modules."""
        # A walk through all modules at each step would cost; the count tells when one is due.
        if self._attached is None or self._attached[0] != _attachments:
            attached = {
                name: part
                for root in self._modules
                for name, module in root.named_modules()
                if (part := attached_to(module)) is not None
            }
            self._attached = _attachments, self._given | attached
        if not self._sources:
            return self._attached[1]
        further = {name: part for each in self._sources for name, part in each.splits.items()}
        return {**further, **self._attached[1]}

    def notice_step(self) -> None:
        """Name the parts that no step has called so far: their sizes do nothing.

        Warns:
            AutomicroWarning: once, after some steps.
        """
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
                f"nested gives sizes to {names}, and {_PATIENCE} steps have not called it: the "
                "size does nothing. Name a module that is called (a list of modules, or a "
                "layer whose weight alone is used, is not; the tail of a language model runs where "
                "the model itself is given labels)",
                AutomicroWarning,
            )

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found, as plain values."""
        return {name: each.state_dict() for name, each in self.by_name().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with sizes that were found earlier; those of parts that are gone are left out."""
        for name, each in self.by_name().items():
            if name in state:
                each.load_state_dict(state[name])

    def took_shortage(self) -> bool:
        """Whether the memory that has run out was that of parts, which have smaller sizes now."""
        took = [each.took_shortage() for each in self.all()]  # all are asked
        return any(took)

    def cut_what_was_whole(self) -> bool:
        """Whether parts that ran in one piece, and kept what they computed, have slices now."""
        cut = [each.cut_what_was_whole() for each in self.all()]  # all of them
        return any(cut)
