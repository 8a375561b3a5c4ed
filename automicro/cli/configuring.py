"""The command ``automicro config``: look at a config, at its keys, or start one."""

import argparse

from automicro.cli.job import Job, add_inputs
from automicro.cli.nodes import NODE_KEYS
from automicro.cli.recipe import Recipe
from automicro.cli.reference import markdown_page, print_keys
from automicro.cli.results import print_yaml
from automicro.cli.subcommand import Subcommand
from automicro.cli.writing import to_yaml
from automicro.errors import ConfigError

DESCRIPTION = """\
Print the config that train would use: files merged, key=value applied, interpolations
resolved, and every key with its default. What can be told without making anything is
checked: keys, values, import paths and the names of arguments. Whether models and data
can be made and fit each other shows automicro verify, or train. run_dir is not looked at.
"""

NODE_IN_WORDS = """\
call and args: how a config names whatever is to be made, under model, train_data and others

call: text, required
    the dotted import path of a class or a function, such as torch.optim.AdamW. It is called once
    and has to return the thing itself: the model, the DataLoader, the function that is the loss.
args: a mapping, default {}
    its arguments by name. A mapping with call anywhere inside is made first.

    optimizer:
      call: torch.optim.AdamW
      args: {lr: 1e-3}

To hand over a function instead of calling it:

    count_tokens:
      call: pkgutil.resolve_name
      args: {name: my_data.count_tokens}
"""

TEMPLATE = """\
# A config to start with. Replace each ???, here or on the command line, and try it:
#   automicro config job.yaml      shows all keys and finds mistakes in them
#   automicro verify job.yaml      tells whether batches may be split
#   automicro train job.yaml
# automicro config --keys explains every key.

global_batch_size: 32        # rows of an optimization batch, whatever the memory

model:
  call: ???                  # import path of your module, such as my_module.MyModel
  args: {}                   # its arguments by name

train_data:
  call: ???                  # of a function that returns a DataLoader
  args: {batch_size: "${global_batch_size}"}

loss:                        # called as loss(model(inputs), targets); without it, the
  call: torch.nn.CrossEntropyLoss   # model computes its own loss

optimizer:                   # is handed the model's parameters first
  call: torch.optim.AdamW
  args: {lr: 1e-3}

eval_data: null              # as train_data
scheduler: null              # {call: torch.optim.lr_scheduler.StepLR, args: {step_size: 100}}
metrics: {}                  # {name: {call: torchmetrics.…, args: {…}}}

max_duration: 1ep            # ep (epochs), ba (batches), sp (samples), tok (tokens)
microbatch_size: auto        # rows computed at a time: as many as fit
memory_limit: null           # such as 8GiB
seed: 0
run_dir: null                # such as runs/${now:%Y-%m-%d_%H-%M-%S}
checkpoint: null             # {interval: 1ep}, with a run_dir to go on in: runs/first
loggers: []                  # [{call: automicro.loggers.JSONLinesLogger, args: {path: …}}]
callbacks: []                # [{call: automicro.callbacks.EarlyStopping, args: {…}}]
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--set", action="store_true", help="only the keys that are set")
    parser.add_argument(
        "--keys",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="list every key with type, default and meaning, or those that match: part of a "
        "name, or a pattern such as '*_size'",
    )
    parser.add_argument("--markdown", action="store_true", help="with --keys: as a page")
    parser.add_argument("--template", action="store_true", help="print a config to start with")


def _config(arguments: argparse.Namespace) -> int:
    if arguments.template:
        _take_no_inputs(arguments, "--template")
        print_yaml(TEMPLATE)
    elif arguments.keys is not None:
        _take_no_inputs(arguments, "--keys")
        if arguments.markdown:
            print(markdown_page(), end="")
        elif arguments.keys in NODE_KEYS:
            print(NODE_IN_WORDS, end="")
        else:
            print_keys(arguments.keys)
    elif arguments.markdown:
        raise ConfigError("--markdown is a form of --keys: say automicro config --keys --markdown")
    else:
        job = Job(arguments.inputs, command="config")
        with job.reading() as loaded:
            with job.making():
                Recipe(loaded.config)
            print_yaml(to_yaml(loaded.written if arguments.set else loaded.everything))
    return 0


def _take_no_inputs(arguments: argparse.Namespace, option: str) -> None:
    if arguments.inputs:
        raise ConfigError(
            f"{option} looks at no config, but {arguments.inputs[0]!r} was given: leave it out, "
            f"or leave out {option} to print that config"
        )


CONFIG = Subcommand(
    name="config",
    brief="print what train would use, all keys, or a template",
    description=DESCRIPTION,
    examples=(
        "automicro config job.yaml",
        "automicro config base.yaml gpu.yaml seed=1 --set",
        "automicro config --keys",
        "automicro config --keys batch",
        "automicro config --template > job.yaml",
    ),
    exit_codes={0: "no mistake was found"},
    add_arguments=_add_arguments,
    run=_config,
)
