"""Any of Lightning's loggers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from automicro.loggers.given_once import GivenOnce, flat
from automicro.loggers.json_lines import to_json


@runtime_checkable
class LightningInterface(Protocol):
    """What all loggers of Lightning have, and what others have that follow them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
        """Take down values by name."""
        ...

    def log_hyperparams(self, params: Any) -> Any:
        """Take down settings."""
        ...

    def save(self) -> Any:
        """Write what is still held."""
        ...

    def finalize(self, status: str) -> Any:
        """End."""
        ...


class LightningLogger:
    """Hands everything on to a logger of Lightning.

    Settings come in one level, ``config.optimizer.args.lr``. After a resume, values of steps that
    were logged already are left out: most of these loggers take nothing back. That they go on in
    the same run has to be said to them, such as ``WandbLogger(id="first", resume="allow")``.

    Args:
        logger: with ``log_metrics``, ``log_hyperparams``, ``save`` and ``finalize``.
        folder: where it is noted down how far the run has come; made where there is none.

    Raises:
        TypeError: ``logger`` is none of Lightning's.

    Example:
        >>> import tempfile
        >>> class Printing:
        ...     def log_hyperparams(self, params):
        ...         print(params)
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        ...     def save(self): ...
        ...     def finalize(self, status):
        ...         print(status)
        >>> logger = LightningLogger(Printing(), tempfile.mkdtemp())
        >>> logger.start({"config": {"seed": 0}})
        {'config.seed': 0}
        >>> logger.log({"train/loss": 0.5}, step=1)
        1 {'train/loss': 0.5}
        >>> logger.close()
        success
    """

    def __init__(self, logger: LightningInterface, folder: str | Path) -> None:
        if isinstance(logger, type) or not isinstance(logger, LightningInterface):
            raise TypeError(
                f"{logger!r} has not got log_metrics, log_hyperparams, save and finalize, which "
                "all loggers of Lightning have: pass one of them, such as "
                "lightning.pytorch.loggers.CSVLogger('runs')"
            )
        self._logger = logger
        self._given = GivenOnce(Path(folder) / "lightning.json")
        self._is_open = False

    def __repr__(self) -> str:
        return f"LightningLogger({type(self._logger).__name__})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Hand on what is run.

        Raises:
            Exception: what the logger raises.
        """
        self._given.begin(resume_step=resume_step)
        self._is_open = True
        self._logger.log_hyperparams(flat(to_json(run)))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Hand on the values that are new.

        Raises:
            OSError: the folder cannot be written.
            Exception: what the logger raises.
        """
        new = self._given.take(values, step=step)
        if new:
            self._logger.log_metrics(new, step=step)
            self._logger.save()  # some hold hundreds of steps, which would die with the process

    def close(self) -> None:
        """Let the logger end."""
        if self._is_open:
            self._is_open = False
            self._logger.finalize("success")
