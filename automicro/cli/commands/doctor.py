"""Explain why memory ran out, from the files of a failure.

Shows which modules and tensors held memory, what grew from batch to batch, whether
memory was fragmented, and three remedies with the bytes that they would save.

FILE is oom-NNNN.json of OutOfMemoryReport (its snapshot is read, too), a memory
snapshot of torch (torch.cuda.memory._dump_snapshot) from any program, or a log with
the message of the error. No code in it is run.
"""

import argparse
from pathlib import Path

from automicro.cli.output import to_json
from automicro.errors import ConfigError, describe_error

EXAMPLES = (
    "automicro doctor runs/1/oom/oom-0001.json",
    "automicro doctor snapshot.pickle --memory 24GiB",
)
JSON = "print it as JSON"
TAKES_CONFIG = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a snapshot, a report or a log")
    parser.add_argument(
        "--memory", metavar="BYTES", help="of the device, such as 24GiB, if FILE lacks it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    from automicro.tools.doctor import UnreadableFailureError, diagnose
    from automicro.units import parse_bytes

    path: Path = arguments.file
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}: give the snapshot, report or log")
    try:
        memory = None if arguments.memory is None else parse_bytes(arguments.memory)
        diagnosis = diagnose(path, memory=memory)
    except (UnreadableFailureError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({describe_error(error)})") from error
    print(to_json(diagnosis.to_dict()) if arguments.json else diagnosis)
    return 0
