"""Plan benchmarks/results/planned_sizes.md: sizes of large language models on absent devices.

    OMP_NUM_THREADS=1 python docs/plan_sizes.py [MODEL …]

Every model is made on the meta device and takes steps on tensors without data, of 1, 2, 4 … rows,
each once; what a rank holds of it is reckoned for every number of ranks. With names of models, only
their lines are planned anew.
"""

import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from automicro.tools.plan.devices import DEVICES
from automicro.tools.plan.dry_run import Conditions, DryRun
from automicro.tools.plan.plan import Planner
from automicro.units import format_bytes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "planned_sizes.md"
LENGTH = 2048
SIZES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (1, 8, 64, 1024)
SHOWN = ("a100-40gb", "a100-80gb", "h200-141gb")
HEAD = f"""\
# Planned microbatch sizes

Written by `python docs/plan_sizes.py`. **Nothing here was measured**: the sizes are
[planned](../../docs/plan.md), by steps on tensors that have shapes but no data.
[Measured ones](measured_sizes.md) stand beside it.

Each field has the most rows per rank that fit (1, 2, 4 … {SIZES[-1]}) and what they need, margin
included; a dash where not even one does. Training in bf16 with AdamW, blocks computed again in the
backward, rows of {LENGTH} tokens (T5: 512 for the encoder, 512 for the decoder), parameters,
gradients and optimizer state sharded over the ranks.

"""


@dataclass(frozen=True)
class Family:
    make: Callable[[], nn.Module]
    length: int = LENGTH


def gpt(layers: int, width: int, heads: int) -> Family:
    config = transformers.GPT2Config(
        n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=heads, use_cache=False
    )
    return Family(lambda: transformers.GPT2LMHeadModel(config))


def t5(inner: int, heads: int) -> Family:
    config = transformers.T5Config(
        d_model=1024, d_kv=128, d_ff=inner, num_layers=24, num_heads=heads, use_cache=False
    )
    config.decoder_start_token_id = 0
    return Family(lambda: transformers.T5ForConditionalGeneration(config), 512)


MODELS = {
    "GPT-3 125M": gpt(12, 768, 12),
    "GPT-3 350M": gpt(24, 1024, 16),
    "GPT-3 760M": gpt(24, 1536, 16),
    "GPT-3 1.3B": gpt(24, 2048, 16),
    "GPT-3 2.7B": gpt(32, 2560, 32),
    "GPT-3 6.7B": gpt(32, 4096, 32),
    "GPT-3 13B": gpt(40, 5120, 40),
    "GPT-3 30B": gpt(48, 7168, 56),
    "GPT-3 66B": gpt(64, 9216, 72),
    "GPT-3 175B": gpt(96, 12288, 96),
    "T5 3B": t5(16384, 32),
    "T5 11B": t5(65536, 128),
}


def planned(family: Family) -> list[tuple[int, list[str]]]:
    """For each number of ranks, a field of each device."""
    ids = torch.zeros(1, family.length, dtype=torch.long)
    batch: Any = {"input_ids": ids, "labels": ids}
    steps = DryRun(model=family.make, batch=batch, optimizer=torch.optim.AdamW)
    conditions = Conditions(precision="bf16", savers=("recompute",))
    planners = {ranks: Planner(steps, conditions, ranks, 2 * SIZES[-1]) for ranks in RANKS}
    return [
        (ranks, [field(planner, name) for name in SHOWN]) for ranks, planner in planners.items()
    ]


def field(planner: Planner, device: str) -> str:
    found = "–"
    for size in SIZES:
        need = planner.need(size)
        if need > DEVICES[device]:
            break
        found = f"{size} ({format_bytes(need)})"
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    for name in sys.argv[1:] or MODELS:
        lines = [line for line in lines if not line.startswith(f"| {name} |")]
        for ranks, fields in planned(MODELS[name]):
            lines.append(f"| {name} | {ranks} | {' | '.join(fields)} | planned |")
            print(lines[-1], flush=True)
        order = list(MODELS)
        rows = [line for line in lines if line.startswith(("| GPT-3 ", "| T5 "))]
        rows.sort(key=lambda line: order.index(line.split(" | ")[0].removeprefix("| ")))
        header = f"| model | ranks | {' | '.join(SHOWN)} | |\n|---|--:|{'--:|' * len(SHOWN)}---|\n"
        foot = f"\nPlanned with torch {torch.__version__.partition('+')[0]}.\n"
        PAGE.write_text(HEAD + header + "\n".join(rows) + "\n" + foot, encoding="utf-8")


if __name__ == "__main__":
    main()
