"""Values for Weights & Biases."""

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.loggers.given_once import GivenOnce
from automicro.loggers.json_lines import to_json
from automicro.loggers.values import not_started

_OWN = ("config", "dir", "id", "resume")


class WandbLogger:
    """Logs to a run of Weights & Biases, and goes on in the same run after a resume.

    The folder holds which run it is and how far it has come, so another process finds it, also
    after a kill. Values of steps that the run has got already are not logged again: W&B takes
    nothing back. What is run becomes the run's config.

    W&B writes what it is given seconds later, so a kill loses the last of it. The steps after the
    checkpoint are handed over again then. Online, those that W&B has are left out.

    With ``mode="offline"`` (or ``WANDB_MODE=offline``) nothing is sent. Each process leaves a
    folder ``wandb/offline-run-*``, and ``wandb sync --append`` sends those of one run together.

    Args:
        folder: of the run; made where there is none.
        project: of W&B; None for W&B's own choice.
        name: of the run; None for W&B's own choice.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None for W&B's own choice.
        options: further arguments of ``wandb.init``, such as ``entity``, ``group`` or ``tags``.

    Raises:
        ImportError: the package wandb is not installed.
        TypeError: options that the logger sets itself.

    Example:
        >>> logger = WandbLogger("runs/first", project="digits", mode="offline", tags=["cpu"])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str | None = None,
        name: str | None = None,
        mode: str | None = None,
        **options: Any,
    ) -> None:
        # Said now: while training it would be one more logger that fails.
        if importlib.util.find_spec("wandb") is None:
            raise ImportError(
                "WandbLogger needs the package wandb, which is not installed: pip install wandb"
            )
        taken = [each for each in _OWN if each in options]
        if taken:
            raise TypeError(
                f"WandbLogger sets {taken[0]!r} itself: leave it out. The folder decides which run "
                "goes on, and what is run becomes the config"
            )
        self._folder = Path(folder)
        self._options = {"project": project, "name": name, "mode": mode, **options}
        self._given = GivenOnce(self._folder / "wandb.json", is_slow=True)
        self._run: Any = None

    def __repr__(self) -> str:
        return f"WandbLogger({str(self._folder)!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Begin a run, or go on in the one that the folder names.

        Raises:
            Exception: what W&B raises where it cannot begin.
        """
        import wandb

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._given.begin(resume_step=resume_step)
        if name is None:
            name = uuid.uuid4().hex[:12]
            self._given.name_run(name)
        self._run = wandb.init(
            dir=str(self._folder), id=name, resume="allow", config=to_json(run), **self._options
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Hand the values to W&B, which sends or writes them.

        Raises:
            OSError: the folder cannot be written.
            Exception: what W&B raises.
        """
        if self._run is None:
            raise not_started(self)
        new = self._given.take(values, step=step)
        if new and step >= self._run.step:  # of a run that goes on: what W&B has
            self._run.log(new, step=step)

    def close(self) -> None:
        """Finish the run: what is not sent yet is sent now."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
            self._given.finish()
