"""Messages of the library, in the words of a config: keys for arguments, YAML for Python."""

import re

from automicro.cli.config.keys import KEYS

ALL = "|".join(KEYS)
ARGUMENTS = {
    "loss_fn": "loss",
    "train_dataloader": "train_data",
    "eval_dataloader": "eval_data",
}
# Keys that hold a node.
NODES = "loss|forward|optimizer|scheduler|train_data|eval_data|update_metric"
COUNT_TOKENS = re.compile(r"pass count_tokens=…, a callable from a batch to .*?\.numel\(\)")
COUNTING = re.compile(r"loss_average=lambda batch: (.*?\)\.sum\(\))")
COUNTING_AS_NODE = (
    r"loss_average: {call: pkgutil.resolve_name, args: {name: my_data.count}} with "
    r"`def count(batch): return \1` in my_data.py"
)
COUNT_TOKENS_AS_NODE = (
    "write count_tokens: {call: pkgutil.resolve_name, args: {name: my_data.count_tokens}}, with a "
    "function of yours from a batch to its number of tokens"
)


def as_yaml(text: str) -> str:
    """Write arguments and values of Python in a message of the library as a config has them.

    >>> as_yaml("pass loss_fn=…, microbatch_size=None, or None")
    'write loss: {call: …}, microbatch_size=null, or null'
    >>> as_yaml("it averages; use batchnorm='disable' or strict_divisible=True")
    'it averages; use batchnorm=disable or strict_divisible=true'
    """
    text = counting_as_node(text)
    text = COUNT_TOKENS.sub(COUNT_TOKENS_AS_NODE, text)
    for argument, key in ARGUMENTS.items():
        text = re.sub(rf"\b{argument}\b", key, text)
    text = re.sub(r"(?<![.\w])resume='never'", "checkpoint.resume=never", text)
    text = re.sub(rf"\bpass ((?:{NODES})=…)", r"write \1", text)
    text = re.sub(rf"\b({NODES})=…(?: to the Trainer\b)?", r"\1: {call: …}", text)
    text = re.sub(r"(?<!returned )(?<=[= ])None\b", "null", text)
    text = re.sub(rf"\b({ALL})=(True|False)\b", lambda found: found[0].lower(), text)
    return _unquoted_in_the_remedy(text)


def counting_as_node(text: str) -> str:
    """Write a lambda that counts, which no config can hold, as a function that one can name.

    >>> print(counting_as_node("pass loss_average=lambda batch: (batch != 0).sum()"))
    write loss_average: {call: pkgutil.resolve_name, args: {name: my_data.count}} with
    `def count(batch): return (batch != 0).sum()` in my_data.py
    """
    return COUNTING.sub(COUNTING_AS_NODE, text).replace("pass loss_average:", "write loss_average:")


def _unquoted_in_the_remedy(text: str) -> str:
    """What is wrong is quoted as it is; what to do is to be copied."""
    wrong, *remedy = re.split(r"([;:.] )", text, maxsplit=1)
    return wrong + re.sub(rf"""\b({ALL})=(['"])(\w+)\2""", r"\1=\3", "".join(remedy))
