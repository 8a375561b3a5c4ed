"""The path of one settled batch: our calls, their files, and the depth of the stack.

    python benchmarks/one_batch.py [--tree]

Counts calls of Python functions of this package, including generators and comprehensions, but not
those of torch and of the model: for `Microbatcher.backward`, whole and in eight microbatches, with
a fixed size and with "auto", and for a batch of `Trainer.fit`. Also counts this package's frames
above the model's `forward`. The result is the same on every machine.
"""

import argparse
import collections
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import automicro
from automicro import Callback, Microbatcher, Trainer

PACKAGE = str(Path(automicro.__file__).parent)
ROWS = 64


class Trace:
    """Calls of this package's functions during the trace.

    Attributes:
        calls: number of calls.
        changes: number of calls from one file to another.
        files: number of calls per file.
        deepest: this package's frames above the model's call.
    """

    def __init__(self) -> None:
        self.calls = self.changes = self.deepest = 0
        self.files: collections.Counter[str] = collections.Counter()
        self.lines: list[str] = []
        self._depth = 0

    def __enter__(self) -> "Trace":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename == __file__ and code.co_qualname == "Net.forward" and event == "call":
            self.deepest = max(self.deepest, _frames_above(frame))
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            self._depth -= 1
        if event != "call":
            return
        self._depth += 1
        self.calls += 1
        self.files[code.co_filename] += 1
        name = code.co_filename.removeprefix(PACKAGE + "/")
        self.lines.append(f"{'  ' * self._depth}{name}:{code.co_firstlineno} {code.co_qualname}")
        if frame.f_back is not None and frame.f_back.f_code.co_filename != code.co_filename:
            self.changes += 1

    def __str__(self) -> str:
        files = f"{len(self.files):3} files, {self.changes:4} changes of file"
        return f"{self.calls:5} calls in {files}; {self.deepest} frames above the model"


def _frames_above(frame: FrameType | None) -> int:
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return found


class Net(nn.Module):
    """Model whose call reveals the depth of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in _layers()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def _layers() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(16, 16), nn.ReLU()


class TraceOneBatch(Callback):
    """Traces the last batch of a run."""

    def __init__(self, number: int) -> None:
        self.trace = Trace()
        self._number = number

    def batch_end(self, run: Any, result: Any) -> None:
        if run.state.batch == self._number:
            self.trace.__enter__()
        elif run.state.batch == self._number + 1:
            self.trace.__exit__()


def trace_microbatcher(size: Any) -> Trace:
    torch.manual_seed(0)
    model, rows = Net(), (torch.randn(ROWS, 16), torch.randn(ROWS, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), microbatch_size=size, optimizer=optimizer, probe=False
    )

    def step() -> None:
        microbatcher.backward(rows)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    trace = Trace()
    with trace:
        microbatcher.backward(rows)
    return trace


def trace_trainer() -> Trace:
    torch.manual_seed(0)
    model, watch = Net(), TraceOneBatch(20)
    data = TensorDataset(torch.randn(ROWS * 24, 16), torch.randn(ROWS * 24, 16))
    Trainer(
        model,
        DataLoader(data, batch_size=ROWS),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        max_duration="1ep",
        device="cpu",
        progress=False,
        callbacks=[watch],
    ).fit()
    return watch.trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="store_true", help="print every call of the first")
    arguments = parser.parse_args()
    cases: dict[str, Callable[[], Trace]] = {
        "backward, whole": lambda: trace_microbatcher(None),
        "backward, 8 microbatches": lambda: trace_microbatcher(ROWS // 8),
        'backward, "auto"': lambda: trace_microbatcher("auto"),
        "a batch of Trainer.fit": trace_trainer,
    }
    for name, trace in ((name, case()) for name, case in cases.items()):
        print(f"{name:26} {trace}")
        if arguments.tree:
            print("\n".join(trace.lines))
            return


if __name__ == "__main__":
    main()
