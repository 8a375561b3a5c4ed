"""What ``automicro config`` prints: a config, the keys that there are, or a template."""

import argparse

from automicro.cli.inputs import look_for_files
from automicro.cli.results import print_yaml
from automicro.cli.template import NODE_IN_WORDS, TEMPLATE
from automicro.errors import ConfigError


def run_config(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    if arguments.template:
        _take_no_inputs(arguments, "--template")
        print_yaml(TEMPLATE)
    elif arguments.keys is not None:
        _take_no_inputs(arguments, "--keys")
        _print_keys(arguments)
    elif arguments.markdown:
        raise ConfigError("--markdown is a form of --keys: say automicro config --keys --markdown")
    else:
        _print_config(arguments)
    return 0


def _print_keys(arguments: argparse.Namespace) -> None:
    # The keys are explained by the docstrings of those who take them, which takes torch.
    from automicro.cli.nodes import NODE_KEYS
    from automicro.cli.reference import markdown_page, print_keys

    if arguments.markdown:
        print(markdown_page(), end="")
    elif arguments.keys in NODE_KEYS:
        print(NODE_IN_WORDS, end="")
    else:
        print_keys(arguments.keys)


def _print_config(arguments: argparse.Namespace) -> None:
    look_for_files(arguments.inputs, command="config")
    from automicro.cli.job import Job
    from automicro.cli.writing import to_yaml

    job = Job(arguments.inputs, command="config")
    with job.reading() as loaded:
        print_yaml(to_yaml(loaded.written if arguments.set else loaded.everything))


def _take_no_inputs(arguments: argparse.Namespace, option: str) -> None:
    if arguments.inputs:
        raise ConfigError(
            f"{option} looks at no config, but {arguments.inputs[0]!r} was given: leave it out, "
            f"or leave out {option} to print that config"
        )
