"""The doctor on programs that run out of memory, and on files of every kind."""

import importlib
import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from automicro.cli import main
from automicro.tools.doctor import Diagnosis, UnreadableFailureError, diagnose
from automicro.tools.doctor.holders import Holder, read_snapshot
from tests.tools.doctor.recorder import Recorder

MIB = 1 << 20
FOLDER = Path(__file__).parent / "failures"
DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"

# By program: MiB of the device, the kind of the likeliest cause, and words of a remedy.
PLANTED = {
    "heavy": (60, "activations", "recompute heavy.py:25 (forward)"),
    "losses": (30, "growth", "keep loss.item()"),
    "bank": (32, "growth", "limit the length of lists"),
    "pieces": (96, "fragmentation", "PYTORCH_ALLOC_CONF=expandable_segments:True"),
    "teacher": (60, "second model", "keep the model of teacher.py:11 (main) on the host"),
    "state": (80, "optimizer state", "8-bit state"),
    "wide_step": (30, "optimizer state", "foreach=False or fused=True"),
    "whole_data": (50, "other tensors", "keep tensors of whole_data.py:8 (main) on the host"),
    "neighbour": (52, "other processes", "nvidia-smi"),
}
# No line is at fault, or one line creates growing tensors and another one keeps them.
WITHOUT_A_LINE = ("losses", "neighbour", "pieces")
PYTHON_ONLY = {"bank", "heavy"}  # the others have C++ frames, too


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


def dump(taken: Any, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(taken))
    return path


def pieces_of(recorder: Recorder) -> list[int]:
    """Return the bytes of each reserved but unallocated piece."""
    blocks = [block for segment in recorder.snapshot["segments"] for block in segment["blocks"]]
    return [block["size"] for block in blocks if block["state"] == "inactive"]


def names_the_culprit(name: str, diagnosis: Diagnosis) -> bool:
    """Return whether the first cause is of the planted kind and names the planted line."""
    cause = diagnosis.causes[0]
    is_line = name in WITHOUT_A_LINE or f"{name}.py:{culprit_of(name)} " in cause.text
    return cause.kind == PLANTED[name][1] and is_line


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_reported_with_remedy(name: str, tmp_path: Path) -> None:
    recorder = fail(name)
    diagnosis = diagnose(dump(recorder.snapshot, tmp_path), memory=recorder.capacity)
    page = str(diagnosis)
    assert names_the_culprit(name, diagnosis), page
    assert any(PLANTED[name][2] in remedy.text for remedy in diagnosis.remedies), page
    saved = [remedy.saved_bytes for remedy in diagnosis.remedies]
    assert saved == sorted(saved, reverse=True)
    assert len(saved) <= 3
    assert all(0 < each <= recorder.capacity for each in saved)
    says = page.split("\n\n")[1]
    assert " 0 bytes" not in says
    grows = {"losses", "bank"}
    assert ("grew from batch to batch" in says) == (name in grows)
    free, asked = pieces_of(recorder), diagnosis.device.requested_bytes or 0
    assert ("fragmentation: " in says) == (sum(free) >= asked)


@pytest.mark.parametrize("name", ["heavy", "state", "teacher"])
def test_late_snapshot_still_shows_holders_at_failure(name: str, tmp_path: Path) -> None:
    """On CUDA, this happens if the error is caught and its frames are gone."""
    recorder = fail(name)
    early = diagnose(dump(recorder.snapshot, tmp_path))
    late = recorder.snapshot
    [trace] = late["device_traces"]
    by_the_one_who_catches = [{"name": "main", "filename": "train.py", "line": 7}]
    for segment in late["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                entry = {"addr": block["address"], "size": block["size"]}
                trace.append(entry | {"action": "free_completed", "frames": by_the_one_who_catches})
                block.update(state="inactive", frames=[])
    found = diagnose(dump(late, tmp_path))
    assert names_the_culprit(name, found)
    # The history contains requested bytes, which the allocator rounds up.
    assert found.device.allocated_bytes == pytest.approx(early.device.allocated_bytes, rel=0.03)
    assert found.remedies[0].text == early.remedies[0].text


PAGES = re.findall(r"```text\n((\w+)\.pickle\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("page", "name"), PAGES, ids=[name for _, name in PAGES])
def test_documented_pages_match_output(page: str, name: str, tmp_path: Path) -> None:
    recorder = fail(name)
    path = dump(recorder.snapshot, tmp_path).rename(tmp_path / f"{name}.pickle")
    printed = str(diagnose(path, memory=recorder.capacity))

    def without_sizes(text: str) -> str:  # which depend on the CPU's kernels
        return re.sub(r" *[\d.]+ ([KM]iB|bytes)", " …", text)

    assert without_sizes(page.strip()) in without_sizes(printed)
    assert PAGES


def test_growth_counts_steady_increase_between_passes() -> None:
    cases: list[Any] = [
        ([0, 1, 2, 3, 4], 3),
        ([9, 0, 0, 0, 0, 0], 0),  # the first pass is ignored
        ([0, 2, 4], 0),  # too few passes
        ([0, 5, 5, 5, 5, 5, 5], 0),
        ([0, 3, 9, 2, 8, 4, 1], 0),  # varying lengths
        ([0, 1, 2, 3, 5, 8, 8, 8, 8, 8, 8, 8], 0),  # a buffer that has filled up
        ([0, 1, 1, 2, 2, 3, 3, 4, 4], 3),
    ]
    for passes, growth in cases:
        assert Holder(kind="activations", owner="a", passes=passes).growth == growth


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return fail("teacher")


@pytest.fixture
def snapshot(recorder: Recorder, tmp_path: Path) -> Path:
    return dump(recorder.snapshot, tmp_path)


def test_held_bytes_add_up(snapshot: Path, recorder: Recorder) -> None:
    read, diagnosis = read_snapshot(snapshot), diagnose(snapshot)
    held = sum(holder.num_bytes for holder in diagnosis.holders)
    assert held == diagnosis.device.allocated_bytes == read.reserved - sum(pieces_of(recorder))
    assert read.reserved == sum(each["total_size"] for each in recorder.snapshot["segments"])


def test_page_without_history_recommends_recording_it(tmp_path: Path) -> None:
    diagnosis = diagnose(dump(fail("state", events=False).snapshot, tmp_path))
    assert diagnosis.causes[0].kind == "not recorded"
    assert "_record_memory_history()" in str(diagnosis)


class Dangerous:
    """Runs code when unpickled."""

    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return Dangerous.ran.append, ("it ran",)


@pytest.mark.parametrize(
    "content",
    [Dangerous(), {"segments": [], "device_traces": [Dangerous()]}, print, torch.device("cpu")],
    ids=["alone", "inside", "a builtin", "torch's"],
)
def test_pickle_with_code_is_rejected_without_running_it(content: object, tmp_path: Path) -> None:
    with pytest.raises(UnreadableFailureError, match=r"snapshot\.pickle .* imports \w+(\.\w+)+,"):
        diagnose(dump(content, tmp_path))
    assert Dangerous.ran == []


def saved_by_torch() -> bytes:
    torch.save(
        {"weight": torch.zeros(3)}, file := io.BytesIO(), _use_new_zipfile_serialization=False
    )
    return file.getvalue()


BLOCK = {"size": -1, "state": "active"}
OTHERS: list[tuple[bytes, str]] = [
    (b"", "no out-of-memory"),
    (b"hello", "no out-of-memory"),
    (b"\x80\x04\x95", "EOFError|UnpicklingError"),
    (b"{", "JSONDecodeError"),
    (b'{"a": 1}', "'held'"),
    (b'{"message": "", "held": 3}', "TypeError"),
    (b'{"held": [], "peak_bytes": 1, "where": {"phase": "train"}}', "'batch'"),
    (pickle.dumps({"a": 1}), "'segments'"),
    (pickle.dumps({"segments": [3]}), "AttributeError"),
    (pickle.dumps({"segments": [{"total_size": 4, "blocks": [BLOCK]}]}), "-1 bytes"),
    (pickle.dumps({"segments": [], "device_traces": [[{}]]}), "'action'"),
    (saved_by_torch(), ""),
]


def test_other_files_are_rejected_with_remedy(snapshot: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "file", snapshot.read_bytes()
    cut = [(whole[: len(whole) * share // 20], "") for share in range(1, 20, 3)]
    for content, message in [*OTHERS, *cut]:
        path.write_bytes(content)
        with pytest.raises(UnreadableFailureError, match=f"({message}).*: give a memory snapshot"):
            diagnose(path)


MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
    "capacity of {capacity} of which 3.12 MiB is free. Including non-PyTorch memory, this process "
    "has 19.00 GiB memory in use. Of the allocated memory {held} is allocated by PyTorch, and "
    "{unused} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_ALLOC_CONF=…"
)


@pytest.mark.parametrize(
    ("capacity", "held", "unused", "said"),
    [
        ("79.15", "18.00 GiB", "500.00 MiB", "other processes, contexts and libraries held 60"),
        (
            *("19.01", "9.00 GiB", "9.50 GiB"),
            "fragmentation: 9.50 GiB were reserved but unallocated, and 512.00 MiB did not fit",
        ),
        ("19.01", "18.90 GiB", "100.00 MiB", None),
    ],
)
def test_log_reveals_other_processes_and_fragmentation(
    capacity: str, held: str, unused: str, said: str | None, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    message = MESSAGE.format(capacity=f"{capacity} GiB", held=held, unused=unused)
    log.write_text(f"step 3\n{message}\nbye\n")
    causes = [cause.text for cause in diagnose(log).causes]
    assert [text.startswith(str(said)) for text in causes[:1]] == [True] * (said is not None)
    assert ("No cause shows." in str(diagnose(log))) == (said is None)
    assert not any("pieces" in text for text in causes)


def held(kind: str, owner: str, num_bytes: int) -> dict[str, Any]:
    sizes = {"num_bytes": num_bytes, "count": 1, "largest_bytes": num_bytes}
    return {"kind": kind, "owner": owner, **sizes}


REPORT: dict[str, Any] = {
    "message": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "where": {"phase": "train", "epoch": 0, "batch": 7},
    "microbatch_size": {"before": 8, "after": 4},
    "peak_bytes": 20 << 30,
    "limit_bytes": 24 << 30,
    "device_memory": None,
    "held": [
        held("parameters", "the model", 1 << 30),
        held("optimizer state", "the optimizer", 14 << 30),
    ],
}


def diagnose_report(folder: Path, **changes: Any) -> Diagnosis:
    path = folder / "oom-0001.json"
    path.write_text(json.dumps(REPORT | changes))
    return diagnose(path)


def test_oom_report_separates_persistent_and_step_memory(tmp_path: Path) -> None:
    diagnosis = diagnose_report(tmp_path)
    assert diagnosis.causes[0].text == "the state of the optimizer took 14.00 GiB"
    step = "the rest of the step took 5.00 GiB; requested 2.00 GiB more"
    assert diagnosis.causes[1].text == step
    assert diagnosis.where == "train, batch 7, 8 rows"
    assert diagnosis.device.capacity_bytes == 24 << 30
    assert "halve the microbatch" in str(diagnosis)
    page = str(diagnose_report(tmp_path, held=[held("parameters", "the model", 12 << 30)]))
    assert "Likeliest cause: the model took 12.00 GiB.\n" in page
    assert "6.00 GiB  hold the model in bfloat16\n" in page
    at_one_row = diagnose_report(tmp_path, microbatch_size={"before": 1, "after": None})
    assert "halve the microbatch" not in str(at_one_row)


SIMULATED = (
    "Simulated device out of memory. Tried to allocate {}.00 GiB. Live tensors hold {}.00 GiB"
)


def test_request_outside_known_modules_belongs_to_step(tmp_path: Path) -> None:
    held_by = [held("parameters", "the model", 1 << 30)]
    diagnosis = diagnose_report(tmp_path, message=SIMULATED.format(4, 2), held=held_by)
    text = "the rest of the step took 1.00 GiB; requested 4.00 GiB more"
    assert diagnosis.causes[0].text == text
    assert diagnosis.remedies[0].text == "halve the microbatch"
    assert diagnosis.remedies[0].saved_bytes == 5 << 29  # half of the total


def test_failed_request_is_not_counted_for_its_module(tmp_path: Path) -> None:
    modules = [held("activations", name, size << 30) for name, size in [("a", 5), ("b", 3)]]
    diagnosis = diagnose_report(
        tmp_path, message=SIMULATED.format(2, 7), held=modules, inside=["net", "b"]
    )
    taken = {each.owner: each.num_bytes >> 30 for each in diagnosis.holders}
    assert taken == {"a": 5, "b": 1, "the rest of the step": 1}  # not the 12 of the peak
    assert diagnosis.where.endswith("8 rows, inside b")
    assert "b took 1.00 GiB" in str(diagnosis)
    assert "requested 2.00 GiB more" in str(diagnosis)


def test_command_prints_page_or_json(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(snapshot)]) == 0
    assert "Likeliest cause: one of 2 models, made at teacher.py" in capsys.readouterr().out
    assert main(["doctor", str(snapshot), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["kind"] == "second model"


def test_command_rejects_unusable_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    for arguments, message in [
        ([str(tmp_path / "none.pickle")], "there is no file"),
        ([str(path)], "cannot be diagnosed"),
        ([str(path), "--memory", "much"], "cannot read 'much'"),
    ]:
        assert main(["doctor", *arguments]) == 2
        assert message in capsys.readouterr().err
