"""What ``automicro torture`` does: fail every operation of a step of the caller's own model."""

import argparse
import sys

from automicro.cli.dotted import import_callable
from automicro.cli.job import importing_beside
from automicro.errors import ConfigError
from automicro.torture.subject import check_subject
from automicro.torture.torture import QUICK_PLANS, Row, TortureReport, torture
from automicro.torture.trials import CALLS


def torture_subject(path: str, *, quick: bool, seed: int, calls: str) -> TortureReport:
    """Torture what a dotted path names.

    Args:
        path: of a function that returns a `Subject`.
        quick: whether to sample a few trials.
        seed: of the choice.
        calls: names joined by commas.

    Raises:
        ConfigError: the path names nothing, or no subject comes of it.
        Exception: what the function itself raises.
    """
    make = import_callable(path, key="SUBJECT")
    chosen = [call.strip() for call in calls.split(",")]
    unknown = [call for call in chosen if call not in CALLS]
    if unknown:
        raise ConfigError(
            f"--calls {calls}: there is no {', '.join(map(repr, unknown))}: choose some of "
            f"{','.join(CALLS)}"
        )
    subject = make()
    try:
        check_subject(subject)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return torture(
        make,
        name=path.rpartition(".")[2],
        calls=chosen,
        most_plans=QUICK_PLANS if quick else None,
        seed=seed,
        show=_show,
    )


def _show(row: Row) -> None:
    """Tell that it goes on: the whole sweep takes minutes."""
    print(f"{row.what}: {row.plans} trials, {len(row.wrong)} wrong", file=sys.stderr)


def run_torture(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    with importing_beside():
        report = torture_subject(
            arguments.subject, quick=arguments.quick, seed=arguments.seed, calls=arguments.calls
        )
    print(report)
    return report.exit_code
