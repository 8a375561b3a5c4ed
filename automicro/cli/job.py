"""The config files and overrides of a command line, which all but one of the commands take."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from automicro.cli.failures import summarize_error
from automicro.cli.inputs import split_inputs
from automicro.cli.keys import TO_TRAIN
from automicro.cli.loading import LoadedConfig, naming, read_config
from automicro.cli.places import is_bug_of_ours
from automicro.errors import ConfigError
from automicro.trainer.processes import place_in_environment


class Job:
    """What a command line names, to be read and made.

    Args:
        inputs: paths of YAML files, and ``key=value``. What has ``=`` in it is a path only where
            a separator comes first, or where there is such a file.
        command: for whom, for messages.
        for_ranks: whether several processes can do it together.

    Raises:
        ConfigError: there is no file among them.

    >>> Job(["base.yaml", "seed=1", "runs/lr=0.1/config.yaml"], command="train").files
    ('base.yaml', 'runs/lr=0.1/config.yaml')
    """

    def __init__(self, inputs: Sequence[str], *, command: str, for_ranks: bool = False) -> None:
        self._command = command
        self._for_ranks = for_ranks
        self.files, self._overrides = split_inputs(inputs, command=command)

    @contextlib.contextmanager
    def reading(self, required: Sequence[str] = TO_TRAIN) -> Iterator[LoadedConfig]:
        """Read the config; meanwhile modules are found beside its files, and where we are.

        Args:
            required: the keys that the command cannot do without.

        Raises:
            ConfigError: anything wrong, or several processes where one is needed.
        """
        num_processes = self._count_processes()
        with importing_beside(*self.files):
            yield read_config(
                self.files, self._overrides, required=required, num_devices=num_processes
            )

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Tell mistakes in what a config names from those of a run.

        Raises:
            ConfigError: whatever went wrong inside, but Ctrl-C and bugs of automicro itself.
        """
        with naming(*self.files):
            try:
                yield
            except ConfigError:
                raise
            except Exception as error:
                if is_bug_of_ours(error):
                    raise
                raise ConfigError(summarize_error(error)) from error

    def _count_processes(self) -> int:
        try:
            number = place_in_environment().world_size
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if number > 1 and not self._for_ranks:
            raise ConfigError(
                f"WORLD_SIZE={number}: this is one of several processes, as torchrun starts them, "
                f"and {self._command} is for one: start it as automicro {self._command}"
            )
        return number


@contextlib.contextmanager
def importing_beside(*paths: str) -> Iterator[None]:
    """Let a config name modules that lie beside it, then those where the command was started."""
    before = list(sys.path)
    folders = [str(Path(path).resolve().parent) for path in paths]
    sys.path[:0] = dict.fromkeys([*folders, str(Path.cwd())])
    try:
        yield
    finally:
        sys.path[:] = before
