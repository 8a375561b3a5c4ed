"""Whether the arguments in a config fit what they are for, told before it is called."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from automicro.cli.suggestions import did_you_mean
from automicro.errors import ConfigError
from automicro.migration import synonym_of

# Keys for functions that are called later, with what only training knows.
TAKE_DATA = ("loss", "forward", "update_metric", "count_tokens", "loss_average")


def check_arguments(
    target: Callable[..., Any],
    call: str,
    args: Mapping[str, Any],
    key: str,
    first: Sequence[str],
) -> None:
    """Refuse arguments that a class or a function does not take, or lacks.

    Args:
        target: what will be called.
        call: its dotted path, for messages.
        args: the arguments by name.
        key: where in the config it stands, for messages.
        first: what will be handed over before them, in words.

    Raises:
        ConfigError: an unknown argument, a missing one, or one that is handed over already.

    >>> import torch
    >>> check_arguments(torch.optim.SGD, "torch.optim.SGD", {"lr": 1}, "optimizer", ["params"])
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return  # some builtins have no signature to read
    positional = [
        each
        for each in parameters
        if each.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    kinds = {each.kind for each in parameters}
    if len(positional) < len(first) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ConfigError(
            f"{key}: {call} takes no argument without a name, but is handed {first[0]} first: name "
            f"a class or a function that takes them"
        )
    taken = {each.name: words for each, words in zip(positional, first, strict=False)}
    accepted = [
        each
        for each in parameters
        if each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and each.name not in taken
    ]
    names = [each.name for each in accepted]
    known = f"it takes {', '.join(names)}" if names else "it takes no arguments"
    for name in args:
        if name in taken:
            raise ConfigError(
                f"{key}.args.{name} is not yours to give: {call} is handed {taken[name]} there; "
                f"remove it"
            )
    unknown = [name for name in args if name not in names]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        said = ", ".join(f"{name!r}{_meant(name, names)}" for name in unknown)
        arguments = "argument" if len(unknown) == 1 else "arguments"
        raise ConfigError(f"{key}: {call} takes no {arguments} {said}: {known}")
    required = [each.name for each in accepted if each.default is inspect.Parameter.empty]
    missing = [name for name in required if name not in args]
    nameless = [
        each.name
        for each in parameters
        if each.kind is inspect.Parameter.POSITIONAL_ONLY
        and each.default is inspect.Parameter.empty
        and each.name not in taken
    ]
    if missing or nameless:
        needs = f"{key}: {call} needs {', '.join(map(repr, [*nameless, *missing]))}"
        raise ConfigError(f"{needs}: {_remedy(target, call, key, missing, nameless, known)}")


def _meant(name: str, names: Sequence[str]) -> str:
    synonym = synonym_of(name)
    ours = "" if synonym is None else synonym.key.rpartition(".")[2]
    return f" (did you mean {ours!r}?)" if ours in names else did_you_mean(name, names)


def _remedy(
    target: Callable[..., Any],
    call: str,
    key: str,
    missing: Sequence[str],
    nameless: Sequence[str],
    known: str,
) -> str:
    is_class = isinstance(target, type)
    if key.partition(".")[0] in TAKE_DATA and not is_class:
        return (
            f"call is called once and has to return the function; name a class or a function that "
            f"returns one; to hand over the function itself, write {key}: "
            f"{{call: pkgutil.resolve_name, args: {{name: {call}}}}}"
        )
    if nameless:
        return "only arguments with a name can be given: name a function of your own that calls it"
    text = f"write {'it' if len(missing) == 1 else 'them'} under {key}.args; {known}"
    if key == "model" and not is_class:
        text += "; call is called once and has to return the torch.nn.Module"
    return text
