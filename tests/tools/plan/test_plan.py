"""Planned peaks without allocation: counted memory, sizes found, and no side effects."""

import json
import pickle
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import automicro
from automicro import UntraceableModelError
from automicro.tools.plan import kernels
from automicro.tools.plan.kernels import KINDS
from automicro.torch_private_execution import (
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
)
from tests.gpu.test_plan_gpu import planned
from tests.sweeps import mostly_in_sweeps
from tests.tools.plan.conftest import adam, real_peak
from tests.torture.engine.subject import freeze

ROWS = 64
LOSS = nn.CrossEntropyLoss()
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20}


class Blocks(nn.Module):
    """Residual blocks, which can be recomputed."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(rows: int = ROWS, width: int = 128) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randint(10, (rows,))


def plan(model: Any, data: Any = None, **options: Any) -> automicro.PlanReport:
    options = {"loss_fn": LOSS, "optimizer": adam, "device": "cpu", **options}
    return automicro.plan(model, batch() if data is None else data, **options)


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "blocks": (Blocks, batch()),
    "batchnorm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        ),
        (torch.randn(ROWS, 3, 8, 8), torch.randint(10, (ROWS,))),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(128, 512), nn.Dropout(0.1), nn.Linear(512, 10)),
        batch(),
    ),
    "frozen": (
        lambda: nn.Sequential(nn.Linear(128, 512).requires_grad_(False), nn.Linear(512, 10)),
        batch(),
    ),
}


@pytest.mark.parametrize("size", mostly_in_sweeps([ROWS, 16], quick=[16]))
@pytest.mark.parametrize("case", CASES)
def test_planned_peak_matches_real_microbatcher(
    case: str, size: int, without_workspaces: None
) -> None:
    make, data = CASES[case]
    planned = plan(make(), data, microbatch_size=size).peak_bytes
    assert planned == pytest.approx(real_peak(make(), data, size, loss_fn=LOSS), rel=0.02)


def test_planned_size_is_largest_that_fits_budget() -> None:
    limit = 3 << 20
    report = plan(Blocks(), batch(512), memory=limit)
    assert 1 < report.microbatch_size < 512
    assert report.needed_bytes <= limit
    assert len(report.points) <= 8
    coarser = -(-512 // (report.num_microbatches - 1))
    larger = plan(Blocks(), batch(512), memory=limit, microbatch_size=coarser)
    assert larger.needed_bytes > limit
    assert not larger.fits
    assert (report.fits, report.exit_code, larger.exit_code) == (True, 0, 1)


def test_plan_leaves_no_trace() -> None:
    model, data = Blocks(), batch()

    def trace() -> Any:
        modules = [vars(module) for module in model.modules()]
        return freeze([modules, data, random.getstate(), torch.get_rng_state()])

    before = trace()
    automicro.plan(model, data, loss_fn=LOSS, optimizer=adam, memory="2MiB")
    assert trace() == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_seven_billion_parameters_are_planned_without_allocation() -> None:
    report = plan(
        lambda: nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range(7))),
        (torch.zeros(2, 32768), torch.zeros(2, dtype=torch.long)),
        memory="80GiB",
    )
    assert report.num_parameters == 7 * 2**30
    assert report.breakdown["optimizer state"] >= 8 * report.num_parameters
    assert not report.fits
    assert report.microbatch_size == 1
    assert "not even one row fits" in str(report)


def test_evaluation_and_half_precision_change_what_is_kept() -> None:
    training, evaluation = (plan(Blocks(), batch(2048), train=train) for train in (True, False))
    assert "gradients" not in evaluation.breakdown
    assert evaluation.breakdown["activations"] < training.breakdown["activations"] / 2
    data = batch()[0].bfloat16(), batch()[1]
    split = [
        plan(Blocks().bfloat16(), data, microbatch_size=16, gradient_sums=sums).breakdown
        for sums in ("fp32", "native")
    ]
    assert split[0]["gradients"] == pytest.approx(2 * split[1]["gradients"], rel=0.02)


def test_remedy_savings_match_plans_with_that_remedy() -> None:
    data = batch(2048)
    report = plan(Blocks(), data, memory="1GiB")
    saved_by = {each.text.partition(":")[0]: each.saved_bytes for each in report.remedies}
    again = plan(Blocks(), data, when_too_large="recompute").levels[1]
    for name, changed in (
        ("recompute", again),
        ("bf16", plan(Blocks(), data, precision="bf16")),
        ("8 ranks", plan(Blocks(), data, ranks=8)),
    ):
        assert saved_by[name] == report.needed_bytes - changed.needed_bytes
    saved = [remedy.saved_bytes for remedy in report.remedies]
    assert saved == sorted(saved, reverse=True)
    assert min(saved) > 0


def test_ranks_shard_state_and_gather_blocks() -> None:
    alone, shared = plan(Blocks(), batch(1)), plan(Blocks(), batch(1), ranks=4)
    for kind in ("parameters", "optimizer state"):
        assert shared.breakdown[kind] == pytest.approx(alone.breakdown[kind] / 4, rel=0.2)
    block = sum(p.nbytes for p in Blocks().blocks[0].parameters())
    assert shared.breakdown["gathered from other ranks"] >= 3 * block


class Attends(nn.Module):
    """One layer of attention, with the options of a case."""

    def __init__(self, heads: int = 4, width: int = 64, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        given = self.inputs(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(2, 3)
        query, key, value = given
        if self.options.get("enable_gqa"):
            key, value = key[:, ::2], value[:, ::2]
        found = nn.functional.scaled_dot_product_attention(query, key, value, **self.options)
        return self.outputs(found.transpose(1, 2).flatten(2))


def texts(length: int = 256, rows: int = 4, width: int = 64, **kind: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, width, **kind), torch.randn(rows, length, width, **kind)


# Peak bytes counted by an H100's allocator (tests/gpu/test_plan_gpu.py).
MEASURED = {
    ("perceptron", "fp32"): 47_572_992,
    ("perceptron", "bf16"): 47_401_472,
    ("convolutions", "fp32"): 123_884_544,
    ("convolutions", "bf16"): 65_238_528,
    ("attention", "fp32"): 359_791_104,
    ("attention", "bf16"): 225_963_520,
}


@pytest.mark.parametrize(("name", "precision"), MEASURED)
def test_planned_peak_matches_gpu_measurement(name: str, precision: str) -> None:
    report, _ = planned(name, precision)
    assert report.peak_bytes == pytest.approx(MEASURED[name, precision], rel=0.03)
    assert report.needed_bytes >= MEASURED[name, precision]


def test_fused_attention_workspace_matches_gpu_measurement() -> None:
    """Workspace bytes per query element, in addition to the three gradients."""
    cases: list[Any] = [
        (torch.bfloat16, 128, 16, 12.25, 16.27),
        (torch.bfloat16, 192, 64, 9.43, 4.08),
        (torch.bfloat16, 128, 80, 8.85, 6.45),
        (torch.bfloat16, 192, 128, 9.45, 5.44),
        (torch.float32, 192, 16, None, 16.31),
        (torch.float32, 128, 32, None, 8.13),
    ]
    for dtype, length, size, *measured in cases:
        query = torch.empty(8, 4, length, size, dtype=dtype, device="meta")
        kinds = FLASH_ATTENTION_BACKWARD, EFFICIENT_ATTENTION_BACKWARD
        for backward, wanted in zip(kinds, measured, strict=True):
            if wanted is not None:
                found = kernels._workspace_bytes(backward, (None, query)) / query.numel()
                assert found == pytest.approx(wanted, rel=0.03)


MASK = torch.ones(256, 256, dtype=torch.bool).tril()


def test_plan_knows_which_attention_is_fused() -> None:
    cases: list[Any] = [
        ({"is_causal": True}, "bf16", "fused kernels"),
        ({"attn_mask": MASK}, "bf16", "fused kernels"),
        ({"attn_mask": MASK, "dropout_p": 0.1}, "fp32", "fused kernels"),
        ({"attn_mask": MASK.float()}, "fp32", "fused kernels"),
        ({"heads": 16, "width": 48}, "bf16", "fused kernels"),  # padded
        ({"heads": 16, "width": 48}, "fp32", "no fused kernel for heads of size 3 in .*float32"),
        ({"enable_gqa": True}, "bf16", "fused kernels"),
        ({"enable_gqa": True}, "fp32", "no fused kernel for fewer keys than queries in .*float32"),
        ({"enable_gqa": True, "attn_mask": MASK}, "bf16", "fewer keys .* with a mask"),
    ]
    for options, precision, assumed in cases:
        options = dict(options)
        width = options.get("width", 64)
        report = plan(
            Attends(**options),
            texts(width=width),
            device="cuda",
            loss_fn=nn.MSELoss(),
            precision=precision,
        )
        (sentence,) = report.assumptions
        assert re.search(assumed, sentence)
        scores = 4 * options.get("heads", 4) * 256 * 256 * 2
        assert (report.modules["the model itself"] > scores) == (
            "no fused" in assumed or "few" in assumed
        )
    for device, precision, said in [
        ("t4", "bf16", "no fused kernel for bfloat16 before Ampere$"),
        ("t4", "fp32", r"fused kernels \(flash"),
        ("l4", "bf16", r"fused kernels \(flash"),
    ]:
        options = {"device": device, "precision": precision, "loss_fn": nn.MSELoss()}
        assert re.search(said, plan(Attends(), texts(), **options).assumptions[0])


def test_attention_outside_plan_is_unaffected() -> None:
    x, seen = torch.randn(1, 2, 8, 8), list[Tensor]()

    def attend() -> None:
        seen.append(nn.functional.scaled_dot_product_attention(x, x, x))

    class Meanwhile(Attends):
        def forward(self, x: Tensor) -> Any:
            thread = threading.Thread(target=attend)
            thread.start()
            thread.join()
            return super().forward(x)

    attend()
    plan(Meanwhile(), texts(), device="cuda", loss_fn=nn.MSELoss())
    attend()
    assert len(seen) > 2
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_lstm_activations_are_counted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(16, 32, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)[0]

    data = torch.randn(64, 50, 16), torch.randn(64, 50, 32)
    report = plan(Recurrent(), data, loss_fn=nn.MSELoss())
    assert report.breakdown["activations"] >= 16 * data[1].nbytes


class Reads(nn.Module):
    """A model that reads values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Any:
        if x.sum().item() > 1e9:  # the line that the error names
            x = x * 2
        return self.layer(x)


class Masks(Reads):
    def forward(self, x: Tensor) -> Any:
        kept = x[x[:, 0] > -1e9]
        return self.layer(kept)


def test_model_that_reads_data_is_rejected_with_line() -> None:
    cases: list[Any] = [(Reads, "x.sum().item()"), (Masks, "x[x[:, 0] > -1e9]")]
    for kind, line in cases:
        with pytest.raises(UntraceableModelError, match=r"real data: .*is_extra_pass") as caught:
            plan(kind(), batch(256))
        assert line in str(caught.value)
        assert "test_plan.py:" in str(caught.value)

    class Guarded(Reads):
        def forward(self, x: Tensor) -> Any:
            return self.layer(x) if automicro.is_extra_pass() else super().forward(x)

    assert plan(Guarded(), batch(256)).fits


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_module_is_rejected_by_name() -> None:
    model = nn.Sequential(Blocks(), torch.jit.trace(nn.Linear(10, 10), torch.zeros(2, 10)))
    with pytest.raises(UntraceableModelError, match=r"^1 is scripted or traced.*original module$"):
        plan(model)


def test_forward_that_refers_to_model_is_rejected() -> None:
    model = Blocks()
    with pytest.raises(UntraceableModelError, match=r"^forward refers to a Blocks.*self$"):
        plan(model, loss_fn=None, forward=lambda _, data: LOSS(model(data[0]), data[1]))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_report_prints_text_and_json() -> None:
    report = plan(Blocks(), batch(512), memory="3MiB")
    text = str(report)
    for word in ("Blocks fits", "activations", "blocks.*", "margin", "recompute"):
        assert word in text
    found = json.loads(json.dumps(report.to_dict()))
    assert pickle.loads(pickle.dumps(report)).to_dict() == report.to_dict()
    assert found["microbatch_size"] == report.microbatch_size
    assert found["needed_bytes"] == report.needed_bytes


def test_report_parts_add_up() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(1, 10):
                self.add_module(f"layer{number}", nn.Linear(8, 8 * number))
            self.head = nn.Linear(360, 10)

        def forward(self, x: Tensor) -> Any:
            *layers, head = self.children()
            return head(torch.cat([layer(x) ** 2 for layer in layers], 1))

    report = plan(Wide(), batch(2048, 8))
    held = str(report).partition("\n  what would help")[0]
    lines = [line.split(maxsplit=2) for line in held.splitlines()]
    parts = {name: float(n) * UNITS[unit] for n, unit, name in lines[3:] if unit in UNITS}
    kinds, modules = (
        {k: v for k, v in parts.items() if k in of} for of in (KINDS, {*parts} - {*KINDS})
    )
    assert sum(kinds.values()) == pytest.approx(report.peak_bytes, rel=0.01)
    assert "others" in modules
    del modules["margin to leave free"]
    assert sum(modules.values()) == pytest.approx(parts["activations"], rel=0.01)


def test_report_states_its_assumptions() -> None:
    cases: list[Any] = [
        ({"memory": "3MiB", "device": "cuda"}, "fp32, as on a GPU"),
        ({"memory": "3MiB"}, "fp32, on the CPU"),
        ({"device": "t4"}, "fp32, on t4"),
        ({"device": "t4", "memory": "3MiB"}, r" of 3.00 MiB \(planned\)\n.*, on t4\n"),
        ({"ranks": 2}, r"64 rows of each rank need .*\n.* over 2 ranks \(.* are per rank\)"),
    ]
    for options, place in cases:
        assert re.search(place, str(plan(Blocks(), **options)))


def test_wrong_arguments_raise_error_with_remedy() -> None:
    cases: list[Any] = [
        ({"device": "a100"}, "is not known: give one of t4, .*memory='24GiB'"),
        ({"memory": "90GiB", "device": "a100-80gb"}, "exceeds the usable 78.55 GiB"),
        ({"memory": "lots"}, "cannot read 'lots'"),
        ({"ranks": 0}, "ranks"),
        ({"precision": "fp8"}, "fp8"),
    ]
    for options, words in cases:
        with pytest.raises((ValueError, TypeError), match=words):
            plan(Blocks(), **options)
