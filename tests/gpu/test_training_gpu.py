"""Common ways of training: deterministic, compiled, in half precision, with a report."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import DeterminismWarning, Halving, Trainer
from automicro.callbacks import MemoryMonitor, OutOfMemoryReport
from automicro.features import with_features
from automicro.trainer.surroundings import CUBLAS_VARIABLE, deterministic_algorithms
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, MIB, room, snapshot
from tests.gpu.subjects import (
    HALF,
    PHASES,
    PLENTY,
    ROOM,
    ROWS,
    Hungry,
    batch,
    microbatcher,
    model,
    require_same_bits,
)

pytestmark = GPU

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "inductor" if DEVICE.type == "cuda" else "aot_eager"

DETERMINISTIC_JOB = """
import json, os, sys
if sys.argv[1] == "standin":
    from tests.standin.device import install
    install()
import torch
from torch import nn
from automicro import Trainer
from automicro.features import Deterministic
from tests.gpu.subjects import Blocks, batch
rows = [batch(seed=seed) for seed in range(3)]
sums = []
for _ in range(2):
    torch.manual_seed(0)
    net = Blocks()  # which the Trainer moves: nothing has asked for the device
    Trainer(net, rows, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, seed=0,
            max_duration="1ep", device=sys.argv[1], features=[Deterministic()],
            progress=False).fit()
    sums.append([each.double().sum().item() for each in net.parameters()])
print(json.dumps({"same": sums[0] == sums[1], "variable": os.environ.get(sys.argv[2])}))
"""


def test_deterministic_trainer_is_reproducible_in_new_process(record_property: Record) -> None:
    others = {name: value for name, value in os.environ.items() if name != CUBLAS_VARIABLE}
    finished = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC_JOB, DEVICE.type, CUBLAS_VARIABLE],
        cwd=ROOT,
        env=others,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    record_property("variable", found["variable"])
    assert found["same"]
    assert (found["variable"] == ":4096:8") == (DEVICE.type == "cuda")
    assert DeterminismWarning.__name__ not in finished.stderr


def test_deterministic_run_restores_settings() -> None:
    trainer(model(), deterministic=True).fit()
    assert not torch.are_deterministic_algorithms_enabled()


def test_nondeterministic_operation_raises_error() -> None:
    zeros, first = torch.zeros(4, device=DEVICE), torch.tensor([0], device=DEVICE)
    with (
        pytest.raises(RuntimeError, match="does not have a deterministic"),
        deterministic_algorithms(DEVICE),
    ):
        zeros.put_(first, torch.ones(1, device=DEVICE))


def trainer(net: nn.Module, rows: int = 4 * ROWS, **options: Any) -> Trainer:
    inputs, targets = batch(rows)
    settings: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW,
        "max_duration": "1ep",
        "device": DEVICE,
        "progress": False,
        "probe": False,
        "seed": 0,
        **options,
    }
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=ROWS)
    return Trainer(net, loader, **with_features(settings))


def uncompiled(demand: Hungry) -> Hungry:
    """Exclude the layer from compilation, which would remove its unused memory."""
    found: Hungry = torch.compiler.disable(Hungry(*(each // MIB for each in demand.row_bytes)))
    return found


def test_compiled_model_recovers_while_backward_compiles(record_property: Record) -> None:
    """The first failure happens before the compiler has seen the backward."""
    torch.compiler.reset()
    net = model(uncompiled(PHASES["backward"]))
    with room(ROOM):
        summary = trainer(net, compile={"backend": COMPILER}, microbatch_size="auto").fit()
    record_property("ooms", summary.train_ooms)
    assert summary.steps == 4
    assert summary.train_ooms >= 1
    assert all(bool(each.isfinite().all()) for each in net.parameters())
    torch.compiler.reset()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("deterministic")
def test_fp16_training_recovers_bit_identically_from_oom(fused: bool) -> None:
    def run(size: Any, limit: int) -> dict[str, torch.Tensor]:
        net = model(Hungry(64, 0))
        options: dict[str, Any] = {"precision": "fp16", "microbatch_size": size}
        if size == "auto":
            options["microbatch_size"] = Halving(refine=False)
        options["optimizer"] = functools.partial(torch.optim.AdamW, fused=fused)
        with room(limit):
            assert trainer(net, **options).fit().train_ooms == (size == "auto")
        return snapshot(net)

    require_same_bits(run)


def test_oom_report_lists_memory_held_on_device(tmp_path: Path) -> None:
    net = model(PHASES["forward"])
    report = OutOfMemoryReport(tmp_path)
    monitor = MemoryMonitor()
    with room(ROOM):
        summary = trainer(net, callbacks=[report, monitor], microbatch_size="auto").fit()
    path, *others = sorted(tmp_path.glob("*.json"))
    found = json.loads(path.read_text())
    assert summary.train_ooms == 1 + len(others)
    assert found["device"] == str(DEVICE)
    assert found["microbatch_size"] == {"before": ROWS, "after": HALF}
    assert "out of memory" in found["message"]
    state_bytes = sum(each.nbytes for each in net.parameters())
    assert found["held"][0]["num_bytes"] >= state_bytes
    assert found["peak_bytes"] > state_bytes
    assert path.with_suffix(".pickle").exists() == (DEVICE.type == "cuda")


def test_compiled_model_after_oom_matches_fixed_size() -> None:
    found = []
    for size, limit in ((HALF, PLENTY), (Halving(refine=False), ROOM)):
        torch.compiler.reset()
        # Without dropout, because the compiler draws other numbers.
        net = model(uncompiled(PHASES["backward"])).eval()
        net.compile(backend=COMPILER)
        with room(limit):
            result = microbatcher(net, size, probe=False).backward(batch())
        assert result.microbatch_size == HALF
        found.append([p.grad for p in net.parameters()])
    torch.compiler.reset()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
