"""The doctor on programs that really run out of memory, and on files of every kind."""

import contextlib
import importlib
import io
import json
import pickle
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import automicro.tools.doctor
from automicro.cli import main
from automicro.tools.doctor import Diagnosis, UnreadableFailureError, diagnose
from automicro.tools.doctor.causes import Device
from automicro.tools.doctor.keepers import find_keepers, reaches_backward
from automicro.tools.doctor.origins import origin_of
from automicro.tools.doctor.snapshot import Frame, read_snapshot
from automicro.tools.doctor.source import line_of
from tests.tools.doctor.recorder import Recorder

MIB = 1 << 20
FOLDER = Path(__file__).parent / "failures"

# MiB of the device, and what the cause may be called.
PLANTED: dict[str, tuple[int, set[str]]] = {
    "average": (40, {"copy"}),
    "bank": (32, {"grows"}),
    "gradients": (16, {"kept"}),
    "heavy": (60, {"activations"}),
    "logits": (150, {"activations"}),
    "long_batch": (100, {"activations"}),
    "losses": (30, {"kept"}),
    "memory_of_steps": (20, {"kept"}),
    "neighbour": (52, {"others"}),
    "outputs": (60, {"kept"}),
    "pieces": (96, {"fragmentation"}),
    "speaking": (30, {"grows"}),
    "state": (80, {"optimizer"}),
    "teacher": (60, {"parameters", "second model"}),
    # Written after the doctor was done.
    "hooks": (24, {"kept"}),
    "large_model": (80, {"parameters"}),
    "predictions": (50, {"kept"}),
    "sum_of_losses": (30, {"kept"}),
    "swa": (40, {"copy"}),
    "whole_data": (50, {"tensors", "batch"}),
    # Written after twelve programs by somebody else had shown what it missed.
    "answers": (24, {"kept"}),
    "cached_samples": (24, {"kept"}),
    "evaluation": (30, {"activations"}),
    "long_sequence": (44, {"activations"}),
    "pairs": (48, {"tensors"}),
    "remembered_bias": (44, {"kept"}),
    "rollouts": (24, {"kept"}),
    "running_total": (24, {"kept"}),
    "sampling": (24, {"kept"}),
    "table": (36, {"gradients", "parameters", "optimizer"}),
    "teacher_with_graph": (24, {"second model"}),
    "tracebacks": (24, {"kept"}),
    "validation": (24, {"kept"}),
    "wide_step": (30, {"optimizer"}),
}
PYTHON_ONLY = {"bank", "gradients", "logits", "hooks"}  # the others have C++ frames, too


def culprit_of(name: str) -> int:
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, line in enumerate(lines, start=1) if "# culprit" in line)
    return found


def fail(name: str, **options: Any) -> Recorder:
    """Run a program until memory runs out."""
    options.setdefault("stacks", "python" if name in PYTHON_ONLY else "all")
    options.setdefault("others", 40 * MIB if name == "neighbour" else 0)
    recorder = Recorder(PLANTED[name][0] * MIB, **options)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"), recorder:
        importlib.import_module(f"tests.tools.doctor.failures.{name}").main()
    return recorder


def dump(recorder: Recorder, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorder.snapshot))
    return path


def names_the_culprit(name: str, diagnosis: Diagnosis) -> bool:
    """Whether the first cause is of the planted kind, and says the planted line or class."""
    cause = diagnosis.cause
    if cause is None or cause.kind not in PLANTED[name][1]:
        return False
    if name in ("neighbour", "pieces"):
        return True  # no line is to blame
    if name == "long_batch":
        return cause.owner == "Attention" and "larger or longer" in cause.text
    if name == "long_sequence":
        return cause.owner == "GRUCell"
    line = culprit_of(name)
    said = f"{cause.where} {cause.text}"
    return f"{name}.py:{line} " in said or f"line {line}: " in said


FAST = ("average", "heavy", "logits", "neighbour", "pieces", "state", "teacher", "outputs")


def case(name: str) -> Any:
    return pytest.param(name, marks=() if name in FAST else pytest.mark.sweep)


@pytest.mark.parametrize("name", [case(name) for name in PLANTED])
def test_the_planted_culprit_is_named(name: str, tmp_path: Path) -> None:
    recorder = fail(name)
    diagnosis = diagnose(dump(recorder, tmp_path), memory=recorder.capacity)
    assert names_the_culprit(name, diagnosis), str(diagnosis)
    assert 1 <= len(diagnosis.remedies) <= 3
    saved = [remedy.saved_bytes for remedy in diagnosis.remedies]
    assert saved == sorted(saved, reverse=True)


# What has to be among the remedies, and what must not be.
REMEDIES = {
    "evaluation": ("no backward ever follows the forward at evaluation.py:13", "recompute"),
    "memory_of_steps": ("detach() what the next round begins with", "loss.item()"),
    "pairs": ("compute pairs.py:8 (spread) in pieces", "let go"),
    "remembered_bias": ("bound the cache at remembered_bias.py:9", "loss.item()"),
    "table": ("sparse=True", "zero_grad"),
    "teacher_with_graph": (
        "run teacher_with_graph.py:15 (main) under torch.no_grad()",
        "recompute",
    ),
    "tracebacks": ("keep str(error) at tracebacks.py:28", "loss.item()"),
    "wide_step": ("foreach=False or fused=True", "zero_grad"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_is_against_its_cause(name: str, tmp_path: Path) -> None:
    diagnosis = diagnose(dump(fail(name), tmp_path))
    wanted, unwanted = REMEDIES[name]
    remedies = [remedy.text for remedy in diagnosis.remedies]
    assert any(wanted in text for text in remedies), remedies
    assert not any(unwanted in text for text in remedies), remedies
    assert "0 bytes in" not in str(diagnosis)


# In each, the line that makes a tensor is marked, and so is the one that keeps it, if one does.
PROGRAMS = {
    "a list": """
def f(model, data):
    kept = []
    for x in data:
        y = model(x)  # makes
        loss = y.mean()
        kept.append(loss)  # keeps
""",
    "numbers": """
def f(model, data):
    kept, total = [], 0.0
    for x in data:
        y = model(x)  # makes
        kept.append(y.mean().item())
        total += float(y.sum())
        right = (y.argmax(1) == x).sum()
        total = total + right
""",
    "copies on the host": """
def f(model, data):
    kept = []
    for x in data:
        y = model(x)  # makes
        kept.append(y.detach().cpu())
""",
    "copies on the host, whose graph is not": """
def f(model, data):
    kept = []
    for x in data:
        y = model(x)  # makes
        kept.append(y.cpu())  # keeps
""",
    "a list that each round makes anew": """
def f(model, data):
    for x in data:
        parts = []
        for piece in x.chunk(4):
            parts.append(piece)
        y = model(x)  # makes
        parts.append(y)
""",
    "through a local list": """
def f(model, data):
    kept = {}
    for number, x in enumerate(data):
        parts = []
        y = model(x)  # makes
        parts.append(y)
        kept[number] = tuple(parts)  # keeps
""",
    "a sum": """
def f(model, data):
    total = 0.0
    for x in data:
        loss = model(x).mean()  # makes
        total = total + loss  # keeps
""",
    "a sum of what is detached": """
def f(model, data):
    total = 0.0
    for x in data:
        loss = model(x).mean()  # makes
        total += loss.detach()
""",
    "another function": """
def note(where, step, loss):
    where[step] = loss  # keeps

def f(model, data, where):
    for step, x in enumerate(data):
        loss = model(x)  # makes
        note(where, step, loss)
""",
    "a hook": """
def f(model, data, seen):
    model.register_forward_hook(lambda module, given, made: seen.append(made))  # keeps
    for x in data:
        model(x).sum().backward()  # makes
""",
    "an exception": """
def f(model, data, failed):
    for x in data:
        try:
            model(x)  # makes
        except ValueError as error:
            failed.append((x, error))  # keeps
""",
    "a state": """
def f(model, data, state):
    for x in data:
        y, state = model(x, state)  # makes keeps
        y.sum().backward()
""",
    "a graph that is retained": """
def f(model, data):
    for x in data:
        loss = model(x).sum()  # makes
        loss.backward(retain_graph=True)  # keeps
""",
    "an expression": """
def f(model, data):
    return [model(x) for x in data]  # makes keeps
""",
    "a module": """
kept = []
for x in data:
    kept.append(model(x))  # makes keeps
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_is_followed_to_the_line_that_keeps_it(name: str, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(PROGRAMS[name])
    lines = PROGRAMS[name].splitlines()
    (made,) = (number for number, line in enumerate(lines, start=1) if "# makes" in line)
    keeping = [number for number, line in enumerate(lines, start=1) if line.endswith("keeps")]
    found = find_keepers([Frame(str(code), made, "f")])
    assert [keeper.frame.line for keeper in found] == keeping


@pytest.mark.parametrize(
    ("after", "reaches"),
    [
        ("loss = made.mean(); loss.backward()", True),
        ("scaler.scale(made).backward()", True),
        ("gradients = torch.autograd.grad(made, weights)", True),
        ("step(made)", True),
        ("self.loss = made.mean(); self.loss.backward()", True),
        ("print(made.mean().item()); other.backward()", False),
        ("right = made.argmax(1); right.backward()", False),
    ],
)
def test_whether_a_backward_comes_shows_in_the_source(
    after: str, reaches: bool, tmp_path: Path
) -> None:
    code = tmp_path / "code.py"
    code.write_text(f"def step(x):\n    x.backward()\nmade = model(x)\n{after}\n")
    assert reaches_backward([Frame(str(code), 3, "<module>")]) is reaches
    assert reaches_backward([Frame("/nowhere.py", 3, "<module>")]) is None


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return fail("average")


@pytest.fixture
def snapshot(recorder: Recorder, tmp_path: Path) -> Path:
    return dump(recorder, tmp_path)


@pytest.mark.parametrize("name", ["average", "pieces"])
def test_torch_reads_what_the_recorder_writes(name: str) -> None:
    """It stands for CUDA's: were its format another, the tests above would say nothing."""
    taken = fail(name).snapshot
    content = pickle.loads(pickle.dumps(taken))

    def lines(text: str) -> str:
        return text

    assert f"{name}.py:" in _memory_viz.memory(content, format_flamegraph=lines)
    assert "seg_" in _memory_viz.segments(content, format_flamegraph=lines)
    assert "total_allocated" in _memory_viz.segsum(content)
    assert "raise OutOfMemoryError" in _memory_viz.trace(content)
    assert "snapshot.pickle" in _memory_viz.trace_plot(content)
    assert "snapshot.pickle" in _memory_viz.segment_plot(content)
    assert _memory_viz.filter_alloc_free_pairs(content)["device_traces"][0]


def test_what_is_held_adds_up(snapshot: Path, recorder: Recorder) -> None:
    read = read_snapshot(snapshot)
    diagnosis = diagnose(snapshot)
    held = sum(holder.num_bytes for holder in diagnosis.holders)
    assert held == read.allocated == diagnosis.device.allocated_bytes
    assert read.reserved == sum(each["total_size"] for each in recorder.snapshot["segments"])
    picture = diagnosis.picture()
    assert picture is not None
    assert sum(diagnosis.samples[-1][1].values()) == pytest.approx(held, rel=0.05)


def test_a_page_stands_alone_and_holds_causes_remedies_and_figures(snapshot: Path) -> None:
    diagnosis = diagnose(snapshot)
    page = diagnosis.html()
    tree = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    text = "".join(tree.itertext())
    assert not {"script", "link", "img"} & {each.tag for each in tree.iter()}
    assert not re.search(r"\bsrc=|\bhref=|url\(", page)
    assert diagnosis.cause is not None
    assert diagnosis.cause.text[1:] in text
    assert all(remedy.text in text for remedy in diagnosis.remedies)
    assert "Memory before it ran out" in text
    json.dumps(diagnosis.to_dict())


def test_without_history_sizes_are_told_and_what_would_tell_more(tmp_path: Path) -> None:
    path = dump(fail("state", events=False), tmp_path)
    diagnosis = diagnose(path)
    assert diagnosis.picture() is None
    assert diagnosis.cause is not None
    assert diagnosis.cause.kind == "earlier"
    assert "_record_memory_history()" in str(diagnosis)


def test_a_list_of_segments_is_a_snapshot(recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "segments.pickle"
    path.write_bytes(pickle.dumps(recorder.snapshot["segments"]))
    assert diagnose(path).device.allocated_bytes


class Dangerous:
    """Runs code where it is loaded by pickle."""

    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return Dangerous.ran.append, ("it ran",)


@pytest.mark.parametrize(
    "content",
    [Dangerous(), {"segments": [], "device_traces": [Dangerous()]}, print, torch.device("cpu")],
    ids=["alone", "inside", "a builtin", "torch's"],
)
def test_a_file_that_names_code_is_refused_by_name_and_nothing_runs(
    content: object, tmp_path: Path
) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UnreadableFailureError, match=r"evil\.pickle .* names \w+(\.\w+)+, and a"):
        diagnose(path)
    assert Dangerous.ran == []


def test_tensors_in_a_file_are_refused(tmp_path: Path) -> None:
    target = io.BytesIO()
    torch.save({"weight": torch.zeros(3)}, target, _use_new_zipfile_serialization=False)
    path = tmp_path / "model.pt"
    path.write_bytes(target.getvalue())
    with pytest.raises(UnreadableFailureError, match=r"model\.pt cannot be diagnosed"):
        diagnose(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a memory snapshot"),
        (b"hello", "neither a memory snapshot"),
        (b"\x80\x04\x95", "damaged"),
        (b"{", "no whole JSON"),
        (b'{"a": 1}', "no report of OutOfMemoryReport"),
        (b'{"message": "", "resident_bytes": 3}', "missing or odd"),
        (pickle.dumps({"a": 1}), "no memory snapshot"),
        (pickle.dumps({"segments": [3]}), "missing or odd"),
        (pickle.dumps({"segments": [{"total_size": 4, "blocks": [{"size": -1}]}]}), "-1 bytes"),
        (pickle.dumps({"segments": [], "device_traces": [[{}]]}), "'action'"),
    ],
)
def test_other_files_are_refused_with_the_remedy(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UnreadableFailureError, match=message):
        diagnose(path)


def test_every_cut_of_a_snapshot_is_refused(snapshot: Path, tmp_path: Path) -> None:
    whole = snapshot.read_bytes()
    cut = tmp_path / "cut.pickle"
    for share in range(1, 20):
        cut.write_bytes(whole[: len(whole) * share // 20])
        with pytest.raises(UnreadableFailureError):
            diagnose(cut)


def test_bytes_that_were_changed_never_end_in_another_error(snapshot: Path, tmp_path: Path) -> None:
    whole = bytearray(snapshot.read_bytes()[:40_000])
    path = tmp_path / "changed.pickle"
    for place in range(0, len(whole), 997):
        changed = bytearray(snapshot.read_bytes())
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        with contextlib.suppress(UnreadableFailureError):
            diagnose(path)


def test_reading_grows_with_the_file_and_no_faster() -> None:
    """Counted in calls and not in seconds: each event is looked at a fixed number of times."""
    counts = []
    for rounds in (50, 100, 200):
        frames = [{"filename": "/p/train.py", "line": 5, "name": "main"}]
        trace = [
            entry
            for number in range(rounds * 10)
            for entry in (
                {"action": "alloc", "addr": 512 * number, "size": 512, "frames": frames},
                {"action": "free_completed", "addr": 512 * number, "size": 512, "frames": []},
            )
        ]
        content = {"segments": [], "device_traces": [trace]}
        looked = 0

        class Counting(list):
            def __iter__(self) -> Any:
                nonlocal looked
                looked += len(self)
                return super().__iter__()

        content["device_traces"] = [Counting(trace)]
        automicro.tools.doctor.snapshot.snapshot_of(content)
        counts.append(looked / len(trace))
    assert counts[0] == counts[1] == counts[2]


MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
    "capacity of 79.15 GiB of which 3.12 MiB is free. Process 11 has 60.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 19.00 GiB memory in use. Of the allocated "
    "memory {held} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=…"
)


def test_a_log_tells_of_others_and_of_fragmentation(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 3\n" + MESSAGE.format(held="18.00 GiB", unused="500.00 MiB") + "\nbye\n")
    cause = diagnose(log).cause
    assert cause is not None
    assert (cause.kind, cause.num_bytes) == ("others", 60 << 30)
    assert "process 11" in cause.text
    alone = MESSAGE.replace("Process 11 has 60.00 GiB memory in use. ", "").replace(
        "79.15", "19.01"
    )
    log.write_text(alone.format(held="9.00 GiB", unused="9.50 GiB"))
    cause = diagnose(log).cause
    assert cause is not None
    assert cause.kind == "fragmentation"
    assert "expandable_segments:True" in cause.remedies[0].text


def test_fragmentation_is_no_matter_where_little_is_free_or_a_piece_is_large_enough() -> None:
    full = Device(
        reserved_bytes=1000, allocated_bytes=900, requested_bytes=50, largest_free_bytes=10
    )
    assert not full.is_fragmented
    full.allocated_bytes = 500
    assert full.is_fragmented
    full.largest_free_bytes = 50
    assert not full.is_fragmented


def test_where_segments_grow_already_expandable_segments_are_no_advice(tmp_path: Path) -> None:
    taken = fail("pieces").snapshot
    for segment in taken["segments"]:
        segment["is_expandable"] = True
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(taken))
    cause = diagnose(path).cause
    assert cause is not None
    assert cause.kind == "fragmentation"
    assert "expandable_segments" not in cause.remedies[0].text


REPORT: dict[str, Any] = {
    "device": "cuda:0",
    "message": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "where": {"phase": "train", "epoch": 0, "batch": 7},
    "microbatch_size": {"before": 8, "after": 4},
    "num_rows": 8,
    "batch": [{"path": "0", "shape": [8, 1024], "dtype": "int64", "device": "cuda:0"}],
    "peak_bytes": 20 << 30,
    "resident_bytes": {
        "parameters": 1 << 30,
        "gradients": 1 << 30,
        "optimizer_state": 14 << 30,
        "buffers": 0,
        "total": 16 << 30,
        "limit": 24 << 30,
    },
    "largest_parameters": [],
}


def test_our_report_tells_residents_and_the_size_without_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "oom-0001.json"
    path.write_text(json.dumps(REPORT))
    diagnosis = diagnose(path)
    assert diagnosis.cause is not None
    assert diagnosis.cause.kind == "optimizer"
    assert diagnosis.facts["microbatch size"] == "8 rows; then 4"
    assert diagnosis.device.capacity_bytes == 24 << 30


def test_our_report_takes_the_snapshot_beside_it(recorder: Recorder, tmp_path: Path) -> None:
    residents = REPORT["resident_bytes"] | {"limit": recorder.capacity}
    report = REPORT | {"resident_bytes": residents}
    (tmp_path / "oom-0001.json").write_text(json.dumps(report))
    (tmp_path / "oom-0001.pickle").write_bytes(pickle.dumps(recorder.snapshot))
    diagnosis = diagnose(tmp_path / "oom-0001.json")
    assert diagnosis.message == REPORT["message"]
    assert names_the_culprit("average", diagnosis)


def frames(*lines: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(file, 1, name) for file, name in lines)


TORCH = "/usr/lib/python3.12/site-packages/torch"


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        (frames((f"{TORCH}/optim/adamw.py", "_init_group"), ("/p/t.py", "main")), "optimizer"),
        (frames((f"{TORCH}/nn/modules/module.py", "to"), ("/p/t.py", "main")), "parameters"),
        (frames((f"{TORCH}/nn/modules/linear.py", "__init__"), ("/p/t.py", "f")), "parameters"),
        (frames((f"{TORCH}/nn/modules/linear.py", "forward"), ("/p/t.py", "f")), "activations"),
        (frames((f"{TORCH}/_tensor.py", "__deepcopy__"), ("/p/t.py", "main")), "copy"),
        (frames(("??", "torch::autograd::Engine::thread_main(x)")), "backward"),
        (frames(("/p/t.py", "main")), "tensors"),
        ((), "earlier"),
    ],
)
def test_stacks_tell_what_a_tensor_is(stack: tuple[Frame, ...], kind: str) -> None:
    assert origin_of(stack).kind == kind


def test_of_files_that_a_snapshot_names_only_python_is_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do not tell")
    assert line_of(Frame(str(secret), 1, "f")) == ""
    code = tmp_path / "code.py"
    code.write_text("def f(kept, x):\n    kept.append(x + 1)\n    kept.append(x.item())\n")
    frame = Frame(str(code), 2, "f")
    assert line_of(frame) == "kept.append(x + 1)"
    assert [keeper.frame.line for keeper in find_keepers([frame])] == [frame.line]
    broken = tmp_path / "broken.py"
    broken.write_text("def f(")
    assert find_keepers([Frame(str(broken), 1, "f")]) == []
    deep = tmp_path / "deep.py"
    deep.write_text("kept.append(" + "1 + " * 3000 + "x())")
    assert find_keepers([Frame(str(deep), 1, "<module>")]) == []


def test_lines_that_a_library_calls_are_told_apart() -> None:
    library = "/usr/lib/python3.12/site-packages/light/loops.py"
    own = ("/p/model.py", "training_step"), ("/p/train.py", "main")
    assert not origin_of(frames(*own)).is_driven
    assert origin_of(frames(own[0], (library, "run"), own[1])).is_driven
    assert not origin_of(frames(*own, (library, "run"))).is_driven


def test_the_command_prints_a_page_and_writes_html_and_json(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "why.html"
    assert main(["doctor", str(snapshot), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "Likeliest cause: a copy of a model" in printed
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["doctor", str(snapshot), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["kind"] == "copy"


def test_the_command_refuses_what_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path / "none.pickle")]) == 2
    assert "there is no file" in capsys.readouterr().err
    path = tmp_path / "a.txt"
    path.write_text("hello")
    assert main(["doctor", str(path)]) == 2
    assert "cannot be diagnosed" in capsys.readouterr().err
    assert main(["doctor", str(path), "--memory", "much"]) == 2
    assert "cannot read 'much'" in capsys.readouterr().err
