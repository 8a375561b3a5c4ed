"""Verdicts on model families; ``python -m tests.acceptance.families`` writes `families.md`.

Models train on a batch in microbatches, and whole in plain torch, in float64 without dropout.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from automicro import Microbatcher
from automicro.errors import AutomicroWarning
from automicro.features import with_features
from tests.acceptance.rows import Batch, Draws
from tests.oracle.judging import relative_error
from tests.oracle.runs import is_refusal

FILE = Path(__file__).with_name("families.md")
EXACT = 1e-9
# Better verdicts first.
ORDER = ("exact", "named", "refused", "exact, and named", "differs", "crash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model, by the names of a library's classes, and a function that makes its batches."""

    kind: str
    config: str
    batch: Batch
    options: Mapping[str, Any]
    declared: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # to the Microbatcher
    size: int = 3

    def model(self) -> nn.Module:
        library = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        made: nn.Module = getattr(library, self.kind)(getattr(library, self.config)(**self.options))
        return made


class InDouble(TorchFunctionMode):
    """Keep float64 when a model converts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def doubled(each: Any) -> Any:
            return torch.float64 if each is torch.float32 else each

        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: doubled(each) for name, each in (kwargs or {}).items()}
        return func(*map(doubled, args), **named)


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    return model


def verdict_of_model(make: Callable[[], nn.Module], batch: Batch, size: int, **options: Any) -> str:
    """Return the verdict: exact, named, refused (with the reason), or none of these."""

    def fresh() -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = without_dropout(make()).double().train()
        generator = torch.Generator().manual_seed(2)
        return model, batch(Draws(generator, torch.float64, 0))

    with warnings.catch_warnings(record=True) as heard, in_double():
        warnings.simplefilter("always")
        model, given = fresh()
        loss = total(
            options["forward"](model, given) if "forward" in options else model(**given).loss
        )
        loss.backward()
        expected = {"loss": loss.detach(), **gradients(model)}
        model, given = fresh()
        try:
            result = Microbatcher(model, microbatch_size=size, **with_features(options)).backward(
                given
            )
        except Exception as error:
            refused = "refused" if is_refusal(error) else "crash"
            return f"{refused}: {type(error).__name__}"
        gap = relative_error({"loss": result.loss, **gradients(model)}, expected)
    told = {e.category.__name__ for e in heard if issubclass(e.category, AutomicroWarning)}
    names = ", ".join(sorted(told))
    if gap <= EXACT:
        return f"exact, and named: {names}" if names else "exact"
    return f"named: {names}" if names else f"differs: {gap:.0e}"


def total(loss: Any) -> Any:
    return sum(loss.values()) if isinstance(loss, Mapping) else loss


def gradients(model: nn.Module) -> dict[str, Any]:
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: None if g is None else g.detach().clone() for name, g in found.items()}


def judges() -> dict[str, Callable[[], str]]:
    """Return the functions that find the verdicts, by library and family."""
    from tests.acceptance.torchmetrics_families import METRICS, verdict_of_metric
    from tests.acceptance.torchvision_families import TORCHVISION, verdict_of_vision
    from tests.acceptance.transformers_families import TRANSFORMERS

    by_name = functools.partial
    return {
        **{
            f"transformers | {name}": by_name(
                verdict_of_model, one.model, one.batch, one.size, **one.declared
            )
            for name, one in TRANSFORMERS.items()
        },
        **{f"torchvision | {name}": by_name(verdict_of_vision, name) for name in TORCHVISION},
        **{f"torchmetrics | {name}": by_name(verdict_of_metric, name) for name in METRICS},
    }


def known() -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in FILE.read_text("utf-8").splitlines()]
    return {
        f"{line[0]} | {line[1]}": line[2]
        for line in lines
        if len(line) == 3 and line[2] != "verdict"
    }


def place(verdict: str) -> int:
    return ORDER.index(verdict.partition(":")[0])


def main() -> None:
    started, asked = time.monotonic(), sys.argv[1:]
    before = known() if FILE.exists() else {}
    for name, judge in judges().items():
        if not asked or any(name.startswith(each) for each in asked):
            before[name] = judge()
            print(name, "|", before[name], flush=True)
    print(f"{time.monotonic() - started:.0f} seconds")
    head = [
        "# Families",
        "",
        "Written by `python -m tests.acceptance.families`. Split beside whole:",
    ]
    head += ["exact, named or refused by what. A test fails where one is worse than here.", ""]
    head += ["| library | family | verdict |", "|---|---|---|"]
    lines = [f"| {name} | {before[name]} |" for name in judges() if name in before]
    FILE.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
